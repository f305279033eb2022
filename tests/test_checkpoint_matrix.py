"""A checkpoint of any strategy on any mesh is restored into any other.

Oracle: the values of the state that was saved, brought to the host beforehand, bit for bit; and for the next step, the
run that was never stopped: bit for bit where sums are added in the same order, and to rounding elsewhere.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from oracle import assert_same_bits, lenient
from quick import quick

from jaxshard.train.checkpoint import Checkpoints, describe, restore

MESHES = ((1, 1), (1, 8), (2, 4), (1, 4))
KINDS = [(strategy, mesh) for strategy in ("ddp", "zero1", "zero2", "zero3") for mesh in MESHES] + [("hsdp", (2, 4))]
RANDOM = np.random.default_rng(3)
# 8 and 4 divide the first, 4 alone the second, neither the third.
PARAMS = {"up": np.zeros((8, 12), np.float32), "down": np.zeros((12, 4), np.float32), "bias": np.zeros(5, np.float32)}
BATCH = {"x": RANDOM.normal(size=(16, 8)).astype(np.float32), "y": RANDOM.normal(size=(16, 4)).astype(np.float32)}


def loss(params, batch):
    return jnp.mean((jnp.tanh(batch["x"] @ params["up"]) @ params["down"] - batch["y"] + params["bias"].sum()) ** 2)


@functools.cache
def training(strategy: str, mesh: tuple[int, int]) -> Any:
    return quick(loss, PARAMS, BATCH, strategy, mesh, optimizer=lenient(optax.adam(0.1)))


@dataclass(frozen=True, kw_only=True)
class Saved:
    """state, next: before and after the step that followed the save, on the host."""

    folder: Any
    state: Any
    next: Any


def on_host(state: Any) -> Any:
    return jax.tree.map(np.asarray, (state.step, state.params, state.opt, jax.random.key_data(state.key)))


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> dict[Any, Saved]:
    found = {}
    for seed, kind in enumerate(KINDS):
        random = np.random.default_rng(seed)  # other values in every checkpoint
        params = jax.tree.map(lambda x, r=random: r.normal(size=x.shape).astype(np.float32) / 4, PARAMS)
        state, _ = training(*kind).step(training(*kind).init(params, jax.random.key(seed)), BATCH)
        folder, before = tmp_path_factory.mktemp("of") / "checkpoints", on_host(state)
        with Checkpoints(folder) as checkpoints:
            checkpoints.save(1, state, {"kind": kind})
            state, _ = training(*kind).step(state, BATCH)
        found[kind] = Saved(folder=folder, state=before, next=on_host(state))
    return found


def test_the_checkpoints_differ(saved):
    digests = {kind: describe(of.folder).leaves["params/up"].digest for kind, of in saved.items()}
    assert len(set(digests.values())) == len(KINDS) == 17
    mesh = {kind: tuple((describe(of.folder).mesh or {}).values()) for kind, of in saved.items()}
    assert mesh == {kind: kind[1] for kind in KINDS}
    split = {kind for kind, of in saved.items() if describe(of.folder).leaves["params/up"].spec}
    assert split == {kind for kind in KINDS if kind[0] in ("zero3", "hsdp")}


@pytest.mark.parametrize("to", KINDS, ids=str)
def test_into_each_other(to, saved):
    target = training(*to)
    same = 0
    for source, of in saved.items():
        restored = restore(of.folder, target)
        assert (restored.step, restored.notes) == (1, {"kind": [source[0], list(source[1])]})
        assert_same_bits(on_host(restored.state), of.state)
        shardings = jax.tree.map(lambda x: x.sharding, target.state_shapes)
        assert jax.tree.map(lambda x: x.sharding, restored.state) == shardings
        after, _ = target.step(restored.state, BATCH)
        after = on_host(after)
        moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), after[1], of.state[1])
        assert min(jax.tree.leaves(moved)) > 1e-3, "the step did nothing"
        # With one replica all strategies add up in one order; with two, each has its own.
        if source == to or (source[1] == to[1] and to[1][0] == 1):
            same += 1
            assert_same_bits(after, of.next)
        else:
            assert jax.tree.all(jax.tree.map(lambda a, b: np.allclose(a, b, rtol=1e-4, atol=1e-6), after, of.next))
    assert same == (1 if to[1] == (2, 4) else 4)
