"""Every strategy trains as one device does. The oracle: plain `jax.grad` over whole batches, and optax."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import optax
import pytest
from oracle import FORMS, Model, assert_close, batches, lenient, mesh_of, oracle, run
from quick import QUICK

import jaxshard as js
from jaxshard import Placement, Strategy

STEPS = 5
SGD = optax.sgd(0.3)
CLIP = 0.1
# A large eps, because Adam divides a gradient by its own size: where that is rounding, so is the quotient.
ADAMW = lenient(optax.adamw(3e-2, eps=1e-2, weight_decay=0.1))
ADAMW_CLIPPED = optax.chain(optax.clip_by_global_norm(CLIP), ADAMW)

SIX = ("dp", "ddp", "zero1", "zero2", "shard_grad_op", "zero3")
FORMS_BY_ACCUMULATE = [(FORMS[0], 3), (FORMS[1], 1)]
ON_BOTH = [(strategy, (1, 8)) for strategy in SIX] + [(strategy, (2, 4)) for strategy in (*SIX[1:], "hsdp")]
ON_OTHERS = [(strategy, mesh) for mesh in ((1, 1), (8, 1), (4, 2), (1, 7)) for strategy in ("zero3", "zero1", "ddp")]
OWN = {
    "fsdp, reduced once": replace(js.ZERO3, reduce="step"),
    "fsdp, kept until the backward pass": replace(js.ZERO3, regather=False),
    "fsdp, tied": replace(js.ZERO3, prefer="memory"),
    "zero2, reduced once": replace(js.ZERO2, reduce="step"),
    "optimizer over both axes": replace(js.ZERO3, opt=Placement(axes=("shard", "replica"))),
    "zero1 over both axes": replace(js.ZERO1, opt=Placement(axes=("shard", "replica"))),
    "zero1 over replicas": replace(js.ZERO1, opt=Placement(axes=("replica",))),
    "gathered at the step's start, again at none": Strategy(
        params=js.ZERO3.params,
        grads=Placement(axes=("shard", "replica")),
        opt=Placement(axes=("shard", "replica")),
        gather="step",
    ),
}


def size_for(mesh: tuple[int, int]) -> int:
    """Of a global batch: three microbatches of two examples for each device."""
    return 6 * mesh[0] * mesh[1]


def trained(model: Model, strategy: str | Strategy, mesh: tuple[int, int], optimizer: Any = SGD, **choices):
    data = batches(STEPS, size_for(mesh))
    training = js.parallelize(
        model.loss,
        optimizer,
        params=model.init,
        batch=data[0],
        mesh=mesh_of(*mesh),
        strategy=strategy,
        compiler_options=QUICK,
        **choices,
    )
    return run(training, model.init, data)


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("model", FORMS, ids=str)
@pytest.mark.parametrize(("strategy", "mesh"), ON_BOTH, ids=str)
def test_sgd_as_on_one_device(strategy, mesh, model, accumulate):
    ours = trained(model, strategy, mesh, accumulate=accumulate)
    assert_close(ours, oracle(model, SGD, STEPS, size_for(mesh)))


@pytest.mark.parametrize(("model", "accumulate"), FORMS_BY_ACCUMULATE, ids=str)
@pytest.mark.parametrize(("strategy", "mesh"), ON_OTHERS, ids=str)
def test_sgd_on_other_meshes_as_on_one_device(strategy, mesh, model, accumulate):
    ours = trained(model, strategy, mesh, accumulate=accumulate)
    assert_close(ours, oracle(model, SGD, STEPS, size_for(mesh)))


@pytest.mark.parametrize(("strategy", "mesh"), ON_BOTH, ids=str)
def test_adamw_with_an_active_clip_as_on_one_device(strategy, mesh):
    model, accumulate = FORMS_BY_ACCUMULATE[mesh == (1, 8)]
    theirs = oracle(model, ADAMW_CLIPPED, STEPS, size_for(mesh))
    assert (theirs.norm > 2 * CLIP).all(), "the clip must be active in every step"
    ours = trained(model, strategy, mesh, ADAMW, accumulate=accumulate, clip=CLIP)
    assert_close(ours, theirs, ulps=4)


@pytest.mark.parametrize(("model", "accumulate"), FORMS_BY_ACCUMULATE, ids=str)
@pytest.mark.parametrize("name", OWN)
def test_a_strategy_of_ones_own(name, model, accumulate):
    ours = trained(model, OWN[name], (2, 4), accumulate=accumulate)
    assert_close(ours, oracle(model, SGD, STEPS, size_for((2, 4))))


@pytest.mark.smoke
@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3"])
def test_tied_leaves_and_rematerialised_blocks(strategy):
    model = Model(form="scan", tied=True)
    ours = trained(model, strategy, (2, 4), accumulate=3, remat="full")
    assert_close(ours, oracle(model, SGD, STEPS, size_for((2, 4))))


def test_the_two_forms_are_one_function():
    scan, listed = (oracle(model, SGD, STEPS, 48) for model in FORMS)
    stacked = jax.tree.map(lambda *x: np.stack(x), *listed.end["blocks"])
    for name, leaf in scan.end["blocks"].items():
        np.testing.assert_allclose(stacked[name], leaf, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("devices", [7, 8])
def test_every_device_sees_its_own_data(devices):
    """Without this, a strategy that forgets to reduce would pass."""
    model = FORMS[0]
    params = model.init(jax.random.key(0))
    for batch in batches(STEPS, 6 * devices):
        parts = [jax.tree.map(lambda x, i=i: x[6 * i : 6 * i + 6], batch) for i in range(devices)]
        losses = sorted(float(model.loss(params, part)) for part in parts)
        assert min(np.diff(losses)) > 1e-5


def test_a_mean_over_parts_that_is_not_divided_is_seen():
    """The comparison can fail: gradients 8 times too large, or of one device alone, are far outside."""
    model, size = FORMS[0], size_for((1, 8))
    theirs = oracle(model, SGD, STEPS, size)
    with pytest.raises(AssertionError, match="off by"):
        assert_close(oracle(model, optax.sgd(0.3 * 8), STEPS, size), theirs)
    with pytest.raises(AssertionError, match="off by"):
        assert_close(oracle(model, optax.sgd(0.3 * (1 + 1e-4)), STEPS, size), theirs)
