"""Faults that a sceptical reading of the library found once, and that must not come back."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType
from quick import quick

import jaxshard as js

RATE = 0.1
X = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)


def mean_square(params, batch):
    return jnp.mean((batch @ params["w"]) ** 2)


def weights(*shape):
    return {"w": np.random.default_rng(1).normal(size=shape).astype(np.float32)}


def make(loss, params, **choices):
    choices = {"mesh": js.make_mesh(), "strategy": js.ZERO3, "whole_budget": 0} | choices
    return js.parallelize(loss, optax.sgd(RATE), params=params, batch=X, **choices)


PLACES = {
    "axis_index": (lambda: lax.axis_index("shard"), np.arange(8)),
    "ppermute": (lambda: lax.ppermute(jnp.int32(3), "shard", [(0, 1)]), np.array([0, 3, 0, 0, 0, 0, 0, 0])),
    "psum_scatter": (
        lambda: lax.psum_scatter(jnp.arange(8, dtype=jnp.int32), "shard", tiled=True)[0] // 8,
        np.arange(8),
    ),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_rows_that_differ_between_devices_are_not_sliced_on_shards(place, strategy):
    """Oracle: each device's part of the batch times the row that its device picks."""
    pick, rows = PLACES[place]

    def loss(params, batch):
        return jnp.mean((batch @ lax.dynamic_index_in_dim(params["w"], pick(), keepdims=False)) ** 2)

    def reference(params):
        return jnp.mean(jnp.einsum("nbi,nij->nbj", X.reshape(8, 2, 8), params["w"][rows]) ** 2)

    params = jax.tree.map(jnp.asarray, weights(8, 8, 8))
    wanted, grads = jax.value_and_grad(reference)(params)
    training = make(loss, params, strategy=strategy)
    state, metrics = training.step(training.init(params), X)
    np.testing.assert_allclose(metrics["loss"], wanted, rtol=1e-5)
    moved = np.asarray(params["w"]) - training.whole(state)["w"]
    np.testing.assert_allclose(moved, RATE * grads["w"], rtol=0, atol=1e-5 * float(jnp.abs(grads["w"]).max()))


def test_a_mesh_axis_that_splits_nothing_is_refused():
    mesh = jax.make_mesh((1, 4, 2), ("replica", "shard", "tensor"), axis_types=(AxisType.Auto,) * 3)
    with pytest.raises(ValueError, match=r"'tensor': 2.*make_mesh"):
        make(mean_square, weights(8, 8), mesh=mesh)


def test_a_mesh_with_explicit_axes_works():
    params = weights(8, 8)
    training = make(mean_square, params, mesh=jax.make_mesh((1, 8), ("replica", "shard")))
    _, metrics = training.step(training.init(params), X)
    np.testing.assert_allclose(metrics["loss"], np.mean((X @ params["w"]) ** 2), rtol=1e-5)


def test_statistics_survive_a_device_without_items():
    """One device has no item and a statistic of 0 / 0; the mean is over the items that there are."""

    def loss(params, batch, *, extra):
        valid = (batch[:, 0] < 100).astype(jnp.float32)
        mean = jnp.sum(batch[:, 1] * valid) / jnp.sum(valid)
        return js.Loss(jnp.sum(valid * (batch[:, 1:3] @ params["w"])[:, 0]), jnp.sum(valid)), {"mean": mean}

    batch = X.copy()
    batch[:2, 0] = 1000
    params, extra = weights(2, 8), {"mean": np.float32(0)}
    training = make(loss, (params, extra))
    state, _ = training.step(training.init((params, extra)), batch)
    np.testing.assert_allclose(state.extra["mean"], batch[2:, 1].mean(), rtol=1e-5)


def test_halves_are_averaged_without_overflow():
    def loss(params, batch, *, extra):
        items = jnp.float32(4096)
        return js.Loss(mean_square(params, batch) * items, items), {"mean": jnp.float16(20) + 0 * extra["mean"]}

    params, extra = weights(8, 8), {"mean": np.float16(0)}
    training = make(loss, (params, extra))
    state, _ = training.step(training.init((params, extra)), X)
    assert state.extra["mean"] == 20
    training.contract()


def test_extra_keeps_its_dtype():
    def loss(params, batch, *, extra):
        return mean_square(params, batch), {"n": extra["n"] + 1.0}

    with (
        jax.numpy_dtype_promotion("standard"),
        pytest.raises(TypeError, match=r"given n of extra as int32\[\] and returned float32\[\]"),
    ):
        make(loss, (weights(8, 8), {"n": np.int32(5)}))


@pytest.mark.parametrize("axis_name", ["shard", ("a",)])
def test_an_axis_name_is_a_new_name(axis_name):
    with pytest.raises(ValueError, match="axis_name="):
        make(mean_square, weights(8, 8), axis_name=axis_name)


def test_a_donated_state_is_named():
    params = weights(8, 8)
    training = make(mean_square, params)
    state = training.init(params)
    training.step(state, X)
    with pytest.raises(ValueError, match="given to an earlier step"):
        training.step(state, X)


@pytest.mark.parametrize("key", [lambda: jax.random.PRNGKey(0), lambda: jax.random.key(0, impl="rbg")])
def test_keys_of_any_style(key):
    def init(key):
        return {"w": jax.random.normal(key, (8, 8))}

    training = make(mean_square, init)
    state, metrics = training.step(training.init(init, key()), X)
    assert np.isfinite(metrics["loss"])
    assert state.step == 1
    with pytest.raises(TypeError, match="the key is an int"):
        training.init(init, 0)  # pyright: ignore[reportArgumentType] -- that is the mistake


def test_another_float_dtype_is_refused():
    training = make(mean_square, weights(8, 8))
    with pytest.raises(ValueError, match=r"w of the parameters given to init is float16\[8, 8\]"):
        training.init({"w": np.zeros((8, 8), np.float16)})


def test_metrics_do_not_take_the_steps_own_names():
    def loss(params, batch):
        return js.Loss(mean_square(params, batch), jnp.float32(1), {"grad_norm": jnp.float32(1)})

    with pytest.raises(ValueError, match=r"\['grad_norm'\].*own names"):
        make(loss, weights(8, 8))


def test_trainable_that_chooses_nothing():
    with pytest.raises(ValueError, match=r"nothing would learn.*w"):
        make(mean_square, weights(8, 8), trainable=lambda path: path.endswith("kernel"))
    with pytest.raises(TypeError, match=r"mask of .'str'.; pass bools"):
        make(mean_square, weights(8, 8), trainable={"w": "no"})


def test_an_optimizer_state_split_over_more_axes_holds_its_contract():
    strategy = replace(js.ZERO3, opt=js.Placement(axes=("shard", "replica")))
    training = make(mean_square, weights(8, 8), mesh=js.make_mesh(replica=2, shard=4), strategy=strategy)
    (published,) = [one for one in training.contract() if one.axes == ("replica",) and one.kind == "all_gather"]
    assert published.bytes == 8 * 8 * 4 // 4


@pytest.mark.parametrize("names", [("a+b", "c"), ("a/b", "c d")])
def test_leaves_of_any_name_hold_their_contract(names):
    params = {name: weights(8, 8)["w"] for name in names}

    def loss(params, batch):
        return mean_square({"w": jnp.concatenate([params[name] for name in names], axis=1)}, batch)

    sent = make(loss, params).contract()
    assert sum(one.bytes for one in sent if one.kind == "reduce_scatter") == 2 * 8 * 8 * 4


def test_debug_nans_does_not_blame_the_state():
    params = weights(8, 8)
    jax.config.update("jax_debug_nans", True)
    try:
        training = make(mean_square, params)
        _, metrics = training.step(training.init(params), X)
    finally:
        jax.config.update("jax_debug_nans", False)
    assert metrics["loss"] > 0


@pytest.mark.skipif(not hasattr(jax, "new_ref"), reason="this JAX has no references")
def test_what_passes_through_a_reference_varies():
    """A device's own index, written to mutable memory and read again, picks its own rows of the whole weight."""

    def index(part):
        return (jnp.argmax(part[:, 0]) % 5).astype(jnp.int32)

    def picked(w, part, i):
        return jnp.mean((part @ lax.dynamic_slice(w, (i, 0), (4, 8))[0]) ** 2)

    def loss(params, batch):
        reference = jax.new_ref(jnp.zeros((), jnp.int32))
        reference[...] = index(batch)
        return picked(params["w"], batch, reference[...])

    def on_parts(params):
        return jnp.mean(jnp.stack([picked(params["w"], part, index(part)) for part in X.reshape(8, 2, 8)]))

    params = jax.tree.map(jnp.asarray, weights(8, 8))
    assert len({int(index(part)) for part in X.reshape(8, 2, 8)}) > 1
    wanted, grads = jax.value_and_grad(on_parts)(params)
    training = make(loss, params)
    state, metrics = training.step(training.init(params), X)
    np.testing.assert_allclose(metrics["loss"], wanted, rtol=1e-5)
    moved = np.asarray(params["w"]) - training.whole(state)["w"]
    np.testing.assert_allclose(moved, RATE * grads["w"], rtol=0, atol=1e-5 * float(jnp.abs(grads["w"]).max()))


@pytest.mark.parametrize("layers", [0, -1, 2.0, True])
def test_a_number_of_layers(layers):
    with pytest.raises((TypeError, ValueError), match="init_layers: layers"):
        js.init_layers(lambda key: jax.random.normal(key, (2,)), jax.random.key(0), layers)


@pytest.mark.parametrize("key", [0, jax.random.split(jax.random.key(0), 3)], ids=["an int", "three"])
def test_init_takes_one_key(key):
    params = weights(8, 8)
    with pytest.raises(TypeError, match="the key is an"):
        make(mean_square, params).init(params, key)


def test_no_batch_is_no_batch():
    params = weights(8, 8)
    training = make(mean_square, params)
    with pytest.raises(ValueError, match="batch has no arrays"):
        training.step(training.init(params), None)


@pytest.mark.parametrize("strategy", [js.DDP, js.ZERO3], ids=["whole", "split"])
def test_a_custom_rule_that_closes_over_a_constant_is_tied_to_no_constant(strategy):
    """Nothing may be differentiated through what a custom rule closes over, a tie included."""
    shift = np.linspace(0, 1, 8, dtype=np.float32)

    @jax.custom_vjp
    def rule(w):
        return jnp.tanh(w) + jnp.asarray(shift)

    rule.defvjp(lambda w: (rule(w), w), lambda w, g: (2 * w * g,))  # on purpose not its derivative

    def loss(params, batch):
        return jnp.mean(jax.checkpoint(lambda x, w: x + rule(w))(batch, params["w"]) ** 2)

    params, batch = {"w": jnp.ones(8)}, jnp.ones((16, 8))
    training = quick(loss, params, batch, replace(strategy, prefer="memory"))
    state, _ = training.step(training.init(params), batch)
    gradient = jax.grad(loss)(params, batch)["w"]
    assert gradient.all()
    np.testing.assert_allclose(1 - training.whole(state)["w"], gradient, rtol=1e-5)
