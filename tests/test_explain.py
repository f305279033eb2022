"""What `explain` says, and the choice it explains: which leaves are split, along which dim, and why others are not."""

from __future__ import annotations

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import FORMS, batches, lenient, mesh_of

import jaxshard as js
from jaxshard.specs import layout

SCAN = FORMS[0]
ADAM = lenient(optax.adam(1e-2))
PARAMS = 4 * (32 * 16 + 16 * 32 + 3 * (16 * 28 + 28 * 16 + 28 + 16))


def training_for(
    strategy: str | js.Strategy = "zero3", loss=SCAN.loss, *, params=SCAN.init, batch=None, mesh=(1, 8), **choices
):
    batch = batches(1, 48)[0] if batch is None else batch
    return js.parallelize(loss, ADAM, params=params, batch=batch, mesh=mesh_of(*mesh), strategy=strategy, **choices)


def rows(explanation):
    return {row.leaf.path: row for row in explanation.leaves}


def test_a_split_leaf():
    row = rows(training_for("zero2", accumulate=3).explain())["blocks/up"]
    assert (row.params, row.grads, row.opt) == ("whole", "dim 1 over shard", "dim 1 over shard")
    size = 3 * 16 * 28 * 4
    assert row.bytes_per_device == size + size / 8 + 2 * size / 8
    assert (row.leaf.whole_because, row.whole_costs) == ("", 0)


@pytest.mark.smoke
def test_a_leaf_left_whole_has_a_reason_a_cost_and_a_fix():
    row = rows(training_for("zero3").explain())["blocks/bias"]
    assert (row.params, row.grads, row.opt) == ("whole", "whole", "whole")
    assert "(3, 28)" in row.leaf.whole_because
    assert "divides by 8" in row.leaf.whole_because
    assert row.bytes_per_device == 4 * 3 * 28 * 4
    assert row.whole_costs == 4 * (3 * 28 * 4 - 3 * 28 * 4 // 8)  # parameter, gradient and two moments
    assert rows(training_for("zero1").explain())["blocks/bias"].whole_costs == row.whole_costs * 3 // 4
    assert rows(training_for("ddp").explain())["blocks/bias"].whole_costs == 0, "ddp would not split it"


def test_the_fix_is_one():
    """What the message proposes in place of a dim does split the leaf."""
    loss = lambda params, batch: jnp.mean(batch @ params["w"])
    row = rows(
        training_for(
            loss=loss, params={"w": np.ones((11, 3), np.float32)}, batch=np.ones((8, 11), np.float32)
        ).explain()
    )["w"]
    assert row.leaf.whole_because == "no dim of (11, 3) divides by 8; e.g. 16 in place of 11 would"
    row = rows(
        training_for(
            loss=loss, params={"w": np.ones((16, 3), np.float32)}, batch=np.ones((8, 16), np.float32)
        ).explain()
    )["w"]
    assert row.leaf.dim == 0


def test_reasons():
    def loss(params, batch):
        x, _ = jax.lax.scan(lambda x, w: (x * jnp.sum(w), None), params["scale"], params["stack"])
        return jnp.mean(batch) * x * jnp.sum(params["w"]) * jax.random.normal(params["keys"][0])

    params = {
        "scale": jnp.ones(()),
        "stack": jnp.ones((8, 3)),
        "empty": jnp.ones((0, 8)),
        "keys": jax.random.split(jax.random.key(0), 8),
        "w": jnp.ones((8, 8)),
    }
    found = rows(training_for(loss=loss, params=params, batch=np.ones((8, 2), np.float32), whole_budget=0).explain())
    because = {path: row.leaf.whole_because for path, row in found.items()}
    assert because == {
        "scale": "a scalar",
        "stack": "the loss slices it along dim 0, the only one that divides by 8",
        "empty": "empty",
        "keys": "a PRNG key",
        "w": "",
    }
    assert (found["keys"].grads, found["keys"].opt) == ("none", "none")


HELD = {  # parameters, gradients between the passes, Adam
    "dp": (1, 1, 2),
    "ddp": (1, 1, 2),
    "zero1": (1, 1 / 8, 2 / 8),
    "zero2": (1, 1 / 8, 2 / 8),
    "shard_grad_op": (1 / 8, 1 / 8, 2 / 8),
    "zero3": (1 / 8, 1 / 8, 2 / 8),
}


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("strategy", HELD)
def test_totals(strategy, accumulate):
    explanation = training_for(strategy, accumulate=accumulate).explain()
    params, grads, opt = HELD[strategy]
    if strategy == "zero1" and accumulate > 1:
        grads = 1  # held whole until the last microbatch
    bias = 4 * 3 * 28  # which no strategy splits
    expected = {
        "params": params * (PARAMS - bias) + bias,
        "grads": grads * (PARAMS - bias) + bias,
        "opt": opt * (PARAMS - bias) + 2 * bias + 4,
        "extra": 0,
    }
    assert explanation.bytes_per_device == expected
    assert sum(row.bytes_per_device for row in explanation.leaves) == sum(expected.values()) - 4


def test_the_contract_and_its_bytes_on_the_wire():
    """By the ring algorithms: an all_reduce sends 2 (n - 1) / n of the buffer, the others half of that."""
    training = training_for("ddp")
    explanation = training.explain()
    assert explanation.contract == training.contract()
    assert explanation.wire_bytes == pytest.approx((PARAMS + 8) * 2 * 7 / 8, rel=1e-3)
    assert training_for("zero1", mesh=(1, 8)).explain().wire_bytes == pytest.approx((PARAMS + 8) * 2 * 7 / 8, rel=1e-3)
    assert training_for("zero3", mesh=(1, 1)).explain().wire_bytes == 0


@pytest.mark.parametrize("strategy", HELD)
def test_printed(strategy):
    explanation = training_for(strategy, accumulate=3).explain()
    text = str(explanation)
    assert text.startswith(f"{strategy} on replica=1 x shard=8")
    for row in explanation.leaves:
        assert f"{row.bytes_per_device:,}" in next(line for line in text.splitlines() if row.leaf.path in line)
    for one in explanation.contract:
        assert f"{one.count} x {one.kind}" in text
        assert f"{one.bytes:,} B" in text
    moved = "sent and received by the first device" if strategy == "dp" else "sent by each device"
    assert f"{moved} in a step, {explanation.wire_bytes:,} B" in text
    splits = strategy not in ("dp", "ddp")  # where nothing is split, nothing needs a reason
    assert ("no dim of (3, 28) divides by 8" in text) == splits
    assert all(line == line.rstrip() for line in text.splitlines())


def test_a_strategy_of_ones_own_is_named_by_its_placements():
    both = js.Placement(axes=("shard", "replica"))
    text = str(training_for(replace(js.ZERO1, opt=both), mesh=(2, 4)).explain())
    assert text.startswith("params whole, grads whole, opt split over shard x replica on replica=2 x shard=4")


def test_nothing_is_sent_by_one_device():
    assert "0 B:\n  (none)" in str(training_for(mesh=(1, 1)).explain())


# The choice of dims


def test_whole_budget_leaves_the_smallest_leaves_whole():
    """Of 64 KiB and 3 x 64 B on 8 devices, 1 % of a share is 82 B: one of the small leaves stays whole."""
    params = {"w": np.ones((128, 128), np.float32)} | {f"b{i}": np.ones(16, np.float32) for i in range(3)}

    def split(budget):
        training = training_for(
            loss=lambda params, batch: jnp.mean(
                batch @ params["w"] + jnp.tile(params["b0"] * params["b1"] * params["b2"], 8)
            ),
            params=params,
            batch=np.ones((8, 128), np.float32),
            whole_budget=budget,
        )
        return {path: row.leaf.whole_because for path, row in rows(training.explain()).items()}

    assert not any(split(0).values())
    assert sum(map(bool, split(0.01).values())) == 1
    assert sum(map(bool, split(0.03).values())) == 3
    assert "whole_budget=0 splits it" in split(0.03)["b0"]
    assert all(split(8).values())


READS = {  # how the loss reads a leaf: the dims along which it takes it piece by piece
    "whole": (lambda x: jnp.sum(jnp.sin(x)), set()),
    "scanned": (
        lambda x: jax.lax.scan(lambda c, row: (c + jnp.sum(row, dtype=jnp.float32), None), jnp.zeros(()), x)[0],
        {0},
    ),
    "transposed and scanned": (lambda x: READS["scanned"][0](jnp.moveaxis(x, -1, 0)), {-1}),
    "row": (lambda x: jnp.sum(x[1]), {0}),
    "cast and scanned": (lambda x: READS["scanned"][0](x.astype(jnp.bfloat16)), {0}),
}
DIMS = st.sampled_from([2, 3, 4, 6, 7, 8, 12, 16, 24])
LEAVES = st.lists(
    st.tuples(st.sampled_from(list(READS)), st.lists(DIMS, min_size=2, max_size=3)), min_size=1, max_size=5
)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(leaves=LEAVES, pieces=st.sampled_from([1, 2, 4, 7, 8]), budget=st.sampled_from([0, 0.01, 0.5, 2]))
def test_any_layout(leaves, pieces, budget):
    """Never a dim that the loss slices, always one that divides, and no more left whole by choice than the budget."""
    params = [jax.ShapeDtypeStruct(tuple(shape), jnp.float32) for _, shape in leaves]
    jaxpr = jax.make_jaxpr(lambda params: sum(READS[kind][0](x) for (kind, _), x in zip(leaves, params, strict=True)))(
        params
    ).jaxpr
    chosen = layout(params, jaxpr, pieces, whole_budget=budget)
    total, by_choice = sum(leaf.bytes for leaf in chosen), []
    for (kind, shape), leaf in zip(leaves, chosen, strict=True):
        sliced = {dim % len(shape) for dim in READS[kind][1]}
        allowed = [dim for dim, size in enumerate(shape) if size % pieces == 0 and dim not in sliced]
        assert bool(leaf.whole_because) == (leaf.dim is None)
        if leaf.dim is not None:
            assert leaf.dim in allowed
        elif allowed:
            by_choice.append(leaf.bytes)
    assert sum(by_choice) <= budget * total / pieces
    split = [leaf.bytes for leaf in chosen if leaf.dim is not None]
    assert max(by_choice, default=0) <= min(split, default=math.inf)
    if split and by_choice:
        assert sum(by_choice) + min(split) > budget * total / pieces, "the budget had room for one more"


@settings(max_examples=60, deadline=None, derandomize=True)
@given(replica=st.integers(-2, 9), shard=st.integers(-2, 9), count=st.integers(1, 8))
def test_any_mesh_factors(replica, shard, count):
    """Factors that multiply to the number of devices make a mesh; all others an error that shows both."""
    devices = jax.devices()[:count]
    fits = {
        (r, s)
        for r in range(1, 9)
        for s in range(1, 9)
        if r * s == count and replica in (r, -1) and shard in (s, -1) and (replica, shard) != (-1, -1)
    }
    if not fits:
        with pytest.raises(ValueError, match=rf"replica={replica} x shard={shard}"):
            js.make_mesh(replica=replica, shard=shard, devices=devices)
        return
    mesh = js.make_mesh(replica=replica, shard=shard, devices=devices)
    assert {mesh.axis_sizes} == fits
    assert mesh.axis_names == ("replica", "shard")
    assert mesh.devices.size == count
