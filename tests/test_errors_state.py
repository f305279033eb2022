"""States that are none, that another training made, or that a step has reused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from mistakes import BATCH, PARAMS, error, literal, square, training_for
from quick import QUICK

import jaxshard as js

ADAM = optax.adam(0.1)
BRING = "init(other.whole(state))"


def without_bias(params, batch):
    return square({**params, "b": 0}, batch)


def state_of(**choices) -> Any:
    return training_for(**choices).init(choices.get("params", PARAMS))


def training_of(**choices) -> Any:
    return training_for(whole_budget=0, compiler_options=QUICK, **choices)


@pytest.mark.parametrize("strategy", ["dp", "zero3"])
@pytest.mark.parametrize(
    ("state", "said"),
    [(lambda state: state.params, "a dict"), (lambda state: (state, {}), "a tuple"), (lambda state: None, "None")],
    ids=["parameters", "what a step returns", "None"],
)
def test_a_state_that_is_none(state, said, strategy):
    training = training_of(strategy=strategy)
    for use in (training.step, training.evaluate):
        with error(TypeError, f"state is {said}; pass what training.init, or a step, returned"):
            use(state(training.init(PARAMS)), BATCH)


OTHERS = {
    "optimizer": ({"optimizer": ADAM}, ["state.opt has the structure", "ScaleByAdamState"]),
    "parameters": ({"loss": without_bias, "params": {"w": PARAMS["w"]}}, ["state.params has the structure", "'b'"]),
    "dtype": ({"precision": js.Precision(params="bfloat16"), "loss": lambda params, batch: jnp.float32(0)},
              ["state.params/b is bfloat16[8]", "is float32[8]"]),
    "loss scale": ({"precision": js.Precision(compute="float16"), "loss": lambda params, batch: jnp.float32(0)},
                   ["state.scale has the structure"]),
}  # fmt: skip


@pytest.mark.parametrize("strategy", ["dp", "zero3"])
@pytest.mark.parametrize(("other", "said"), OTHERS.values(), ids=OTHERS)
def test_a_step_with_the_state_of_another(other, said, strategy):
    with error(ValueError, *literal(*said, BRING)):
        training_of(strategy=strategy).step(state_of(strategy=strategy, **other), BATCH)


PLACES = {
    "strategy": ({"strategy": "ddp"}, [r"state\.params/b lives in .*P\(\)", r"this training's in .*'shard'"]),
    "mesh": ({"mesh": (2, 4), "whole_budget": 0}, ["state.params/b lives in .*'replica': 2", "'replica': 1"]),
    "devices": ({"mesh": (1, 4)}, [r"lives in .*'shard': 4", "this training's in .*'shard': 8"]),
    "first device": ({"strategy": "dp"}, ["lives in SingleDeviceSharding", "this training's in .*'shard': 8"]),
}


@pytest.mark.parametrize(("other", "said"), PLACES.values(), ids=PLACES)
def test_a_step_with_a_state_that_lives_elsewhere(other, said):
    training, state = training_of(), state_of(**other)
    with error(ValueError, *said, *literal(BRING)):
        training.step(state, BATCH)
    state, _ = training.step(training.init(jax.tree.map(np.asarray, state.params)), BATCH)
    assert state.step == 1


def test_dp_with_the_state_of_another_strategy():
    with error(ValueError, "lives in .*'shard': 8", "this training's in SingleDeviceSharding", *literal(BRING)):
        training_of(strategy="dp").step(state_of(), BATCH)


def test_an_evaluation_needs_the_parameters_alone():
    """Those of another strategy, mesh or optimizer do; those of another shape, or on other devices, do not."""
    training = training_of()
    for other in ({"optimizer": ADAM}, {"strategy": "ddp"}, {"mesh": (2, 4)}):
        loss = training.evaluate(state_of(**other), BATCH)["loss"]
        np.testing.assert_allclose(loss, square(PARAMS, BATCH), rtol=1e-6)
    for other in ("parameters", "dtype"):
        choices, said = OTHERS[other]
        with error(ValueError, *literal(*said, BRING)):
            training.evaluate(state_of(**choices), BATCH)
    with error(ValueError, "state lives in", "not on the devices", *literal(BRING)):
        training.evaluate(state_of(mesh=(1, 4)), BATCH)


@pytest.mark.parametrize("strategy", ["dp", "zero3"])
def test_a_state_that_a_step_has_reused(strategy):
    """JAX would name one array, or end the process."""
    training = training_of(strategy=strategy)
    state = training.init(PARAMS)
    training.step(state, BATCH)
    for use in (training.step, training.evaluate):
        with error(ValueError, "given to an earlier step", "Go on with"):
            use(state, BATCH)
    with error(ValueError, "given to an earlier step"):
        training.whole(state)


def test_a_state_on_the_host_is_a_state():
    """As one that was read from a file is."""

    def on_host(x):
        return x if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else np.asarray(x)

    training = training_of(optimizer=ADAM)
    state = training.init(PARAMS)
    host = jax.tree.map(on_host, state)
    ours, _ = training.step(replace(host, key=state.key), BATCH)
    theirs, _ = training.step(training.init(PARAMS), BATCH)
    jax.tree.map(np.testing.assert_array_equal, training.whole(ours), training.whole(theirs))
