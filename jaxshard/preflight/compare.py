"""Strategies side by side, for devices that need not be there: each compiled in a process of its own."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxshard.preflight.line import Line, Row, row, start
from jaxshard.preflight.target import Target
from jaxshard.strategy import named, offload

RESERVED = 0.05
"""The share of a device's memory that CUDA's context, NCCL and the libraries are taken to need."""
USUAL = ("dp", "ddp", "zero1", "zero2", "shard_grad_op", "zero3", "hsdp")
"""Every strategy under the name it is best known by."""


def asked(strategies: Sequence[str] = USUAL, choices: Mapping[str, Sequence[Any]] | None = None) -> tuple[Line, ...]:
    """A line for each strategy with each combination of the choices, ``{"accumulate": [1, 8], "regather": [True]}``.

    Of lines that mean the same (regather for a strategy that splits no parameters) the first alone is kept. Raises
    ValueError for an unknown strategy, with the nearest name.
    """
    choices = choices or {}
    seen, lines = [], []
    for name in strategies:
        named(name)
        for values in itertools.product(*choices.values()):
            line = Line(strategy=name, options=dict(zip(choices, values, strict=True)))
            meaning = _meaning(line)
            if meaning not in seen:
                seen.append(meaning)
                lines.append(line)
    return tuple(lines)


def _meaning(line: Line) -> Any:
    """What two lines are compared by: options that change nothing about a strategy are left out."""
    strategy, options = line.resolve()
    if strategy.params.devices == "first":
        return line.strategy, strategy.params, strategy.grads, strategy.opt
    if strategy == offload(strategy, "none"):  # nothing is in host memory
        default = named(line.strategy)
        strategy = replace(strategy, update=default.update, buffers=default.buffers)
    if not strategy.params.axes:  # nothing is gathered
        default = named(line.strategy)
        strategy = replace(strategy, gather=default.gather, regather=default.regather)
    return line.strategy, strategy, options


def compare(
    build: Callable[..., Any] | str,
    target: Target,
    lines: Iterable[Line],
    *,
    replica: int | None = None,
    arguments: Mapping[str, Any] | None = None,
    workers: int = 2,
    cache: Path | None = None,
) -> Generator[Row]:
    """The rows of these lines, each as soon as it is there.

    build: ``build(mesh, strategy, **arguments, **options)`` makes the training, by `parallelize`; a function at the top
    of a module or a script, or its place as text, ``"script.py:build"``. It is called in processes of their own, which
    see no GPU. replica: copies of the states, where a strategy does not need more. arguments: what JSON can say.
    workers: processes at a time. cache: a folder, see `cache_folder`.

    Leaving early (Ctrl-C, or closing the iterator) ends the processes, and rows that are done are in the cache.
    """
    calls, stopped = [], threading.Event()

    def examined(line: Line) -> Row:
        with start(build, line, target, replica=replica, arguments=arguments or {}, cache=cache) as call:
            calls.append(call)
            if stopped.is_set():
                call.stop()
            return row(call, line)

    pool = ThreadPoolExecutor(workers)
    try:
        for done in as_completed([pool.submit(examined, line) for line in lines]):
            yield done.result()
    finally:
        stopped.set()
        pool.shutdown(wait=False, cancel_futures=True)
        for call in calls:
            call.stop()


def cache_folder() -> Path:
    """Where rows of programs that were compiled before are kept, for every project of this user."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "jaxshard", "compare")


def room(row: Row, target: Target) -> int | None:
    """Bytes that a row leaves free on a device, below 0 if it does not fit; None where that is not known.

    `RESERVED` is taken off first.
    """
    if row.problem or target.device is None:
        return None
    return round(target.device.memory * (1 - RESERVED)) - row.peak


def ranked(rows: Iterable[Row], target: Target) -> list[Row]:
    """Rows that fit by their estimated time, then those of unknown time, those that do not fit, and problems."""

    def rank(one: Row):
        free = room(one, target)
        if one.problem:
            return 3, 0.0
        if free is not None and free < 0:
            return 2, float(one.peak)
        return (0, one.timeline.seconds) if one.timeline else (1, float(one.peak))

    return sorted(rows, key=rank)
