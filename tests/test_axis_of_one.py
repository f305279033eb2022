"""Meshes with an axis of one: the same results, no reduction dropped and none left over.

Oracles: one device for the step; for what is sent, the tables below, written by hand. It is counted three times: in the
contract, in the step's jaxpr (where an axis of one must not be named either) and in the compiled text.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import Run, assert_close
from quick import quick

import jaxshard as js
from jaxshard.jaxprs import COLLECTIVES, axes_of, walk

BOTH = js.Placement(axes=("shard", "replica"))
STRATEGIES = {
    **{name: js.STRATEGIES[name] for name in ("dp", "ddp", "zero1", "zero2", "shard_grad_op", "zero3")},
    "hsdp on any mesh": replace(js.HSDP, min_replicas=1),
    "zero1 over both axes": replace(js.ZERO1, opt=BOTH),
    "zero3, optimizer over both axes": replace(js.ZERO3, opt=BOTH),
}
RANDOM = np.random.default_rng(0)
# `b` does not divide by 8: it stays whole.
PARAMS = {name: RANDOM.normal(size=shape).astype(np.float32) / 3 for name, shape in {"w": (8, 16), "b": (7,)}.items()}
BATCH = RANDOM.normal(size=(48, 8)).astype(np.float32)


def loss(params, batch):
    """One use of each leaf, and no weight that the backward pass needs again."""
    squares = jnp.square(jnp.tanh(batch @ params["w"]) * (1 + jnp.mean(jnp.sin(params["b"]))))
    return js.Loss(jnp.sum(squares), jnp.sum(jnp.isfinite(squares), dtype=jnp.float32))


def mean(params, batch):
    whole = loss(params, batch)
    return whole.total / whole.weight


@functools.cache
def one_device() -> Run:
    value, grads = jax.jit(jax.value_and_grad(mean))(PARAMS, BATCH)
    norm = np.sqrt(sum(np.sum(np.square(g)) for g in jax.tree.leaves(grads)))
    return Run(PARAMS, jax.tree.map(lambda p, g: p - np.asarray(g), PARAMS, grads), value[None], norm[None])


# Items are two: the sum of losses and their number.
ALL_REDUCED = {("all_reduce", "w"): 1, ("all_reduce", "b"): 1, ("all_reduce", "items"): 2}
NORM = {("all_reduce", "norm"): 1}
SPLIT = {("reduce_scatter", "w"): 1, ("all_gather", "w"): 1, ("all_reduce", "b"): 1, ("all_reduce", "items"): 2, **NORM}
DP = {("broadcast", "w"): 1, ("broadcast", "b"): 1, ("gather", "w"): 1, ("gather", "b"): 1}


def sent(name: str, mesh: tuple[int, int]) -> dict[tuple[str, str], int]:
    """How often (kind, leaf) is sent. Which axis has the devices decides whether a split over `shard` splits."""
    replica, shard = mesh
    if replica * shard == 1:
        return {}
    if name == "dp":
        return DP
    if shard == 8:  # the norm is summed over slices, under ddp too, so that all add in one order
        return ALL_REDUCED | NORM if name == "ddp" else SPLIT
    return SPLIT if "both axes" in name else ALL_REDUCED


ARRAY = re.compile(r"\w+\[[\d,]*\]")
LINE = re.compile(r" = (.*?) (all-gather|reduce-scatter|all-reduce|all-to-all|collective-permute)(?:-start)?\(")


def in_text(text: str) -> Counter[str]:
    """Arrays by kind of collective, in a compiled program; one that was combined has a tuple of them."""
    found: Counter[str] = Counter()
    for result, kind in LINE.findall(text):
        found[kind.replace("-", "_")] += len(ARRAY.findall(result))
    return found


@pytest.mark.parametrize("mesh", [(1, 1), (8, 1), (1, 8)], ids=str)
@pytest.mark.parametrize("name", STRATEGIES)
def test_the_step_and_what_it_sends(name, mesh):
    training = quick(loss, PARAMS, BATCH, STRATEGIES[name], mesh)
    state, metrics = training.step(training.init(PARAMS), BATCH)
    assert_close(Run(PARAMS, training.whole(state), metrics["loss"][None], metrics["grad_norm"][None]), one_device())
    # The contract.
    expected = sent(name, mesh)
    contract = training.contract()
    assert Counter({(one.kind, one.leaf): one.count for one in contract}) == expected
    if name == "dp":
        return
    real = {axis for axis, size in zip(("replica", "shard"), mesh, strict=True) if size > 1}
    assert {axis for one in contract for axis in one.axes} == (real if expected else set())
    # The jaxpr, whatever the sizes of the axes it names.
    kinds = Counter(kind for (kind, _), count in expected.items() for _ in range(count))
    jaxpr = jax.make_jaxpr(training.step_fn)(training.state_shapes, BATCH).jaxpr
    collectives = [site.eqn for site in walk(jaxpr) if site.eqn.primitive.name in COLLECTIVES]
    assert Counter(COLLECTIVES[eqn.primitive.name] for eqn in collectives for _ in eqn.invars) == kinds
    assert {axis for eqn in collectives for axis in axes_of(eqn)} == (real if expected else set())
    # The compiled text.
    assert in_text(training.built(BATCH).compiled.as_text()) == kinds


@pytest.mark.parametrize("mesh", [(1, 1), (8, 1)], ids=str)
@pytest.mark.parametrize("name", ["dp", "ddp", "zero2", "hsdp on any mesh"])
def test_microbatches(name, mesh):
    training = quick(loss, PARAMS, BATCH, STRATEGIES[name], mesh, accumulate=3, clip=1e3)
    state, metrics = training.step(training.init(PARAMS), BATCH)
    assert_close(Run(PARAMS, training.whole(state), metrics["loss"][None], metrics["grad_norm"][None]), one_device())


def test_devices_have_different_gradients():
    """Without this, a reduction that is dropped would not be seen."""
    grads = jax.jit(jax.vmap(jax.grad(mean), (None, 0)))(PARAMS, BATCH.reshape(8, 6, 8))
    for leaf in jax.tree.leaves(grads):
        assert np.abs(leaf - leaf[:1])[1:].max(axis=tuple(range(1, leaf.ndim))).min() > 1e-3
