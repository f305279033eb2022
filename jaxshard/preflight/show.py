"""A comparison on a terminal: what one device holds, and what a step sends and takes, a line for each row."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxshard.preflight.compare import RESERVED, room
from jaxshard.preflight.ledger import DIRECTIONS
from jaxshard.preflight.line import Row
from jaxshard.preflight.target import Target

GIB = 2**30
SHOWN = {
    "params": "params",
    "opt": "opt",
    "gradients": "grads",
    "gathered weights": "gathered",
    "logits": "logits",
    "activations": "activ.",
}
"""The classes that have a column, and its header; the rest is together in one."""
KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "permute", "broadcast", "gather")


def show(console: Console, rows: Sequence[Row], target: Target) -> None:
    """Prints the tables, and under them what did not compile, does not fit, or is otherwise to be known."""
    there = [row for row in rows if not row.problem]
    if there:
        console.print(
            f"held by one device at the worst moment, GiB ({target}, compiled, not run)", highlight=False, markup=False
        )
        _print(console, memory_table(there, target))
        console.print("sent by one device in a step, GiB on the wire, and the time that a step takes", highlight=False)
        _print(console, step_table(there))
    for line in notes(rows, target):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _print(console: Console, table: Table) -> None:
    """Prints every figure: a terminal that is too narrow breaks the lines."""
    width = console.width
    console.width = max(width, 1000)  # the table takes what it needs
    console.print(table)
    console.width = width


def _table(*headers: str) -> Table:
    table = Table(*headers, box=SIMPLE_HEAD, padding=(0, 1))
    for column in table.columns:
        column.no_wrap = True
        column.justify = "left" if column.header in ("strategy", "bound by") else "right"
    return table


def memory_table(rows: Sequence[Row], target: Target) -> Table:
    offloads = any(row.host for row in rows)
    table = _table("strategy", *SHOWN.values(), "other", "peak", "left", *(["host", "host/node"] if offloads else []))
    for row in rows:
        shown = [row.held.get(name, 0) for name in SHOWN]
        free = room(row, target)
        left = "" if free is None else gib(free)
        style = "dim" if free is not None and free < 0 else None
        host = [gib(row.in_host), gib(row.in_host * target.per_node)] if offloads else []
        table.add_row(
            Text(str(row.line)), *map(gib, shown), gib(row.peak - sum(shown)), gib(row.peak), left, *host, style=style
        )
    return table


def step_table(rows: Sequence[Row]) -> Table:
    totals = {id(row): by_kind(row) for row in rows}
    kinds = [kind for kind in KINDS if any(kind in total for total in totals.values())]
    directions = DIRECTIONS if any(row.link for row in rows) else ()
    link = [direction.replace("_", " ") for direction in directions]
    table = _table("strategy", *kinds, *link, "hidden", "step ms", "XLA's", "bound by")
    for row in rows:
        total = totals[id(row)]
        sent = [f"{total[kind][0]} x {gib(total[kind][1])}" if kind in total else "" for kind in kinds]
        crossed = [gib(row.crossed(direction)) for direction in directions]
        table.add_row(Text(str(row.line)), *sent, *crossed, *_times(row))
    return table


def _times(row: Row) -> tuple[str, str, str, str]:
    if row.timeline is None:
        return "", "", "", ""
    estimated = ms(row.estimate.seconds) if row.estimate else ""
    return f"{max(row.timeline.hidden, 0):.0%}", ms(row.timeline.seconds), estimated, row.timeline.bound_by


def by_kind(row: Row) -> dict[str, tuple[int, int]]:
    """(messages, bytes on the wire) of a step, by kind."""
    totals: dict[str, tuple[int, int]] = {}
    for one in row.messages:
        count, bytes = totals.get(one.kind, (0, 0))
        totals[one.kind] = count + one.count, bytes + one.wire_bytes
    return totals


def notes(rows: Sequence[Row], target: Target) -> list[str]:
    """What a reader of the tables should know, a line each."""
    lines = []
    for row in rows:
        free = room(row, target)
        if row.problem:
            lines.append(f"{row.line}: {row.problem}")
        elif free is not None and free < 0:
            lines.append(f"{row.line}: does not fit, {gib(-free)} GiB too much")
        lines += [f"{row.line}: {one.splitlines()[0]}" for one in (row.broken, *row.notes) if one]
        lines += [f"    {one.strip()}" for one in row.broken.splitlines()[1:]]
    if target.device is not None:
        lines += [
            f"left: of {gib(target.device.memory)} GiB, less {RESERVED:.0%} for CUDA, NCCL and libraries. JAX takes "
            "75 % of the memory, unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise.",
            "step: a roofline over the compiled schedule. It ranks, and promises nothing: measured steps took up to "
            "1.4 times as long.",
        ]
    if any(row.host or row.link for row in rows):
        lines.append(
            "host: in the host's memory, for each device and for the devices of a node together; no part of the peak. "
            "to device, to host: GiB over the link between a device and its host."
        )
    return lines


def gib(bytes: int) -> str:
    size = bytes / GIB
    return (
        "-" if not bytes else f"{size:.1f}" if abs(size) >= 10 else f"{size:.2f}" if abs(size) >= 0.1 else f"{size:.3f}"
    )


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f}" if seconds >= 0.1 else f"{seconds * 1e3:.2f}"
