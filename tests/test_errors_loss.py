"""What a loss function may take, return and do, and what it hears when it does something else."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mistakes import BATCH, PARAMS, error, literal, square, training_for
from quick import QUICK

import jaxshard as js


def returning(make):
    """A loss function that returns ``make(loss)``."""
    return lambda params, batch: make(square(params, batch))


# What it is


class Callable:
    def __call__(self, params, batch):
        return square(params, batch)

    def method(self, params, batch):
        return square(params, batch)


FUNCTIONS = {
    "any arguments": lambda *args, **kwargs: square(*args, **kwargs),
    "a third argument with a default": lambda params, batch, train=True: square(params, batch),
    "a partial": functools.partial(lambda scale, params, batch: scale * square(params, batch), 1.0),
    "an object": Callable(),
    "a method": Callable().method,
    "jitted": jax.jit(square),
    "checkpointed": jax.checkpoint(square),
    "a key among the positional": lambda params, batch, key: square(params, batch),
}


@pytest.mark.parametrize("loss", FUNCTIONS.values(), ids=FUNCTIONS)
def test_any_callable(loss):
    training = training_for(loss)
    got = training.evaluate(training.init(PARAMS), BATCH)["loss"]
    np.testing.assert_allclose(got, square(PARAMS, BATCH), rtol=1e-6)


def test_equinox_jits_too():
    equinox = pytest.importorskip("equinox")
    test_any_callable(equinox.filter_jit(square))


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (7, "loss_fn is an int; it must be a function (params, batch) -> loss"),
        (Callable, "loss_fn is the class Callable"),
        (lambda params, batch, rng: 0.0, "loss_fn takes (params, batch, rng), and is called as loss_fn(params, batch)"),
        (
            lambda params, batch, *, train: 0.0,
            "loss_fn takes (params, batch, *, train), and is called as loss_fn(params, batch): missing a required",
        ),
        (lambda params: 0.0, "too many positional arguments. Only key= and extra= are passed"),
        (lambda key, params, batch: 0.0, "loss_fn(params, batch, key=): multiple values for argument 'key'"),
        (
            lambda params, batch, key, /: 0.0,
            "loss_fn takes (params, batch, key, /), and is called as loss_fn(params, batch, key=): ",
        ),
    ],
)
def test_what_is_no_loss_function(loss, said):
    with error(TypeError, *literal(said)):
        training_for(loss)


# What it returns


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (lambda loss: jnp.full(3, loss), "an array of shape (3,) and dtype float32"),
        (lambda loss: loss[None], "an array of shape (1,)"),
        (lambda loss: jnp.ones((), jnp.int32), "an array of shape () and dtype int32"),
        (lambda loss: loss.astype(jnp.complex64), "an array of shape () and dtype complex64"),
        (lambda loss: 1, "an int"),
        (lambda loss: True, "a bool"),
        (lambda loss: None, "None"),
        (lambda loss: {"loss": loss}, "a dict"),
        (lambda loss: js.Loss, "the class Loss"),
    ],
)
def test_what_a_loss_is_not(result, said):
    with error(TypeError, *literal(f"the loss of <lambda> is {said}", "float scalar", "Loss(total, weight)")):
        training_for(returning(result))


def test_a_tuple_says_where_metrics_and_state_go():
    with error(TypeError, *literal("<lambda> is a tuple", "Loss.metrics", "names `extra`")):
        training_for(returning(lambda loss: (loss, {})))


@pytest.mark.parametrize("one", [1.0, np.float32(1), np.float64(1), np.ones((), np.float32)], ids=repr)
def test_a_constant_is_a_loss(one):
    training = training_for(lambda params, batch: one)
    assert training.evaluate(training.init(PARAMS), BATCH)["loss"] == 1


@pytest.mark.parametrize(
    ("fields", "kind", "said"),
    [
        ({"total": np.ones(2)}, TypeError, "Loss.total of <lambda> is an array of shape (2,)"),
        ({"total": 1}, TypeError, "Loss.total of <lambda> is an int"),
        ({"weight": np.ones(2)}, TypeError, "Loss.weight of <lambda> is an array of shape (2,)"),
        ({"weight": None}, TypeError, "Loss.weight of <lambda> is None; it must be a real scalar"),
        ({"weight": "16"}, TypeError, "Loss.weight of <lambda> is a str"),
        ({"weight": 1j}, TypeError, "Loss.weight of <lambda> is a complex"),
        ({"weight": -16}, ValueError, "Loss.weight of <lambda> is -16; it is a number of items, 0 or more"),
        ({"metrics": None}, TypeError, "Loss.metrics of <lambda> is None; it must be a dict of scalars by name"),
        ({"metrics": [1.0]}, TypeError, "Loss.metrics of <lambda> is [1.0]"),
        ({"metrics": {("a",): 1.0}}, TypeError, "Loss.metrics of <lambda> is {('a',): 1.0}"),
        ({"metrics": {"hits": np.ones(4)}}, TypeError, "Loss.metrics['hits'] of <lambda> is an array of shape (4,)"),
        ({"metrics": {"hits": {"top1": 1.0}}}, TypeError, "Loss.metrics['hits'] of <lambda> is a dict"),
        ({"metrics": {"hits": np.complex64(1)}}, TypeError, "Loss.metrics['hits'] of <lambda> is an array"),
    ],
)
def test_what_a_loss_with_a_weight_holds(fields, kind, said):
    with error(kind, *literal(said)):
        training_for(returning(lambda loss: js.Loss(**{"total": loss, "weight": loss, **fields})))


@pytest.mark.parametrize("items", [2, 2.0, np.int64(2), np.array(2), jnp.bfloat16(2)], ids=repr)
def test_any_real_number_counts_items(items):
    def loss(params, batch):
        metrics: Any = {"hits": np.array(True), "n": items}
        return js.Loss((square(params, batch) * 2).astype(jnp.bfloat16), items, metrics)

    training = training_for(loss)
    metrics = training.evaluate(training.init(PARAMS), BATCH)
    np.testing.assert_allclose(metrics["loss"], square(PARAMS, BATCH), rtol=2**-8)
    assert (metrics["hits"], metrics["n"]) == (0.5, 1)


def test_extra():
    params = {"w": np.ones(8, np.float32)}
    given = params, {"mean": np.zeros(8, np.float32)}

    def with_extra(result):
        def loss(params, batch, *, extra):
            return result(jnp.sum(params["w"]), extra)

        return loss

    with error(TypeError, "loss takes `extra`", "pair", "is a dict"):
        training_for(with_extra(lambda value, extra: (value, extra)), params=params)
    with error(TypeError, "loss takes `extra`", r"\(loss, new_extra\)", "returned an array"):
        training_for(with_extra(lambda value, extra: value), params=given)
    with error(TypeError, "structure", "mean", "new", "same"):
        training_for(with_extra(lambda value, extra: (value, {"new": extra["mean"]})), params=given)
    with error(TypeError, "given mean of extra", r"float32\[8\]", r"float32\[2\]", "must stay"):
        training_for(with_extra(lambda value, extra: (value, {"mean": extra["mean"][:2]})), params=given)
    with error(TypeError, "the new extra of loss: mean is a str"):
        training_for(with_extra(lambda value, extra: (value, {"mean": "a"})), params=given)


# What it does


def test_the_axes_of_the_mesh_have_names():
    """On 2 x 4 devices, each of which sees its own two examples."""

    def loss(params, batch):
        mine = square(params, batch)
        here = 4 * jax.lax.axis_index("replica") + jax.lax.axis_index("shard")
        sums = {
            "row": jax.lax.psum(mine, "shard"),
            "mean": jax.lax.pmean(mine, ("replica", "shard")),
            "here": here.astype(jnp.float32) * mine,
        }
        return js.Loss(mine, jnp.ones(()), sums)

    training = training_for(loss, mesh=(2, 4))
    got = training.evaluate(training.init(PARAMS), BATCH)
    parts = [square(PARAMS, jax.tree.map(lambda x, i=i: x[2 * i : 2 * i + 2], BATCH)) for i in range(8)]
    wanted = {"loss": np.mean(parts), "row": np.mean(parts) * 4, "mean": np.mean(parts)}
    wanted["here"] = np.mean([i * part for i, part in enumerate(parts)])
    assert np.std(parts) > 0.1 * np.mean(parts), "the devices' losses differ"
    for name, value in wanted.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-6, err_msg=name)


@pytest.mark.parametrize("collective", [jax.lax.psum, jax.lax.pmean, lambda x, axis: x * jax.lax.axis_size(axis)])
def test_an_axis_that_there_is_not(collective):
    named = r"unbound axis name: data.*the mesh has the axes \('replica', 'shard'\).*axis_name=; it is"
    with error(NameError, f"{named} None"):
        training_for(returning(lambda loss: collective(loss, "data")))
    with error(NameError, f"{named} 'batch'"):
        training_for(returning(lambda loss: collective(loss, "data")), axis_name="batch")


def test_a_misspelt_variable_is_not_taken_for_an_axis():
    with pytest.raises(NameError, match="undefined_name") as caught:
        training_for(lambda params, batch: undefined_name)  # noqa: F821  # pyright: ignore[reportUndefinedVariable]
    assert not any("axes" in note for note in caught.value.__notes__)


def test_a_batch_axis_inside_a_custom_derivative():
    mean = jax.custom_vjp(lambda x: jax.lax.pmean(x, "batch"))
    mean.defvjp(lambda x: (mean(x), None), lambda _, g: (g,))
    with error(NotImplementedError, "axis_name='batch'", "custom derivative", "replica"):
        training_for(returning(mean), axis_name="batch")


def test_it_is_called_once_for_each_shape_of_a_batch():
    """So that is how often its side effects happen."""
    calls = []

    def loss(params, batch):
        calls.append(batch["x"].shape)
        return square(params, batch)

    training = training_for(loss, compiler_options=QUICK)
    assert calls == [(2, 8)]
    state = training.init(PARAMS)
    for _ in range(2):
        state, _ = training.step(state, BATCH)
    str(training.explain())
    assert len(calls) == 1
    for _ in range(2):
        state, _ = training.step(state, jax.tree.map(lambda x: np.tile(x, (2, 1)), BATCH))
    assert calls[1:] == [(4, 8)]
    for _ in range(2):
        training.evaluate(state, jax.tree.map(lambda x: x[:11], BATCH))
    assert calls[2:] == [(1, 8), (3, 8)]


def test_what_it_changes_of_a_batch_is_a_copy():
    def loss(params, batch):
        batch["x"] = 2 * batch.pop("x")
        return square(params, batch)

    batch = dict(BATCH)
    training = training_for(loss, batch=batch)
    got = training.evaluate(training.init(PARAMS), batch)["loss"]
    assert all(batch[name] is BATCH[name] for name in BATCH)
    np.testing.assert_allclose(got, loss(PARAMS, dict(BATCH)), rtol=1e-6)


def test_what_leaks_out_of_it_is_jaxs_own_error():
    leaked = []

    def loss(params, batch):
        leaked.append(params["w"])
        return square(params, batch)

    training = training_for(loss)
    training.evaluate(training.init(PARAMS), BATCH)
    with error(jax.errors.UnexpectedTracerError, "side effect", r"float32\[8,8\]"):
        _ = leaked[0] + 1


def test_it_may_print(capfd):
    def loss(params, batch):
        jax.debug.print("sum {s:.3f}", s=jnp.sum(batch["x"]))
        return square(params, batch)

    training = training_for(loss, compiler_options=QUICK)
    training.step(training.init(PARAMS), BATCH)
    jax.effects_barrier()
    printed = sorted(line for line in capfd.readouterr().out.splitlines() if line.startswith("sum"))
    assert printed == sorted(f"sum {BATCH['x'][2 * i : 2 * i + 2].sum():.3f}" for i in range(8))
