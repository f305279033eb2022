"""An optimizer that does not fit the parameters is found when the training is made, by tracing its update once."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from mistakes import PARAMS, error, training_for
from quick import QUICK

ADAM = optax.adam(0.1)
OTHER = jax.tree.map(lambda x: jnp.zeros(5), PARAMS)


def optimizer_of(init: Any, update: Any) -> optax.GradientTransformation:
    return optax.GradientTransformation(init, update)


def updating(change):
    """Adam, whose ``(updates, state)`` are changed."""
    return optimizer_of(ADAM.init, lambda *args: change(*ADAM.update(*args)))


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        (0.1, "optimizer is a float; pass an optax optimizer, such as optax.adamw"),
        (optax.adam, "optimizer is a function"),
        (optax.GradientTransformation, "optimizer is the class GradientTransformation"),
        (optax.cosine_decay_schedule(1.0, 10), "optimizer is a function"),
    ],
)
def test_what_is_no_optimizer(optimizer, said):
    with error(TypeError, said):
        training_for(optimizer=optimizer)


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.masked(ADAM, {"w": True}),
        optax.partition({"adam": ADAM}, {"w": "adam"}),
        optax.partition({"adam": ADAM}, {"b": "adam", "w": "sgd"}),
    ],
    ids=["a mask", "labels", "an unknown label"],
)
def test_a_mask_or_labels_of_another_structure(optimizer):
    with error(ValueError, r"optimizer=: its init failed on these params: b float32\[8\], w float32\[8, 8\].*A mask"):
        training_for(optimizer=optimizer)


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        (optax.lbfgs(0.1), "missing 2 required.*'value_fn'"),
        (optax.lookahead(optax.sgd(0.1), 2, 0.5), "no attribute 'fast'"),
        (optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.1), opaque_mode=True), "unexpected keyword argument 'value'"),
        (optimizer_of(lambda params: ADAM.init(OTHER), ADAM.update), r"shapes.*\(8,\), \(5,\)"),
        (optimizer_of(ADAM.init, lambda grads, state: (grads, state)), "takes 2 positional arguments"),
    ],
    ids=["a line search", "its own parameters", "another gradient", "made for other shapes", "another signature"],
)
def test_an_update_that_fails(optimizer, said):
    called = r"optimizer=: its update failed.*update\(grads, state, params, value=loss\).*evaluates the loss again"
    with error((TypeError, AttributeError), said, called):  # pyright: ignore[reportArgumentType]
        training_for(optimizer=optimizer)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda updates, state: ({"w": updates["w"]}, state), "updates of the structure .*{'w': .*, not of"),
        (lambda updates, state: (updates, (state, 1)), "state of the structure .*, which it was given"),
        (lambda updates, state: (jax.tree.map(jnp.sum, updates), state), r"b of the updates as float32\[\], not as"),
        (
            lambda updates, state: (updates, jax.tree.map(lambda x: x.astype(jnp.float32), state)),
            r"0/count of the state as float32\[\], not as int32\[\]",
        ),
    ],
    ids=["structure of the updates", "structure of the state", "shape", "kind of dtype"],
)
def test_an_update_that_returns_something_else(change, said):
    with error(TypeError, "optimizer=: its update returned ", said):
        training_for(optimizer=updating(change))


def test_the_width_of_floats_may_change_in_an_update():
    """They are cast back, as optimizers in mixed precision expect."""

    def narrow(tree):
        return jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x, tree)

    training = training_for(optimizer=updating(lambda *results: narrow(results)), compiler_options=QUICK)
    shapes = training.state_shapes
    assert {x.dtype.name for x in jax.tree.leaves((shapes.params, shapes.opt))} == {"float32", "int32"}
    training.built()


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.polyak_sgd(),
        optax.lbfgs(0.1, linesearch=None),
        optax.chain(ADAM, optax.contrib.reduce_on_plateau()),
        optax.inject_hyperparams(optax.adam)(0.1),
        optax.apply_if_finite(ADAM, 3),
        optax.MultiSteps(ADAM, 3),
        optax.masked(ADAM, {"b": False, "w": True}),
        optax.masked(ADAM, lambda params: jax.tree.map(lambda x: x.ndim > 1, params)),
    ],
)
@pytest.mark.parametrize("trainable", [None, lambda path: path == "w"], ids=["all", "frozen"])
def test_what_fits(optimizer, trainable):
    """Optimizers that want the loss's value, keep counts, or tell leaves apart; and leaves that are frozen."""
    training_for(optimizer=optimizer, trainable=trainable)
