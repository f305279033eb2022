"""What the compiler, a profile or an out-of-memory report names is the user's layer: its line, its scopes, its leaf.

Oracle: the marks of this file's lines, and the scopes that plain `jax.grad` gives the same operations.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from mistakes import training_for
from quick import QUICK

LINES = Path(__file__).read_text().splitlines()


def layer(w, x):
    with jax.named_scope("layer"):
        return jnp.tanh(x @ w)  # the layer


def loss(params, batch):
    x = batch["x"]
    with jax.named_scope("first"):
        x = layer(params["first"], x)  # first
    with jax.named_scope("jitted"):
        x = jax.jit(layer)(params["jitted"], x)  # jitted
    with jax.named_scope("remat"):
        x = jax.checkpoint(layer)(params["remat"], x)  # remat
    with jax.named_scope("scanned"):
        x, _ = lax.scan(lambda x, w: (layer(w, x), None), x, params["scanned"])  # scanned
    return jnp.mean(jnp.square(x - batch["y"]))


PARAMS = {name: np.eye(8, dtype=np.float32) / 2 for name in ("first", "jitted", "remat")}
PARAMS["scanned"] = np.stack([PARAMS["first"]] * 2)
BATCH = {name: np.ones((64, 8), np.float32) for name in "xy"}


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """kind: its opcode. scopes: the name JAX gave it. line: the innermost line it was written on, with its file."""

    kind: str
    scopes: str
    line: str


def instructions(compiled: str) -> list[Instruction]:
    """The instructions of a compiled program that have a place."""

    def table(name: str, row: str) -> dict[int, tuple[str, ...]]:
        (rows,) = re.findall(rf"^{name}\n((?:\d+ .*\n)+)", compiled, re.M)
        return {int(found[0]): found[1:] for found in re.findall(rf"^(\d+) {row}", rows, re.M)}

    files = table("FileNames", '"(.*)"')
    places = table("FileLocations", r"\{file_name_id=(\d+) .*?line=(\d+)")
    frames = table("StackFrames", r"\{file_location_id=(\d+)(.*)")

    def place(frame: str) -> str:
        file, line = places[int(frames[int(frame)][0])]
        return f"{files[int(file)][0]}:{line}"

    found = re.findall(r'^ .*? = .*? ([a-z][\w-]*)\(.*op_name="([^"]*)" stack_frame_id=(\d+)', compiled, re.M)
    return [Instruction(kind=kind, scopes=scopes, line=place(frame)) for kind, scopes, frame in found]


def mark(one: Instruction) -> str:
    """What this file says beside the line an instruction is written on."""
    file, line = one.line.rsplit(":", 1)
    return LINES[int(line) - 1].partition("# ")[2] if file == __file__ else file


@pytest.fixture(autouse=True, scope="module")
def cache_by_metadata():
    """Otherwise a cached program may be one that was compiled from other lines."""
    jax.config.update("jax_compilation_cache_include_metadata_in_key", True)
    yield
    jax.config.update("jax_compilation_cache_include_metadata_in_key", False)


@functools.cache
def compiled(strategy: str, **choices) -> list[Instruction]:
    jax.clear_caches()  # which hold JAX's own small programs with the places of whoever was first to use them
    choices |= {"params": PARAMS, "batch": BATCH, "whole_budget": 0, "compiler_options": QUICK}
    training = training_for(loss, strategy=strategy, **choices)
    return instructions(training.built().compiled.as_text() or "")


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_products_stand_in_their_layer(strategy, accumulate):
    products = [one for one in compiled(strategy, accumulate=accumulate) if one.kind == "dot"]
    layers = [one for one in products if "/layer" in one.scopes]
    # One that XLA has made of several bears all of their scopes, and the line of what is around them.
    assert {mark(one) for one in layers if ";" not in one.scopes} == {"the layer"}
    for name in ("first", "jitted", "remat", "scanned"):
        assert any(name in one.scopes for one in layers), f"no product of {name}"
        backward = [one for one in layers if name in one.scopes and "transpose" in one.scopes]
        assert backward, f"no product of the backward pass of {name}"
    # The norm's own products are the library's.
    assert all("gradients.py" in one.line for one in products if one not in layers)


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_loops_stand_on_the_users_scan(strategy):
    """What a scan stacks for its backward pass is most of what an out-of-memory report names."""
    found = compiled(strategy, accumulate=1)
    for kind in ("while", "dynamic-update-slice"):
        loops = [one for one in found if one.kind == kind]
        assert loops
        assert {mark(one) for one in loops} == {"scanned"}
        assert all("scanned" in one.scopes for one in loops)


def test_collectives_name_their_leaf_in_its_layer():
    found = compiled("zero3", accumulate=1)
    for kind, purpose in (("all-gather", "gather"), ("reduce-scatter", "reduce")):
        for name in PARAMS:
            ours = [one for one in found if one.kind == kind and f"jaxshard.{purpose}:{name}/" in one.scopes]
            assert ours, (kind, name)
            assert all(re.search(rf"\b{name}\b.*layer.*jaxshard\.use:{name}/", one.scopes) for one in ours), ours
            assert {mark(one) for one in ours} == {"the layer"}


def test_the_scopes_are_those_of_plain_jax():
    """Each scope of a product that plain JAX gives is found among ours, in the same order."""
    gradient = jax.jit(jax.grad(loss)).lower(jax.tree.map(jnp.asarray, PARAMS), BATCH)
    plain = instructions(gradient.compile(compiler_options=dict(QUICK)).as_text() or "")
    named = re.compile("first|jitted|remat(?!t)|scanned|layer(?=/)")

    def forward(found):
        return {
            tuple(dict.fromkeys(named.findall(one.scopes)))
            for one in found
            if one.kind == "dot" and "layer" in one.scopes and "transpose" not in one.scopes
        }

    assert forward(plain) == forward(compiled("zero3", accumulate=1))
    assert len(forward(plain)) == 4
