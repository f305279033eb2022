"""States in host memory change where things lie, and nothing else.

Oracle: the same strategy without offload, bit for bit: parameters, optimizer state, losses and norms.
"""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib
from oracle import FORMS, Model, assert_same_bits, batches, mesh_of
from quick import EVERY, quick
from test_precision import brittle, brittle_loss

import jaxshard as js
from jaxshard import host_memory
from jaxshard.strategy import offload

SCAN, LIST = FORMS
STEPS, CLIP = 3, 0.1
ADAMW = optax.adamw(1e-2, weight_decay=0.1)
WHOLE, SMALL = host_memory.PIECE_BYTES, 256  # bytes; with the second the leaves below are updated in many pieces


@dataclass(frozen=True)
class Steps:
    """What training gave: the states (on the host), and each step's loss and norm."""

    states: list[Any]
    loss: np.ndarray
    norm: np.ndarray


def on_host(state: Any) -> Any:
    return jax.tree.map(np.asarray, (state.step, state.params, state.opt, state.extra, state.scale))


def kinds(tree: Any) -> Counter[str]:
    """How many arrays with dims lie in which memory. Scalars are on the devices, always."""
    leaves = [x for x in jax.tree.leaves(tree) if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)]
    assert {x.sharding.memory_kind for x in leaves if not x.ndim} <= {"device"}
    return Counter(x.sharding.memory_kind for x in leaves if x.ndim)


def check_places(training: Any, state: Any) -> None:
    """What the strategy names is in host memory whole, and nothing else is."""
    strategy = training.strategy
    for tree, placement in ((state.params, strategy.params), (state.opt, strategy.opt)):
        assert set(kinds(tree)) <= {placement.memory}
    assert set(kinds((state.extra, state.key, state.scale))) <= {"device"}
    wanted = training.state_shapes
    assert jax.tree.all(jax.tree.map(lambda x, y: x.sharding.is_equivalent_to(y.sharding, x.ndim), state, wanted))


def stepped(training: Any, init: Any, data: Any, places: Any = check_places) -> Steps:
    state = training.init(init, jax.random.key(0))
    places(training, state)
    states, metrics = [on_host(state)], []
    for batch in data:
        state, now = training.step(state, batch)
        places(training, state)
        states.append(on_host(state))
        metrics.append((now["loss"], now["grad_norm"]))
    loss, norm = np.array(metrics, np.float32).T
    return Steps(states, loss, norm)


def assert_equal(ours: Steps, theirs: Steps, *, moved: bool = True) -> None:
    assert_same_bits((ours.loss, ours.norm, ours.states), (theirs.loss, theirs.norm, theirs.states))
    if moved:
        far = jax.tree.map(lambda a, b: np.abs(a - b).max(), theirs.states[0][1], theirs.states[-1][1])
        assert min(jax.tree.leaves(far)) > 0


MESH = dict(EVERY)


@functools.cache
def made(name: str, states: str, model: Model = SCAN, pieces: int = WHOLE, buffers: int = 2, **choices: Any) -> Any:
    """A training, compiled once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_memory, "PIECE_BYTES", pieces)
        strategy = replace(offload(name, states), buffers=buffers)
        choices = {"optimizer": ADAMW, "clip": CLIP} | choices
        training = quick(model.loss, model.init, batches(1, 48)[0], strategy, MESH[name], **choices)
        if name != "dp":
            training.built()
        else:
            training.step(training.init(model.init, jax.random.key(0)), batches(1, 48)[0])
        return training


@functools.cache
def trained(name: str, states: str, model: Model = SCAN, pieces: int = WHOLE, **choices: Any) -> Steps:
    return stepped(made(name, states, model, pieces, **choices), model.init, batches(STEPS, 48))


CASES = [("opt", 1, WHOLE), ("opt", 3, SMALL), ("opt+params", 1, SMALL), ("opt+params", 3, WHOLE)]


@pytest.mark.parametrize(("states", "accumulate", "pieces"), CASES)
@pytest.mark.parametrize("name", MESH)
def test_adamw_with_an_active_clip_is_the_same_to_the_bit(name, states, accumulate, pieces):
    theirs = trained(name, "none", accumulate=accumulate)
    assert (theirs.norm > CLIP).all(), "the clip must be active in every step"
    assert len(set(theirs.loss)) == STEPS
    assert_equal(trained(name, states, pieces=pieces, accumulate=accumulate), theirs)
