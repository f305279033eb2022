"""The mean is over items, whatever falls where; keys, extra state, named batch axes, and evaluation."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from oracle import FORMS, Model, Run, assert_close, batches, mesh_of, one_device, run
from quick import EVERY, quick

import jaxshard as js

SGD = optax.sgd(0.3)
SCAN = FORMS[0]
MESH = (2, 4)


def weighted(model: Model, params, batch):
    """(sum of losses, items, sum of squared losses) over the tokens that the mask keeps."""
    losses = model.losses(params, batch)
    return jnp.sum(losses * batch["mask"]), jnp.sum(batch["mask"]), jnp.sum(jnp.square(losses) * batch["mask"])


def as_loss(params, batch):
    total, weight, squares = weighted(SCAN, params, batch)
    return js.Loss(total, weight, {"squares": squares})


def as_mean(params, batch):
    total, weight, _ = weighted(SCAN, params, batch)
    return total / weight


def masked(kept: np.ndarray, steps: int = 5) -> list[dict[str, np.ndarray]]:
    """Batches of as many examples as `kept` says how many tokens to keep of."""
    mask = (np.arange(4) < kept[:, None]).astype(np.float32)
    return [{**batch, "mask": mask} for batch in batches(steps, len(kept))]


UNEVEN = {
    "eight tokens here and one there": np.array([4, 4, 4, 4, 4, 4] + [0, 0, 1, 0, 0, 0] * 7),
    "the second microbatch of every device empty": np.tile([4, 2, 0, 0, 1, 3], 8),
    "one device empty": np.array([0] * 6 + [1] * 12 + [4] * 30),
}


def training_for(loss, *, params=SCAN.init, batch, mesh=MESH, optimizer=SGD, **choices):
    return js.parallelize(loss, optimizer, params=params, batch=batch, mesh=mesh_of(*mesh), **choices)


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3"])
@pytest.mark.parametrize("where", UNEVEN)
def test_the_mean_is_over_items(where, strategy, accumulate):
    data = masked(UNEVEN[where])
    theirs = one_device(as_mean, SCAN.init, SGD, data)
    training = training_for(as_loss, batch=data[0], strategy=strategy, accumulate=accumulate)
    assert_close(run(training, SCAN.init, data), theirs)
    # A mean of the microbatches' means is something else: the test can fail.
    params, parts = theirs.start, [jax.tree.map(lambda x, i=i: x[2 * i : 2 * i + 2], data[0]) for i in range(24)]
    means = [float(as_mean(params, part)) for part in parts if part["mask"].any()]
    assert abs(np.mean(means) - theirs.loss[0]) > 1e-3


@pytest.mark.parametrize("accumulate", [1, pytest.param(3, marks=pytest.mark.smoke)])
@pytest.mark.parametrize("strategy", ["dp", "ddp", "zero3"])
def test_nothing_valid_anywhere_is_zero(strategy, accumulate):
    (batch,) = masked(np.zeros(24, int), steps=1)
    training = training_for(as_loss, batch=batch, mesh=(1, 8), strategy=strategy, accumulate=accumulate)
    ours = run(training, SCAN.init, [batch])
    assert ours.loss == ours.norm == 0
    jax.tree.map(np.testing.assert_array_equal, ours.end, ours.start)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_metrics_are_means_over_the_same_items(accumulate):
    (batch,) = masked(UNEVEN["one device empty"], steps=1)
    training = training_for(as_loss, batch=batch, accumulate=accumulate)
    state = training.init(SCAN.init, jax.random.key(0))
    total, weight, squares = weighted(SCAN, training.whole(state), batch)
    _, metrics = training.step(state, batch)
    np.testing.assert_allclose(metrics["squares"], squares / weight, rtol=1e-5)
    np.testing.assert_allclose(metrics["loss"], total / weight, rtol=1e-5)


def keyed(params, batch, *, key):
    """Counts each random number among 2^20 that it draws: distinct keys leave distinct marks in the gradient."""
    at = jax.random.randint(key, (), 0, 64)
    return params["hits"][at] + 0 * jnp.mean(batch)


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("mesh", [(1, 8), (2, 4)], ids=str)
def test_every_device_and_microbatch_has_its_own_key(mesh, accumulate):
    """The gradient of entry i is the share of parts that drew i; parts that shared a key would all draw the same."""
    batch = np.zeros((8 * accumulate, 1), np.float32)
    params = {"hits": np.zeros(64, np.float32)}
    training = training_for(
        keyed, params=params, batch=batch, mesh=mesh, accumulate=accumulate, optimizer=optax.sgd(1.0)
    )

    def hits(seed, steps):
        state = training.init(params, jax.random.key(seed))
        for _ in range(steps):
            state, _ = training.step(state, batch)
        return -training.whole(state)["hits"] * 8 * accumulate

    first, parts = hits(0, 1), 8 * accumulate
    assert first.sum() == parts
    # With 8 draws of 64, fewer than 5 distinct ones have probability 1e-4; with 32, fewer than 16 about 1e-4 as well.
    assert (first > 0).sum() >= {8: 5, 32: 16}[parts]
    np.testing.assert_array_equal(hits(0, 1), first)
    assert (hits(1, 1) != first).any()
    assert (hits(0, 2) != 2 * first).any(), "another step draws from other keys"


def with_extra(params, batch, *, extra):
    value = jnp.mean(jnp.square(batch["x"] @ params["w"]))
    items = jnp.sum(batch["mask"])
    new = {
        "mean": 0.5 * extra["mean"]
        + 0.5 * jnp.sum(batch["x"] * batch["mask"][:, None], axis=0) / jnp.maximum(items, 1),
        "calls": extra["calls"] + 1,
    }
    return js.Loss(value * items, items), new


@pytest.mark.parametrize("strategy", ["dp", "ddp", "zero1", "zero3"])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_extra_becomes_the_mean_over_items(strategy, accumulate):
    random = np.random.default_rng(1)
    mask = (random.random(24) < np.arange(24) / 24).astype(np.float32)
    mask[:3] = 0  # the first device has nothing to say
    batch = {"x": random.normal(size=(24, 8)).astype(np.float32), "mask": mask}
    params = {"w": np.ones((8, 8), np.float32)}
    extra = {"mean": np.full(8, 2, np.float32), "calls": np.zeros((), np.int32)}
    training = training_for(
        with_extra, params=(params, extra), batch=batch, mesh=(1, 8), strategy=strategy, accumulate=accumulate
    )
    state, _ = training.step(training.init((params, extra)), batch)
    assert state.extra["calls"] == accumulate

    # The oracle: devices take rows of 24 / 8 in order, and of these microbatches in order, one after another.
    x, kept = batch["x"].reshape(8, accumulate, -1, 8), mask.reshape(8, accumulate, -1)
    want = extra["mean"]
    for k in range(accumulate):
        items = kept[:, k].sum(axis=1)
        means = [0.5 * want + 0.5 * (x[d, k] * kept[d, k][:, None]).sum(axis=0) / max(items[d], 1) for d in range(8)]
        want = sum(n * mean for n, mean in zip(items, means, strict=True)) / items.sum()
    np.testing.assert_allclose(state.extra["mean"], want, rtol=1e-5, atol=1e-6)


def test_extra_that_has_no_mean_must_agree():
    def loss(params, batch, *, extra):
        return jnp.mean(batch @ params), {"seen": extra["seen"] + jnp.sum(batch > 0, dtype=jnp.int32)}

    given = np.ones((8, 8), np.float32), {"seen": np.zeros((), np.int32)}
    with pytest.raises(ValueError, match=r"\['seen'\] of extra are no floats and depend on the batch"):
        training_for(loss, params=given, batch=np.ones((8, 8), np.float32))


def normed(params, batch, *, extra, axis_name="batch"):
    """A BatchNorm over the global batch, by the name of an axis that only the caller knows."""
    h = batch["x"] @ params["w"]
    mean = jax.lax.pmean(jnp.mean(h, axis=0), axis_name)
    square = jax.lax.pmean(jnp.mean(jnp.square(h), axis=0), axis_name)
    h = (h - mean) * jax.lax.rsqrt(square - jnp.square(mean) + 1e-2) * params["scale"]
    new = {"mean": 0.9 * extra["mean"] + 0.1 * jax.lax.stop_gradient(mean)}
    return jnp.mean(jnp.square(jnp.tanh(h) @ params["out"] - batch["y"])), new


def norm_params(key):
    a, b = jax.random.split(key)
    params = {"w": jax.random.normal(a, (8, 16)), "scale": jnp.ones(16), "out": jax.random.normal(b, (16, 8))}
    return params, {"mean": jnp.zeros(16)}


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3"])
@pytest.mark.parametrize("mesh", [(1, 8), (2, 4)], ids=str)
def test_a_named_batch_axis_as_under_vmap(strategy, mesh):
    random = np.random.default_rng(2)
    data = [
        {"x": random.normal(size=(24, 8)).astype(np.float32), "y": random.normal(size=(24, 8)).astype(np.float32)}
        for _ in range(5)
    ]
    training = training_for(normed, params=norm_params, batch=data[0], mesh=mesh, strategy=strategy, axis_name="batch")
    state = training.init(norm_params, jax.random.key(0))
    start, metrics = training.whole(state), []
    for batch in data:
        state, now = training.step(state, batch)
        metrics.append((now["loss"], now["grad_norm"]))

    params, extra = jax.jit(norm_params)(jax.random.key(0))
    theirs = []

    @jax.jit
    def step(params, extra, batch):
        def total(params):
            parts = jax.tree.map(lambda x: x.reshape(8, -1, *x.shape[1:]), batch)
            losses, new = jax.vmap(partial(normed, params, extra=extra), axis_name="batch")(parts)
            return jnp.mean(losses), jax.tree.map(lambda x: jnp.mean(x, axis=0), new)

        (value, new), grads = jax.value_and_grad(total, has_aux=True)(params)
        return jax.tree.map(lambda p, g: p - 0.3 * g, params, grads), new, (value, optax.tree.norm(grads))

    for batch in data:
        params, extra, now = step(params, extra, batch)
        theirs.append(now)
    ours = Run(start, training.whole(state), *np.array(metrics, np.float32).T)
    assert_close(ours, Run(start, jax.tree.map(np.asarray, params), *np.array(theirs, np.float32).T), ulps=4)
    np.testing.assert_allclose(state.extra["mean"], extra["mean"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("strategy", ["dp", "ddp", "shard_grad_op", "zero3"])
@pytest.mark.parametrize("size", [5, 16, 19])
def test_evaluation_of_any_size(strategy, size):
    """16 of 19 examples are split over 8 devices, 3 are left: a scalar weighs by examples, a Loss by items."""
    (example,), (batch,) = masked(np.full(24, 4), 1), masked(np.arange(size) % 5, 1)
    by_items = training_for(as_loss, batch=example, mesh=(1, 8), strategy=strategy)
    state = by_items.init(SCAN.init, jax.random.key(0))
    params = by_items.whole(state)
    total, weight, squares = weighted(SCAN, params, batch)
    found = by_items.evaluate(state, batch)
    np.testing.assert_allclose(found["loss"], total / weight, rtol=1e-5)
    np.testing.assert_allclose(found["squares"], squares / weight, rtol=1e-5)
    by_examples = by_items.evaluate(state, batch, fn=SCAN.loss)
    np.testing.assert_allclose(by_examples["loss"], SCAN.loss(params, batch), rtol=1e-5)
    assert abs(float(by_examples["loss"] - found["loss"])) > 1e-3


def test_evaluation_leaves_the_state_alone():
    (batch,) = masked(np.full(24, 4), 1)
    training = training_for(as_loss, batch=batch)
    state = training.init(SCAN.init, jax.random.key(0))
    before = training.whole(state)
    first, second = training.evaluate(state, batch), training.evaluate(state, batch)
    assert first == second
    jax.tree.map(np.testing.assert_array_equal, training.whole(state), before)
    _, metrics = training.step(state, batch)
    np.testing.assert_allclose(metrics["loss"], first["loss"], rtol=1e-6)


# Every strategy, by exact numbers

COUNTS = np.zeros(24, np.float32)
COUNTS[3:6] = [8, 0, 0]  # of the second device one microbatch has eight items
COUNTS[21:] = [1, 0, 0]  # and of the last has one; every second and third microbatch has none anywhere
SLOPE = np.arange(24, dtype=np.float32)


def counted(params, batch, *, extra):
    """A sum over items whose gradient is their slope; evaluation sees what `extra` says."""
    items = jnp.sum(batch["items"])
    losses = batch["slope"] * batch["items"] * (jnp.sum(params["w"]) / 8 + extra["shift"])
    metrics = {"slopes": jnp.sum(batch["slope"] * batch["items"])}
    return js.Loss(jnp.sum(losses), items, metrics), {"shift": extra["shift"] + 1}


def counting(strategy, mesh, **choices):
    given = {"w": np.ones((8, 8), np.float32)}, {"shift": np.float32(0)}
    training = quick(counted, given, {"items": COUNTS, "slope": SLOPE}, strategy, mesh, **choices)
    return training, training.init(given)


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize(("strategy", "mesh"), EVERY, ids=str)
def test_eight_items_here_and_one_there(strategy, mesh, accumulate):
    """(8 x 3 + 1 x 21) / 9 = 5; a mean of the devices' means is 12, and of nine parts that are mostly empty less."""
    training, state = counting(strategy, mesh, accumulate=accumulate)
    state, metrics = training.step(state, {"items": COUNTS, "slope": SLOPE})
    np.testing.assert_allclose(1 - training.whole(state)["w"], 5 / 8, rtol=1e-6)
    np.testing.assert_allclose(metrics["slopes"], 5, rtol=1e-6)
    np.testing.assert_allclose(metrics["grad_norm"], 5, rtol=1e-6)
    # Each microbatch moves `extra`, which the next one reads; only the first has items.
    np.testing.assert_allclose(metrics["loss"], 5 * 8, rtol=1e-6)
    assert state.extra["shift"] == accumulate


@pytest.mark.parametrize(("strategy", "mesh"), EVERY, ids=str)
def test_evaluation_reads_extra_and_leaves_it(strategy, mesh):
    """19 examples are two for each device and three that are left; one alone is all that is left."""
    training, state = counting(strategy, mesh)
    state, _ = training.step(state, {"items": COUNTS, "slope": SLOPE})
    shift, weight = float(state.extra["shift"]), float(training.whole(state)["w"].sum()) / 8
    for batch in ({"items": SLOPE[:19], "slope": SLOPE[:19]}, {"items": SLOPE[3:4], "slope": SLOPE[3:4]}):
        mean = np.vdot(batch["items"], batch["slope"]) / batch["items"].sum()
        found = training.evaluate(state, batch)
        np.testing.assert_allclose(found["slopes"], mean, rtol=1e-6)
        np.testing.assert_allclose(found["loss"], mean * (weight + shift), rtol=1e-6)
        assert state.extra["shift"] == shift == 1
    with pytest.raises(ValueError, match="first dim"):
        training.evaluate(state, {"items": SLOPE[:0], "slope": SLOPE[:0]})
