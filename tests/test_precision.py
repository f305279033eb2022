"""Dtypes are honoured on every wire, and float16 trains with a loss scale that all devices agree on."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from oracle import FORMS, assert_same_bits, batches, lenient, mesh_of
from quick import EVERY, quick

import jaxshard as js
from jaxshard.onshard import read_once

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


HALVES = {
    "wide": np.ones((8, 4), np.float32),
    "brain": np.ones((8, 4), jnp.bfloat16),
    "brain_whole": np.ones((3, 5), jnp.bfloat16),
    "half": np.ones((4, 8), np.float16),
    "turning": np.ones((8, 2), np.complex64),
    "turning_whole": np.ones((3,), np.complex64),
}
UNEQUAL = np.repeat([1] + [2.0**-9] * 7, 3).astype(np.float32)  # the first device's gradient is 1, the others' 2^-9


def sums(params, batch):
    """A mean over devices of gradients that need nine bits."""
    wide = [jnp.sum(jnp.real(x)) if jnp.iscomplexobj(x) else jnp.sum(x.astype(jnp.float32)) for x in params.values()]
    return jnp.mean(batch) * sum(wide)


@pytest.mark.parametrize("reduce", ["float32", "bfloat16"])
@pytest.mark.parametrize("strategy", ["dp", *FIVE])
def test_leaves_of_every_dtype_are_reduced_in_one(strategy, reduce):
    """Whatever a leaf is at rest, in the jaxpr and in the sum that arrives; complex numbers go as their two parts.

    (1 + 7 x 2^-9) / 8 has nine bits: float32 keeps them, bfloat16 rounds up. dp sends parts that have one.
    """
    accumulate = 1 if strategy in ("zero1", "zero3") else 3
    training = quick(sums, HALVES, UNEQUAL, strategy, accumulate=accumulate, precision=js.Precision(reduce=reduce))
    sent = {(one.leaf, one.dtype) for one in training.contract() if one.purpose == "reduce"}
    kept = {name for name, x in HALVES.items() if strategy == "dp" and np.iscomplexobj(x)}
    assert sent == {(name, "complex64" if name in kept else reduce) for name in HALVES}
    state, metrics = training.step(training.init(HALVES), UNEQUAL)
    after = training.whole(state)
    assert {name: x.dtype for name, x in after.items()} == {name: x.dtype for name, x in HALVES.items()}
    arrived = (1 + 7 * 2.0**-9) / 8 if reduce == "float32" or strategy == "dp" else (1 + 2.0**-6) / 8
    for name in ("wide", "turning", "turning_whole"):  # the others are halves at rest
        np.testing.assert_allclose(1 - after[name], arrived, rtol=1e-6)
    size = sum(x.size for x in HALVES.values())
    np.testing.assert_allclose(metrics["grad_norm"], arrived * np.sqrt(size), rtol=1e-6)


def test_evaluation_of_a_float16_mean_does_not_overflow():
    """A mean of 80 over 1024 examples of each device: their sum is above 65504."""

    def loss(params, batch):
        return 10 * jnp.mean(jnp.abs(batch.astype(params["w"].dtype) @ params["w"]))

    params, batch = {"w": np.ones((8, 1), np.float32)}, np.ones((8200, 8), np.float32)
    training = quick(loss, params, batch, precision=fp16())
    assert training.evaluate(training.init(params), batch)["loss"] == 80


SPREAD = {"w": np.full((8, 8), 0.5, np.float32), "b": np.full(3, 0.5, np.float32)}
SEEN = {"mean": np.float32(1), "calls": np.int32(0), "key": np.arange(2, dtype=np.uint32), "half": np.float16(2)}


def spread(params, batch, *, extra):
    """An infinite or undefined example spoils its device's loss, gradients and statistics."""
    total = jnp.sum(params["w"].astype(jnp.float32) ** 2) + jnp.sum(params["b"].astype(jnp.float32) ** 2)
    mean = jnp.mean(batch)
    new = {
        "mean": 0.9 * extra["mean"] + 0.1 * mean,
        "calls": extra["calls"] + 1,
        "key": extra["key"] + np.uint32(1),
        "half": (extra["half"].astype(jnp.float32) * mean).astype(jnp.float16),
    }
    return mean * total, new


@pytest.mark.parametrize(("strategy", "mesh"), EVERY, ids=str)
def test_all_devices_skip_together_and_recover(strategy, mesh):
    """One example is inf, two steps later one is nan, each on another device; then the scale grows again."""
    batch = np.linspace(0.5, 1.3, 24, dtype=np.float32)
    training = quick(
        spread,
        (SPREAD, SEEN),
        batch,
        strategy,
        mesh,
        accumulate=1 if strategy in ("zero1", "shard_grad_op") else 3,
        optimizer=lenient(optax.chain(optax.trace(0.9), optax.scale_by_schedule(lambda count: -1e-3 / (1 + count)))),
        precision=fp16(initial_scale=2.0**10, growth_interval=2),
        clip=1.0,
    )

    def host(state):
        return jax.tree.map(np.asarray, (state.params, state.opt, state.extra, state.step))

    state, seen = training.init((SPREAD, SEEN)), []
    for bad in ({}, {5: np.inf}, {}, {22: np.nan}, {}, {}, {}):
        before, now = host(state), batch.copy()
        for at, value in bad.items():
            now[at] = value
        state, metrics = training.step(state, now)
        after = host(state)
        if bad:
            assert_same_bits(after, before)
            assert not np.isfinite(metrics["grad_norm"])
        else:
            assert all((a != b).any() for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(before), strict=True))
        counts = {int(x) for x in jax.tree.leaves(state.opt) if x.dtype == jnp.int32}
        assert counts == {int(state.step)}
        seen.append((int(state.step), float(metrics["loss_scale"]), int(metrics["skipped"])))
        assert {len({bytes(np.asarray(s.data)) for s in x.addressable_shards}) for x in state.extra.values()} == {1}
    assert seen == [(1, 1024, 0), (1, 512, 1), (2, 512, 1), (2, 256, 2), (3, 256, 2), (4, 512, 2), (5, 512, 2)]


def _scanned(w, x):
    return jax.lax.scan(lambda x, row: (jnp.tanh(x @ row), None), x, w)[0]


@pytest.mark.parametrize(
    ("reads", "shape", "once"),
    [
        pytest.param(lambda w, x: x @ w, (4, 4), True, id="a product"),
        pytest.param(lambda w, x: x.astype("bfloat16") @ w.astype("bfloat16").T, (4, 4), True, id="cast and turned"),
        pytest.param(lambda w, x: jax.jit(jax.checkpoint(jnp.matmul))(x, w), (4, 4), True, id="inside jit and remat"),
        pytest.param(_scanned, (3, 4, 4), True, id="layer by layer"),
        pytest.param(lambda w, x: x @ w + x, (4, 4), True, id="what is made of it may be read often"),
        pytest.param(lambda w, x: x @ w @ w, (4, 4), False, id="two products"),
        pytest.param(
            lambda w, x: (lambda c: x @ c @ c)(w.astype("bfloat16")), (4, 4), False, id="cast once, read twice"
        ),
        pytest.param(lambda w, x: _scanned(jnp.stack([x, x]), w), (4, 4), False, id="carried"),
        pytest.param(
            lambda w, x: jax.lax.scan(lambda x, _: (x @ w, None), x, None, 3)[0], (4, 4), False, id="each step"
        ),
        pytest.param(lambda w, x: x @ w[0] + x @ w[1], (2, 4, 4), False, id="by rows"),
        pytest.param(lambda w, x: x @ (w * 2), (4, 4), False, id="scaled"),
        pytest.param(lambda w, x: (x @ w, w), (4, 4), False, id="given back"),
    ],
)
def test_which_leaves_are_read_once(reads, shape, once):
    with jax.numpy_dtype_promotion("standard"):
        jaxpr = jax.make_jaxpr(reads)(jnp.ones(shape), jnp.ones((4, 4))).jaxpr
    assert read_once(jaxpr, jaxpr.invars[0]) == once


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero3"])
def test_summands_are_added_in_float32_though_they_travel_in_bfloat16(strategy):
    """1 + 2^-9 is no bfloat16: a leaf that is read twice must not be summed in the dtype of the wire."""
    batch = {"x": jnp.ones((16, 8)), "y": jnp.full((16, 8), 2.0**-9)}

    def loss(params, batch):
        once = jnp.mean(batch["x"] @ params["once"])
        return once + jnp.mean(batch["x"] @ params["twice"]) + jnp.mean(batch["y"] @ params["twice"])

    params = {"once": jnp.zeros((8, 1)), "twice": jnp.zeros((8, 1))}
    training = quick(loss, params, batch, strategy, precision=js.Precision(reduce="bfloat16"))
    state, _ = training.step(training.init(params), batch)
    new = training.whole(state)
    np.testing.assert_array_equal(new["twice"], -(1 + 2.0**-9) * np.ones((8, 1)))
    np.testing.assert_array_equal(new["once"], -np.ones((8, 1)))
