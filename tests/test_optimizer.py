"""The schedule's corners, and which leaves decay, against numbers worked out by hand."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxshard.models import gpt
from jaxshard.train import optimizer
from jaxshard.train.config import OptimizerConfig

CONFIG = OptimizerConfig(learning_rate=0.1, warmup_steps=4, final=0.1, base_batch=16)
GPT = gpt.GPTConfig(vocab=32, width=8, layers=2, heads=2, context=8, tied=False, positions="learned")


def update(tx, params, grads, state=None) -> Any:
    # As a training step calls it: optax mixes integer counts with floats.
    with jax.numpy_dtype_promotion("standard"):
        updates, state = tx.update(grads, tx.init(params) if state is None else state, params)
        return optax.apply_updates(params, updates), state


def test_warm_up_and_cosine():
    rate = optimizer.schedule(CONFIG, batch=16, steps=24)
    np.testing.assert_allclose([rate(step) for step in range(5)], [0.02, 0.04, 0.06, 0.08, 0.1], rtol=1e-5)
    np.testing.assert_allclose(rate(14), (0.1 + 0.01) / 2, rtol=1e-5)  # half way down
    np.testing.assert_allclose(rate(24), 0.01, rtol=1e-5)


def test_a_run_shorter_than_its_warm_up_only_warms_up():
    rate = optimizer.schedule(CONFIG, batch=16, steps=2)
    np.testing.assert_allclose([rate(0), rate(1)], [0.02, 0.04], rtol=1e-5)


def test_without_warm_up_the_first_step_has_the_peak():
    rate = optimizer.schedule(replace(CONFIG, warmup_steps=0), batch=16, steps=10)
    np.testing.assert_allclose(rate(0), 0.1, rtol=1e-6)


@pytest.mark.parametrize(("scaling", "factor"), [("none", 1), ("linear", 4)])
def test_linear_scaling_follows_the_batch(scaling, factor):
    rate = optimizer.schedule(replace(CONFIG, lr_scaling=scaling), batch=64, steps=24)
    np.testing.assert_allclose(rate(4), 0.1 * factor, rtol=1e-5)
    np.testing.assert_allclose(rate(24), 0.01 * factor, rtol=1e-5)


@pytest.mark.parametrize("scan", [True, False], ids=["scan", "list"])
@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_matrices_decay_and_nothing_else(scan, norm):
    """Oracle: a leaf is a matrix if it has two dims in the form with a list of blocks."""
    config = replace(GPT, scan=scan, norm=norm)
    params = gpt.init(config, jax.random.key(0))
    mask = optimizer.decayed(params)
    for path, leaf in jax.tree.leaves_with_path(params):
        stacked = scan and path[0].key == "blocks"
        decays = leaf.ndim - stacked == 2
        node = mask
        for entry in path:
            node = node[entry.key]
        assert node == decays, jax.tree_util.keystr(path)
    assert {True, False} == set(jax.tree.leaves(mask))


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_decay_is_decoupled_and_scaled_by_the_rate(name):
    """Oracle: with a gradient of zero, a matrix shrinks by rate x decay, and a bias stays."""
    config = replace(CONFIG, name=name, weight_decay=0.5, warmup_steps=0)
    params = {"kernel": jnp.full((2, 3), 4.0), "bias": jnp.full((2, 3), 4.0)}
    after, _ = update(optimizer.make(config, batch=16, steps=10), params, jax.tree.map(jnp.zeros_like, params))
    np.testing.assert_allclose(after["kernel"], 4.0 * (1 - 0.1 * 0.5), rtol=1e-6)
    np.testing.assert_array_equal(after["bias"], 4.0)


def test_sgd_has_momentum():
    """Oracle: v = m v + g; p = p - rate v, by hand over two steps."""
    config = replace(CONFIG, name="sgd", beta1=0.5, weight_decay=0.0, warmup_steps=0, final=1.0)
    tx = optimizer.make(config, batch=16, steps=10)
    params = {"bias": jnp.zeros(1)}
    params, state = update(tx, params, {"bias": jnp.ones(1)})
    params, _ = update(tx, params, {"bias": jnp.ones(1)}, state)
    np.testing.assert_allclose(params["bias"], -0.1 * (1 + 1.5), rtol=1e-6)
