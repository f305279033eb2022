"""equinox: modules are pytrees, with functions among their leaves. Oracle: `eqx.filter_value_and_grad`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp

from frameworks.case import SGD, WIDTH, Case, history, mean_square

LAYERS = 2


class Block(eqx.Module):
    norm: eqx.nn.LayerNorm
    linear: eqx.nn.Linear
    activation: Callable  # a leaf that is no array
    name: str = eqx.field(static=True)

    def __init__(self, key):
        self.norm = eqx.nn.LayerNorm(WIDTH)
        self.linear = eqx.nn.Linear(WIDTH, WIDTH, key=key)
        self.activation = jax.nn.gelu
        self.name = "block"

    def __call__(self, x):
        return x + self.activation(self.linear(self.norm(x)))


class Blocks(eqx.Module):
    blocks: list[Block]

    def __init__(self, key):
        self.blocks = [Block(key) for key in jax.random.split(key, LAYERS)]

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Stack(eqx.Module):
    blocks: Block

    def __init__(self, key):
        self.blocks = eqx.filter_vmap(Block)(jax.random.split(key, LAYERS))

    def __call__(self, x):
        arrays, static = eqx.partition(self.blocks, eqx.is_array)

        @jax.checkpoint
        def body(x, layer):
            return eqx.combine(layer, static)(x), None

        return jax.lax.scan(body, x, arrays)[0]


class Normed(eqx.Module):
    inward: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    outward: eqx.nn.Linear

    def __init__(self, key, mode, axis_name):
        first, second = jax.random.split(key)
        self.inward = eqx.nn.Linear(WIDTH, WIDTH, use_bias=False, key=first)
        self.norm = eqx.nn.BatchNorm(WIDTH, axis_name=axis_name, mode=mode, momentum=0.9)
        self.outward = eqx.nn.Linear(WIDTH, WIDTH, key=second)

    def __call__(self, x, state):
        x, state = self.norm(self.inward(x), state)
        return self.outward(jnp.tanh(x)), state


def plain_training(make, data):
    model = eqx.filter_jit(make)(jax.random.key(0))
    opt = SGD.init(eqx.filter(model, eqx.is_inexact_array))
    start, metrics = eqx.filter(model, eqx.is_inexact_array), []

    @eqx.filter_jit
    def step(model, opt, batch):
        loss, grads = eqx.filter_value_and_grad(lambda m: mean_square(jax.vmap(m)(batch["x"]), batch))(model)
        updates, opt = SGD.update(grads, opt)
        return eqx.apply_updates(model, updates), opt, (loss, grads)

    for batch in data:
        model, opt, now = step(model, opt, batch)
        metrics.append(now)
    return history(start, eqx.filter(model, eqx.is_inexact_array), metrics), None


def training_with_statistics(mode, data):
    model, state = eqx.nn.make_with_state(Normed)(jax.random.key(0), mode, "batch")
    opt = SGD.init(eqx.filter(model, eqx.is_inexact_array))
    start, metrics = eqx.filter(model, eqx.is_inexact_array), []

    @eqx.filter_jit
    def step(model, state, opt, batch):
        def loss(model):
            y, new = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(batch["x"], state)
            return mean_square(y, batch), new

        (value, new), grads = eqx.filter_value_and_grad(loss, has_aux=True)(model)
        updates, opt = SGD.update(grads, opt)
        return eqx.apply_updates(model, updates), new, opt, (value, grads)

    for batch in data:
        model, state, opt, now = step(model, state, opt, batch)
        metrics.append(now)
    return history(start, eqx.filter(model, eqx.is_inexact_array), metrics), state


def partitioned(make) -> Case:
    _, static = eqx.partition(eqx.filter_eval_shape(make, jax.random.key(0)), eqx.is_inexact_array_like)

    def init(key):
        return eqx.filter(make(key), eqx.is_inexact_array)

    def loss(params, batch):
        return mean_square(jax.vmap(eqx.combine(params, static))(batch["x"]), batch)

    return Case(init=init, loss=loss, train=partial(plain_training, make))


def with_statistics(mode) -> Case:
    """The batch has two axes: examples of one device, by `jax.vmap`, and the devices."""
    model, state = eqx.nn.make_with_state(Normed)(jax.random.key(0), mode, ("batch", "devices"))
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def loss(params, batch, *, extra):
        model = jax.vmap(eqx.combine(params, static), axis_name="batch", in_axes=(0, None), out_axes=(0, None))
        y, new = model(batch["x"], extra)
        return mean_square(y, batch), new

    return Case(
        init=lambda key: (params, state), loss=loss, train=partial(training_with_statistics, mode), axis_name="devices"
    )


CASES = {
    "list": partitioned(Blocks),
    "scan with remat": partitioned(Stack),
    "statistics of the batch": with_statistics("batch"),
    "moving statistics of the batch": with_statistics("ema"),
}


def drop(x, key):
    return eqx.nn.Dropout(0.5)(x, key=key)


DROPOUT = {"key": drop}
