"""What a strategy holds and sends, from shapes alone.

Oracles: Table 1 and section 7 of the ZeRO paper (Rajbhandari et al. 2020, arXiv 1910.02054); its formulas at any size;
and what `explain` says of the same step on real devices.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AbstractMesh
from oracle import FORMS, batches, mesh_of

import jaxshard as js
from jaxshard.preflight.plan import plan

# Model states per device in GB (1e9), mixed-precision Adam (12 bytes of optimizer state for each parameter), of models
# of 7.5B, 128B and 1T parameters under ZeRO-1, -2 and -3 on so many devices.
TABLE_1 = {
    1: ((120, 120, 120), (2048, 2048, 2048), (16000, 16000, 16000)),
    4: ((52.5, 41.3, 30), (896, 704, 512), (7000, 5500, 4000)),
    16: ((35.6, 21.6, 7.5), (608, 368, 128), (4750, 2875, 1000)),
    64: ((31.4, 16.6, 1.88), (536, 284, 32), (4187, 2218, 250)),
    256: ((30.4, 15.4, 0.47), (518, 263, 8), (4046, 2054, 62.5)),
    1024: ((30.1, 15.1, 0.12), (513, 257, 2), (4011, 2013, 15.6)),
}
STAGES = ("zero1", "zero2", "zero3")
BILLIONS = (7.5, 128, 1000)
CELLS = [
    (devices, billions, stage, TABLE_1[devices][row][column])
    for devices in TABLE_1
    for row, billions in enumerate(BILLIONS)
    for column, stage in enumerate(STAGES)
]
HALF = js.Precision(params="bfloat16", compute="bfloat16", reduce="bfloat16", accumulate="bfloat16")


def with_master_weights() -> optax.GradientTransformation:
    """Adam as the paper counts it: a float32 copy of the parameters and two float32 moments, 12 bytes for each."""

    def init(params):
        return [jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params) for _ in range(3)]

    return optax.GradientTransformation(init, lambda updates, state, params=None: (updates, state))


def model(billions: float) -> dict:
    return {"w": jax.ShapeDtypeStruct((1024, round(billions * 1e9 / 1024)), jnp.bfloat16)}


def planned(strategy, devices, billions=7.5, accumulate=1, **choices):
    return plan(
        model(billions),
        with_master_weights(),
        strategy=strategy,
        mesh={"replica": 1, "shard": devices},
        precision=HALF,
        accumulate=accumulate,
        whole_budget=0,
        **choices,
    )


@pytest.mark.parametrize(("devices", "billions", "stage", "published"), CELLS)
def test_table_1(devices, billions, stage, published):
    """ZeRO-1 keeps whole gradients, as it does between microbatches. The paper's rounding is mixed."""
    states = planned(stage, devices, billions, accumulate=2).states / 1e9
    rounding = 0.005 if published < 1 else min(max(0.01 * published, 0.05), 1)
    assert states == pytest.approx(published, abs=rounding)


def test_there_are_54_cells():
    assert len(CELLS) == 54


@pytest.mark.smoke
@pytest.mark.parametrize(("strategy", "times"), [("ddp", 2), ("zero1", 2), ("zero2", 2), ("zero3", 3)])
def test_traffic_in_parameters(strategy, times):
    """Section 7, where 2 and 3 leave out a factor of (N - 1) / N."""
    found = planned(strategy, 64)
    params = 2 * model(7.5)["w"].size  # bytes
    assert found.wire_bytes / params == pytest.approx(times * 63 / 64, rel=1e-6)


def test_gradients_are_held_in_the_dtype_they_are_summed_in():
    size = model(7.5)["w"].size
    held = {
        dtype: plan(
            model(7.5),
            optax.sgd(0.1),
            strategy="ddp",
            mesh={"replica": 1, "shard": 8},
            precision=js.Precision(accumulate=dtype),
        ).held["grads"]
        for dtype in ("bfloat16", "float32")
    }
    assert held == {"bfloat16": 2 * size, "float32": 4 * size}


def test_gradients_between_microbatches_are_held_as_the_strategy_says():
    """Reduced in each microbatch, and whole until the last, whose slices the update takes."""
    whole = replace(js.ZERO1, reduce="microbatch")
    assert planned(whole, 8, accumulate=2).held["grads"] == 8 * planned(whole, 8).held["grads"] > 0


def test_what_is_whole_for_a_while():
    weights = 2 * model(7.5)["w"].size
    assert planned("zero3", 64).gathered == weights, "the one leaf that there is"
    assert planned("shard_grad_op", 64).gathered == weights
    assert planned("zero2", 64).gathered == 0, "it never was split"
    two = {name: jax.ShapeDtypeStruct((64, size), jnp.float32) for name, size in (("a", 64), ("b", 128))}
    for strategy, whole in (("zero3", 64 * 128), ("shard_grad_op", 64 * 192)):
        found = plan(two, optax.sgd(0.1), strategy=strategy, mesh={"replica": 2, "shard": 8}, whole_budget=0)
        assert found.gathered == 4 * whole


def test_dp_is_the_first_device():
    found = plan({"w": jax.ShapeDtypeStruct((64, 64), jnp.float32)}, optax.sgd(0.1), strategy="dp", mesh=mesh_of(1, 8))
    size = 4 * 64 * 64
    assert (found.held["params"], found.held["grads"], found.gathered) == (size, size, 7 * size)
    assert found.wire_bytes == 2 * 7 * size


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "shard_grad_op", "zero3"])
def test_of_a_loss_it_is_what_explain_says(strategy, accumulate):
    model, batch, mesh = FORMS[0], batches(1, 48)[0], mesh_of(2, 4)
    choices = {"strategy": strategy, "accumulate": accumulate}
    training = js.parallelize(
        model.loss, optax.sgd(0.1, momentum=0.9), params=model.init, batch=batch, mesh=mesh, **choices
    )
    said = training.explain()
    found = plan(model.init, optax.sgd(0.1, momentum=0.9), mesh=mesh, loss_fn=model.loss, batch=batch, **choices)
    assert found.held == said.bytes_per_device
    assert found.leaves == tuple(row.leaf for row in said.leaves)
    assert found.mesh == said.mesh
    # The contract is an upper bound: a backward pass that does not read a weight does not gather it again.
    assert said.wire_bytes <= found.wire_bytes <= 1.2 * said.wire_bytes
    assert {(c.kind, c.axes, c.leaf) for c in found.collectives} >= {(c.kind, c.axes, c.leaf) for c in said.contract}


def test_any_mesh():
    sizes = {"replica": 2, "shard": 4}
    params = {"w": jax.ShapeDtypeStruct((64, 64), jnp.float32), "n": jax.ShapeDtypeStruct((), jnp.int32)}
    plans = [
        plan(params, optax.sgd(0.1), mesh=mesh)
        for mesh in (sizes, AbstractMesh(tuple(sizes.values()), tuple(sizes)), mesh_of(2, 4))
    ]
    assert plans[0] == plans[1] == plans[2]
    assert [leaf.whole_because for leaf in plans[0].leaves] == ["a scalar", ""]


def test_a_loss_wants_a_batch():
    with pytest.raises(ValueError, match="come together"):
        plan({}, optax.sgd(0.1), mesh={"replica": 1, "shard": 2}, loss_fn=FORMS[0].loss)
