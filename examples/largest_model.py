"""The largest GPT that trains on one GPU, without and with each offload and remat, and how fast.

    python examples/largest_model.py                  # on the GPU of this machine
    python examples/largest_model.py --target h200    # on one that is not there: compiled, not run

The family of models has one number: n layers of width 128 n, with n heads of 128 channels. So are the three largest of
GPT-3 proportioned (Brown et al. 2020, arXiv 2005.14165, table 2.1: 32 layers of width 4096, 40 of about 5120, 96 of
12288), and parameters grow with the cube of n. Parameters and Adam's moments are float32, 12 bytes for each parameter;
compute and gradients are bfloat16.

A model fits if the GPU's memory has room for all that its compiled step holds at once. XLA says that without running
it, and nothing of the model's size is made for that. On a machine with a GPU a few real steps follow.
"""

from __future__ import annotations

import argparse
import functools
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

import jaxshard as js
from jaxshard.explain import table
from jaxshard.link import PINNED
from jaxshard.models import gpt
from jaxshard.preflight import compare, process, target
from jaxshard.preflight.line import Line, Row
from jaxshard.preflight.records import from_json, to_json
from jaxshard.preflight.show import SHOWN, gib
from jaxshard.preflight.target import Target
from jaxshard.strategy import DEVICE, HOST
from jaxshard.train.build import training_for
from jaxshard.train.config import Config, DataConfig, RunConfig

LAST = 96
"""Layers of GPT-3 itself, where the family ends: 175 billion parameters."""

CASES = {
    f"{states}/{activations}": Line(strategy="zero3", options={"offload": states, "remat": activations})
    for states, activations in (
        ("none", "none"),
        ("none", "full"),
        ("opt", "none"),
        ("opt", "full"),
        ("opt+params", "none"),
        ("opt+params", "full"),
        ("opt+params", "offload"),
        ("opt+params+grads", "full"),
        ("opt+params+grads", "offload"),
    )
}
"""What lies in host memory, and what becomes of activations. Any option of a strategy, or of `config_of`, will do."""


# The family.


def config_of(
    layers: int, *, sequence: int, batch: int, vocab: int, remat: Any = "none", accumulate: int = 1
) -> Config:
    """The training of one model. sequence: in tokens; batch: in sequences."""
    shape: dict[str, Any] = {"layers": layers, "width": 128 * layers, "heads": layers, "vocab": vocab}
    return Config(
        model=gpt.GPTConfig(**shape, context=sequence, positions="learned", remat=remat, loss_chunk=2048),
        precision=js.Precision(compute="bfloat16", reduce="bfloat16"),
        data=DataConfig(batch=batch),
        run=RunConfig(accumulate=accumulate),
    )


def build(mesh: Mesh, strategy: js.Strategy, layers: int, **options: Any) -> Any:
    """The training of one model, from shapes alone."""
    return training_for(config_of(layers, **options), mesh, strategy)


def parameters(layers: int, *, sequence: int, vocab: int) -> int:
    """How many: in a block 12 matrices of width x width, biases and norms; vectors of tokens and positions; a norm."""
    width = 128 * layers
    return layers * (12 * width + 13) * width + (vocab + sequence + 2) * width


# The search.


def largest(used: Callable[[int], float], first: int) -> int:
    """The most layers, up to `LAST`, for which `used` is at most 1; 0 if one is too many.

    used: the share that so many layers take of what there is; it grows about as their cube. first: where to begin.
    """
    fits, fails, layers = 0, LAST + 1, first
    while fails - fits > 1:
        layers = min(max(layers, fits + 1), fails - 1)
        share = used(layers)
        fits, fails = (layers, fails) if share <= 1 else (fits, layers)
        layers = int(layers / share ** (1 / 3))
    return fits


@dataclass(frozen=True, kw_only=True)
class Room:
    """Bytes that there are: of the device's memory, and of the host's."""

    device: float
    host: float

    def share(self, row: Row, layers: int) -> float:
        """The largest of the shares that are taken: by the compiled step, and by making what lies in host memory."""
        making = array_bytes(layers) if row.in_host else 0
        return max(row.peak / self.device, making / self.device, host_bytes(row.in_host, layers) / self.host)


def array_bytes(layers: int) -> int:
    """The largest array, a matrix of all MLPs. On its way to host memory it is on the device, alone."""
    return 4 * layers * 4 * (128 * layers) ** 2


def host_bytes(at_rest: int, layers: int) -> int:
    """What the host needs: the states, and while they are made the largest array of zeros once more."""
    return at_rest + array_bytes(layers) if at_rest else 0


@dataclass(frozen=True, kw_only=True)
class Found:
    """The largest model of a case, and what keeps it from being larger; 0 layers: there is none."""

    case: str
    layers: int
    row: Row
    limit: str


def find(case: str, compiled: Callable[[str, int], Row], room: Room) -> Found:
    """The largest model of a case that there is room for."""
    rows = {0: Row(line=CASES[case])}

    def used(layers: int) -> float:
        rows[layers] = compiled(case, layers)
        if rows[layers].problem:
            raise ValueError(rows[layers].problem)
        return room.share(rows[layers], layers)

    try:
        layers = largest(used, _first(CASES[case], room))
    except ValueError as error:
        return Found(case=case, layers=0, row=rows[0], limit=str(error))
    return Found(case=case, layers=layers, row=rows[layers], limit=_limit(rows.get(layers + 1), layers, room))


def _first(case: Line, room: Room) -> int:
    """Where to begin, by the states of a parameter that are on the device; what else is there is small beside them."""
    strategy, _ = case.resolve()
    bytes = {"params": 4, "grads": 2, "opt": 8}
    held = sum(size for state, size in bytes.items() if getattr(strategy, state).memory == DEVICE)
    return round((room.device / (held + 0.2) / (12 * 128**2)) ** (1 / 3))


def _limit(beyond: Row | None, layers: int, room: Room) -> str:
    if beyond is None:
        return f"the family ends at {LAST} layers"
    if beyond.peak <= room.device:
        if (array := array_bytes(layers + 1)) > room.device:
            return f"device memory: one array of {layers + 1} layers is {gib(array)} GiB when it is made"
        return f"host memory: {layers + 1} layers need {gib(host_bytes(beyond.in_host, layers + 1))} GiB"
    classes = sorted(beyond.held, key=lambda name: -beyond.held[name])[:3]
    held = ", ".join(f"{SHOWN.get(name, name)} {gib(beyond.held[name])}" for name in classes)
    return f"device memory: {layers + 1} layers hold {gib(beyond.peak)} GiB ({held})"


# Real steps.


def trained(case: Mapping[str, Any], layers: int, options: Mapping[str, Any], steps: int, on: str) -> dict[str, Any]:
    """Steps on random tokens: their seconds, the first left out, and the losses of all.

    Raises MemoryError, before anything is made, when the host has too little memory.
    """
    strategy, others = from_json(Line, case).resolve()
    config = config_of(layers, **options, **others)
    training = training_for(config, target.parse(on).mesh(), strategy)
    hosted = [x for x in jax.tree.leaves(training.state_shapes) if x.sharding.memory_kind == HOST]
    needed, free = host_bytes(sum(x.size * x.dtype.itemsize for x in hosted), layers), available()
    if needed > free:
        raise MemoryError(f"{gib(needed)} GiB of the host's memory are needed, and {gib(free)} are free.")
    state = training.init(partial(gpt.init, config.model), jax.random.key(0))
    rng, shape = np.random.default_rng(0), (config.data.batch, config.model.context)
    seconds, losses = [], []
    for _ in range(steps + 1):
        inputs, targets = (rng.integers(config.model.vocab, size=shape, dtype=np.int32) for _ in range(2))
        start = time.perf_counter()
        state, metrics = training.step(
            state, {"inputs": inputs, "targets": targets, "weights": np.ones(shape, np.float32)}
        )
        losses.append(float(metrics["loss"]))
        jax.block_until_ready(state)
        seconds.append(time.perf_counter() - start)
    return {"seconds": sum(seconds[1:]) / steps, "losses": losses}


def available() -> int:
    """Bytes of this machine's memory that are free, or would be made so."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    (free,) = (line.split()[1] for line in lines if line.startswith("MemAvailable:"))
    return 1024 * int(free)


def for_steps(where: Target) -> dict[str, str]:
    """What XLA must know before it starts, or it takes 75 % of a GPU's memory and pins at most 64 GB of the host's."""
    if where.source != "local":
        return {}
    share, pinned = f"{1 - compare.RESERVED:g}", f"{available() // 2**30}"
    return {"JAX_PLATFORMS": "cuda,cpu", "XLA_CLIENT_MEM_FRACTION": share, PINNED: pinned}


def seen() -> dict[str, Any]:
    """The GPU of this machine, or why there is none."""
    try:
        return to_json(target.parse("local"))
    except ValueError as error:
        return {"problem": str(error)}


# The answer. What compiles and what runs has a process of its own; this one starts no GPU.


def main() -> None:
    given = _arguments()
    where = _target(given.target)
    real = where.source != "compiler"
    memory = where.device.memory if where.device and given.memory_gib is None else (given.memory_gib or 0) * 2**30
    if not memory:
        sys.exit(f"{where}: how much memory has it? Add --memory-gib.")
    host = given.host_gib * 2**30 if given.host_gib else available() if real else math.inf
    sizes = {"sequence": given.sequence, "batch": given.batch, "vocab": given.vocab}

    @functools.cache
    def compiled(case: str, layers: int) -> Row:
        place = f"{Path(__file__).resolve()}:{build.__name__}"
        arguments = {"layers": layers, **sizes}
        (row,) = compare.compare(place, where, [CASES[case]], arguments=arguments, cache=compare.cache_folder())
        held = f"{gib(row.peak)} GiB, {gib(row.in_host)} of the host's, compiled in {row.seconds:.0f} s"
        print(f"{case}, {layers} layers: {row.problem[:200] or held}", file=sys.stderr, flush=True)
        return row

    @functools.cache
    def seconds(case: str, layers: int) -> float:
        """Of a step: measured where there is a device, else estimated."""
        if not real:
            timeline = compiled(case, layers).timeline
            return timeline.seconds if timeline else math.nan
        asked = {"case": to_json(CASES[case]), "layers": layers, "options": sizes, "steps": given.steps}
        ran = process.run(trained, environment=for_steps(where), on=str(where), **asked)
        print(f"{case}, {layers} layers: {ran['seconds']:.3g} s, losses {ran['losses']}", file=sys.stderr, flush=True)
        return ran["seconds"]

    room = Room(device=memory * (1 - compare.RESERVED), host=host)
    try:
        found = [find(case, compiled, room) for case in given.only]
        count = partial(parameters, sequence=given.sequence, vocab=given.vocab)
        header, *lines = _lines(found, seconds, count)
    except process.ProcessError as error:
        sys.exit(str(error).splitlines()[0])
    print(
        f"{where}: {memory / 2**30:.4g} GiB, of which {compare.RESERVED:.0%} is left to CUDA; {given.batch} x "
        f"{given.sequence} tokens; GiB; seconds of a step {'measured' if real else 'estimated, not run'}"
    )
    print(table(header, lines))
    for one in found:
        print(f"{one.case}: {one.limit[:400]}")


def _lines(
    found: Sequence[Found], seconds: Callable[[str, int], float], count: Callable[[int], int]
) -> Iterator[tuple[str, ...]]:
    """A header and a line for each case. Steps are compared at the largest size that fits without offload."""
    without = [one for one in found if CASES[one.case].options["offload"] == "none"]
    base = max(without, key=lambda one: one.layers, default=None)
    same = base.layers if base else 0
    yield "case", "layers", "parameters", "device", "host", "a parameter", "step", f"at {same} layers"
    for one in found:
        sizes, times = ["-"] * 5, ["-"] * 2
        if one.layers:
            size = count(one.layers)
            each = f"{one.row.in_host / size:.3g} bytes"
            sizes = [str(one.layers), f"{size / 1e9:.3g} B", gib(one.row.peak), gib(one.row.in_host), each]
            times[0] = f"{seconds(one.case, one.layers):.3g}"
        if base and one.layers >= same > 0:
            times[1] = f"{seconds(one.case, same) / seconds(base.case, same):.3g} x"
        yield one.case, *sizes, *times


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The largest GPT that trains on one GPU.")
    parser.add_argument("--target", help="one that is not there, such as h200; without it, the one of this machine")
    parser.add_argument("--memory-gib", type=float, help="of the device; without it, what it has")
    parser.add_argument("--host-gib", type=float, help="of the host; without it, what is free; for a target, any")
    parser.add_argument("--sequence", type=int, default=2048, help="tokens")
    parser.add_argument("--batch", type=int, default=1, help="sequences")
    parser.add_argument("--vocab", type=int, default=50304, help="tokens")
    parser.add_argument("--steps", type=int, default=3, help="real ones, where there is a device")
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), metavar="CASE", help=", ".join(CASES))
    return parser.parse_args()


def _target(asked: str | None) -> Target:
    """One device. Leaves, with a line, where there is none."""
    try:
        if asked is not None:
            where = target.parse(asked if ":" in asked else f"{asked}:1")
        else:
            os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")
            found = process.run(seen, environment={"JAX_PLATFORMS": "", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"})
            where = from_json(Target, found) if "problem" not in found else sys.exit(found["problem"])
    except (ValueError, process.ProcessError) as error:
        sys.exit(str(error).splitlines()[0])
    return where if where.size == 1 else sys.exit(f"{where}: {where.size} devices; name one, such as {where.name}:1.")


if __name__ == "__main__":
    main()
