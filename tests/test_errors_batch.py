"""Batches that cannot be split over devices, or are no arrays, and those that are other than was said."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mistakes import BATCH, PARAMS, error, square, training_for
from quick import QUICK

X, Y = BATCH["x"], BATCH["y"]
NO_ARRAYS = [
    ({"x": X, "y": "abc"}, TypeError, "batch: y is a str; every leaf must be a NumPy or JAX array"),
    ({"x": X, "y": ["abc"] * 16}, TypeError, r"batch: y/0 is a str, .*\(and 12 more\).*numpy.asarray"),
    ({"x": X, "y": np.array(["abc"] * 16)}, TypeError, "y is an array .* dtype <U3"),
    ({"x": X, "y": np.full(16, None)}, TypeError, "y is an array .* dtype object"),
    ({"x": X, "y": np.zeros(16, "datetime64[s]")}, TypeError, "y is an array .* dtype datetime64"),
    ("abc", TypeError, "batch is a str"),
    (object(), TypeError, "batch is an object"),
    ({}, ValueError, "no arrays.*pytree of arrays"),
    (None, ValueError, "no arrays"),
    ({"x": X, "y": [1.0] * 16}, ValueError, "batch: y/0, .* and 12 more have no dims.*numpy.asarray"),
    ({"x": np.float32(1), "y": 2.0}, ValueError, "batch: x, y have no dims.*close over"),
    ({"x": X, "y": Y[:8]}, ValueError, "disagree in their first dim.*{'x': 16, 'y': 8}"),
    ({"x": X[:0], "y": Y[:0]}, ValueError, "batch of 0 .*: 8"),
]


@pytest.mark.parametrize(("batch", "kind", "said"), NO_ARRAYS)
def test_what_is_no_batch(batch, kind, said):
    with error(kind, said):
        training_for(batch=batch)


def test_batches_instead_of_one():
    with error(TypeError, r"batch is a generator; pass one batch, such as next\("):
        training_for(batch=(b for b in [BATCH]))


def test_a_batch_that_does_not_divide():
    def of(size: int) -> Any:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct((size, 8), x.dtype), BATCH)

    with error(ValueError, "batch of 50", "replica=2 x shard=4 x accumulate=3 = 24", "48 or 72"):
        training_for(batch=of(50), mesh=(2, 4), accumulate=3)
    with error(ValueError, "batch of 5 ", "= 8", "that do: 8"):
        training_for(batch=of(5))
    with error(ValueError, "batch of 96", "accumulate=5 = 40", "80 or 120", "accumulate=4 or 6"):
        training_for(batch=of(96), accumulate=5)
    training = training_for()
    with error(ValueError, "batch of 50", "= 8", "48 or 56"):
        training.step(training.init(PARAMS), jax.tree.map(lambda x: np.resize(x, (50, 8)), BATCH))


@pytest.mark.parametrize(
    ("batch", "kind", "said"),
    [
        ({"x": X}, KeyError, "'y'.*another than parallelize was given: its structure is .*'y'"),
        ({"x": X, "y": Y[:, :4]}, TypeError, r"given one device's part.*y float32\[2, 4\].*y is float32\[16, 4\], not"),
        ({"x": X, "y": Y.astype(np.int32)}, ValueError, r"y int32\[2, 8\].*y is int32\[16, 8\], not float32\[16, 8\]"),
        *(one for one in NO_ARRAYS if one[0] is not None),
    ],
)
def test_a_later_batch_is_another(batch, kind, said):
    """The loss is traced again, and where it fails, the error says what is new about the batch."""
    training = training_for()
    state = training.init(PARAMS)
    with error(kind, said):
        training.step(state, batch)
    assert not state.step.is_deleted(), "the state can be used further"


def test_a_later_batch_of_wider_dtypes_is_the_same():
    """Float64 and int64 are what NumPy makes by itself; JAX holds them as 32 bits."""

    def loss(params, batch):
        return square(params, {"x": batch["x"], "y": params["w"][batch["rows"]]})

    batch = {"x": X, "rows": np.arange(16, dtype=np.int32) % 8}
    wide = {"x": X.astype(np.float64), "rows": batch["rows"].astype(np.int64)}
    training = training_for(loss, batch=batch, compiler_options=QUICK)
    traces = [training.step(training.init(PARAMS), one)[1]["loss"] for one in (batch, wide)]
    np.testing.assert_allclose(traces, loss(PARAMS, batch), rtol=1e-6)
    assert training_for(loss, batch=wide).setup.batch == training.setup.batch


def test_evaluation():
    training = training_for()
    state = training.init(PARAMS)
    for batch, kind, said in NO_ARRAYS[:-1]:
        with error(kind, said):
            training.evaluate(state, batch)
    with error(ValueError, "first dim 0.*an example at least"):
        training.evaluate(state, NO_ARRAYS[-1][0])

    def in_pairs(params, batch):
        return jnp.mean(batch["x"].reshape(2, -1, 8) @ params["w"])

    with error(TypeError, "reshape", r"in_pairs was given .*x float32\[5, 8\]", "what is left of a batch"):
        training.evaluate(state, jax.tree.map(lambda x: x[:5], BATCH), in_pairs)
