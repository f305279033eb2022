"""State that is not trained: averaged over all items, and equal on every device after every step.

Oracle: the running mean in numpy. Devices take rows of the batch in order, and of these their microbatches in order.
The numbers of items are very unequal, and a device or a microbatch may have none.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quick import EVERY, quick

import jaxshard as js

STEPS, WIDTH = 3, 4
RANDOM = np.random.default_rng(0)
PARAMS = {"w": RANDOM.normal(size=(8, WIDTH)).astype(np.float32) / 10}
EXTRA = {
    "mean": np.full(WIDTH, 2, np.float32),
    "half": np.float16(2),
    "spectrum": np.complex64(1j),
    "weights": np.zeros((8, WIDTH), np.float32),
    "calls": np.int32(0),
    "count": np.float32(0),
    "decay": np.float32(0.9),
    "key": np.zeros(2, np.uint32),
}


def kept(step):
    """Of 24 examples some have eight items and some one; the first device has none, nor has any third microbatch."""
    items = np.where(np.arange(24) % 5 == step, 8, np.arange(24) % 2)
    items[:3] = 0
    items[2::3] = 0
    return items.astype(np.float32)


BATCHES = [{"x": RANDOM.normal(size=(24, WIDTH)).astype(np.float32), "items": kept(step)} for step in range(STEPS)]


def loss(params, batch, *, extra):
    items = jnp.sum(batch["items"])
    mean = jnp.sum(batch["x"] * batch["items"][:, None], axis=0) / items  # 0 / 0 where there is no item
    new = {
        "mean": extra["decay"] * extra["mean"] + (1 - extra["decay"]) * mean,
        "half": mean[0].astype(jnp.float16),
        "spectrum": jax.lax.complex(mean[0], mean[1]),
        "weights": (extra["weights"] + params["w"]) / 2,  # an average of the parameters themselves
        "calls": extra["calls"] + 1,
        "count": extra["count"] + 1,
        "decay": extra["decay"],
        "key": jax.random.key_data(jax.random.split(jax.random.wrap_key_data(extra["key"]))[0]),
    }
    losses = jnp.square(batch["x"] @ params["w"].T).sum(axis=1) * batch["items"]
    return js.Loss(jnp.sum(losses), items), new


def expected(old, batch, accumulate):
    """(mean, the mean of the last microbatch)."""
    x, items = batch["x"].reshape(8, accumulate, -1, WIDTH), batch["items"].reshape(8, accumulate, -1, 1)
    running = last = old["mean"].astype(np.float64)
    for k in range(accumulate):
        if items[:, k].any():
            last = (x[:, k] * items[:, k]).sum((0, 1)) / items[:, k].sum()
            running = 0.9 * running + 0.1 * last
    return running, last


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize(("strategy", "mesh"), EVERY, ids=str)
def test_statistics_over_steps(strategy, mesh, accumulate):
    training = quick(loss, (PARAMS, EXTRA), BATCHES[0], strategy, mesh, accumulate=accumulate)
    state, key = training.init((PARAMS, EXTRA)), jax.random.key(0)
    for step, batch in enumerate(BATCHES):
        old, weights = jax.tree.map(np.asarray, state.extra), training.whole(state)["w"]
        state, _ = training.step(state, batch)
        for name, x in state.extra.items():
            assert (x.shape, x.dtype) == (EXTRA[name].shape, EXTRA[name].dtype)
            on_devices = {np.asarray(shard.data).tobytes() for shard in x.addressable_shards}
            assert len(on_devices) == 1, f"devices disagree about {name}"
            assert len(x.addressable_shards) == (1 if strategy == "dp" else 8)
        running, last = expected(old, batch, accumulate)
        assert np.abs(running - old["mean"]).min() > 1e-3
        new = jax.tree.map(np.asarray, state.extra)
        np.testing.assert_allclose(new["mean"], running, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(new["half"], last[0], rtol=2e-3)
        np.testing.assert_allclose(new["spectrum"], last[0] + 1j * last[1], rtol=1e-5, atol=1e-6)
        # What all devices agree about is not averaged, so it stays exact.
        calls = accumulate * (step + 1)
        assert (new["calls"], new["count"], new["decay"]) == (calls, calls, EXTRA["decay"])
        average = old["weights"]
        for _ in range(accumulate):
            key, average = jax.random.split(key)[0], (average + weights) / 2
        np.testing.assert_allclose(new["weights"], average, rtol=1e-6)
        np.testing.assert_array_equal(new["key"], jax.random.key_data(key))


def test_a_mean_of_means_is_another_number():
    """Not vacuous: an unweighted mean over the devices is far off, and so is the first device's."""
    batch = BATCHES[0]
    x, items = batch["x"].reshape(8, -1, WIDTH), batch["items"].reshape(8, -1, 1)
    means = (x * items).sum(1) / np.maximum(items.sum(1), 1)
    mean = (x * items).sum((0, 1)) / items.sum()
    assert np.abs(means[items.sum((1, 2)) > 0].mean(0) - mean).max() > 0.05
    assert np.abs(means - mean).max(axis=1).min() > 0.05


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_what_all_devices_agree_about_is_not_sent(strategy):
    averaged = {one.leaf for one in quick(loss, (PARAMS, EXTRA), BATCHES[0], strategy).contract()}
    assert {name for name in averaged if name.startswith("extra")} == {"extra.mean", "extra.half", "extra.spectrum"}
