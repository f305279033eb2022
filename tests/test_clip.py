"""The norm is global and counts each element once, whatever is split, whole or held twice; so does the clip.

Oracle: exact numbers. The loss is linear, so that the gradient of every element of a leaf is the leaf's own slope.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from quick import EVERY, quick

import jaxshard as js

MESH = (2, 4)
BOTH = js.Placement(axes=("shard", "replica"))
STRATEGIES = {
    **{name: js.STRATEGIES[name] for name, _ in EVERY},
    "zero1 over both axes": replace(js.ZERO1, opt=BOTH),
    "zero1 over replicas": replace(js.ZERO1, opt=js.Placement(axes=("replica",))),
}
SHAPES = {
    "split": (8, 3),
    "split_later": (3, 16),
    "whole": (3, 5),
    "scalar": (),
    "empty": (0, 4),
    "complex_split": (8, 2),
    "complex_whole": (3,),
    "frozen": (8, 8),
}
SLOPES = {name: 2.0 ** (i - 2) for i, name in enumerate(SHAPES)}  # each leaf's share of the norm is another
PARAMS = {
    name: np.zeros(shape, np.complex64 if name.startswith("complex") else np.float32) for name, shape in SHAPES.items()
}
NORM = np.sqrt(sum(SLOPES[name] ** 2 * np.prod(shape) for name, shape in SHAPES.items() if name != "frozen"))
# Every example weighs differently; their mean is 1.
BATCH = np.linspace(0, 2, 24, dtype=np.float32)


def total(x):
    """A sum whose gradient has size 1 at every element, complex ones too."""
    return x.sum() if jnp.isrealobj(x) else (jnp.real(x) - jnp.imag(x)).sum() / np.float32(np.sqrt(2))


def loss(params, batch):
    return jnp.mean(batch) * sum(SLOPES[name] * total(x) for name, x in params.items())


def trained(strategy: str, **choices):
    training = quick(
        loss, PARAMS, BATCH, STRATEGIES[strategy], MESH, trainable=lambda path: path != "frozen", **choices
    )
    state, metrics = training.step(training.init(PARAMS), BATCH)
    np.testing.assert_allclose(metrics["grad_norm"], NORM, rtol=1e-6)
    moved = {name: np.abs(x) / SLOPES[name] for name, x in training.whole(state).items()}
    assert not moved.pop("frozen").any()
    return np.concatenate([x.reshape(-1) for x in moved.values()])


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_active_clip(strategy, accumulate):
    """Every leaf is scaled by the same factor, so that the step has exactly the norm asked for."""
    moved = trained(strategy, accumulate=accumulate, clip=NORM / 4)
    np.testing.assert_allclose(moved, 1 / 4, rtol=1e-6)


@pytest.mark.parametrize("strategy", ["dp", "ddp", "zero1 over replicas", "hsdp"])
def test_an_inactive_clip(strategy):
    np.testing.assert_allclose(trained(strategy, clip=NORM * 1.01), 1, rtol=1e-6)


def test_the_norm_is_one_devices():
    """The slopes are what they are said to be, and optax computes the same norm of them."""

    @jax.jit
    def measured(params):
        grads = jax.grad(loss)(params, BATCH)
        return optax.tree.norm(grads), jax.tree.map(jnp.abs, grads)

    norm, sizes = measured({name: x for name, x in PARAMS.items() if name != "frozen"})
    np.testing.assert_allclose(norm, NORM, rtol=1e-6)
    for name, size in sizes.items():
        np.testing.assert_allclose(size, SLOPES[name], rtol=1e-6)
