"""One trajectory for all: under every strategy, with and without accumulation, each step is one device's step.

Oracle: plain `jax.grad` over whole batches and optax. Parameters, losses and norms are compared after every step, under
momentum first: it adds gradients up over steps, and divides no wrong scale away.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from oracle import Run, assert_close, lenient
from quick import EVERY, quick

STEPS, EXAMPLES = 6, 48
OPTIMIZERS = {
    "momentum": optax.sgd(0.1, momentum=0.9),
    # A large eps, because Adam divides a gradient by its own size: where that is rounding, so is the quotient.
    "adam": lenient(optax.adam(3e-2, eps=1e-2)),
}
RANDOM = np.random.default_rng(0)
PARAMS = {name: RANDOM.normal(size=shape).astype(np.float32) / 3 for name, shape in {"w": (8, 16), "b": (7,)}.items()}
DATA = [{name: RANDOM.normal(size=(EXAMPLES, 8)).astype(np.float32) for name in "xy"} for _ in range(STEPS)]


def loss(params, batch):
    """An autoencoder: `w` is split and used at both ends; no dim of `b` divides."""
    h = jnp.tanh(batch["x"] @ params["w"]) * (1 + jnp.mean(jnp.sin(params["b"])))
    return jnp.mean(jnp.square(h @ params["w"].T - batch["y"])) + jnp.mean(jnp.square(params["b"]))


def prefixes(trail: list[tuple[Any, Any, Any]]) -> list[Run]:
    """The run so far, after each step. trail: (parameters, loss, norm) of every step."""
    losses, norms = (np.array([step[i] for step in trail], np.float32) for i in (1, 2))
    return [Run(PARAMS, params, losses[: i + 1], norms[: i + 1]) for i, (params, _, _) in enumerate(trail)]


@functools.cache
def one_device(optimizer: str) -> list[Run]:
    @jax.jit
    def step(params, opt, batch):
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, opt = OPTIMIZERS[optimizer].update(grads, opt, params)
        return optax.apply_updates(params, updates), opt, value, optax.tree.norm(grads)

    params, opt, trail = PARAMS, OPTIMIZERS[optimizer].init(PARAMS), []
    for batch in DATA:
        params, opt, *now = step(params, opt, batch)
        trail.append((jax.tree.map(np.asarray, params), *now))
    return prefixes(trail)


@pytest.mark.parametrize(("optimizer", "accumulate"), [("momentum", 1), ("momentum", 3), ("adam", 3)])
@pytest.mark.parametrize(("strategy", "mesh"), EVERY, ids=str)
def test_every_step_is_one_devices(optimizer, strategy, mesh, accumulate):
    training = quick(loss, PARAMS, DATA[0], strategy, mesh, optimizer=OPTIMIZERS[optimizer], accumulate=accumulate)
    state, trail = training.init(PARAMS), []
    for batch in DATA:
        state, metrics = training.step(state, batch)
        trail.append((training.whole(state), metrics["loss"], metrics["grad_norm"]))
    for ours, theirs in zip(prefixes(trail), one_device(optimizer), strict=True):
        assert_close(ours, theirs, ulps=4)
    assert state.step == STEPS


def test_every_step_and_every_microbatch_counts():
    """Not vacuous: the losses differ from step to step, and a third of a batch has another gradient than the whole."""
    whole = jax.jit(jax.grad(loss))
    for name in OPTIMIZERS:
        assert min(abs(np.diff(one_device(name)[-1].loss))) > 1e-3
    for batch in DATA:
        grads = [whole(PARAMS, part)["w"] for part in (batch, jax.tree.map(lambda x: x.reshape(8, 6, 8)[:, 0], batch))]
        assert np.abs(grads[0] - grads[1]).max() > 1e-2
