"""Planned beside compiled (and measured): states to the byte, and every message of every strategy.

Oracle of the target tests: the plan, made without a compiler, for a scanned model whose leaves are all split. What it
holds and sends must be what XLA's compiler for 8 H100s makes of it, exactly.
"""

from __future__ import annotations

from functools import cache

import jax
import jax.numpy as jnp
import optax
import pytest
from quick import QUICK, quick

import jaxshard as js
from jaxshard.preflight import target
from jaxshard.preflight.check import check
from jaxshard.preflight.examine import examined
from jaxshard.preflight.ledger import RESIDUAL, books, ledger
from jaxshard.preflight.plan import plan

VOCAB, WIDTH, LAYERS, TOKENS, BATCH = 512, 64, 3, 32, 16


def init(key):
    embed, head, layers = jax.random.split(key, 3)
    return {
        "embed": jax.random.normal(embed, (VOCAB, WIDTH)) * 0.1,
        "head": jax.random.normal(head, (WIDTH, VOCAB)) * 0.1,
        "layers": js.init_layers(lambda k: jax.random.normal(k, (WIDTH, WIDTH)) * 0.1, layers, LAYERS),
    }


def loss(params, batch):
    def layer(x, w):
        return jnp.tanh(x @ w), None

    x, _ = jax.lax.scan(jax.checkpoint(layer, prevent_cse=False), params["embed"][batch], params["layers"])
    logits = (x @ params["head"]).astype(jnp.float32)
    return jnp.mean(jax.nn.logsumexp(logits, -1) - logits[..., 0])


MIXED = js.Precision(compute="bfloat16")
TOKENS_BxT = jax.ShapeDtypeStruct((BATCH, TOKENS), jnp.int32)
gpu_compiler = pytest.mark.skipif(
    not target.compiler_installed(), reason=f"needs the GPU compiler's wheels: {target.INSTALL}"
)
# dp is several programs, and hybrid_shard another name.
STRATEGIES = [(name, 1) for name in ("ddp", "zero1", "zero2", "shard_grad_op", "zero3")] + [("hsdp", 2)]


@cache
def for_h100s(name, replica):
    mesh = target.parse("h100:8").mesh(replica=replica)
    training = js.parallelize(
        loss, optax.adamw(1e-3), params=init, batch=TOKENS_BxT, mesh=mesh, strategy=name, clip=1.0, precision=MIXED
    )
    assert isinstance(training, js.Training)
    return training, examined(training)


@pytest.mark.target
@gpu_compiler
@pytest.mark.parametrize(("name", "replica"), STRATEGIES)
def test_planned_is_compiled(name, replica):
    training, found = for_h100s(name, replica)
    made = books(training, found)
    for line in made.held:
        if line.name in ("params", "opt", "extra"):
            assert line.planned == line.compiled, line
    pieces = 1 if name == "ddp" else 8 // replica
    # Adam's two moments and its count.
    assert made["opt"].compiled == 2 * 4 * (2 * VOCAB * WIDTH + LAYERS * WIDTH**2) // pieces + 4
    assert made["batch"].compiled == BATCH * TOKENS * 4 // 8
    assert sum(made[each].compiled or 0 for each in RESIDUAL) == found.facts.memory.temps
    assert made["logits"].compiled or name == "ddp"  # which holds most when it updates
    assert bool(made["gathered weights"].compiled) == (name in ("shard_grad_op", "zero3", "hsdp"))
    for one in made.sent:
        assert one.planned == one.compiled, one
    assert {one.kind for one in made.sent} >= {"ddp": {"all_reduce"}}.get(name, {"reduce_scatter", "all_gather"})
    check(training, found.facts.collectives)
    assert "gathered weights" in str(made)


@pytest.mark.target
@gpu_compiler
def test_the_plan_needs_no_training():
    """`plan` alone, from a dict of mesh sizes, says the same."""
    _, found = for_h100s("zero3", 1)
    planned = plan(
        init,
        optax.adamw(1e-3),
        strategy="zero3",
        mesh={"replica": 1, "shard": 8},
        precision=MIXED,
        loss_fn=loss,
        batch=TOKENS_BxT,
    )
    arguments = found.arguments
    assert planned.held["params"] == sum(size for path, size in arguments.items() if path.startswith("state.params"))
    assert planned.held["opt"] == sum(size for path, size in arguments.items() if path.startswith("state.opt"))
    matrices = [one for one in planned.collectives if one.kind != "all_reduce"]
    compiled = [one for one in found.facts.collectives if one.kind != "all_reduce"]
    # The plan says at most: the backward pass does not need the embedding, which is only indexed, a second time.
    assert total(matrices) - 2 * VOCAB * WIDTH == total(compiled) > 0


def total(collectives):
    return sum(one.bytes * one.count for one in collectives)


def test_measured_beside_compiled_on_cpu_devices():
    training = quick(loss, init, TOKENS_BxT, "zero3", optimizer=optax.adamw(1e-3))
    state = training.init(init, jax.random.key(0))
    made = ledger(training, state)
    for name in ("params", "opt", "extra", "state's rest"):
        assert made[name].measured == made[name].compiled, name
    assert made["params"].measured == 4 * (2 * VOCAB * WIDTH + LAYERS * WIDTH**2) // 8
    assert made["logits"].compiled
    assert "measured" in str(made)
    assert made.largest[0].bytes >= made.largest[-1].bytes > 0


def test_dp_is_no_one_program():
    training = js.parallelize(
        lambda p, b: jnp.mean((b @ p) ** 2),
        optax.sgd(1.0),
        params=jnp.ones((8, 8)),
        batch=jnp.ones((16, 8)),
        strategy="dp",
        compiler_options=QUICK,
    )
    with pytest.raises(TypeError, match="dp is several programs"):
        ledger(training)
