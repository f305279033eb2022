"""Optimizers that look at more than one element at a time: as on one device, and what that makes the update send.

Oracle: the same optimizer on one device. On shards these are silently wrong, which the first test shows.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib
from oracle import FORMS, batches, lenient, mesh_of, one_device, run
from quick import QUICK

import jaxshard as js

MODEL = FORMS[0]
MIXED = {
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=8),
    "lamb": optax.lamb(1e-2),
    "lars": optax.lars(0.1),
    "muon": contrib.muon(1e-2),
    "clip_by_global_norm": optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1)),
    "clip_by_block_rms": optax.chain(optax.clip_by_block_rms(0.01), optax.sgd(0.1)),
    "novograd": optax.novograd(1e-2),
}
"""Non-elementwise, by name."""
ELEMENTWISE = {
    "sgd": optax.sgd(0.1, momentum=0.9),
    "adamw": optax.adamw(optax.warmup_cosine_decay_schedule(1e-3, 1e-2, 2, 9)),
    "lion": optax.lion(1e-3),
    "multi_steps": optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(),
    "ema": optax.chain(optax.sgd(0.1), optax.ema(0.9)),
    "inject_hyperparams": optax.inject_hyperparams(optax.adam)(learning_rate=1e-2),
    "multi_transform": optax.multi_transform(
        {"matrix": optax.adam(1e-2), "rest": optax.sgd(0.1)},
        lambda params: jax.tree.map(lambda x: "matrix" if x.ndim > 2 else "rest", params),
    ),
}
ALL = MIXED | ELEMENTWISE


def training_for(name, strategy="zero3", mesh=(1, 8)):
    return js.parallelize(
        MODEL.loss,
        ALL[name],
        params=MODEL.init,
        batch=batches(1, 48)[0],
        mesh=mesh_of(*mesh),
        strategy=strategy,
        whole_budget=0,
        compiler_options=QUICK,
    )


@pytest.mark.parametrize("name", MIXED)
def test_on_a_shard_it_would_be_wrong(name):
    optimizer = lenient(MIXED[name])
    key, other = jax.random.split(jax.random.key(0))
    params = {"w": jax.random.normal(key, (16, 16)) * jnp.linspace(0.1, 1, 16)[:, None]}
    grads = {"w": jax.random.normal(other, (16, 16)) * jnp.linspace(1, 0.1, 16)[:, None]}

    def updates(params: Any, grads: Any) -> Any:
        new: Any = optimizer.update(grads, optimizer.init(params), params)[0]
        return new["w"]

    half = slice(8)
    whole = updates(params, grads)[half]
    shard = updates(*jax.tree.map(lambda x: x[half], (params, grads)))
    assert float(jnp.abs(whole - shard).max() / jnp.abs(whole).max()) > 0.01


@pytest.mark.parametrize("name", ALL)
def test_zero3_as_on_one_device(name):
    """Three steps, within a thousandth of how far each leaf moved."""
    data = batches(3, 48)
    theirs = one_device(MODEL.loss, MODEL.init, lenient(ALL[name]), data)
    ours = run(training_for(name), MODEL.init, data)
    named = jax.tree_util.tree_leaves_with_path(theirs.end)
    columns = zip(named, *map(jax.tree.leaves, (theirs.start, ours.end)), strict=True)
    for (path, want), start, have in columns:
        moved = np.abs(want - start).max()
        assert moved > 1e-5, path
        assert np.abs(have - want).max() < 1e-3 * moved, path
    np.testing.assert_allclose(ours.loss, theirs.loss, rtol=1e-5)


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_updates_send_nothing(name):
    explanation = training_for(name).explain()
    assert explanation.update == ()
    assert "the optimizer's update sends nothing" in str(explanation)
    assert explanation.wire_bytes == sum(one.wire_bytes for one in explanation.contract)


SENDS = {"lamb": {"all_reduce"}, "adafactor": {"all_reduce", "all_gather"}, "muon": {"all_reduce", "all_gather"}}


@pytest.mark.parametrize("name", SENDS)
def test_explain_says_what_an_update_sends(name):
    explanation = training_for(name).explain()
    assert {one.kind for one in explanation.update} == SENDS[name]
    assert {one.purpose for one in explanation.update} == {"update"}
    sent = sum(one.wire_bytes for one in explanation.update)
    assert sent > 0
    assert explanation.wire_bytes == sent + sum(one.wire_bytes for one in explanation.contract)
    assert f"the optimizer's update sends {sent:,} B more" in str(explanation)


def test_lamb_sends_its_norms_alone():
    """Of every leaf the norms of parameter and update, each at most twice (`optax.safe_norm`), of 4 B."""
    update, split = training_for("lamb").explain().update, 5  # all leaves but the bias
    assert 2 * split * 4 <= sum(one.bytes * one.count for one in update) <= 4 * split * 4


@pytest.mark.parametrize(("strategy", "mesh"), [("ddp", (1, 8)), ("dp", (1, 8)), ("zero3", (1, 1)), ("zero3", (8, 1))])
def test_what_is_whole_everywhere_is_updated_without_messages(strategy, mesh):
    assert training_for("muon", strategy, mesh).explain().update == ()


def test_updates_of_split_optimizer_states_send_as_well():
    assert training_for("lamb", "zero1").explain().update
