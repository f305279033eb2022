"""Dtypes are honoured on every wire, and float16 trains with a loss scale that all devices agree on."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from oracle import FORMS, assert_same_bits, batches, lenient, mesh_of

import jaxshard as js

SCAN, LIST = FORMS
FIVE = ("ddp", "zero1", "zero2", "shard_grad_op", "zero3")
ADAM = lenient(optax.adam(1e-2))


def training_for(strategy, loss=SCAN.loss, *, params=SCAN.init, batch=None, mesh=(2, 4), optimizer=ADAM, **choices):
    batch = batches(1, 48)[0] if batch is None else batch
    return js.parallelize(
        loss, optimizer, params=params, batch=batch, mesh=mesh_of(*mesh), strategy=strategy, **choices
    )


def dtypes(contract, purpose):
    return {one.dtype for one in contract if one.purpose == purpose}


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("strategy", FIVE)
@pytest.mark.parametrize("reduce", ["bfloat16", "float16", "float32"])
def test_the_reduction_dtype_is_honoured(reduce, strategy, accumulate):
    compute = "float16" if reduce == "float16" else "bfloat16"
    precision = js.Precision(compute=compute, reduce=reduce)
    contract = training_for(
        strategy, LIST.loss, params=LIST.init, accumulate=accumulate, precision=precision
    ).contract()
    assert dtypes(contract, "reduce") == {reduce}
    assert dtypes(contract, "total") == {"float32"}
    gathered = {"ddp": set(), "zero1": {"float32"}, "zero2": {"float32"}}  # after the update, as they are stored
    assert dtypes(contract, "gather") == gathered.get(strategy, {compute})


def test_dp_transfers_in_the_reduction_dtype():
    contract = training_for("dp", precision=js.Precision(reduce="bfloat16")).contract()
    assert dtypes(contract, "reduce") == {"bfloat16"}
    assert dtypes(contract, "gather") == {"float32"}


@pytest.mark.parametrize("strategy", ["dp", *FIVE])
def test_parameters_and_moments_at_rest(strategy):
    """The loss sees the compute dtype; what is stored has its own."""
    seen = []

    def loss(params, batch):
        seen.append(params["head"].dtype.name)
        return SCAN.loss(params, batch)

    precision = js.Precision(params="float32", compute="bfloat16")
    training = training_for(strategy, loss, precision=precision)
    state, metrics = training.step(training.init(SCAN.init, jax.random.key(0)), batches(1, 48)[0])
    assert set(seen) == {"bfloat16"}
    assert {x.dtype.name for x in jax.tree.leaves(state.params)} == {"float32"}
    assert {x.dtype.name for x in jax.tree.leaves(state.opt)} == {"float32", "int32"}
    assert {x.dtype.name for x in metrics.values()} == {"float32"}


def test_gradients_are_added_up_in_float32():
    """A microbatch of gradient 1, then 63 of 2^-9: a bfloat16 sum would stay where it is."""

    def loss(params, batch):
        return jnp.mean(batch.astype(params.dtype) * params[0])

    parts = 64
    batch = np.repeat(np.concatenate([[1], np.full(parts - 1, 2.0**-9)]), 8).astype(np.float32)
    batch = batch.reshape(parts, 8).T.reshape(-1)  # the first microbatch of every device is 1
    params = np.zeros(8, np.float32)
    for accumulate, exact in (("float32", True), ("bfloat16", False)):
        precision = js.Precision(compute="bfloat16", accumulate=accumulate)
        training = training_for(
            "ddp", loss, params=params, batch=batch, optimizer=optax.sgd(1.0), accumulate=parts, precision=precision
        )
        state, _ = training.step(training.init(params), batch)
        want = (1 + (parts - 1) * 2.0**-9) / parts
        assert (abs(-training.whole(state)[0] - want) < 1e-6 * want) == exact


# float16


def fp16(**choices):
    return js.Precision(compute="float16", **choices)


def brittle_loss(params, batch):
    """Finite everywhere, with an infinite gradient where `ok` is 0."""
    head = jnp.sum(params["head"].astype(jnp.float32))
    return SCAN.loss(params, batch) + jnp.sqrt(jnp.min(batch["ok"]) + head - jax.lax.stop_gradient(head))


def brittle(step: int, broken: int | None = None):
    batch = batches(8, 48)[step]
    return {**batch, "ok": (np.arange(48) != broken).astype(np.float32)}


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("strategy", ["dp", "ddp", "zero2", "zero3"])
def test_an_overflow_on_one_device_makes_all_skip(strategy, accumulate):
    schedule = lenient(optax.chain(optax.scale_by_adam(), optax.scale_by_schedule(lambda count: -1e-2)))
    training = training_for(
        strategy,
        brittle_loss,
        batch=brittle(0),
        mesh=(1, 8),
        optimizer=schedule,
        accumulate=accumulate,
        clip=0.1,
        precision=fp16(initial_scale=2.0**12),
    )

    def host(state):
        return jax.tree.map(np.asarray, (state.params, state.opt, state.step))

    state = training.init(SCAN.init, jax.random.key(0))
    state, metrics = training.step(state, brittle(0))
    assert (metrics["loss_scale"], metrics["skipped"], state.step) == (2.0**12, 0, 1)
    before = host(state)
    state, metrics = training.step(state, brittle(1, broken=13))  # the data of the third device
    assert (metrics["loss_scale"], metrics["skipped"], state.step) == (2.0**11, 1, 1)
    assert np.isfinite(metrics["loss"])
    assert not np.isfinite(metrics["grad_norm"])
    assert_same_bits(host(state), before)
    counts = [x for x in jax.tree.leaves(state.opt) if x.dtype == jnp.int32]
    assert counts
    assert {int(count) for count in counts} == {1}
    state, metrics = training.step(state, brittle(2))
    assert (metrics["loss_scale"], metrics["skipped"], state.step) == (2.0**11, 1, 2)
    assert np.isfinite(metrics["grad_norm"])
    assert all((a != b).any() for a, b in zip(jax.tree.leaves(host(state)[0]), jax.tree.leaves(before[0]), strict=True))


def test_the_scale_grows_after_the_interval():
    training = training_for("zero3", precision=fp16(initial_scale=4.0, growth_interval=2))
    state = training.init(SCAN.init, jax.random.key(0))
    scales = []
    for batch in batches(5, 48):
        state, metrics = training.step(state, batch)
        scales.append(float(metrics["loss_scale"]))
    assert scales == [4, 8, 8, 16, 16]


def test_a_scale_too_large_comes_down_by_itself():
    training = training_for("zero3", precision=fp16(initial_scale=2.0**30, backoff=2.0**-6))
    state = training.init(SCAN.init, jax.random.key(0))
    skipped = []
    for batch in batches(8, 48):
        state, metrics = training.step(state, batch)
        skipped.append(int(metrics["skipped"]))
    assert 1 <= skipped[-1] < 8
    assert skipped[-1] == skipped[-3], "it has come to rest"
    assert state.step == 8 - skipped[-1]


@pytest.mark.smoke
@pytest.mark.parametrize("accumulate", [1, 3])
def test_float16_trains_as_float32_does(accumulate):
    """The scale leaves no trace in the gradients, and a sum over many items does not overflow it."""

    def summed(params, batch):
        losses = SCAN.losses(params, batch)
        return js.Loss(jnp.sum(losses), jnp.asarray(losses.size, jnp.float32))

    norms = {}
    for compute in ("float16", "float32"):
        training = training_for(
            "zero3",
            summed,
            batch=batches(1, 480)[0],
            accumulate=accumulate,
            optimizer=optax.sgd(0.3),
            precision=js.Precision(compute=compute),
        )
        state = training.init(SCAN.init, jax.random.key(0))
        norms[compute] = []
        for batch in batches(3, 480):
            state, metrics = training.step(state, batch)
            norms[compute].append((metrics["grad_norm"], metrics["loss"]))
            if compute == "float16":
                assert (metrics["skipped"], metrics["loss_scale"]) == (0, 2.0**16)
    np.testing.assert_allclose(np.array(norms["float16"]), np.array(norms["float32"]), rtol=2e-3)


def test_the_scalar_of_the_scale_is_in_the_contract():
    def loss(params, batch):
        losses = SCAN.losses(params, batch)
        keep = (batch["tokens"] > 3).astype(jnp.float32)
        return js.Loss(jnp.sum(losses * keep), jnp.sum(keep))

    with_scale, without = (
        sum(
            one.count
            for one in training_for("zero3", loss, accumulate=3, precision=p).contract()
            if one.leaf == "items"
        )
        for p in (fp16(), js.Precision())
    )
    assert with_scale == without + 3
