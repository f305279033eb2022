"""Every error says what is wrong with its numbers, what is valid, and what to do: choices, parameters, states."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh
from mistakes import BATCH, PARAMS, error, training_for
from oracle import mesh_of

import jaxshard as js
from jaxshard import Placement, Precision, Strategy
from jaxshard.mesh import axis_sizes
from jaxshard.step import _check_donation
from jaxshard.strategy import SPLIT, WHOLE, named

# Strategies


@pytest.mark.parametrize("axes", [("tensor",), ("shard", "shard"), ("shard", "data")])
def test_axes(axes):
    with error(ValueError, str(axes[-1]), r"\('replica', 'shard'\)", "at most once"):
        Placement(axes=axes)


def test_placement_choices():
    with error(ValueError, "memory='disk'", "choose one of 'device'"):
        Placement(memory="disk")  # pyright: ignore[reportArgumentType]
    with error(ValueError, "devices='last'", "'all', 'first'"):
        Placement(devices="last")  # pyright: ignore[reportArgumentType]
    with error(ValueError, "devices='first'", "'shard'", "not split"):
        Placement(axes=("shard",), devices="first")


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("field", "valid"),
    [("gather", "'use', 'step'"), ("reduce", "'microbatch', 'step'"), ("prefer", "'speed', 'memory'")],
)
def test_strategy_choices(field, valid):
    with error(ValueError, f"{field}='never'", valid):
        replace(js.ZERO3, **{field: "never"})


def test_strategy_numbers():
    with error(ValueError, "bucket_mb=0", "above 0, or None"):
        replace(js.ZERO3, bucket_mb=0)
    with error(ValueError, "min_replicas=0", "at least 1"):
        replace(js.ZERO3, min_replicas=0)


@pytest.mark.parametrize(
    "rungs",
    [
        (SPLIT, WHOLE, SPLIT),
        (SPLIT, SPLIT, WHOLE),
        (WHOLE, SPLIT, WHOLE),
        (Placement(axes=("replica",)), Placement(axes=("shard", "replica")), Placement(axes=("shard", "replica"))),
        (WHOLE, WHOLE, Placement(devices="first")),
    ],
)
def test_the_ladder_is_shown(rungs):
    params, grads, opt = rungs
    with error(ValueError, "no ladder", f"params +{params}", f"grads +{grads}", f"opt +{opt}", "must begin"):
        Strategy(params=params, grads=grads, opt=opt)


def test_strategy_names():
    with error(ValueError, "'zero4'", "dp, ddp, no_shard", "hybrid_shard", "Did you mean 'zero"):
        named("zero4")
    with error(ValueError, "'quite different'", "choose one of dp"):
        training_for(strategy="quite different")
    with error(TypeError, "strategy is a Placement", "jaxshard.Strategy", "zero3"):
        training_for(strategy=Placement())


# Meshes


def test_mesh_factors():
    with error(ValueError, "replica=3 x shard=-1", "8 devices", "3 x 2 = 6", "product is 8"):
        js.make_mesh(replica=3)
    with error(ValueError, "replica=2 x shard=8", "8 devices", "2 x 8 = 16"):
        js.make_mesh(replica=2, shard=8)
    with error(ValueError, "replica=-1 x shard=-1", "at most one may be -1"):
        js.make_mesh(replica=-1, shard=-1)
    with error(ValueError, "replica=0", "1 or more"):
        js.make_mesh(replica=0)


def test_a_mesh_without_our_axes():
    mesh = Mesh(np.array(jax.devices()), ("data",))
    with error(ValueError, r"\('data',\)", "replica", "shard", "make_mesh"):
        axis_sizes(mesh)
    with error(ValueError, r"\('data',\)", "make_mesh"):
        training_for(mesh=mesh)


@pytest.mark.parametrize(
    "mesh", [jax.devices, lambda: AbstractMesh((1, 8), ("replica", "shard")), lambda: {"shard": 8}]
)
def test_what_is_no_mesh(mesh):
    with error(TypeError, "mesh is an? (list|AbstractMesh|dict)", "jax.sharding.Mesh", "make_mesh"):
        training_for(mesh=mesh())


def test_devices_that_come_too_late():
    js.force_cpu_devices(8)  # what there is already
    with error(RuntimeError, "started with 8 cpu", "3 CPU", "before"):
        js.force_cpu_devices(3)


# Choices of parallelize


def test_hsdp_wants_replicas():
    with error(ValueError, "hsdp", "at least 2 replicas", "replica=1 x shard=8", r"make_mesh\(replica=2\)", "zero3"):
        training_for(strategy="hsdp")


NORM, FRACTION = "largest global norm.*above 0, or None", "a fraction, 0 or more"
CHOICES = [
    ({"accumulate": 0}, ValueError, "accumulate=0: the number of microbatches per step, an int of 1 or more"),
    ({"accumulate": -1}, ValueError, "accumulate=-1"),
    ({"accumulate": 2.0}, TypeError, "accumulate=2.0 is a float: the number of microbatches"),
    ({"accumulate": True}, TypeError, "accumulate=True is a bool"),
    ({"accumulate": "2"}, TypeError, "accumulate='2' is a str"),
    ({"accumulate": 3}, ValueError, "batch of 16.*accumulate=3 = 24.*: 24. Or keep it, with accumulate=1 or 2"),
    ({"clip": 0}, ValueError, f"clip=0: the {NORM}"),
    ({"clip": -1.0}, ValueError, "clip=-1.0"),
    ({"clip": float("nan")}, ValueError, "clip=nan"),
    ({"clip": "1"}, TypeError, f"clip='1' is a str: the {NORM}"),
    ({"clip": True}, TypeError, "clip=True is a bool"),
    ({"clip": np.ones(2)}, TypeError, r"clip=.* is an array of shape \(2,\)"),
    ({"whole_budget": -1}, ValueError, f"whole_budget=-1.*{FRACTION}"),
    ({"whole_budget": float("nan")}, ValueError, f"whole_budget=nan.*{FRACTION}"),
    ({"whole_budget": "a"}, TypeError, f"whole_budget='a' is a str: {FRACTION}"),
    ({"whole_budget": None}, TypeError, "whole_budget=None"),
    ({"remat": "some"}, ValueError, "remat='some'.*'none', 'full', 'dots'"),
    ({"precision": "bf16"}, TypeError, r"precision='bf16': pass jaxshard.Precision\(compute='bfloat16'\)"),
    ({"trainable": {"head": True}}, ValueError, "trainable is a mask of structure.*head.*one bool"),
    ({"trainable": {"b": 0, "w": 1}}, TypeError, r"trainable is a mask of \['int'\]; pass bools"),
    ({"trainable": "w"}, ValueError, "trainable is a mask of structure.*predicate"),
    ({"compiler_options": "--xla_no_such"}, TypeError, "compiler_options is a str; pass a dict of XLA options"),
]


@pytest.mark.parametrize(("choice", "kind", "said"), CHOICES, ids=lambda x: str(x)[:24])
def test_choices(choice, kind, said):
    with error(kind, said):
        training_for(**choice)


@pytest.mark.parametrize("two", [np.int32(2), np.uint8(2), np.array(2), jnp.int32(2)], ids=repr)
def test_any_int_counts_microbatches(two):
    accumulate = training_for(accumulate=two).setup.program.accumulate
    assert accumulate == 2
    assert type(accumulate) is int


@pytest.mark.parametrize("one", [1, np.float64(1), np.int64(1), np.array(1.0), jnp.bfloat16(1)], ids=repr)
def test_any_real_number_is_a_norm_or_a_fraction(one):
    made = training_for(clip=one, whole_budget=one).setup
    assert made.clip == 1
    assert type(made.clip) is float


def test_precision():
    with error(ValueError, "compute='int8'", "'float32', 'bfloat16' or 'float16'"):
        Precision(compute="int8")
    with error(ValueError, "reduce='half a float'", "'bfloat16'"):
        Precision(reduce="half a float")
    with error(ValueError, "backoff=2.0", "between 0 and 1"):
        Precision(backoff=2.0)
    with error(ValueError, "growth_interval=0", "above 0"):
        Precision(growth_interval=0)


def test_a_users_own_compiler_option_is_never_dropped_silently():
    training = training_for(compiler_options={"xla_no_such_option": "True"})
    with error(Exception, "xla_no_such_option"):
        training.built()
    training = training_for(strategy="dp", compiler_options={"xla_no_such_option": "True"})
    with error(Exception, "xla_no_such_option"):
        training.step(training.init(PARAMS), BATCH)


# Parameters and states


@pytest.mark.parametrize(
    ("leaf", "said"),
    [
        ("mlp", "name is a str"),
        (jnp.tanh, "name is a "),
        (object(), "name is an object"),
        (np.array("mlp"), r"name is an array of shape \(\) and dtype <U3"),
    ],
    ids=["a string", "a function", "an object", "an array of a string"],
)
def test_a_leaf_that_is_no_array(leaf, said):
    params = {**PARAMS, "name": leaf}
    kept_out = r"every leaf must be a NumPy or JAX array.*equinox.partition.*nnx.split"
    with error(TypeError, "params: ", said, kept_out):
        training_for(params=params)
    with error(TypeError, "params=, called with a key: ", said, kept_out):
        training_for(params=lambda key: params)
    with error(TypeError, "the parameters given to init: ", said, kept_out):
        training_for().init(params)
    with error(TypeError, "the parameters given to init: ", said, kept_out):
        training_for().init(lambda key: params, jax.random.key(0))


def test_parameters_are_a_function_of_a_key():
    with error(TypeError, "2 were given|takes 0 positional|missing 1", "params= is a function.*one PRNG key"):
        training_for(params=lambda: PARAMS)
    with error(ZeroDivisionError, "params= is a function"):
        training_for(params=lambda key: 1 / 0)


@pytest.mark.parametrize(
    "place",
    [
        lambda: jax.devices()[5],
        lambda: jax.NamedSharding(mesh_of(2, 4), jax.P("shard")),
        lambda: jax.NamedSharding(js.make_mesh(devices=jax.devices()[4:]), jax.P("shard")),
    ],
    ids=["another device", "another mesh", "a mesh of other devices"],
)
def test_parameters_that_live_elsewhere(place):
    """They are copied to where this training wants them, and stay as they are."""
    params = jax.device_put(PARAMS, place())
    training = training_for(params=params)
    state = training.init(params)
    assert jax.tree.map(lambda x: x.sharding, state) == training.setup.where.shardings
    jax.tree.map(np.testing.assert_array_equal, training.whole(state), PARAMS)
    jax.tree.map(np.testing.assert_array_equal, params, PARAMS)


def test_parameters_in_double_precision_become_what_jax_makes_of_them():
    double = {name: x.astype(np.float64) for name, x in PARAMS.items()}
    training = training_for(params=double)
    for params in (double, PARAMS):
        state = training.init(params)
        assert state.params["w"].dtype == np.float32
        jax.tree.map(np.testing.assert_array_equal, training.whole(state), PARAMS)


def test_other_parameters_than_were_said():
    training = training_for()
    with error(ValueError, "needs the key"):
        training.init(lambda key: PARAMS)
    with error(ValueError, "structure", "parallelize was given", "Pass what params= said"):
        training.init({"w": PARAMS["w"]})
    with error(ValueError, "w of the parameters", r"float32\[3\]", r"float32\[8, 8\]"):
        training.init({**PARAMS, "w": np.zeros(3, np.float32)})
    with error(ValueError, "w of the parameters", "int32", "float32"):
        training.init({**PARAMS, "w": np.zeros((8, 8), np.int32)})


def test_a_state_that_is_not_updated_in_place():
    training = training_for()
    built, state = training.built(), training.state_shapes
    _check_donation(built, state)
    copied = SimpleNamespace(memory_analysis=lambda: SimpleNamespace(alias_size_in_bytes=8, host_alias_size_in_bytes=0))
    with error(RuntimeError, r"\d+ of the state's \d+ bytes", "twice"):
        _check_donation(replace(built, compiled=copied), state)
