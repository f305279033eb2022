"""What a run shows: a progress bar on a terminal, plain lines elsewhere, and a summary at the end."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table


@dataclass(frozen=True, kw_only=True)
class Report:
    """Where a run is: its step (from 1), the loss of that step, and its speed since the last report."""

    step: int
    loss: float
    tokens_per_second: float | None
    seconds_left: float | None


class Pace:
    """Tokens per second and time left, without the time that compiling, saving and evaluation take."""

    def __init__(self, *, tokens: int, steps: int):
        self.tokens, self.steps = tokens, steps
        self.since: tuple[int, float] | None = None

    def resume(self, step: int) -> None:
        self.since = (step, time.perf_counter())

    def report(self, step: int, loss: float) -> Report:
        speed = left = None
        if self.since is not None and step > self.since[0]:
            seconds = (time.perf_counter() - self.since[1]) / (step - self.since[0])
            speed, left = self.tokens / seconds, seconds * (self.steps - step)
        self.resume(step)
        return Report(step=step, loss=loss, tokens_per_second=speed, seconds_left=left)


@contextmanager
def progress_bar(console: Console, steps: int) -> Iterator[Callable[[Report], None]]:
    """A function that shows each `Report` of a run of `steps` steps."""
    if not console.is_terminal:
        yield lambda report: say(console, f"step {report.step}/{steps}  {_speed(report)}")
        return
    count, speed = TextColumn("step {task.completed:.0f}/{task.total:.0f}"), TextColumn("{task.description}")
    with Progress(count, BarColumn(), speed, console=console) as bar:
        task = bar.add_task("compiling", total=steps)
        yield lambda report: bar.update(task, completed=report.step, description=_speed(report))


def say(console: Console, line: str) -> None:
    """Prints one line, whatever the terminal's width and however it looks to rich."""
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def summary(console: Console, explanation: Any) -> None:
    """What each device held, and what it sent in each step, from `training.explain()`."""
    held = Table("state", "size", box=SIMPLE_HEAD)
    held.columns[1].justify = "right"
    for name, size in explanation.bytes_per_device.items():
        if size:
            held.add_row(name, mib(size))
    held.add_row("in all", mib(sum(explanation.bytes_per_device.values())))

    calls, wire = Counter(), Counter()
    for collective in explanation.contract:
        kind = (collective.kind, " x ".join(collective.axes), collective.dtype)
        calls[kind] += collective.count
        wire[kind] += collective.wire_bytes
    sent = Table("collective", "over", "dtype", "calls", "size", box=SIMPLE_HEAD)
    for column in sent.columns[3:]:
        column.justify = "right"
    for kind in calls:
        sent.add_row(*map(str, kind), str(calls[kind]), mib(wire[kind]))
    sent.add_row("in all", "", "", str(calls.total()), mib(wire.total()))
    console.print(f"held by {explanation.device}:", held)
    console.print(f"{explanation.moves} by {explanation.device} in a step:", sent)


def mib(size: float) -> str:
    return f"{size / 2**20:,.3f} MiB"


def clock(seconds: float) -> str:
    """Seconds as m:ss, or h:mm:ss."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _speed(report: Report) -> str:
    parts = [f"loss {report.loss:.5f}"]
    if report.tokens_per_second is not None:
        parts.append(f"{report.tokens_per_second:,.0f} tokens/s")
    if report.seconds_left is not None:
        parts.append(f"{clock(report.seconds_left)} left")
    return "  ".join(parts)
