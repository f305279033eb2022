"""An error inside the user's model points at the user's line, wherever in the model it is and whenever it comes up.

Oracle: the innermost frame outside of JAX is the line of this file that bears the mark.
"""

from __future__ import annotations

import traceback
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from mistakes import BATCH, PARAMS, training_for

JAX = str(Path(jax.__file__).parent)
WIDE = {**PARAMS, "w": np.stack([PARAMS["w"]] * 3)}  # three layers
LINES = Path(__file__).read_text().splitlines()


def assert_points_at(mark: str, error: BaseException) -> None:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(JAX)]
    assert frames[-1].filename == __file__
    assert frames[-1].lineno is not None
    line = LINES[frames[-1].lineno - 1]
    assert line.endswith(f"# {mark}"), line


def layer(w, x):
    if w.shape == (8, 8):
        return jnp.tanh(x @ w)
    return x @ w.reshape(4, 16)  # the layer


def short(w):
    """The third layer's weights, in the wrong shape."""
    return w[2].reshape(4, 4, 4)


def in_a_list(params, batch):
    x = batch["x"]
    for w in (params["w"][0], params["w"][1], short(params["w"])):
        x = layer(w, x)
    return jnp.mean(x)


def in_a_scan(params, batch):
    return jnp.mean(lax.scan(lambda x, w: (layer(w[:4], x), None), batch["x"], params["w"])[0])


def in_a_jit(params, batch):
    return jnp.mean(jax.jit(layer)(short(params["w"]), batch["x"]))


def in_a_remat(params, batch):
    return jnp.mean(jax.checkpoint(layer)(short(params["w"]), batch["x"]))


def in_a_branch(params, batch):
    return jnp.mean(lax.cond(jnp.sum(batch["x"]) > 0, layer, lambda w, x: x, short(params["w"]), batch["x"]))


def in_a_vmap(params, batch):
    return jnp.mean(jax.vmap(layer, in_axes=(None, 0))(short(params["w"]), batch["x"]))


def of_dtypes(params, batch):
    x = batch["x"] @ params["w"][0]
    return jnp.mean(x * jnp.arange(8))  # the dtypes


PLACES = {
    in_a_list: "the layer",
    in_a_scan: "the layer",
    in_a_jit: "the layer",
    in_a_remat: "the layer",
    in_a_branch: "the layer",
    in_a_vmap: "the layer",
    of_dtypes: "the dtypes",
}


@pytest.mark.smoke
@pytest.mark.parametrize("loss", PLACES, ids=lambda loss: loss.__name__)
def test_when_the_loss_is_traced(loss):
    with pytest.raises((TypeError, ValueError)) as caught:
        training_for(loss, params=WIDE)
    assert_points_at(PLACES[loss], caught.value)
    said = f"loss_fn: {loss.__name__} was given one device's part of a batch: x float32[2, 8], y float32[2, 8]."
    assert said in caught.value.__notes__


@pytest.mark.parametrize("loss", [in_a_list, in_a_scan], ids=lambda loss: loss.__name__)
def test_when_another_function_is_evaluated(loss):
    training = training_for(lambda params, batch: jnp.mean(batch["x"] @ params["w"][0]), params=WIDE)
    with pytest.raises((TypeError, ValueError)) as caught:
        training.evaluate(training.init(WIDE), BATCH, loss)
    assert_points_at(PLACES[loss], caught.value)


def test_when_a_later_batch_has_another_shape():
    """Here the loss needs an even number of examples on each device."""

    def loss(params, batch):
        pairs = batch["x"].reshape(2, -1, 8)  # the pairs
        return jnp.mean(pairs @ params["w"])

    training = training_for(loss)
    state = training.init(PARAMS)
    with pytest.raises(TypeError, match="reshape") as caught:
        training.step(state, jax.tree.map(lambda x: np.resize(x, (24, 8)), BATCH))
    assert_points_at("the pairs", caught.value)
    *_, note = (note for note in caught.value.__notes__ if "another than" in note)
    assert "x is float32[24, 8], not float32[16, 8]" in note


@pytest.mark.parametrize("strategy", ["dp", "ddp", "zero3"])
def test_in_a_backward_pass(strategy):
    """A rule for a derivative is first called when the step is built."""

    @jax.custom_vjp
    def cube(x):
        return x**3

    def backward(x, g):
        return (3 * jnp.square(x)[:1] @ g.T,)  # the rule

    cube.defvjp(lambda x: (x**3, x.reshape(-1, 4)), backward)
    training = training_for(lambda params, batch: jnp.mean(cube(batch["x"] @ params["w"])), strategy=strategy)
    with pytest.raises(TypeError, match="dot_general") as caught:
        training.step(training.init(PARAMS), BATCH)
    assert_points_at("the rule", caught.value)


def test_a_gradient_of_the_wrong_shape_names_its_rule():
    @jax.custom_vjp
    def cube(x):
        return x**3

    def backward(x, g):
        return (jnp.sum(g),)

    cube.defvjp(lambda x: (x**3, x), backward)
    training = training_for(lambda params, batch: jnp.mean(cube(batch["x"] @ params["w"])))
    with pytest.raises((TypeError, ValueError), match=r"backward|bwd"):
        training.built()


def test_in_the_initialiser_and_the_predicate():
    def init(key):
        return {**PARAMS, "w": jax.random.normal(key, (8, 8)) @ jnp.ones((4, 8))}  # the initialiser

    with pytest.raises(TypeError, match="dot_general") as caught:
        training_for(params=init)
    assert_points_at("the initialiser", caught.value)

    def trainable(path):
        return path.index(".") > 0  # the predicate

    with pytest.raises(ValueError, match="substring not found") as caught:
        training_for(trainable=trainable)
    assert_points_at("the predicate", caught.value)
