"""What a step sends: exactly the collectives of the ladder, written out by hand, and counted in the jaxpr.

The oracle is `ladder` below: it knows the five strategies by name and nothing of placements. 1x8 splits every leaf of
the model but the bias (28 does not divide by 8); 2x4 splits that as well and adds an all_reduce over the replicas.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from oracle import FORMS, HIDDEN, LAYERS, VOCAB, WIDTH, Model, batches, lenient, mesh_of
from quick import quick

import jaxshard as js
from jaxshard import collectives
from jaxshard.contract import hold

FIVE = ("ddp", "zero1", "zero2", "shard_grad_op", "zero3")
SCAN, LIST = FORMS

# Elements of a layer, and how often one use of the leaf gathers it: the backward pass needs a matrix (and a factor)
# again for the gradient of its input, but neither an embedding it only indexed nor a bias it only added.
BLOCK = {
    "norm": (WIDTH, 2),
    "up": (WIDTH * HIDDEN, 2),
    "bias": (HIDDEN, 1),
    "down": (HIDDEN * WIDTH, 2),
}
ENDS = {"embed": (VOCAB * WIDTH, 1), "head": (WIDTH * VOCAB, 2)}


def ladder(strategy, mesh, form, accumulate, *, gather=("float32", 4), wire=("float32", 4), bias_uses=1):
    """(kind, leaf, axes, dtype, bytes, loops) -> how often.

    gather, wire: (dtype, its bytes) of weights and of gradients.
    """
    replica, shard = mesh
    everywhere = ("shard",) if replica == 1 else ("replica", "shard")
    looped = ("microbatches",) if accumulate > 1 else ()
    sent: Counter = Counter()

    def send(kind, leaf, axes, size, typed, times, loops):
        sent[kind, leaf, axes, typed[0], size * typed[1], loops] += times

    for leaf, (size, uses), layers, inside in _leaves(form):
        split = not (leaf.endswith("bias") and shard == 8)
        uses = bias_uses if leaf.endswith("bias") else uses
        at_use = (size, accumulate * (layers if inside else 1), (*looped, *inside))
        at_once = (size * layers, 1, ())

        # Weights.
        if split and strategy == "zero3":
            send("all_gather", leaf, ("shard",), size, gather, uses * at_use[1], at_use[2])
        if split and strategy == "shard_grad_op":
            send("all_gather", leaf, ("shard",), at_once[0], gather, 1, ())
        if split and strategy in ("zero1", "zero2"):  # after the update, in the dtype they are stored in
            send("all_gather", leaf, ("shard",), at_once[0], ("float32", 4), 1, ())

        # Gradients.
        after_the_loop = accumulate > 1 and strategy in ("ddp", "zero1")
        size, times, loops = at_once if after_the_loop else at_use
        if strategy == "ddp" or not split:
            send("all_reduce", leaf, everywhere, size, wire, times, loops)
            continue
        send("reduce_scatter", leaf, ("shard",), size, wire, times, loops)
        if replica > 1:
            send("all_reduce", leaf, ("replica",), size // shard, wire, times, loops)

    # The norm is summed over the slices. A plain scalar loss weighs 1: with one microbatch the weight is known.
    send("all_reduce", "norm", ("shard",), 1, ("float32", 4), 1, ())
    send("all_reduce", "items", everywhere, 1, ("float32", 4), 2 if accumulate > 1 else 1, ())
    return sent


def _leaves(form):
    for name, leaf in ENDS.items():
        yield name, leaf, 1, ()
    for name, leaf in BLOCK.items():
        if form == "scan":
            yield f"blocks.{name}", leaf, LAYERS, ("scan",)
        else:
            yield from ((f"blocks.{i}.{name}", leaf, 1, ()) for i in range(LAYERS))


def training_for(strategy, mesh, model, accumulate=1, *, optimizer=None, **choices) -> Any:
    return js.parallelize(
        model.loss,
        optimizer or optax.sgd(0.1),
        params=model.init,
        batch=batches(1, 6 * mesh[0] * mesh[1])[0],
        mesh=mesh_of(*mesh),
        strategy=strategy,
        accumulate=accumulate,
        **choices,
    )


def counted(training):
    found: Counter = Counter()
    for one in training.contract():
        found[one.kind, one.leaf, one.axes, one.dtype, one.bytes, one.loops] += one.count
    return found


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("model", FORMS, ids=str)
@pytest.mark.parametrize("mesh", [(1, 8), (2, 4)], ids=str)
@pytest.mark.parametrize("strategy", FIVE)
def test_exactly_the_ladder(strategy, mesh, model, accumulate):
    assert counted(training_for(strategy, mesh, model, accumulate)) == ladder(strategy, mesh, model.form, accumulate)


@pytest.mark.smoke
def test_zero3_written_out():
    sent = [str(one) for one in training_for("zero3", (1, 8), SCAN, 3).contract()]
    assert sorted(sent) == sorted(
        [
            "3 x all_gather float32 2,048 B over shard inside microbatches (gather embed)",
            "18 x all_gather float32 64 B over shard inside microbatches > scan (gather blocks.norm)",
            "18 x all_gather float32 1,792 B over shard inside microbatches > scan (gather blocks.up)",
            "18 x all_gather float32 1,792 B over shard inside microbatches > scan (gather blocks.down)",
            "6 x all_gather float32 2,048 B over shard inside microbatches (gather head)",
            "3 x reduce_scatter float32 2,048 B over shard inside microbatches (reduce head)",
            "9 x reduce_scatter float32 1,792 B over shard inside microbatches > scan (reduce blocks.down)",
            "9 x all_reduce float32 112 B over shard inside microbatches > scan (reduce blocks.bias)",
            "9 x reduce_scatter float32 1,792 B over shard inside microbatches > scan (reduce blocks.up)",
            "9 x reduce_scatter float32 64 B over shard inside microbatches > scan (reduce blocks.norm)",
            "3 x reduce_scatter float32 2,048 B over shard inside microbatches (reduce embed)",
            "2 x all_reduce float32 4 B over shard (total items)",
            "1 x all_reduce float32 4 B over shard (total norm)",
        ]
    )


@pytest.mark.parametrize("strategy", FIVE)
def test_remat_gathers_the_same_and_reduces_the_same(strategy):
    # Rematerialised, a block runs again in the backward pass, and its bias is read again for what follows it.
    sent = counted(training_for(strategy, (2, 4), SCAN, remat="full"))
    assert sent == ladder(strategy, (2, 4), "scan", 1, bias_uses=2)


def test_ddp_sends_no_gradient_inside_the_microbatch_loop():
    one, many = (training_for("ddp", (2, 4), LIST, k).contract() for k in (1, 3))
    assert [c for c in one if c.purpose == "reduce"]
    assert [c for c in many if c.purpose == "reduce"]
    assert not [c for c in many if c.loops]


@pytest.mark.parametrize("strategy", FIVE)
def test_bfloat16_gradients(strategy):
    """Only gradients are reduced in `reduce`; sums of losses and squares stay float32."""
    training = training_for(strategy, (2, 4), SCAN, 3, precision=js.Precision(reduce="bfloat16"))
    assert counted(training) == ladder(strategy, (2, 4), "scan", 3, wire=("bfloat16", 2))


@pytest.mark.parametrize("strategy", FIVE)
def test_bfloat16_weights_are_cast_before_the_gather(strategy):
    """And their gradients are reduced in float32 unless asked otherwise."""
    training = training_for(strategy, (1, 8), SCAN, precision=js.Precision(compute="bfloat16"))
    assert counted(training) == ladder(strategy, (1, 8), "scan", 1, gather=("bfloat16", 2))


@pytest.mark.parametrize("strategy", FIVE)
@pytest.mark.parametrize("accumulate", [1, 3])
def test_one_device_sends_nothing(strategy, accumulate):
    assert training_for(strategy, (1, 1), SCAN, accumulate, clip=1.0).contract() == ()


@pytest.mark.parametrize("strategy", FIVE)
def test_replicas_alone_send_all_reduces_alone(strategy):
    """On 8x1 nothing can be split over `shard`: every strategy is ddp."""
    contract = training_for(strategy, (8, 1), SCAN).contract()
    assert {(one.kind, one.axes) for one in contract} == {("all_reduce", ("replica",))}


@pytest.mark.parametrize("strategy", FIVE)
def test_frozen_leaves_send_no_gradient(strategy):
    training = training_for(strategy, (1, 8), LIST, 3, trainable=lambda path: path == "head")
    reduced = {one.leaf for one in training.contract() if one.purpose == "reduce"}
    gathered = {one.leaf: one.count for one in training.contract() if one.purpose == "gather"}
    assert reduced == {"head"}
    if strategy == "zero3":  # once in the forward pass; nothing is differentiated through any of them
        assert gathered == dict.fromkeys(gathered, 3)
        assert len(gathered) == 2 + LAYERS * 3
    if strategy in ("zero1", "zero2"):  # what was not updated is not sent either
        assert gathered == {"head": 1}


def test_a_tied_leaf_is_reduced_once_per_use():
    model = Model(form="scan", tied=True)
    sent = {one.leaf: one for one in training_for("zero3", (1, 8), model).contract() if one.purpose == "reduce"}
    assert sent["embed"].count == 2
    deferred = {one.leaf: one for one in training_for("zero1", (1, 8), model, 3).contract()}
    assert deferred["embed"].count == 1


def twice(gradient, dim, route, path, _reduce=collectives.reduce):
    once = _reduce(gradient, dim, route, path)
    with collectives.scope("reduce", path):
        return jax.lax.psum(once, "shard") / jnp.asarray(8, once.dtype)


def in_float32(gradient, dim, route, path, _reduce=collectives.reduce):
    return _reduce(gradient, dim, replace(route, reduce_dtype="float32"), path)


def all_reduced_first(gradient, dim, route, path, _reduce=collectives.reduce):
    whole = _reduce(gradient, None, route, path)
    return collectives.own_piece(whole, dim, route.scatter, route.sizes)


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("strategy", FIVE)
def test_an_extra_reduction_breaks_the_contract(strategy, accumulate, monkeypatch):
    monkeypatch.setattr(collectives, "reduce", twice)
    with pytest.raises(js.ContractError, match=r"all_reduce float32 .*reduce blocks\.up.*contract"):
        training_for(strategy, (1, 8), SCAN, accumulate).contract()


@pytest.mark.smoke
@pytest.mark.parametrize("wrong", [in_float32, all_reduced_first])
def test_another_dtype_or_kind_breaks_the_contract(wrong, monkeypatch):
    half = js.Precision(reduce="bfloat16")
    assert training_for("zero3", (1, 8), SCAN, precision=half).contract()
    monkeypatch.setattr(collectives, "reduce", wrong)
    with pytest.raises(js.ContractError, match="not in the contract"):
        training_for("zero3", (1, 8), SCAN, precision=half).contract()


def test_one_too_many_breaks_the_contract():
    contract = training_for("zero3", (1, 8), SCAN).contract()
    hold(contract, contract)
    for one in contract:
        with pytest.raises(js.ContractError, match=rf"at most {one.count} in the contract"):
            hold(contract, [replace(one, count=one.count + 1)])
        with pytest.raises(js.ContractError, match="not in the contract"):
            hold(contract, [replace(one, loops=("microbatches", *one.loops))])


def test_gathers_beside_a_loop_and_moved_out_of_it_are_one_account():
    """Rows at a place that an integer leaf tells, read in a loop and beside it; JAX moves gathers out of the loop."""

    def loss(params, batch):
        def rows():
            return jax.lax.dynamic_slice_in_dim(params["w"], jnp.sum(params["i"]) % 3, 8, 0)

        def run(x):
            x, _ = jax.lax.scan(lambda x, _: (jnp.tanh(x) + rows().mean(0), None), x, None, 2)
            return x @ rows()

        return jnp.mean(jax.checkpoint(run, prevent_cse=False)(batch) ** 2)

    params = {"w": jnp.ones((16, 8)), "i": jnp.arange(8)}
    contract = quick(loss, params, jnp.ones((16, 8)), "zero3").contract()
    outside = [one for one in contract if one.kind == "all_gather" and not one.loops]
    assert [(one.leaf, one.count) for one in outside] == [("i", 4), ("w", 4)]

    loop = replace(outside[0], count=4, loops=("scan",))
    beside = replace(outside[0], count=2)
    hold([loop, beside], [replace(outside[0], count=6)])
    with pytest.raises(js.ContractError, match="at most 6 in the contract"):
        hold([loop, beside], [replace(outside[0], count=7)])


def test_the_loss_functions_own_collectives_are_its_own_business():
    def loss(params, batch):
        value = SCAN.loss(params, batch)
        return value + jax.lax.stop_gradient(value - jax.lax.pmean(value, "shard"))

    training = js.parallelize(
        loss, optax.sgd(0.1), params=SCAN.init, batch=batches(1, 48)[0], mesh=mesh_of(1, 8), strategy="zero3"
    )
    assert counted(training) - ladder("zero3", (1, 8), "scan", 1) == {
        ("all_reduce", "", ("shard",), "float32", 4, ()): 1
    }
    assert [one.kind for one in training.contract() if one.purpose == "loss"] == ["all_reduce"]


@pytest.mark.parametrize("strategy", FIVE)
def test_the_compiler_adds_nothing(strategy):
    """The update runs over global arrays, where the compiler may insert collectives of its own.

    The compiled text has at most one line for each collective of the jaxpr (those of a loop stand once, forward and
    backward apart). There may be fewer: XLA for CPUs combines all-reduces, and merges the two gathers of the head.
    """
    training = training_for(strategy, (1, 8), SCAN, optimizer=lenient(optax.adamw(1e-3)), clip=0.1)
    text = training.built().compiled.as_text()
    lines = {
        kind: len(re.findall(rf" = .*? {kind}(?:-start)?\(", text))
        for kind in ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
    }
    expected = Counter()
    for one in training.contract():
        expected[one.kind.replace("_", "-")] += one.count // (LAYERS if one.loops else 1)
    assert expected["all-gather"] - 1 <= lines["all-gather"] <= expected["all-gather"]
    assert lines["reduce-scatter"] == expected["reduce-scatter"]
    assert 0 < lines["all-reduce"] <= expected["all-reduce"]
    assert lines["all-to-all"] == lines["collective-permute"] == 0
