"""Who owns an array: a state is donated to each step, and nothing else is; what is shared going in is not shared after.

Oracle: the arrays themselves before and after, and one device for what is trained from them.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from oracle import assert_same_bits, mesh_of
from quick import EVERY, quick

W = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32) / 3
X = np.random.default_rng(1).normal(size=(20, 8)).astype(np.float32)
ON_MESHES = [("dp", (1, 8)), ("ddp", (1, 8)), ("zero1", (1, 8)), ("zero3", (1, 8)), ("zero3", (1, 1))]


def loss(params, batch):
    return jnp.mean(jnp.square(batch["x"] @ params["a"]) + jnp.tanh(batch["y"] @ params["b"]))


def one(params, batch):
    return jnp.mean(jnp.square(batch["x"] @ params["a"]))


@pytest.mark.parametrize(("strategy", "mesh"), ON_MESHES, ids=str)
def test_one_array_in_many_places(strategy, mesh):
    """Two leaves that are one array, twice in the batch too: they are trained apart, and it stays as it was."""
    array = jnp.asarray(W)
    params, batch = {"a": array, "b": array}, {"x": array, "y": array}
    training = quick(loss, params, batch, strategy, mesh)
    state, wanted = training.init(params), {"a": W, "b": W}
    for _ in range(2):
        state, _ = training.step(state, batch)
        grads = jax.jit(jax.grad(loss))(wanted, {"x": W, "y": W})
        wanted = jax.tree.map(lambda p, g: p - np.asarray(g), wanted, grads)
    for name, leaf in training.whole(state).items():
        np.testing.assert_allclose(leaf, wanted[name], rtol=1e-5, atol=1e-6)
    assert np.abs(wanted["a"] - wanted["b"]).max() > 0.05
    np.testing.assert_array_equal(array, W)


def test_one_array_from_an_init_function():
    def init(key):
        w = jax.random.normal(key, (8, 8))
        return {"a": w, "b": w}

    training = quick(loss, init, {"x": W, "y": W})
    state = training.init(init, jax.random.key(0))
    state, _ = training.step(state, {"x": W, "y": W})
    after = training.whole(state)
    assert (after["a"] != after["b"]).any()


@pytest.mark.parametrize(("strategy", "mesh"), ON_MESHES, ids=str)
def test_a_batch_that_is_an_array_of_the_state(strategy, mesh):
    """It is read as it was before the step, though the step reuses its memory.

    A loader that places its batches makes another array of it, over the same memory.
    """
    training = quick(one, {"a": W}, {"x": W}, strategy, mesh)
    grads = jax.jit(jax.grad(one))({"a": W}, {"x": W})
    for place in (lambda x: x, lambda x: jax.device_put(x, NamedSharding(training.mesh, P(("replica", "shard"))))):
        state = training.init({"a": W})
        state, _ = training.step(state, {"x": place(state.params["a"])})
        np.testing.assert_allclose(training.whole(state)["a"], W - grads["a"], rtol=1e-5, atol=1e-6)


def with_extra(params, batch, *, extra):
    """Returns part of its extra as it was given, which JAX could hand through without a copy."""
    return one(params, batch), {"seen": extra["seen"] + 1, "constant": extra["constant"], "key": extra["key"]}


@pytest.mark.parametrize(("strategy", "mesh"), ON_MESHES, ids=str)
def test_what_init_was_given_outlives_the_state(strategy, mesh):
    params = {"a": jnp.asarray(W), "spare": jax.random.key(1)}
    extra = {"seen": jnp.zeros(3), "constant": jnp.arange(4), "key": jax.random.key(2)}
    key = jax.random.key(3)
    training = quick(with_extra, (params, extra), {"x": X[:16]}, strategy, mesh)
    state = training.init((params, extra), key)
    for _ in range(2):
        state, _ = training.step(state, {"x": X[:16]})
    assert not [path for path, x in jax.tree.leaves_with_path((params, extra, key)) if x.is_deleted()]
    np.testing.assert_array_equal(params["a"], W)
    np.testing.assert_array_equal(extra["seen"], 0)
    np.testing.assert_array_equal(state.extra["seen"], 2)
    np.testing.assert_array_equal(state.extra["constant"], np.arange(4))


@pytest.mark.parametrize("strategy", ["dp", "zero1", "zero3"])
def test_a_state_made_from_a_states_own_arrays(strategy):
    """A copy of a run: each goes its own way."""
    training = quick(one, {"a": W}, {"x": X[:16]}, strategy)
    first = training.init({"a": W})
    second = training.init(first.params, first.key)
    second, _ = training.step(second, {"x": X[:16]})
    np.testing.assert_array_equal(training.whole(first)["a"], W)
    first, _ = training.step(first, {"x": X[:16]})
    assert_same_bits(training.whole(first), training.whole(second))


@pytest.mark.parametrize(("strategy", "mesh"), EVERY, ids=str)
def test_parameters_on_the_host_are_not_the_states_memory(strategy, mesh):
    training = quick(one, {"a": W}, {"x": X[:16]}, strategy, mesh)
    state = training.init({"a": W})
    whole = training.whole(state)["a"]
    for _ in range(3):
        state, _ = training.step(state, {"x": X[:16]})
    np.testing.assert_array_equal(whole, W)
    assert (training.whole(state)["a"] != W).all()


@pytest.mark.parametrize("strategy", ["dp", "zero3"])
def test_a_donated_state_is_named(strategy):
    training = quick(one, {"a": W}, {"x": X[:16]}, strategy)
    state = training.init({"a": W})
    evaluated = training.evaluate(state, {"x": X[:16]})  # which donates nothing
    new, metrics = training.step(state, {"x": X[:16]})
    np.testing.assert_allclose(evaluated["loss"], metrics["loss"], rtol=1e-6)
    for use in (
        lambda: training.step(state, {"x": X[:16]}),
        lambda: training.evaluate(state, {"x": X[:16]}),
        lambda: training.whole(state),
    ):
        with pytest.raises(ValueError, match="given to an earlier step"):
            use()
    assert training.whole(new)["a"].shape == (8, 8)


def sharded(axes: dict[str, int], spec: P, first: int = 0) -> NamedSharding:
    """On some of the devices, with the axes that `jax.make_mesh` gives."""
    sizes = tuple(axes.values())
    devices = jax.devices()[first : first + int(np.prod(sizes))]
    return NamedSharding(jax.make_mesh(sizes, tuple(axes), devices=devices), spec)


PLACES: dict[str, Any] = {
    "numpy": lambda x: x,
    "numpy, in float64": lambda x: x.astype(np.float64),
    "the first device": lambda x: jax.device_put(x, jax.devices()[0]),
    "another device": lambda x: jax.device_put(x, jax.devices()[5]),
    "everywhere whole": lambda x: jax.device_put(x, NamedSharding(mesh_of(1, 8), P())),
    "split over another mesh": lambda x: jax.device_put(x, sharded({"a": 2, "b": 2}, P("b", "a"), first=4)),
    "split over our mesh, if it divides": lambda x: (
        x if len(x) % 8 else jax.device_put(x, NamedSharding(mesh_of(1, 8), P(("replica", "shard"))))
    ),
}


@pytest.mark.parametrize("strategy", ["dp", "zero3"])
def test_batches_from_anywhere(strategy):
    """Whole batches for a step and 20 examples for an evaluation, of which 4 are left; none is donated."""
    training = quick(one, {"a": W}, {"x": X[:16]}, strategy)
    losses, evaluated = set(), set()
    for place in PLACES.values():
        batch, more = ({"x": place(x)} for x in (X[:16], X))
        state, metrics = training.step(training.init({"a": W}), batch)
        losses.add(float(metrics["loss"]))
        evaluated.add(float(training.evaluate(state, more)["loss"]))
        np.testing.assert_array_equal(batch["x"], X[:16])
        np.testing.assert_array_equal(more["x"], X)
    assert len(losses) == len(evaluated) == 1
    np.testing.assert_allclose(losses.pop(), np.mean(np.square(X[:16] @ W)), rtol=1e-5)


@pytest.mark.parametrize("strategy", ["dp", "zero3"])
def test_keys_that_live_anywhere(strategy):
    """A key restored from a checkpoint, or of another run's state, lives on devices of its own."""

    def init(key):
        return {"a": jax.random.normal(key, (8, 8))}

    training = quick(one, init, {"x": X[:16]}, strategy)
    key = jax.random.key(4)
    wanted = training.whole(training.init(init, key))
    for place in (jax.devices()[0], jax.devices()[5], NamedSharding(mesh_of(1, 4), P())):
        committed = jax.device_put(key, place)
        state = training.init(init, committed)
        assert_same_bits(training.whole(state), wanted)
        state = training.init(wanted, committed)
        training.step(state, {"x": X[:16]})
        assert not committed.is_deleted()


def test_a_state_of_other_devices():
    """Its arrays may start another run; it may not go on in a training that lives elsewhere."""
    here = quick(one, {"a": W}, {"x": X[:16]}, mesh=(1, 4))
    there = quick(one, {"a": W}, {"x": X[:16]}, mesh=(1, 8))
    state = here.init({"a": W})
    moved, _ = there.step(there.init(state.params, state.key), {"x": X[:16]})
    stayed, _ = here.step(state, {"x": X[:16]})
    np.testing.assert_allclose(there.whole(moved)["a"], here.whole(stayed)["a"], rtol=1e-5, atol=1e-6)
    for use in (there.step, there.evaluate):
        with pytest.raises(ValueError, match=r"devices?|sharding"):
            use(stayed, {"x": X[:16]})
