"""A state at step 0: the same values on every mesh and under every strategy, each leaf where its spec says."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from oracle import FORMS, assert_same_bits, batches, lenient, mesh_of

import jaxshard as js
from jaxshard.state import initialiser
from jaxshard.strategy import STRATEGIES

SCAN, LIST = FORMS
ADAM = lenient(optax.adam(1e-2))
MESHES = [(1, 1), (1, 2), (1, 4), (1, 8), (2, 4)]


def training_for(strategy="zero3", model=SCAN, *, mesh=(1, 8), optimizer=ADAM, params=None, **choices):
    return js.parallelize(
        model.loss,
        optimizer,
        params=params or model.init,
        batch=batches(1, 48)[0],
        mesh=mesh_of(*mesh),
        strategy=strategy,
        **choices,
    )


@pytest.mark.parametrize(
    ("name", "mesh"),
    [(name, mesh) for name in STRATEGIES for mesh in MESHES if STRATEGIES[name].min_replicas <= mesh[0]],
    ids=str,
)
def test_the_same_values_everywhere(name, mesh):
    training = training_for(name, mesh=mesh)
    state = training.init(SCAN.init, jax.random.key(3))
    assert_same_bits(training.whole(state), jax.tree.map(np.asarray, jax.jit(SCAN.init)(jax.random.key(3))))
    assert state.step == 0
    assert all(not np.asarray(x).any() for x in jax.tree.leaves(state.opt))


@pytest.mark.smoke
@pytest.mark.parametrize("strategy", ["dp", "ddp", "zero3"])
def test_from_an_existing_pytree_which_stays_usable(strategy):
    params = jax.jit(SCAN.init)(jax.random.key(3))
    on_host = jax.tree.map(np.asarray, params)
    training = training_for(strategy, params=params)
    batch = batches(1, 48)[0]
    for given in (params, on_host):
        state = training.init(given)
        assert_same_bits(training.whole(state), on_host)
        state, _ = training.step(state, batch)  # which donates the state
        assert (training.whole(state)["head"] != on_host["head"]).any()
    assert_same_bits(params, on_host)


def test_arrays_and_a_function_give_the_same_run():
    training = training_for()
    key, batch = jax.random.key(3), batches(1, 48)[0]
    born = training.init(SCAN.init, key)
    placed = training.init(training.whole(born), key)
    for x, y in zip(jax.tree.leaves(born), jax.tree.leaves(placed), strict=True):
        assert x.sharding == y.sharding
    (born, first), (placed, second) = training.step(born, batch), training.step(placed, batch)
    assert first["loss"] == second["loss"]
    assert_same_bits(training.whole(placed), training.whole(born))


LAYERS, WIDTH, HIDDEN = 8, 64, 128
PARTITIONED = {
    "normal": jax.nn.initializers.normal(),
    "truncated_normal": jax.nn.initializers.truncated_normal(),
    "lecun_normal": jax.nn.initializers.lecun_normal(),
    "xavier_uniform": jax.nn.initializers.xavier_uniform(),
}


def bytes_to_initialise(init):
    """(temporaries of initialisation on one of 8 devices, all parameters), in bytes, and the parameters it makes."""

    def loss(params, batch):
        x = batch
        for i in range(LAYERS):
            w = params[i] if isinstance(params, list) else jax.tree.map(lambda w, i=i: w[i], params)
            x = jnp.tanh(x @ w["up"]) @ w["down"]
        return jnp.mean(x)

    training: Any = js.parallelize(
        loss, ADAM, params=init, batch=np.ones((8, WIDTH), np.float32), mesh=mesh_of(1, 8), whole_budget=0
    )
    made = training.setup
    make: Any = initialiser(made.program, made.optimizer, made.where, lambda key: (init(key), None))
    memory = make.lower(jax.random.key(0)).compile().memory_analysis()
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(training.state_shapes.params))
    assert memory.output_size_in_bytes < 3 * size / 8 + 4096  # parameters and two moments, each an eighth
    return memory.temp_size_in_bytes, size, training.whole(training.init(init, jax.random.key(1)))


def stack_of(initialize, stacked):
    def layer(key):
        up, down = jax.random.split(key)
        return {"up": initialize(up, (WIDTH, HIDDEN)), "down": initialize(down, (HIDDEN, WIDTH))}

    return lambda key: stacked(layer, key)


def at_once(layer, key):
    return jax.vmap(layer)(jax.random.split(key, LAYERS))


def one_by_one(layer, key):
    return js.init_layers(layer, key, LAYERS)


@pytest.mark.parametrize("name", PARTITIONED)
def test_initialisers_that_partition_need_little_memory(name):
    temporary, size, _ = bytes_to_initialise(stack_of(PARTITIONED[name], at_once))
    assert 0 < temporary <= 3 * size / 8


@pytest.mark.smoke
def test_layers_made_one_by_one_need_the_memory_of_one():
    """Orthogonal matrices are made whole on every device, in up to four copies; the values are the same."""
    orthogonal = jax.nn.initializers.orthogonal()
    together, size, values = bytes_to_initialise(stack_of(orthogonal, at_once))
    apart, _, same = bytes_to_initialise(stack_of(orthogonal, one_by_one))
    assert together > 2 * size
    assert apart <= 4.5 * size / LAYERS
    assert_same_bits(same, values)


def test_a_list_of_layers_is_slices_of_a_stack():
    make = stack_of(jax.nn.initializers.orthogonal(), one_by_one)

    def listed(key):
        return [jax.tree.map(lambda x, i=i: x[i], make(key)) for i in range(LAYERS)]

    temporary, size, _ = bytes_to_initialise(listed)
    assert temporary <= size


SPECS = {
    "embed": P(("shard",)),
    "head": P(("shard",)),
    "up": P(None, ("shard",)),
    "down": P(None, None, ("shard",)),
    "norm": P(None, ("shard",)),
    "bias": P(),
}


def spec_of(params, name):
    return (params if name in params else params["blocks"])[name].sharding.spec


def test_optimizer_leaves_take_their_parameters_sharding():
    state = training_for().init(SCAN.init, jax.random.key(0))
    (adam, _) = state.opt
    for name, spec in SPECS.items():
        assert spec_of(state.params, name) == spec_of(adam.mu, name) == spec_of(adam.nu, name) == spec
    assert adam.count.sharding.spec == P()
    zero1 = training_for("zero1").init(SCAN.init, jax.random.key(0))
    for name, spec in SPECS.items():
        assert spec_of(zero1.params, name) == P()
        assert spec_of(zero1.opt[0].mu, name) == spec


def test_a_scanned_dim_is_never_split():
    """Eight layers divide by 8, but the scan takes them one by one."""
    params = {"w": jnp.ones((8, 16, 8)), "b": jnp.ones((8, 4))}

    def loss(params, batch):
        x, _ = jax.lax.scan(lambda x, p: (jnp.tanh(x @ p["w"] @ p["w"].T + jnp.sum(p["b"])), None), batch, params)
        return jnp.mean(x)

    training = js.parallelize(
        loss, ADAM, params=params, batch=np.ones((8, 16), np.float32), mesh=mesh_of(1, 8), whole_budget=0
    )
    state = training.init(params)
    assert state.params["w"].sharding.spec == P(None, ("shard",))
    assert state.params["b"].sharding.spec == P()


@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_factored_rows_fall_to_the_chooser(strategy):
    """Adafactor keeps a row and a column for each matrix, which have no parameter's shape."""
    adafactor = lenient(optax.adafactor(1e-2, min_dim_size_to_factor=8))
    training = training_for(strategy, LIST, optimizer=adafactor)
    init = LIST.init
    state = training.init(init, jax.random.key(0))
    named = jax.tree_util.tree_leaves_with_path(state.opt)
    rows = {jax.tree_util.keystr(path): x for path, x in named if "v_row" in str(path) or "v_col" in str(path)}
    split = {path: x.shape for path, x in rows.items() if x.sharding.spec != P()}
    assert len(split) == 5 + 5  # of embed and head both, of 3 x (up, down) the side of 16
    assert all(shape[0] % 8 == 0 for shape in split.values())
    # Whole rows are those that do not divide; the optimizer's result is one device's.
    batch = batches(1, 48)[0]
    params = jax.jit(init)(jax.random.key(0))
    new, _ = training.step(state, batch)

    @jax.jit
    def oracle(params):
        updates, _ = adafactor.update(jax.grad(LIST.loss)(params, batch), adafactor.init(params), params)
        return optax.apply_updates(params, updates)

    for ours, theirs in zip(jax.tree.leaves(training.whole(new)), jax.tree.leaves(oracle(params)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def only_blocks(path: str) -> bool:
    return path.startswith("blocks")


MASK = {"embed": False, "head": False, "blocks": dict.fromkeys(("norm", "up", "bias", "down"), True)}


@pytest.mark.parametrize("strategy", ["dp", "ddp", "zero1", "zero2", "shard_grad_op", "zero3"])
@pytest.mark.parametrize("trainable", [only_blocks, MASK], ids=["predicate", "mask"])
def test_frozen_leaves_do_not_move_and_have_no_moments(strategy, trainable):
    training = training_for(strategy, trainable=trainable, accumulate=3, clip=0.1)
    state = training.init(SCAN.init, jax.random.key(0))
    before, (adam, _) = training.whole(state), state.opt
    moments = {jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(adam.mu)}
    assert moments == {f"['blocks']['{name}']" for name in MASK["blocks"]}
    state, metrics = training.step(state, batches(1, 48)[0])
    after = training.whole(state)
    for name in ("embed", "head"):
        np.testing.assert_array_equal(after[name], before[name])
    for name in MASK["blocks"]:
        assert (after["blocks"][name] != before["blocks"][name]).any()
    grads = jax.grad(SCAN.loss)(before, batches(1, 48)[0])
    np.testing.assert_allclose(metrics["grad_norm"], optax.tree.norm(grads["blocks"]), rtol=1e-5)


def test_what_cannot_be_differentiated_does_not_learn():
    def loss(params, batch):
        return jnp.mean(
            jnp.square(
                batch["tokens"][:, :1].astype(jnp.float32) * params["w"] - params["shift"][0].astype(jnp.float32)
            )
        )

    params = {"w": np.ones((1, 8), np.float32), "shift": np.arange(8, dtype=np.int32)}
    training = js.parallelize(loss, ADAM, params=params, batch=batches(1, 8)[0], mesh=mesh_of(1, 8))
    state, _ = training.step(training.init(params), batches(1, 8)[0])
    assert training.whole(state)["shift"].tolist() == list(range(8))
    assert (training.whole(state)["w"] != 1).all()
