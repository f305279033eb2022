"""A step that is not finite: skipped if that is asked for, and the leaves that went bad are named."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from quick import EVERY, quick

PARAMS = {"a": np.linspace(0.5, 1.5, 16, dtype="float32"), "b": np.ones(8, "float32")}


def loss(params, batch):
    # The row that holds 0 gives `a`, and not `b`, an infinite gradient: of a square root at 0.
    return jnp.mean(jnp.sqrt(batch["x"] * params["a"][:1] ** 2) + params["b"].sum() * batch["x"])


GOOD = {"x": np.linspace(1, 2, 16, dtype="float32")}
BAD = {"x": np.where(np.arange(16) == 11, 0, GOOD["x"]).astype("float32")}


def values(state):
    return [np.asarray(x) for x in jax.tree.leaves((state.params, state.opt, state.step))]


@pytest.mark.parametrize(("strategy", "mesh"), EVERY)
def test_a_bad_step_leaves_the_state_as_it_was(strategy, mesh):
    """Oracle: the same run without the bad batch, to the bit."""
    training = quick(loss, PARAMS, GOOD, strategy, mesh, optimizer=optax.adam(0.1), skip_nonfinite=True)
    state, metrics = training.step(training.init(PARAMS), GOOD)
    before = values(state)
    assert np.isfinite(metrics["grad_norm"])
    assert not np.array_equal(before[0], PARAMS["a"])
    state, metrics = training.step(state, BAD)
    assert not np.isfinite(metrics["grad_norm"])
    assert all(np.array_equal(x, y) for x, y in zip(values(state), before, strict=True))
    state, metrics = training.step(state, GOOD)
    assert np.isfinite(metrics["grad_norm"])
    expected = training.init(PARAMS)
    for _ in range(2):
        expected, _ = training.step(expected, GOOD)
    assert all(np.array_equal(x, y) for x, y in zip(values(state), values(expected), strict=True))


@pytest.mark.parametrize(("strategy", "mesh"), [EVERY[0], EVERY[1], EVERY[5]])
def test_the_leaves_are_named(strategy, mesh):
    training = quick(loss, PARAMS, GOOD, strategy, mesh, optimizer=optax.adam(0.1))
    state = training.init(PARAMS)
    assert training.nonfinite(state, GOOD) == ()
    assert training.nonfinite(state, BAD) == ("grads/a",)
    state, _ = training.step(state, BAD)
    assert {"params/a", "opt/0/mu/a"} <= set(training.nonfinite(state, GOOD))
    assert "params/b" not in training.nonfinite(state, GOOD)


def test_what_is_not_asked_for_is_not_done():
    training = quick(loss, PARAMS, GOOD)
    state, _ = training.step(training.init(PARAMS), BAD)
    assert not np.isfinite(state.params["a"]).all()
    assert int(state.step) == 1
    with pytest.raises(TypeError, match="skip_nonfinite='yes'"):
        quick(loss, PARAMS, GOOD, skip_nonfinite="yes")  # type: ignore[arg-type]


def test_rows_of_a_batch():
    """In one process all rows are its own; with several, see the tests that start them."""
    training = quick(loss, PARAMS, GOOD)
    assert training.rows.tolist() == list(range(16))
    batch = training.global_batch({"x": GOOD["x"].astype("float64")})
    assert batch["x"].dtype == jnp.float32
    assert tuple(batch["x"].sharding.spec) == (("replica", "shard"),)
    with pytest.raises(ValueError, match=r"16 rows of a batch, x is float32\[8\], not float32\[16\]"):
        training.global_batch({"x": GOOD["x"][:8]})
