"""What XLA's scheduler expects, and the timeline, of a model compiled for 8 H100s.

Oracles: sums by hand over texts such as XLA writes; for the compiled model its FLOPs, and what must rank before what.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax

import jaxshard as js
from jaxshard.compiled import hlo
from jaxshard.mesh import axis_sizes
from jaxshard.preflight import estimate, process, target
from jaxshard.preflight.estimate import Estimate
from jaxshard.preflight.records import from_json
from jaxshard.preflight.timeline import Timeline, timeline

PROGRAM = hlo.parse("""
%body.1 (given: f32[8]) -> f32[8] {
  ROOT %given = f32[8]{0} parameter(0)
}

%more.2 (given: f32[8]) -> pred[] {
  %given = f32[8]{0} parameter(0)
  ROOT %yes = pred[] constant(true)
}

%quick (given: f32[8]) -> f32[8] {
  ROOT %given = f32[8]{0} parameter(0)
}

ENTRY %main.3 (x: f32[8], n: s32[]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %n = s32[] parameter(1)
  %loop = f32[8]{0} while(%x), condition=%more.2, body=%body.1, backend_config={"known_trip_count":{"n":"7"}}
  ROOT %one = f32[8]{0} conditional(%n, %loop, %loop), branch_computations={%body.1, %quick}
}
""")


def said(*statistics: tuple[str, float, float], when: str = "after") -> str:
    """(computation, cycles, wasted cycles) as XLA's scheduler writes them, without most of its lines."""
    lines = []
    for name, cycles, wasted in statistics:
        lines += [
            f"[latency-hiding-scheduler] Statistics {when} scheduling: ",
            f"For computation: {name}, module jit_step(1)",
            f"Total wasted cycles: {wasted:g}",
            f"Wasted cycles for all-gather: {wasted:g}",
            f"Total cycles: {cycles:g}",
            "Memory pressure peak (bytes): 4096",
        ]
    return "".join(f"I1130 10:57:50.742340    4919 latency_hiding_scheduler.cc:4341] {line}\n" for line in lines)


def test_loops_and_branches_count_as_often_as_they_run():
    once = [("body.1", 1000.5, 20.0), ("quick", 10.0, 0.0), ("main.3", 300.0, 1.5)]
    text = said(*once, when="before") + said(("main.3", 9999.5, 99.5), *once)
    # In microseconds: the entry as it was scheduled last, the loop's seven runs, and the slower branch.
    found = estimate.parse(text, PROGRAM)
    assert found is not None
    assert found.seconds == pytest.approx(1e-6 * (300 + 8 * 1000.5))
    assert found.exposed == pytest.approx(1e-6 * (1.5 + 8 * 20))
    assert estimate.missing(text, PROGRAM) == ""


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", r"said nothing: .* estimate.ENVIRONMENT, or .* before Hopper"),
        (said(("body.1", 1.5, 0), when="before"), "said nothing: "),
        (said(("body.1", 6000, 1000), ("quick", 1, 0), ("main.3", 5000, 0)), "no model of this GPU"),
        (said(("quick", 1.5, 0), ("main.3", 5000, 0)), "said nothing of body.1: it gives no time to loops"),
    ],
    ids=["silent", "not scheduled", "sizes", "a loop that is not timed"],
)
def test_no_estimate(text, why):
    assert estimate.parse(text, PROGRAM) is None
    assert re.search(why, estimate.missing(text, PROGRAM))


ASYNCHRONOUS = """
%kernel (given: f32[8]) -> f32[8] {
  %given = f32[8]{0} parameter(0)
  ROOT %made = f32[8]{0} OPCODE(%given), to_apply=%add
}

ENTRY %main.3 (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %started = ((f32[8]{0}), f32[8]{0}) fusion-start(%x), kind=kLoop, calls=%kernel
  ROOT %done = f32[8]{0} fusion-done(%started)
}
"""


def test_no_estimate_of_asynchronous_kernels_but_of_messages():
    text = said(("main.3", 5000.5, 0))
    assert "asynchronous fusions" in estimate.missing(text, hlo.parse(ASYNCHRONOUS.replace("OPCODE", "negate")))
    assert estimate.parse(text, hlo.parse(ASYNCHRONOUS.replace("OPCODE", "all-reduce"))) is not None


def test_capture_takes_the_scheduler_lines_alone(capfd):
    line = said(("main", 1.5, 0))
    with estimate.capture() as first:
        os.write(2, line.encode() + b"a warning of ptxas\n")
        assert capfd.readouterr().err == ""
    assert (first.text, capfd.readouterr().err) == (line, "a warning of ptxas\n")
    with contextlib.suppress(KeyError), estimate.capture() as caught:
        os.write(2, line.encode() + b"the last words\n")
        raise KeyError
    os.write(2, b"and after\n")
    assert (caught.text, capfd.readouterr().err) == (line, "the last words\nand after\n")


LAYERS, WIDTH, TOKENS, GPUS = 6, 4096, 4096, 8


def loss(params, x):
    def layer(x, w):
        return x + (jax.nn.silu(x @ w["gate"]) * (x @ w["up"])) @ w["down"], None

    x, _ = lax.scan(jax.checkpoint(layer, prevent_cse=False), x, params)
    return jnp.mean(jnp.square(x.astype(jnp.float32)))


def schedules() -> dict[str, Any]:
    """By what is preferred: the timeline, XLA's estimate, and why there is none."""
    found = {}
    at = target.parse(f"h100:{GPUS}")
    wide, narrow = (LAYERS, WIDTH, 4 * WIDTH), (LAYERS, 4 * WIDTH, WIDTH)
    shapes = {"gate": wide, "up": wide, "down": narrow}
    for prefer in ("speed", "memory"):
        training = js.parallelize(
            loss,
            optax.sgd(0.1),
            params={name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()},
            batch=jax.ShapeDtypeStruct((GPUS * TOKENS, WIDTH), jnp.bfloat16),
            mesh=at.mesh(),
            strategy=replace(js.ZERO3, prefer=prefer),
            precision=js.Precision(compute="bfloat16", reduce="bfloat16"),
        )
        assert isinstance(training, js.Training)
        with estimate.capture() as said:
            compiled: Any = training.built().compiled
        module = hlo.parse(compiled.as_text())
        expected = estimate.parse(said.text, module)
        found[prefer] = {
            "timeline": dataclasses.asdict(timeline(module, axis_sizes(at.mesh()), at)),
            "estimate": expected and dataclasses.asdict(expected),
            "missing": estimate.missing(said.text, module),
        }
    return found


@pytest.mark.target
@pytest.mark.skipif(not target.compiler_installed(), reason=f"needs the GPU compiler's wheels: {target.INSTALL}")
def test_speed_hides_more_than_memory():
    found = process.run(schedules, environment=estimate.ENVIRONMENT)
    speed, memory = (from_json(Timeline, found[prefer]["timeline"]) for prefer in ("speed", "memory"))
    # Of each of three products one forward and two backward, and of two of them one more, recomputed.
    flops = (3 + 2 * 3 + 2) * LAYERS * 2 * TOKENS * WIDTH * 4 * WIDTH
    assert memory.matmul == pytest.approx(flops / 794e12, rel=0.01)
    # Two gathers and a scatter of three weights in bf16, 7/8 of each at 361e9 bytes/s; there is little else.
    assert memory.messages == pytest.approx(3 * 3 * LAYERS * 2 * 4 * WIDTH**2 * 7 / 8 / 361e9, rel=0.01)
    assert memory.bound_by == speed.bound_by == "compute"
    assert {one.name for one in speed.passes} == {"forward", "backward", "outside"}
    assert 0 < memory.hidden < 1
    assert 0 < speed.hidden < 1
    assert memory.hidden < speed.hidden
    assert speed.seconds < memory.seconds
    if found["speed"]["estimate"] and found["memory"]["estimate"]:
        expected = {prefer: Estimate(**one["estimate"]) for prefer, one in found.items()}
        assert 0 < expected["speed"].exposed < expected["memory"].exposed
        assert expected["speed"].seconds < expected["memory"].seconds
        assert expected["memory"].seconds == pytest.approx(memory.seconds, rel=0.2)
    else:
        assert jax.__version_info__ >= (0, 12)
        assert "asynchronous fusions" in found["speed"]["missing"] + found["memory"]["missing"]
