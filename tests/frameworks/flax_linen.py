"""flax linen: modules as functions of their variables. Oracle: a `TrainState` and `jax.value_and_grad`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.spmd import with_logical_constraint
from flax.training.train_state import TrainState

from frameworks.case import SGD, WIDTH, Case, history, mean_square

LAYERS = 2
EXAMPLE = jnp.ones((1, WIDTH))


class Block(nn.Module):
    kernel_init: Callable[..., Any] = nn.initializers.lecun_normal()

    @nn.compact
    def __call__(self, x, _=None):
        y = nn.Dense(WIDTH, kernel_init=self.kernel_init)(nn.LayerNorm()(x))
        # Without rules for these names this does nothing.
        return x + nn.gelu(with_logical_constraint(y, ("batch", "mlp"))), None


class Stack(nn.Module):
    remat: bool
    kernel_init: Callable[..., Any] = nn.initializers.lecun_normal()

    @nn.compact
    def __call__(self, x):
        block = nn.remat(Block, prevent_cse=False) if self.remat else Block
        scan = nn.scan(
            block,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=LAYERS,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )
        return scan(self.kernel_init)(x, None)[0]


class Layers(nn.Module):
    @nn.compact
    def __call__(self, x):
        for _ in range(LAYERS):
            x, _ = nn.remat(Block)()(x)
        return x


class Normed(nn.Module):
    axis_name: str | None = None

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(WIDTH, use_bias=False)(x)
        x = nn.BatchNorm(use_running_average=False, momentum=0.9, axis_name=self.axis_name)(x)
        return nn.Dense(WIDTH)(jnp.tanh(x))


def plain_training(model, data):
    variables = jax.jit(model.init)(jax.random.key(0), EXAMPLE)
    state = TrainState.create(apply_fn=model.apply, params=variables["params"], tx=SGD)
    stats, start, metrics = variables.get("batch_stats", {}), state.params, []

    @jax.jit
    def step(state, stats, batch):
        def loss(params):
            y, new = state.apply_fn({"params": params, "batch_stats": stats}, batch["x"], mutable=["batch_stats"])
            return mean_square(y, batch), new.get("batch_stats", {})

        (value, new), grads = jax.value_and_grad(loss, has_aux=True)(state.params)
        return state.apply_gradients(grads=grads), new, (value, grads)

    for batch in data:
        state, stats, now = step(state, stats, batch)
        metrics.append(now)
    return history(start, state.params, metrics), stats or None


def plain(model) -> Case:
    def init(key):
        return model.init(key, EXAMPLE)["params"]

    def loss(params, batch):
        return mean_square(model.apply({"params": params}, batch["x"]), batch)

    return Case(init=init, loss=loss, train=partial(plain_training, model))


def with_statistics(axis_name) -> Case:
    model = Normed(axis_name)

    def init(key):
        variables = model.init(key, EXAMPLE)
        return variables["params"], variables["batch_stats"]

    def loss(params, batch, *, extra):
        y, new = model.apply({"params": params, "batch_stats": extra}, batch["x"], mutable=["batch_stats"])
        return mean_square(y, batch), new["batch_stats"]

    return Case(init=init, loss=loss, train=partial(plain_training, Normed()), axis_name=axis_name)


CASES = {
    "list with remat": plain(Layers()),
    "scan": plain(Stack(remat=False)),
    "scan with remat": plain(Stack(remat=True)),
    "statistics of the batch": with_statistics("batch"),
}


def drop(x, key):
    return nn.Dropout(0.5, deterministic=False).apply({}, x, rngs={"dropout": key})


DROPOUT = {"rngs": drop}
