"""Strategies that reduce at the same moment are equal bit for bit: in one process, on one mesh shape, over 10 steps.

With one microbatch all five reduce at the use. With several, `ddp` and `zero1` add up first and reduce
once; the others reduce each time.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import optax
import pytest
from oracle import FORMS, Model, Run, assert_same_bits, batches, lenient, mesh_of, run

import jaxshard as js

STEPS, CLIP = 10, 0.1
# JAX 0.12's CPU compiler fuses zero3's backward pass otherwise in a list of blocks: a few biases' last bit differs.
SAME_FUSIONS = pytest.mark.skipif(jax.__version_info__ >= (0, 11), reason="to the bit on jax 0.10 only, in a list")
SCANNED, LISTED = FORMS
ADAMW = lenient(optax.adamw(1e-2, weight_decay=0.1))
AT_THE_USE = ("zero2", "shard_grad_op", "zero3")


def trained(strategy: str, model: Model, accumulate: int, mesh=(1, 8), **choices) -> Run:
    data = batches(STEPS, 48)
    training = js.parallelize(
        model.loss,
        ADAMW,
        params=model.init,
        batch=data[0],
        mesh=mesh_of(*mesh),
        strategy=strategy,
        accumulate=accumulate,
        clip=CLIP,
        **choices,
    )
    return run(training, model.init, data)


def assert_equal(strategies, model, accumulate, **choices) -> Run:
    first, *others = (trained(strategy, model, accumulate, **choices) for strategy in strategies)
    assert (first.norm > CLIP).all(), "the clip must be active in every step"
    assert len(set(first.loss)) == STEPS
    for other in others:
        assert_same_bits(other, first)
    return first


@pytest.mark.parametrize(
    "model", [pytest.param(SCANNED, marks=pytest.mark.smoke), pytest.param(LISTED, marks=SAME_FUSIONS)], ids=str
)
def test_all_five_with_one_microbatch(model):
    assert_equal(("ddp", "zero1", *AT_THE_USE), model, 1)


def test_all_five_with_replicas_and_bfloat16_gradients():
    precision = js.Precision(compute="bfloat16", reduce="bfloat16")
    assert_equal(("zero1", *AT_THE_USE), FORMS[0], 1, mesh=(2, 4), precision=precision)


@pytest.mark.parametrize("model", [SCANNED, pytest.param(LISTED, marks=SAME_FUSIONS)], ids=str)
def test_by_the_moment_of_reduction_with_three_microbatches(model):
    once = assert_equal(("ddp", "zero1"), model, 3)
    each = assert_equal(AT_THE_USE, model, 3)
    # The two groups add in another order: close, and (this is why there are two) not the same.
    np.testing.assert_allclose(once.loss, each.loss, rtol=1e-4)
    assert any((once.loss != each.loss) | (once.norm != each.norm))


@pytest.mark.parametrize(
    "model",
    [replace(SCANNED, tied=True), pytest.param(replace(LISTED, tied=True), marks=SAME_FUSIONS)],
    ids=str,
)
@pytest.mark.parametrize("accumulate", [1, 3])
def test_tied_leaves_by_the_moment_of_reduction(model, accumulate):
    """A tied leaf, read transposed by the head, is reduced once after the loop, or once per use."""
    if accumulate == 1:
        assert_equal(("zero1", *AT_THE_USE), model, 1)
    else:
        assert_equal(AT_THE_USE, model, accumulate)
        assert_equal(("ddp", "zero1"), model, accumulate)


def test_another_seed_is_another_run():
    """The comparison can fail."""
    data = batches(1, 48)
    model = FORMS[0]
    training = js.parallelize(model.loss, ADAMW, params=model.init, batch=data[0], mesh=mesh_of(1, 8))
    with pytest.raises(AssertionError, match="off by up to"):
        assert_same_bits(run(training, model.init, data, seed=1).end, run(training, model.init, data, seed=2).end)
