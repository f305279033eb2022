"""A checkpoint of states in host memory is restored where the target wants them, and back.

Oracle: the values that were saved, and the step that followed the save, bit for bit: with one replica and one
microbatch all strategies add in the same order.
"""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
import optax
import pytest
from oracle import assert_same_bits, lenient
from quick import quick
from test_checkpoint_matrix import BATCH, PARAMS, loss, on_host

import jaxshard as js
from jaxshard.strategy import named
from jaxshard.train.checkpoint import Checkpoints, describe, restore

KINDS = [("zero3", "none"), ("zero3", "opt+params"), ("ddp", "none"), ("ddp", "opt+params"), ("zero1", "opt")]
# Products with these numbers are exact: it does not matter which of them XLA's CPU compiler merges with a sum.
EXACT = lenient(optax.sgd(0.125, momentum=0.5))


@functools.cache
def training(name: str, states: str, optimizer: Any = EXACT, fraction: float = 1.0) -> Any:
    """A training whose devices update what lies in host memory."""
    strategy = named(name) if states == "none" else js.offload(name, states, fraction=fraction)
    return quick(loss, PARAMS, BATCH, replace(strategy, update="device"), optimizer=optimizer)


@dataclass(frozen=True, kw_only=True)
class Saved:
    """state, next: before and after the step that followed the save, on the host."""

    folder: Any
    state: Any
    next: Any


def save(training: Any, seed: int, folder: Any) -> Saved:
    random = np.random.default_rng(seed)  # other values in every checkpoint
    params = jax.tree.map(lambda x: random.normal(size=x.shape).astype(np.float32) / 4, PARAMS)
    state, _ = training.step(training.init(params, jax.random.key(seed)), BATCH)
    before = on_host(state)
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(1, state, {})
        state, _ = training.step(state, BATCH)
    return Saved(folder=folder, state=before, next=on_host(state))


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> dict[Any, Saved]:
    return {
        kind: save(training(*kind), seed, tmp_path_factory.mktemp("of") / "checkpoints")
        for seed, kind in enumerate(KINDS)
    }


def memories(state: Any) -> tuple[Counter[str], Counter[str]]:
    """In which memory parameters and optimizer state lie, but for scalars."""
    found = [Counter(x.sharding.memory_kind for x in jax.tree.leaves(t) if x.ndim) for t in (state.params, state.opt)]
    assert {x.sharding.memory_kind for x in jax.tree.leaves(state) if not x.ndim} == {"device"}
    return found[0], found[1]


def in_memory(states: str) -> tuple[dict[str, int], dict[str, int]]:
    params, opt = ("pinned_host" if state in states else "device" for state in ("params", "opt"))
    return {params: len(PARAMS)}, {opt: len(PARAMS)}


@pytest.mark.parametrize("to", KINDS, ids=str)
def test_into_each_other(to, saved):
    target = training(*to)
    for of in saved.values():
        restored = restore(of.folder, target).state
        assert_same_bits(on_host(restored), of.state)
        assert memories(restored) == in_memory(to[1])
        assert jax.tree.map(lambda x: x.sharding, restored) == jax.tree.map(lambda x: x.sharding, target.state_shapes)
        after, _ = target.step(restored, BATCH)
        assert memories(after) == in_memory(to[1])
        moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), on_host(after)[1], of.state[1])
        assert min(jax.tree.leaves(moved)) > 1e-3, "the step did nothing"
        assert_same_bits(on_host(after), of.next)


def test_a_checkpoint_says_where_it_was_and_its_digests_do_not(saved, tmp_path):
    for kind, of in saved.items():
        leaves = describe(of.folder).leaves
        assert leaves["params/up"].memory == ("pinned_host" if "params" in kind[1] else "device")
        assert leaves["step"].memory == "device"
    digests = []
    for kind in KINDS:
        state = restore(saved[KINDS[0]].folder, training(*kind)).state
        with Checkpoints(tmp_path / kind[0] / kind[1]) as checkpoints:
            checkpoints.save(1, state, {})
        digests.append({p: x.digest for p, x in describe(tmp_path / kind[0] / kind[1]).leaves.items()})
    assert all(digest == digests[0] for digest in digests)
    assert len(set(digests[0].values())) > 6


def test_a_part_of_adams_moments(tmp_path):
    """What lies where is the target's: half of the bytes, in a run that had all on its devices; and the way back."""
    adam = lenient(optax.adam(0.1))
    all_here, half = training("zero3", "none", adam), training("zero3", "opt+params", adam, 0.5)
    for source, target, wanted in ((all_here, half, 1), (half, all_here, 0)):
        of = save(source, 3, tmp_path / str(wanted))
        restored = restore(of.folder, target).state
        assert_same_bits(on_host(restored), of.state)
        params, opt = memories(restored)
        assert (params["pinned_host"], opt["pinned_host"]) == (wanted, 2 * wanted)
        after, _ = target.step(restored, BATCH)
        for ours, theirs in zip(jax.tree.leaves(on_host(after)), jax.tree.leaves(of.next), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-7)
