"""Every error says what is wrong with its numbers, what is valid, and what to do."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh
from oracle import FORMS, batches, mesh_of

import jaxshard as js
from jaxshard import Placement, Precision, Strategy
from jaxshard.mesh import axis_sizes
from jaxshard.step import _check_donation
from jaxshard.strategy import SPLIT, WHOLE, named

SCAN = FORMS[0]
BATCH = batches(1, 48)[0]
SGD = optax.sgd(0.1)


def error(kind: type[Exception], *parts: str):
    """Expects an error whose message has all these parts, in this order."""
    return pytest.raises(kind, match="(?s)" + ".*".join(parts))


def training_for(
    loss: Any = SCAN.loss, optimizer: Any = SGD, *, params=SCAN.init, batch=BATCH, mesh=(1, 8), **choices
) -> Any:
    return js.parallelize(loss, optimizer, params=params, batch=batch, mesh=mesh_of(*mesh), **choices)


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
        js.parallelize(SCAN.loss, SGD, params=SCAN.init, batch=BATCH, mesh=mesh)


def test_devices_that_come_too_late():
    js.force_cpu_devices(8)  # what there is already
    with error(RuntimeError, "started with 8 cpu", "3 CPU", "before"):
        js.force_cpu_devices(3)


# Choices of parallelize


def test_hsdp_wants_replicas():
    with error(ValueError, "hsdp", "at least 2 replicas", "replica=1 x shard=8", r"make_mesh\(replica=2\)", "zero3"):
        training_for(strategy="hsdp")


@pytest.mark.parametrize("accumulate", [0, -1, 1.5])
def test_accumulate(accumulate):
    with error(ValueError, f"accumulate={accumulate}", "1 or more"):
        training_for(accumulate=accumulate)


@pytest.mark.parametrize("clip", [0, -1.0])
def test_clip(clip):
    with error(ValueError, f"clip={clip}", "above 0, or None"):
        training_for(clip=clip)


def test_optimizer():
    with error(TypeError, "optimizer is a float", "optax.adamw"):
        training_for(optimizer=0.1)


def test_remat():
    with error(ValueError, "remat='some'", "'none', 'full', 'dots'"):
        training_for(remat="some")


def test_trainable_mask():
    with error(ValueError, "trainable is a mask of structure", "head", "One bool|one bool"):
        training_for(trainable={"head": True})


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


# Losses


def test_what_a_loss_function_is():
    with error(TypeError, "loss_fn is a int", r"\(params, batch\) -> loss"):
        training_for(7)
    with error(TypeError, r"\['params', 'batch', 'rng'\]", r"key= and extra=", "Close over"):
        training_for(lambda params, batch, rng: 0.0)


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (lambda: jnp.ones(3), r"an array of shape \(3,\)"),
        (lambda: jnp.ones((), jnp.int32), "dtype int32"),
        (lambda: (jnp.ones(()), {}), "a tuple"),
        (lambda: None, "a NoneType"),
    ],
)
def test_what_a_loss_is(result, said):
    with error(TypeError, "loss of .*lambda", said, "float scalar", r"jaxshard.Loss\(total, weight\)"):
        training_for(lambda params, batch: result())


def test_what_a_loss_with_a_weight_holds():
    one = lambda: jnp.ones(())
    with error(TypeError, "Loss.total", r"shape \(2,\)"):
        training_for(lambda params, batch: js.Loss(jnp.ones(2), one()))
    with error(TypeError, "Loss.weight", r"shape \(2,\)", "scalar"):
        training_for(lambda params, batch: js.Loss(one(), jnp.ones(2)))
    with error(TypeError, r"Loss.metrics\['hits'\]", r"shape \(4,\)", "scalar"):
        training_for(lambda params, batch: js.Loss(one(), one(), {"hits": jnp.ones(4)}))


def test_extra():
    params = {"w": np.ones(8, np.float32)}
    given = params, {"mean": np.zeros(8, np.float32)}

    def with_extra(result):
        def loss(params, batch, *, extra):
            return result(jnp.sum(params["w"]), extra)

        return loss

    with error(TypeError, "loss takes `extra`", "pair", "dict"):
        training_for(with_extra(lambda value, extra: (value, extra)), params=params)
    with error(TypeError, "loss takes `extra`", r"\(loss, new_extra\)", "returned an array"):
        training_for(with_extra(lambda value, extra: value), params=given)
    with error(TypeError, "structure", "mean", "new", "same"):
        training_for(with_extra(lambda value, extra: (value, {"new": extra["mean"]})), params=given)
    with error(TypeError, "given mean of extra", r"float32\[8\]", r"float32\[2\]", "must stay"):
        training_for(with_extra(lambda value, extra: (value, {"mean": extra["mean"][:2]})), params=given)


def test_a_batch_axis_inside_a_custom_derivative():
    mean = jax.custom_vjp(lambda x: jax.lax.pmean(x, "batch"))
    mean.defvjp(lambda x: (mean(x), None), lambda _, g: (g,))
    with error(NotImplementedError, "axis_name='batch'", "custom derivative", "replica"):
        training_for(lambda params, batch: mean(SCAN.loss(params, batch)), axis_name="batch")


# Batches and states


def test_a_batch_that_does_not_divide():
    with error(ValueError, "batch of 50", "replica=2 x shard=4 x accumulate=3 = 24", "48 or 72"):
        training_for(batch=batches(1, 50)[0], mesh=(2, 4), accumulate=3)
    with error(ValueError, "batch of 5 ", "= 8", "that do: 8"):
        training_for(batch=batches(1, 5)[0])
    training = training_for()
    with error(ValueError, "batch of 50", "= 8", "48 or 56"):
        training.step(training.init(SCAN.init, jax.random.key(0)), batches(1, 50)[0])


def test_a_batch_that_is_none():
    with error(ValueError, "no arrays", "pytree of arrays"):
        training_for(batch={})
    with error(ValueError, "disagree", "'targets': 8", "'tokens': 16"):
        training_for(batch={"tokens": np.zeros((16, 4), np.int32), "targets": np.zeros((8, 4), np.int32)})
    with error(ValueError, "disagree", "'tokens': 0"):
        training_for(batch={"tokens": np.int32(3), "targets": np.zeros((8, 4), np.int32)})
    training = training_for()
    with error(ValueError, "first dims", "above 0"):
        training.evaluate(training.init(SCAN.init, jax.random.key(0)), batches(1, 0)[0])


def test_other_parameters_than_were_said():
    training = training_for()
    with error(ValueError, "needs the key"):
        training.init(SCAN.init)
    with error(ValueError, "structure", "parallelize was given", "Pass what params= said"):
        training.init({"head": np.zeros(3, np.float32)})
    params = jax.jit(SCAN.init)(jax.random.key(0))
    with error(ValueError, "head of the parameters", r"float32\[3\]", r"float32\[16, 32\]"):
        training.init({**params, "head": np.zeros(3, np.float32)})
    with error(ValueError, "head of the parameters", "int32", "float32"):
        training.init({**params, "head": np.zeros((16, 32), np.int32)})


def test_a_state_that_is_not_updated_in_place():
    training = training_for()
    built, state = training.built(), training.state_shapes
    _check_donation(built, state)
    copied = SimpleNamespace(memory_analysis=lambda: SimpleNamespace(alias_size_in_bytes=100))
    with error(RuntimeError, r"\d+ of the state's \d+ bytes", "twice"):
        _check_donation(replace(built, compiled=copied), state)
