"""flax nnx: modules that hold their parameters. Oracle: `nnx.Optimizer` and `nnx.value_and_grad` on the module."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from frameworks.case import SGD, WIDTH, Case, history, mean_square

LAYERS = 2
KERNEL = nnx.initializers.lecun_normal()


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, *, kernel_init: Any = KERNEL):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.linear = nnx.Linear(WIDTH, WIDTH, kernel_init=kernel_init, rngs=rngs)
        self.activation = nnx.gelu

    def __call__(self, x):
        return x + self.activation(self.linear(self.norm(x)))


class Blocks(nnx.Module):
    """Blocks in a list, or stacked and scanned over; each recomputed in the backward pass, or not."""

    def __init__(self, rngs: nnx.Rngs, *, stacked: bool, remat: bool, kernel_init: Any = KERNEL):
        self.remat = remat
        if stacked:
            self.blocks = nnx.vmap(Block, in_axes=0, out_axes=0)(rngs.split(LAYERS))
        else:
            self.blocks = nnx.List([Block(rngs, kernel_init=kernel_init) for _ in range(LAYERS)])

    def __call__(self, x):
        def apply(x, block):
            return block(x)

        apply = nnx.remat(apply) if self.remat else apply
        if isinstance(self.blocks, Block):
            return nnx.scan(apply, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.blocks)
        for block in self.blocks:
            x = apply(x, block)
        return x


class Normed(nnx.Module):
    """With statistics of the batch: of one device's part, or of all that `axis_name` names."""

    def __init__(self, rngs: nnx.Rngs, *, axis_name: str | None = None):
        self.inward = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, momentum=0.9, axis_name=axis_name, rngs=rngs)
        self.outward = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return self.outward(jnp.tanh(self.norm(self.inward(x))))


def plain_training(make, data):
    """A module, an optimizer, and a step that changes both in place."""
    model = nnx.jit(lambda key: make(nnx.Rngs(key)))(jax.random.key(0))
    optimizer = nnx.Optimizer(model, SGD, wrt=nnx.Param)
    start, metrics = jax.tree.map(jnp.copy, nnx.state(model, nnx.Param)), []

    @nnx.jit
    def step(model, optimizer, batch):
        loss, grads = nnx.value_and_grad(lambda model: mean_square(model(batch["x"]), batch))(model)
        optimizer.update(model, grads)
        return loss, grads

    for batch in data:
        metrics.append(step(model, optimizer, batch))
    return history(start, nnx.state(model, nnx.Param), metrics), nnx.state(model, nnx.BatchStat)


def training_on_parts(make, data, parts=8):
    """The same where each of so many parts of a batch is normed by itself, and statistics are their mean."""
    model = nnx.jit(lambda key: make(nnx.Rngs(key)))(jax.random.key(0))
    graphdef, params, stats = nnx.split(model, nnx.Param, nnx.BatchStat)
    start, metrics = params, []

    @jax.jit
    def step(params, stats, batch):
        def loss(params):
            def part(batch):
                model = nnx.merge(graphdef, params, stats, copy=True)
                return mean_square(model(batch["x"]), batch), nnx.state(model, nnx.BatchStat)

            losses, new = jax.vmap(part)(jax.tree.map(lambda x: x.reshape(parts, -1, *x.shape[1:]), batch))
            return jnp.mean(losses), jax.tree.map(lambda x: jnp.mean(x, axis=0), new)

        (value, new), grads = jax.value_and_grad(loss, has_aux=True)(params)
        return jax.tree.map(lambda p, g: p - 0.3 * g, params, grads), new, (value, grads)

    for batch in data:
        params, stats, now = step(params, stats, batch)
        metrics.append(now)
    return history(start, params, metrics), stats


def split(make) -> Case:
    """A module of parameters alone: split, and merged again inside the loss."""
    graphdef = nnx.graphdef(nnx.eval_shape(lambda: make(nnx.Rngs(0))))

    def init(key):
        return nnx.state(make(nnx.Rngs(key)), nnx.Param)

    def loss(params, batch):
        return mean_square(nnx.merge(graphdef, params, copy=True)(batch["x"]), batch)

    return Case(init=init, loss=loss, train=partial(plain_training, make))


def itself(make) -> Case:
    """A module of parameters alone is a pytree, and is itself what is trained."""

    def loss(model, batch):
        return mean_square(model(batch["x"]), batch)

    return Case(init=lambda key: make(nnx.Rngs(key)), loss=loss, train=partial(plain_training, make))


def with_statistics(make, train, axis_name=None) -> Case:
    graphdef = nnx.graphdef(nnx.eval_shape(lambda: make(nnx.Rngs(0), axis_name=axis_name)))

    def init(key):
        return nnx.split(make(nnx.Rngs(key)), nnx.Param, nnx.BatchStat)[1:]

    def loss(params, batch, *, extra):
        model = nnx.merge(graphdef, params, extra, copy=True)
        return mean_square(model(batch["x"]), batch), nnx.state(model, nnx.BatchStat)

    return Case(init=init, loss=loss, train=partial(train, make), axis_name=axis_name)


CASES = {
    "list": split(partial(Blocks, stacked=False, remat=False)),
    "list with remat": split(partial(Blocks, stacked=False, remat=True)),
    "scan": split(partial(Blocks, stacked=True, remat=False)),
    "scan with remat": split(partial(Blocks, stacked=True, remat=True)),
    "the module itself": itself(partial(Blocks, stacked=True, remat=True)),
    "statistics of a device": with_statistics(Normed, training_on_parts),
    "statistics of the batch": with_statistics(Normed, plain_training, axis_name="batch"),
}


def drop(x, key):
    return nnx.Dropout(0.5)(x, rngs=nnx.Rngs(key))


def drop_reseeded(x, key):
    """A dropout that was made with a generator of its own, which is given another key."""
    model = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    nnx.reseed(model, default=key)
    return model(x)


DROPOUT = {"key": drop, "reseed": drop_reseeded}
