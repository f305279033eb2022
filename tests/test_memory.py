"""What a device holds: the arguments of the compiled step are exactly what the ladder says, and updated in place.

Oracle: parameters + Adam's two moments at N = 8 are 3, 1 + 2/8 and 3/8 of the parameters' bytes.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from oracle import lenient, mesh_of

import jaxshard as js
from jaxshard.state import initialiser

ADAM = lenient(optax.adam(1e-3))
HELD = {"ddp": 3, "zero1": 1 + 2 / 8, "zero2": 1 + 2 / 8, "shard_grad_op": 3 / 8, "zero3": 3 / 8}
WIDTH, LAYERS = 64, 3


def init(key):
    """A stack and its biases; 8 divides the last dim of every leaf."""
    up, down = jax.random.split(key)
    shape = (LAYERS, WIDTH, WIDTH)
    return {
        "up": jax.random.normal(up, shape),
        "down": jax.random.normal(down, shape),
        "bias": jnp.zeros((LAYERS, WIDTH)),
    }


def loss(params, batch):
    def block(x, p):
        return x + jnp.tanh(x @ p["up"] + p["bias"]) @ p["down"], None

    x, _ = jax.lax.scan(block, batch["x"], params)
    return jnp.mean(jnp.square(x))


def training_for(strategy, optimizer=ADAM, mesh=(1, 8), **choices) -> Any:
    return js.parallelize(loss, optimizer, params=init, batch=BATCH, mesh=mesh_of(*mesh), strategy=strategy, **choices)


PARAMS = LAYERS * (2 * WIDTH * WIDTH + WIDTH) * 4
BATCH = {"x": np.ones((8, WIDTH), np.float32)}
# Besides: this device's example, the step and Adam's count (int32), and a key.
EXAMPLE, COUNTERS, KEY = WIDTH * 4, 2 * 4, 8


@pytest.mark.smoke
@pytest.mark.parametrize("strategy", HELD)
def test_arguments_are_the_formula(strategy):
    memory = training_for(strategy, whole_budget=0).built().compiled.memory_analysis()
    held = memory.argument_size_in_bytes - EXAMPLE - COUNTERS - KEY
    assert held == HELD[strategy] * PARAMS


@pytest.mark.parametrize("strategy", HELD)
def test_the_state_is_updated_in_place(strategy):
    memory = training_for(strategy, whole_budget=0).built().compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= HELD[strategy] * PARAMS + COUNTERS + KEY


def test_four_pieces_on_2x4():
    memory = training_for("zero3", mesh=(2, 4), whole_budget=0).built().compiled.memory_analysis()
    assert memory.argument_size_in_bytes - EXAMPLE - COUNTERS - KEY == 3 / 4 * PARAMS


@pytest.mark.parametrize("strategy", HELD)
def test_explain_says_the_same(strategy):
    said = training_for(strategy, whole_budget=0).explain().bytes_per_device
    assert said["params"] + said["opt"] == HELD[strategy] * PARAMS + 4  # Adam's count; the step is no optimizer state


@pytest.mark.parametrize("strategy", HELD)
def test_live_arrays_are_the_formula(strategy):
    """Not only the program's arguments: what init gives, and what a step returns."""
    training = training_for(strategy, whole_budget=0)
    state = training.init(init, jax.random.key(0))
    for _ in range(2):
        first = jax.devices()[0]
        shards = [
            shard.data.nbytes
            for x in jax.tree.leaves((state.params, state.opt))
            for shard in x.addressable_shards
            if shard.device == first
        ]
        assert sum(shards) == HELD[strategy] * PARAMS + 4
        state, _ = training.step(state, BATCH)


def birth(strategy: str) -> Any:
    """The compiled program that makes a state."""
    made = training_for(strategy, whole_budget=0).setup

    make: Any = initialiser(made.program, made.optimizer, made.where, lambda key: (init(key), None))
    return make.lower(jax.random.key(0)).compile()


def test_no_leaf_is_whole_at_birth():
    whole = f"f32[{LAYERS},{WIDTH},{WIDTH}]"
    assert whole in birth("ddp").as_text(), "the search would find a whole leaf"
    born = birth("zero3")
    assert whole not in born.as_text()
    memory = born.memory_analysis()
    pointers = 8 * len(jax.tree.leaves(training_for("zero3").state_shapes))
    assert memory.output_size_in_bytes == 3 / 8 * PARAMS + COUNTERS + KEY + pointers
    assert memory.output_size_in_bytes + memory.temp_size_in_bytes < PARAMS


def test_a_donated_state_is_gone():
    training = training_for("zero3")
    state = training.init(init, jax.random.key(0))
    training.step(state, BATCH)
    with pytest.raises(RuntimeError, match="deleted"):
        np.asarray(state.params["up"])
