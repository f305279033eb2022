"""What offload frees on a GPU, as XLA compiles it for one H100. Compiled, not run.

The model is eight blocks of 1024 x 4096 and back, over 4096 tokens, in a stack or in a list. Oracle: the sizes of the
states, and the program without offload.
"""

from __future__ import annotations

import functools
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax

import jaxshard as js
from jaxshard import host_memory, update
from jaxshard.compiled import hlo
from jaxshard.link import host_bytes, link_bytes, transfers
from jaxshard.preflight import target
from jaxshard.preflight.facts import facts

pytestmark = [
    pytest.mark.target,
    pytest.mark.skipif(not target.compiler_installed(), reason=f"needs the GPU compiler's wheels: {target.INSTALL}"),
]

WIDTH, HIDDEN, LAYERS, TOKENS = 1024, 4096, 8, 4096
PARAMS = 4 * 2 * WIDTH * HIDDEN * LAYERS
OPT = 2 * PARAMS  # AdamW's two moments
MIB = 2**20
FORMS = ("stack", "list")


@pytest.fixture(autouse=True)
def _compiled_anew():
    with target.uncached():
        yield


def shapes(form: str):
    def array(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    if form == "stack":
        return {"up": array(LAYERS, WIDTH, HIDDEN), "down": array(LAYERS, HIDDEN, WIDTH)}
    return [{"up": array(WIDTH, HIDDEN), "down": array(HIDDEN, WIDTH)} for _ in range(LAYERS)]


def loss(params, batch):
    block = jax.checkpoint(lambda x, w: x + jnp.tanh(x @ w["up"]) @ w["down"])
    x = batch.astype(jnp.bfloat16)
    if isinstance(params, dict):
        x, _ = lax.scan(lambda x, w: (block(x, w), None), x, params)
    else:
        for w in params:
            x = block(x, w)
    return jnp.mean(jnp.square(x.astype(jnp.float32)))


def training(form: str, offloaded: str, accumulate: int = 1, **choices):
    # In a list, left free, XLA puts off products of weight gradients as it likes, and keeps activations for them.
    choices = {"prefer": "memory" if form == "list" else "speed"} | choices
    strategy = replace(js.offload("zero3", offloaded), **choices)
    return js.parallelize(
        loss,
        optax.adamw(1e-3),
        params=shapes(form),
        batch=jax.ShapeDtypeStruct((TOKENS * accumulate, WIDTH), jnp.float32),
        mesh=target.parse("h100:1").mesh(),
        strategy=strategy,
        accumulate=accumulate,
        clip=1.0,
        precision=js.Precision(compute="bfloat16", reduce="bfloat16"),
    )


def examined(made):
    compiled = made.built().compiled
    return facts(compiled, made.mesh), hlo.parse(compiled.as_text())


@functools.cache
def found(form: str, offloaded: str, accumulate: int = 1):
    """(what is known of the compiled step, its instructions, its setup)."""
    with target.uncached():
        made = training(form, offloaded, accumulate)
        return *examined(made), made.setup


def buffers(form: str) -> int:
    """What may be on the device for the update: of each of two moments, pieces that come, are updated and leave."""
    largest = PARAMS // (2 if form == "stack" else 2 * LAYERS)
    return 3 * 2 * min(host_memory.PIECE_BYTES, largest)


@pytest.mark.parametrize("form", FORMS)
def test_the_peak_falls_by_the_optimizers_state(form):
    without, opt = found(form, "none")[0].memory, found(form, "opt")[0].memory
    assert without.peak > PARAMS + OPT
    assert buffers(form) < OPT / 2
    assert opt.peak <= without.peak - OPT + buffers(form)
    assert opt.arguments < without.arguments - OPT + MIB


@pytest.mark.parametrize("form", FORMS)
def test_the_naive_order_would_not(form, monkeypatch):
    """All of it in, the update, all of it out: the bound above is one that this order fails."""

    def naive(fn, states, others, homes, after, **_):
        flat, structure = jax.tree.flatten(states)
        at = jax.tree.leaves(homes, is_leaf=lambda x: isinstance(x, host_memory.Home))
        near = [host_memory.to_device(x, "") if home.hosted else x for x, home in zip(flat, at, strict=False)]
        new = jax.tree.leaves(fn(jax.tree.unflatten(structure, near), others))
        back = [host_memory.to_host(x, "") if home.hosted else x for x, home in zip(new, at, strict=False)]
        return jax.tree.unflatten(structure, back)

    monkeypatch.setattr(update, "streamed", naive)
    compiled, _ = examined(training(form, "opt"))
    assert compiled.memory.peak > found(form, "none")[0].memory.peak - OPT + buffers(form)


@pytest.mark.parametrize("form", FORMS)
def test_parameters_and_gradients_leave_no_state_on_the_device(form):
    compiled, _, made = found(form, "all")
    assert host_bytes(made) == {"params": PARAMS, "grads": PARAMS // 2, "opt": OPT}
    assert compiled.memory.arguments < 4 * TOKENS * WIDTH + MIB
    # A weight in bfloat16 and its gradient, twice; what is kept of each block; one block's activations; the buffers.
    weights, kept, inside = 4 * 2 * 2 * WIDTH * HIDDEN, LAYERS * TOKENS * WIDTH * 2, 4 * TOKENS * HIDDEN * 2
    assert compiled.memory.temps < weights + kept + inside + buffers(form)
    # The gradients are in the host's temporary memory, in the dtype that they travel in.
    assert compiled.host_memory.arguments == pytest.approx(PARAMS + OPT, rel=1e-3)
    assert PARAMS // 2 <= compiled.host_memory.temps < PARAMS // 2 + MIB


def test_gradients_of_several_microbatches_are_added_up_in_host_memory():
    compiled, _, made = found("stack", "all", 3)
    assert host_bytes(made)["grads"] == PARAMS
    assert compiled.memory.peak < found("stack", "all")[0].memory.peak + 3 * 4 * TOKENS * WIDTH + buffers("stack")
    assert compiled.host_memory.temps < 2 * PARAMS + MIB


@pytest.mark.parametrize("offloaded", ["opt", "opt+params", "all"])
@pytest.mark.parametrize("form", FORMS)
def test_what_is_planned_passes_the_link(form, offloaded):
    """A backward pass does not fetch what it does not read, and the compiler may fetch a scalar more."""
    compiled, _, made = found(form, offloaded)
    planned = link_bytes(transfers(made))
    assert planned["to_host"] == pytest.approx(compiled.to_host, rel=0.01)
    assert compiled.to_device <= planned["to_device"] * 1.01
    assert compiled.to_device > planned["to_device"] - PARAMS


@pytest.mark.parametrize("offloaded", ["opt", "opt+params", "all"])
@pytest.mark.parametrize("form", FORMS)
def test_transfers_are_asynchronous_and_no_kernel_reads_host_memory(form, offloaded):
    _, module, _ = found(form, offloaded)
    moves = ("copy-start", "copy-done", "fusion-start", "fusion-done", "async-start", "async-done")
    passes = ("parameter", "tuple", "get-tuple-element", "while", "bitcast", "custom-call", "optimization-barrier")
    others = set()
    for home in module.computations.values():
        for one in home.instructions.values():
            hosted = [x for x in one.arrays if x.space == hlo.HOST and x.bytes > MIB]
            inside = re.match(r"wrapped_|async_", home.name)  # what a transfer runs
            if hosted and not inside and one.opcode not in (*moves, *passes):
                others.add((home.name, one.opcode, one.op_name))
    assert not others


def test_the_host_updates_what_it_holds():
    """ZeRO-Offload's division of work: gradients out, parameters back, and the host computes."""
    made = training("stack", "opt", update="host")
    compiled, module = examined(made)
    assert made.strategy.update == "host"
    assert "updated by the host" in str(made.explain())
    instructions = [one for home in module.computations.values() for one in home.instructions.values()]
    assert any('execution_thread="host"' in one.attributes for one in instructions)
    planned = link_bytes(transfers(made.setup))
    assert (planned["to_device"], planned["to_host"]) == (PARAMS + OPT, PARAMS // 2 + PARAMS + OPT)
    assert planned["to_host"] == pytest.approx(compiled.to_host, rel=0.01)
    assert planned["to_device"] == pytest.approx(compiled.to_device, rel=0.01)
    assert compiled.memory.peak < found("stack", "none")[0].memory.peak - OPT + PARAMS
