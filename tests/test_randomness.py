"""Random numbers: other ones on every device, microbatch and step; the same on a rerun, and when recomputed.

Dropout is read off exactly. The loss is linear in parameters of which each example has its own, so that a step of plain
descent writes each example's mask into them; and a loss that is linear equals its gradient times the parameters, which
holds only if the forward and the backward pass used one mask.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from quick import EVERY, quick

LAYERS, EXAMPLES, WIDTH = 2, 24, 32
BATCH = np.eye(EXAMPLES, dtype=np.float32)  # each example picks its own row
PARAMS = {"rows": np.random.default_rng(0).normal(size=(LAYERS, EXAMPLES, WIDTH)).astype(np.float32)}
REMATS = {
    "none": lambda body: body,
    "all": jax.checkpoint,
    "products": functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable, prevent_cse=False),
}


def dropout(remat="none"):
    """A scan over layers that drops half of every example's row."""

    def loss(params, batch, *, key):
        def body(total, layer):
            rows, key = layer
            kept = jax.random.bernoulli(key, 0.5, (len(batch), WIDTH)).astype(jnp.float32)
            # Not linear in the mask: the backward pass needs what the forward pass made of it, or makes it again.
            return total + jnp.sum(jnp.sin(np.float32(np.pi / 2) * kept) * (batch @ rows), axis=1), None

        layers = params["rows"], jax.random.split(key, LAYERS)
        return jnp.mean(lax.scan(REMATS[remat](body), jnp.zeros(len(batch)), layers)[0])

    return loss


def masks(training, steps=1, seed=0):
    """(steps, LAYERS, EXAMPLES, WIDTH) of 0 and 1."""
    state, found = training.init(PARAMS, jax.random.key(seed)), []
    before = training.whole(state)["rows"]
    for _ in range(steps):
        state, metrics = training.step(state, BATCH)
        after = training.whole(state)["rows"]
        mask = np.round((before - after) * EXAMPLES)
        np.testing.assert_allclose(before - after, mask / EXAMPLES, atol=1e-6)
        np.testing.assert_allclose(metrics["loss"], np.vdot(mask, before) / EXAMPLES, rtol=1e-5, atol=1e-5)
        found.append(mask)
        before = after
    assert set(np.unique(found)) == {0, 1}
    return np.stack(found)


@functools.cache
def reference(mesh, accumulate):
    """Of one training; every other on this mesh must draw the same."""
    return masks(quick(dropout(), PARAMS, BATCH, "ddp", mesh, accumulate=accumulate), steps=2)


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("mesh", [(1, 8), (2, 4)], ids=str)
def test_another_mask_for_every_device_microbatch_layer_and_step(mesh, accumulate):
    """Two equal ones among 96 of 32 bits have probability 1e-6."""
    assert len(np.unique(reference(mesh, accumulate).reshape(-1, WIDTH), axis=0)) == 2 * LAYERS * EXAMPLES
    assert abs(reference(mesh, accumulate).mean() - 0.5) < 0.05


@pytest.mark.parametrize(("strategy", "mesh"), EVERY, ids=str)
def test_every_strategy_draws_the_same(strategy, mesh):
    accumulate = 1 if strategy in ("dp", "zero3") else 3
    training = quick(dropout(), PARAMS, BATCH, strategy, mesh, accumulate=accumulate)
    np.testing.assert_array_equal(masks(training, steps=2), reference(mesh, accumulate))


def test_a_key_gives_one_run():
    """Also after the training is made anew; and another key another run."""
    once, again = (quick(dropout(), PARAMS, BATCH) for _ in range(2))
    np.testing.assert_array_equal(masks(once, steps=2), reference((1, 8), 1))
    np.testing.assert_array_equal(masks(again, steps=2), masks(once, steps=2))
    assert (masks(again, seed=1) != masks(once)).mean() > 0.4


@pytest.mark.parametrize(("strategy", "accumulate"), [("ddp", 3), ("zero3", 1)])
@pytest.mark.parametrize(("own", "remat"), [("all", "none"), ("products", "none"), ("none", "full"), ("all", "dots")])
def test_recomputed_masks_are_the_same(own, remat, strategy, accumulate):
    training = quick(dropout(own), PARAMS, BATCH, strategy, accumulate=accumulate, remat=remat)
    np.testing.assert_array_equal(masks(training), reference((1, 8), accumulate)[:1])


def test_evaluation_draws_alike_on_every_device():
    """What is left of a batch is computed on every device, and they must agree about it."""
    training = quick(dropout(), PARAMS, BATCH)
    state = training.init(PARAMS)
    for size in (3, 19):
        (loss,) = training.evaluate(state, BATCH[:size]).values()
        assert len({float(shard.data) for shard in loss.addressable_shards}) == 1


def by_its_own_key(params, batch):
    """A key for each example, as data: then the mesh does not matter."""

    def one(row, key):
        return jnp.vdot(jnp.tanh(row @ params["rows"][0]), jax.random.normal(key, (WIDTH,)))

    return jnp.mean(jax.vmap(one)(batch["x"], batch["key"]))


@pytest.mark.parametrize(("strategy", "mesh"), [("dp", (1, 8)), ("zero2", (1, 8)), ("hsdp", (2, 4))], ids=str)
def test_keys_in_the_batch(strategy, mesh):
    """Oracle: one device."""
    batch = {"x": BATCH, "key": jax.random.split(jax.random.key(5), EXAMPLES)}
    training = quick(by_its_own_key, PARAMS, batch, strategy, mesh, accumulate=3)
    state, _ = training.step(training.init(PARAMS), batch)
    grads = jax.jit(jax.grad(by_its_own_key))(PARAMS, batch)
    moved = PARAMS["rows"] - training.whole(state)["rows"]
    np.testing.assert_allclose(moved, grads["rows"], rtol=0, atol=1e-5 * float(jnp.abs(grads["rows"]).max()))


def test_noise_of_the_optimizer_is_the_same_under_every_strategy():
    """It is drawn for whole arrays, so that it does not repeat from slice to slice."""
    noisy = optax.noisy_sgd(1.0, eta=1.0, key=jax.random.key(3))
    ends = []
    for strategy, mesh in [("ddp", (1, 8)), ("hsdp", (2, 4))]:
        training = quick(
            lambda params, batch: 0 * jnp.sum(params["rows"]), PARAMS, BATCH, strategy, mesh, optimizer=noisy
        )
        state, _ = training.step(training.init(PARAMS), BATCH)
        ends.append(training.whole(state)["rows"] - PARAMS["rows"])
    np.testing.assert_allclose(*ends, rtol=0, atol=1e-6)
    assert len(np.unique(np.round(ends[0], 6))) > 0.9 * ends[0].size
