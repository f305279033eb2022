"""Training speed on forced CPU devices, as a ratio to what a careful user would write by hand with `jit`.

    python benchmarks/cpu.py                                     every strategy, about 20 minutes
    python benchmarks/cpu.py --quick --strategies zero3 ddp      a first look

A small GPT is trained with every strategy, its blocks scanned or in a list, on 2 and on 8 devices. Program by hand and
program of the library run in turn and every pair gives one ratio, so that a machine that slows down slows both. Ratios
of CPU seconds, which other processes disturb less, stand beside those of wall time. A CPU says nothing of GPUs.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
import optax
import tyro
from jax.lax import with_sharding_constraint
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

import jaxshard as js
from jaxshard.mesh import force_cpu_devices
from jaxshard.models import gpt
from jaxshard.strategy import named

DEVICES = (2, 8)
BATCH, TOKENS, VOCAB = 16, 128, 512
OPTIMIZER = optax.adamw(3e-4)
Blocks = Literal["scan", "list"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Training speed on CPU devices, as a ratio to programs written by hand with `jit`."""

    strategies: tuple[str, ...] = ("dp", "ddp", "zero1", "zero2", "shard_grad_op", "zero3", "hsdp")
    blocks: tuple[Blocks, ...] = ("scan", "list")
    """Of the model: one stack that is scanned over, or a list."""
    pairs: int = 7
    """How often each program runs."""
    steps: int = 2
    """Steps of one run."""
    compiles: int = 2
    """How often each program is traced and compiled."""
    quick: bool = False
    """2 pairs of one step and one compilation, whatever the three above say."""
    json: Path | None = None
    """A file to write all figures to."""


# -- The model and its data


def model(blocks: Blocks) -> gpt.GPTConfig:
    return gpt.GPTConfig(vocab=VOCAB, width=256, layers=4, heads=8, context=TOKENS, scan=blocks == "scan")


def random_batch() -> dict[str, np.ndarray]:
    tokens = np.random.default_rng(0).integers(0, VOCAB, (BATCH, TOKENS + 1), dtype=np.int32)
    weights = np.ones((BATCH, TOKENS), np.float32)
    return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights}


# -- By hand: one `jit`, whose layout is said with shardings


def by_hand(config: gpt.GPTConfig, replica: int, params: bool, grads: bool, opt: bool, gather_first: bool):
    """(build, state) of a program whose parameters, gradients and optimizer state are split or not.

    gather_first: all parameters are made whole at the start of a step, where otherwise the compiler decides.
    """
    shape = (replica, jax.device_count() // replica)
    mesh = jax.make_mesh(shape, ("replica", "shard"), axis_types=(AxisType.Auto,) * 2)
    whole, over_batch = NamedSharding(mesh, P()), NamedSharding(mesh, P(("replica", "shard")))

    def split(path, x):
        """Over the first dim that divides, but never over the layers of a stack."""
        layers = config.scan and "blocks" in jax.tree_util.keystr(path)
        dims = [d for d in range(int(layers), x.ndim) if x.shape[d] % shape[1] == 0]
        return NamedSharding(mesh, P(*(None,) * dims[0], "shard")) if dims else whole

    def shardings(tree, is_split: bool):
        return jax.tree.map_with_path(split if is_split else lambda path, x: whole, tree)

    def init(key):
        params = gpt.init(config, key)
        return params, OPTIMIZER.init(params)

    shapes = jax.eval_shape(init, jax.random.key(0))
    where = shardings(shapes[0], params), shardings(shapes[1], opt)

    def step(state, batch):
        params, opt_state = state

        def mean_loss(params):
            total, weight = gpt.loss(config, params, batch)
            return total / weight

        used = with_sharding_constraint(params, whole) if gather_first else params
        loss, gradients = jax.value_and_grad(mean_loss)(used)
        gradients = with_sharding_constraint(gradients, shardings(gradients, True)) if grads else gradients
        updates, opt_state = OPTIMIZER.update(gradients, opt_state, params)
        metrics = {"loss": loss, "grad_norm": optax.global_norm(gradients)}
        return (optax.apply_updates(params, updates), opt_state), metrics

    def build():
        jitted = jax.jit(lambda *args: step(*args), donate_argnums=0, out_shardings=(where, whole))
        compiled = jitted.lower(state, jax.device_put(random_batch(), over_batch)).compile()
        return lambda state, batch: compiled(state, jax.device_put(batch, over_batch))

    state = jax.jit(init, out_shardings=where)(jax.random.key(0))
    return build, state


# -- Ours


def ours(config: gpt.GPTConfig, replica: int, strategy: js.Strategy):
    """(build, state) of the same program by `parallelize`."""
    init = partial(gpt.init, config)

    def parallelize():
        return js.parallelize(
            lambda params, batch: js.Loss(*gpt.loss(config, params, batch)),
            OPTIMIZER,
            params=init,
            batch=random_batch(),
            mesh=js.make_mesh(replica=replica),
            strategy=strategy,
        )

    return lambda: parallelize().step, parallelize().init(init, jax.random.key(0))


# -- In a process of its own for each number of devices


class Seconds(NamedTuple):
    wall: float
    cpu: float  # of all threads

    def __sub__(self, other: Seconds) -> Seconds:
        return Seconds(self.wall - other.wall, self.cpu - other.cpu)


def now() -> Seconds:
    return Seconds(time.perf_counter(), time.process_time())


@dataclass
class Program:
    """A training step and its state. build: traces and compiles it."""

    build: Callable[[], Callable[..., Any]]
    state: Any
    step: Callable[..., Any] | None = None

    def run(self, steps: int, *, anew: bool) -> tuple[Seconds, float]:
        """The time that these steps take, compiling included if `anew`, and the last loss."""
        if anew:
            jax.clear_caches()
        batch, metrics, start = random_batch(), {}, now()
        step = self.step = self.build() if self.step is None or anew else self.step
        for _ in range(steps):
            self.state, metrics = step(self.state, batch)
        jax.block_until_ready(self.state)
        return now() - start, float(metrics["loss"])


@lru_cache(maxsize=1)
def programs(blocks: Blocks, name: str) -> dict[str, Program]:
    strategy, config = named(name), model(blocks)
    placements = {"params": strategy.params, "grads": strategy.grads, "opt": strategy.opt}
    is_split = {state: bool(placement.axes) for state, placement in placements.items()}
    replica, gather_first = strategy.min_replicas, strategy.gather == "step"
    hand = by_hand(config, replica, **is_split, gather_first=gather_first)
    return {"hand": Program(*hand), "ours": Program(*ours(config, replica, strategy))}


def run(blocks: Blocks, name: str, side: str, steps: int, anew: bool) -> tuple[Seconds, float]:
    return programs(blocks, name)[side].run(steps, anew=anew)


def start_worker(devices: int) -> None:
    jax.config.update("jax_enable_compilation_cache", False)
    force_cpu_devices(devices)


# -- In turn, and what comes of it


class Spread(NamedTuple):
    median: float
    least: float
    most: float


def ratios(above: Sequence[Seconds], below: Sequence[Seconds]) -> dict[str, Spread]:
    """Of each pair, by wall time and by CPU time."""
    pairs = {"wall": [a.wall / b.wall for a, b in zip(above, below, strict=True)]}
    pairs["cpu"] = [a.cpu / b.cpu for a, b in zip(above, below, strict=True)]
    return {clock: Spread(statistics.median(x), min(x), max(x)) for clock, x in pairs.items()}


def compare(workers: dict[int, ProcessPoolExecutor], blocks: Blocks, name: str, options: Options) -> list[Any]:
    """One strategy on all numbers of devices, as rows of figures; a ratio is (median, least, most) of the pairs.

    speed: tokens/s, ours / by hand. growth: tokens/s / that on the fewest devices. compile: time, ours / by hand.
    Raises RuntimeError when the losses of two programs differ.
    """
    # Ours last: clearing JAX's caches for the next program would make `dp` compile once more.
    turns = [(devices, side) for devices in workers for side in ("hand", "ours")]

    def in_turn(steps: int, anew: bool) -> dict[tuple[int, str], Seconds]:
        got = {turn: workers[turn[0]].submit(run, blocks, name, turn[1], steps, anew).result() for turn in turns}
        losses = [loss for _, loss in got.values()]
        if not np.allclose(losses, losses[0], rtol=1e-3):
            raise RuntimeError(f"{name}, {blocks}: {turns} have the losses {losses}, so these programs differ.")
        return {turn: seconds for turn, (seconds, _) in got.items()}

    first = [in_turn(1, anew=True) for _ in range(options.compiles)]
    later = [in_turn(options.steps, anew=False) for _ in range(options.pairs)]
    runs = {turn: [times[turn] for times in later] for turn in turns}
    step = {
        turn: Seconds(*(statistics.median(x) / options.steps for x in zip(*runs[turn], strict=True))) for turn in turns
    }
    compiling = {turn: [times[turn] - step[turn] for times in first] for turn in turns}

    def figures(devices: int) -> dict[str, Any]:
        fewest, sides = min(workers), {"hand": (devices, "hand"), "ours": (devices, "ours")}
        return {
            "strategy": name,
            "blocks": blocks,
            "devices": devices,
            "tokens_per_second": {side: BATCH * TOKENS / step[turn].wall for side, turn in sides.items()},
            "compile_seconds": {side: min(compiling[turn]).wall for side, turn in sides.items()},
            "speed": ratios(runs[sides["hand"]], runs[sides["ours"]]),
            "growth": ratios(runs[fewest, "ours"], runs[sides["ours"]]),
            "growth_by_hand": ratios(runs[fewest, "hand"], runs[sides["hand"]]),
            "compile": ratios(compiling[sides["ours"]], compiling[sides["hand"]]),
        }

    return [figures(devices) for devices in workers]


def show(ratio: dict[str, Spread]) -> str:
    wall = ratio["wall"]
    return f"{wall.median:.3f} ({wall.least:.2f}-{wall.most:.2f}) {ratio['cpu'].median:.3f}"


def machine() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(": ")[2] for line in lines if line.startswith("model name")] or [platform.processor()]
    return {"cpu": names[0], "cores": os.cpu_count(), "load": os.getloadavg(), "jax": jax.__version__}


def main(options: Options) -> None:
    if options.quick:
        options = replace(options, pairs=2, steps=1, compiles=1)
    console, before, results = Console(width=None if sys.stdout.isatty() else 120), machine(), []
    pool = partial(ProcessPoolExecutor, max_workers=1, mp_context=get_context("spawn"), initializer=start_worker)
    workers = {devices: pool(initargs=(devices,)) for devices in DEVICES}
    for blocks in options.blocks:
        for name in options.strategies:
            with console.status(f"{name}, {blocks}"):
                results += compare(workers, blocks, name, options)

    title = f"{before['cpu']}, {before['cores']} cores, jax {before['jax']}"
    head = ("strategy", "blocks", "devices", "tokens/s", "speed", f"from {min(DEVICES)} devices", "compile")
    table = Table(*head, title=title, box=SIMPLE_HEAD)
    for row in results:
        first = (row["strategy"], row["blocks"], str(row["devices"]), f"{row['tokens_per_second']['ours']:,.0f}")
        table.add_row(*first, *(show(row[name]) for name in ("speed", "growth", "compile")))
    console.print(table)
    console.print("Ours / by hand: median (least-most) of the pairs by wall time; median by CPU time.")
    if options.json:
        figures = {"before": before, "after": machine(), "results": results}
        options.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main(tyro.cli(Options))
