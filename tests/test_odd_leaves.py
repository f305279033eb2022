"""Leaves that are ragged, empty, of odd dtypes, frozen, or used in many places.

None is padded, cast, lost or summed twice.

Oracle: one device, by plain descent; for leaves used many times exact numbers.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from oracle import assert_same_bits
from quick import EVERY, quick

RANDOM = np.random.default_rng(0)


def normal(*shape):
    return RANDOM.normal(size=shape).astype(np.float32) / 2


def complex_normal(*shape):
    return normal(*shape) + 1j * normal(*shape)


ODD = {
    "ragged": normal(10, 3),
    "prime": normal(7),
    "scalar": normal(),
    "empty": np.zeros((0, 4), np.float32),
    "embed": normal(50257, 8),
    "embed_whole": normal(50257, 3),
    "integers": np.arange(16, dtype=np.int32)[::-1].copy(),
    "bytes": np.arange(8, dtype=np.uint8),
    "flags": np.arange(8) % 3 == 0,
    "filter": complex_normal(8, 3),
    "phase": complex_normal(3),
    "half": normal(8, 6).astype(np.float16),
    "half_whole": normal(6).astype(np.float16),
    "brain": normal(3, 8).astype(jnp.bfloat16),
    "frozen": normal(16, 2),
}
SPLIT = ("embed", "integers", "bytes", "flags", "filter", "half", "brain", "frozen")  # on 1x8; on 2x4 the same
LEARNING = [name for name, x in ODD.items() if jnp.issubdtype(x.dtype, jnp.inexact) and name != "frozen"]
BATCH = {"tokens": RANDOM.integers(0, 50257, (24, 4), dtype=np.int32), "x": normal(24, 16)}
RATE = 2.0


def odd_loss(params, batch):
    wide = functools.partial(jnp.asarray, dtype=jnp.float32)
    h = jnp.mean(params["embed"][batch["tokens"]], axis=1) * 4 + wide(params["flags"]) + wide(params["bytes"]) / 8
    z = h.astype(jnp.complex64) @ params["filter"] * params["phase"]
    y = (
        jnp.real(z) ** 2
        - jnp.imag(z)
        + params["scalar"] * (batch["x"][:, params["integers"]][:, :10] @ params["ragged"])
    )
    y += jnp.mean(params["embed_whole"][batch["tokens"]], axis=1) + params["empty"].sum()
    # No gradient goes back from halves, so that the other leaves' can be compared in float32.
    half = lax.stop_gradient(h).astype(jnp.float16) @ params["half"] + params["half_whole"]
    brain = lax.stop_gradient(y).astype(jnp.bfloat16) @ params["brain"]
    rest = jnp.sum(jnp.sin(params["prime"])) + batch["x"] @ params["frozen"]
    return sum(jnp.mean(jnp.square(jnp.tanh(wide(x)))) for x in (y, half, brain, rest))


@functools.cache
def odd_gradients():
    learning = {name: jnp.asarray(ODD[name]) for name in LEARNING}
    return jax.jit(jax.value_and_grad(lambda learning: odd_loss({**ODD, **learning}, BATCH)))(learning)


@pytest.mark.parametrize(("strategy", "mesh"), EVERY, ids=str)
def test_odd_leaves(strategy, mesh):
    training = quick(
        odd_loss,
        ODD,
        BATCH,
        strategy,
        mesh,
        optimizer=optax.sgd(RATE, momentum=0.5),
        trainable=lambda path: path != "frozen",
        accumulate=1 if strategy in ("ddp", "zero2", "hsdp") else 3,
    )
    state = training.init(ODD)
    assert_same_bits(training.whole(state), ODD)
    where = training.strategy
    check_bytes(state.params, where.params, mesh)
    (trace, _) = state.opt
    # No moments for what does not learn, but the parameters are all there.
    assert {name for name, x in trace.trace.items() if x is not None} == set(LEARNING)
    check_bytes({name: trace.trace[name] for name in LEARNING}, where.opt, mesh)
    assert {one.leaf for one in training.contract() if one.purpose == "reduce"} <= set(LEARNING)

    state, metrics = training.step(state, BATCH)
    after, (value, grads) = training.whole(state), odd_gradients()
    assert jax.tree.structure(state.params) == jax.tree.structure(ODD)
    np.testing.assert_allclose(metrics["loss"], value, rtol=1e-3)
    for name, before in ODD.items():
        assert (after[name].shape, after[name].dtype) == (before.shape, before.dtype)
        if name not in LEARNING:
            np.testing.assert_array_equal(after[name], before)
            continue
        # In float32: a step in halves is rounded to them, and so are gradients of halves on their way.
        exact = np.complex64 if jnp.iscomplexobj(before) else np.float32
        moved = (before.astype(exact) - after[name].astype(exact)) / RATE
        if not before.size:
            continue
        wanted = np.asarray(grads[name]).astype(exact)
        # What a parameter of this size can be rounded by, and that share of the gradient by which halves may differ.
        rounded = float(jnp.finfo(before.dtype).eps) * np.abs(before).max() / RATE
        close = {"half": 2e-2, "half_whole": 2e-2, "brain": 5e-2}.get(name, 1e-5) * np.abs(wanted).max()
        assert np.abs(wanted).max() > 20 * rounded, f"{name} hardly moved"
        np.testing.assert_allclose(moved, wanted, rtol=0, atol=close + rounded, err_msg=name)


def check_bytes(leaves, placement, mesh):
    """Each device holds its share, to the byte, and nothing is padded."""
    for name, x in leaves.items():
        pieces = math.prod(mesh[("replica", "shard").index(axis)] for axis in placement.axes) if name in SPLIT else 1
        devices = 1 if placement.devices == "first" else 8
        assert x.shape == ODD[name].shape
        assert [shard.data.nbytes for shard in x.addressable_shards] == [ODD[name].nbytes // pieces] * devices
        assert ODD[name].nbytes % pieces == 0


# Leaves that are used more than once

USES = 1 + 2 + 1 + 3 + 3
SLOPE = np.arange(128, dtype=np.float32).reshape(8, 16) / 128
WEIGHTS = np.arange(24, dtype=np.float32) / 8  # another for each example


def slope(w):
    return jnp.sum(w * SLOPE)


def tied_loss(params, batch):
    """A sum over all uses of `w`. Its gradient is the slope times their number and, for one use, the slope reversed."""
    w = params["w"]
    twice = jax.jit(lambda w: jnp.sum(jnp.concatenate([w.T, w.T]) * np.concatenate([SLOPE.T, SLOPE.T])))
    again = jax.checkpoint(lambda w: slope(w * jnp.cos(0 * w)))
    in_scan, _ = lax.scan(lambda total, _: (total + slope(w), None), jnp.float32(0), None, length=3)
    body = jax.checkpoint(lambda total, layer: (total + slope(w * layer), None))
    in_remat_scan, _ = lax.scan(body, jnp.float32(0), params["layers"])
    return jnp.mean(batch) * (slope(w[::-1]) + slope(w) + twice(w) + again(w) + in_scan + in_remat_scan)


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize(("strategy", "mesh"), EVERY, ids=str)
def test_a_leaf_used_many_times_has_one_summed_gradient(strategy, mesh, accumulate):
    params = {"w": np.ones((8, 16), np.float32), "layers": np.ones((3, 8, 16), np.float32)}
    training = quick(tied_loss, params, WEIGHTS, strategy, mesh, accumulate=accumulate, optimizer=optax.sgd(1.0, 0.9))
    state, metrics = training.step(training.init(params), WEIGHTS)
    after, mean = training.whole(state), WEIGHTS.mean()
    np.testing.assert_allclose(metrics["loss"], mean * (USES + 1) * SLOPE.sum(), rtol=1e-6)
    np.testing.assert_allclose(1 - after["w"], mean * (USES * SLOPE + SLOPE[::-1]), rtol=1e-6)
    np.testing.assert_allclose(1 - after["layers"], mean * np.stack([SLOPE] * 3), rtol=1e-6, atol=1e-7)
    assert len(jax.tree.leaves(state.params)) == len(jax.tree.leaves(state.opt)) == 2
