"""ZeRO-3 against programs written by hand with `jit`, as XLA's compiler for GPUs builds them. Compiled, not run.

    python benchmarks/compiled.py                              every model and program, about 25 minutes, no GPU
    python benchmarks/compiled.py --models gpt --blocks scan   a first look

Needs `pip install -e '.[targets]'`; `2>/dev/null` keeps the compiler quiet. What a program holds and sends is exact.
What it hides, and how long a step takes, are estimates of its schedule: they rank programs, and promise nothing. The
programs are in `compiled_programs.py`.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import jax
import tyro
from compiled_programs import Model, Side, by_hand, gpt, llama, training
from jax.sharding import Mesh
from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table

import jaxshard as js
from jaxshard.compiled import hlo
from jaxshard.compiler import options_for
from jaxshard.mesh import axis_sizes
from jaxshard.preflight import estimate, process
from jaxshard.preflight import target as targets
from jaxshard.preflight.facts import facts
from jaxshard.preflight.timeline import timeline

Blocks = Literal["scan", "list"]
Attention = Literal["blockwise", "cudnn"]
MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Options:
    """ZeRO-3 against programs written by hand with `jit`, compiled for GPUs that are not there."""

    models: tuple[Literal["gpt", "llama-8", "llama-32"], ...] = ("gpt", "llama-8", "llama-32")
    blocks: tuple[Blocks, ...] = ("scan", "list")
    """Of the model: one stack that is scanned over, or a list."""
    only: tuple[str, ...] = ()
    """Programs whose name begins with one of these; all without."""
    target: str = "h100:8"
    """The GPUs, as `jaxshard.preflight.target` reads them."""
    attention: Attention | None = None
    """Llama's; by default cudnn where its wheels are (`pip install 'jax[cuda12]'`), else blockwise."""
    together: int = 1
    """Compilations at once; above 1 their times say little."""
    json: Path | None = None
    """A file to write all figures to."""


# -- What is compared


def model(name: str, attention: Attention) -> Model:
    if name == "gpt":
        return gpt(vocab=32000, width=1024, layers=12, heads=16, tokens=1024, examples=4)
    return llama(
        vocab=1024,
        width=4096,
        layers=int(name.removeprefix("llama-")),
        heads=32,
        kv_heads=8,
        hidden=14336,
        tokens=4096,
        examples=1,
        attention=attention,
    )


@dataclass(frozen=True, kw_only=True)
class Program:
    """side: who says what moves. strategy: of ours, whose XLA options a program by hand may take too."""

    side: Side
    strategy: js.Strategy | None = None


PROGRAMS = {
    "jit": Program(side="plain"),
    "by hand": Program(side="careful"),
    "by hand, our options": Program(side="careful", strategy=js.ZERO3),
    "jaxshard, speed": Program(side="ours", strategy=js.ZERO3),
    "jaxshard, memory": Program(side="ours", strategy=replace(js.ZERO3, prefer="memory")),
}


# -- In a process of its own for each program


def figures(*, name: str, blocks: Blocks, program: str, target: str, attention: Attention) -> dict[str, Any]:
    """What is known of one compiled program: bytes on each device, seconds of a step, seconds to build it."""
    where, shape, one = targets.parse(target), model(name, attention), PROGRAMS[program]
    mesh, scanned = where.mesh(), blocks == "scan"
    with targets.uncached(), jax.numpy_dtype_promotion("standard"), estimate.capture() as scheduler:
        wall, cpu = time.perf_counter(), time.process_time()
        compiled = built(one, shape, scanned, mesh)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    module = hlo.parse(compiled.as_text())
    found, step = facts(compiled, mesh, module), timeline(module, axis_sizes(mesh), where)
    expected = estimate.parse(scheduler.text, module)
    sent: Counter[str] = Counter()
    for message in found.collectives:
        sent[message.kind] += message.wire_bytes
    return {
        "model": name,
        "blocks": blocks,
        "program": program,
        "attention": attention,
        "theory": theory(shape, mesh.size),
        "states": found.memory.arguments,
        "peak": found.memory.peak,
        "sent": dict(sent),
        "seconds": step.seconds,
        "messages": step.messages,
        "exposed": step.exposed,
        "exposed_by_xla": expected.exposed if expected else None,
        "build": {"wall": wall, "cpu": cpu},
        "jax": jax.__version__,
    }


def built(program: Program, shape: Model, scanned: bool, mesh: Mesh) -> Any:
    if program.side == "ours":
        return training(shape, scanned, mesh, program.strategy or js.ZERO3).built().compiled
    options = options_for(program.strategy, "gpu") if program.strategy else {}
    return by_hand(shape, scanned, mesh, program.side == "careful", options)


def theory(shape: Model, gpus: int) -> int:
    """Bytes on a device's link: weights in bfloat16 gathered for both passes, their gradients scattered once."""
    sizes = (math.prod(x.shape) for x in jax.tree.leaves(shape.params(scanned=True)))
    return round(3 * 2 * sum(sizes) * (gpus - 1) / gpus)


# -- The tables


def table(title: str, rows: list[dict[str, Any]]) -> Table:
    made = Table("blocks", "program", title=title, box=MARKDOWN)
    bytes, times = ("peak MiB", "sent MiB", "all_gather", "reduce_scatter", "other"), ("step ms", "build s")
    for column in (*bytes, "hidden", "by XLA", *times):
        made.add_column(column, justify="right")
    for row in rows:
        sent = Counter(row["sent"])
        total, gathered, scattered = sent.total(), sent["all_gather"], sent["reduce_scatter"]
        made.add_row(
            row["blocks"],
            row["program"],
            *(f"{size / MIB:,.0f}" for size in (row["peak"], total, gathered, scattered, total - gathered - scattered)),
            hidden(row["exposed"], row["messages"]),
            hidden(row["exposed_by_xla"], row["messages"]),
            f"{row['seconds'] * 1e3:.1f}",
            f"{row['build']['wall']:.1f} ({row['build']['cpu']:.1f})",
        )
    return made


def hidden(exposed: float | None, messages: float) -> str:
    return "?" if exposed is None else f"{1 - exposed / messages:.1%}"


def main(options: Options) -> None:
    console = Console(width=None if sys.stdout.isatty() else 160)
    attention = options.attention or ("cudnn" if targets.cudnn_installed() else "blockwise")
    names = [name for name in PROGRAMS if not options.only or name.startswith(options.only)]
    if not names:
        raise SystemExit(f"--only {' '.join(options.only)}: no program begins so; there are {', '.join(PROGRAMS)}.")
    results: list[dict[str, Any]] = []

    def compiled(case: tuple[str, Blocks, str]) -> dict[str, Any]:
        chosen = dict(zip(("name", "blocks", "program"), case, strict=True))
        target = {"target": options.target, "attention": attention}
        return process.run(figures, environment=estimate.ENVIRONMENT, **chosen, **target)

    with ThreadPoolExecutor(options.together) as pool:
        for name in options.models:
            rows = list(pool.map(compiled, itertools.product((name,), options.blocks, names)))
            kernel = "" if name == "gpt" else f", {attention} attention"
            what = f"{name}{kernel} for {options.target}, compiled, not run; jax {jax.__version__}"
            console.print(table(f"{what}. Theory sends {rows[0]['theory'] / MIB:,.0f} MiB", rows))
            results += rows
            if options.json:
                options.json.write_text(json.dumps(results, indent=1))
    console.print(
        "Sent: bytes on each GPU's link, in all and by kind. Hidden: the share of the messages' time in which kernels "
        "run, by our timeline of XLA's schedule, and by XLA's own estimate of what is exposed (? where it has none). "
        "Build: trace and compile, by the clock (and CPU seconds)."
    )


if __name__ == "__main__":
    main(tyro.cli(Options))
