"""A comparison as one web page: it needs no network, and is the same for the same rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from html import escape
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax

from jaxshard.contract import Collective
from jaxshard.preflight import page, plots, timelines
from jaxshard.preflight.compare import RESERVED, ranked, room
from jaxshard.preflight.ledger import sent
from jaxshard.preflight.line import Row
from jaxshard.preflight.palette import CLASSES, KERNELS, KINDS
from jaxshard.preflight.plots import Bar, Mark
from jaxshard.preflight.show import GIB, by_kind, gib, memory_table, ms, notes, step_table
from jaxshard.preflight.target import Target
from jaxshard.preflight.timeline import Timeline


def report(rows: Sequence[Row], target: Target) -> str:
    """The text of the page: tables, plots, and for each row its timeline, its contract and what stays whole."""
    rows = ranked(rows, target)
    there = [row for row in rows if not row.problem]
    title = f"{_count(len(rows), 'line')} compared for {target}"
    with plots.style():
        parts = [
            f"<h1>{escape(title)}</h1>",
            f'<p class="quiet">{escape(_made(target))}</p>',
            _in_short(rows, there, target),
            _held(rows, there, target),
            _hosted(there, target),
            _sent(there),
            _times(there),
            _remarks(rows, target),
            "<h2>Line by line</h2>" if there else "",
            *_lines(there, target),
            page.legend(there),
        ]
    style = (Path(__file__).parent / "report.css").read_text(encoding="utf-8")
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    body = "\n".join(filter(None, parts))
    return (
        f'<!doctype html>\n<html lang="en">\n<head>{head}<style>\n{style}</style></head>\n'
        f"<body>\n{body}\n</body>\n</html>\n"
    )


def _count(number: int, of: str) -> str:
    return f"{number} {of}" + "s" * (number != 1)


def _made(target: Target) -> str:
    ours = ""
    with suppress(PackageNotFoundError):  # run from its source
        ours = f", jaxshard {version('jaxshard')}"
    where = "forced CPU devices, which only stand in for others: no capacity, no times"
    if target.device is not None:
        where = f"{target.device.name}, {gib(target.device.memory)} GiB each"
    nodes = f" on {_count(target.nodes, 'node')}" if target.nodes > 1 else ""
    return f"{_count(target.size, 'device')}{nodes} ({where}). Compiled, not run, by jax {jax.__version__}{ours}."


def _in_short(rows: Sequence[Row], there: Sequence[Row], target: Target) -> str:
    fit = [row for row in there if (room(row, target) or 0) >= 0]
    said = [f"{row.line} has the shortest estimated step, {ms(row.timeline.seconds)} ms" for row in fit if row.timeline]
    del said[1:]  # they are ranked
    if compiled := [row for row in fit if row.compiled]:
        least = min(compiled, key=lambda row: row.peak)
        said.append(f"{least.line} holds least, {gib(least.peak)} GiB")
    for number, what in (
        (len(there) - len(fit), "not fit"),
        (len(rows) - len(there), "not compile"),
        (sum(bool(row.broken) for row in there), "not keep to the contract"),
    ):
        if number:
            said.append(f"{number} of {len(rows)} {'does' if number == 1 else 'do'} {what}")
    return f"<p>{escape('; '.join(said))}.</p>" if said else ""


def _held(rows: Sequence[Row], there: Sequence[Row], target: Target) -> str:
    missing = [(str(row.line), row.problem) for row in rows if row.problem]
    made = ["<h2>Held by one device at the worst moment, GiB</h2>", page.summary(memory_table(there, target), missing)]
    bars = [memory_bar(row, target) for row in there]
    if any(one.total for one in bars):
        mark = None
        if target.device is not None:
            memory = target.device.memory
            label = f"a device has {gib(memory)} GiB, {RESERVED:.0%} reserved"
            mark = Mark(at=memory, reserved=memory * (1 - RESERVED), label=label)
        drawn = plots.bars(bars, CLASSES, GIB, "GiB", lambda bytes: gib(round(bytes)), mark)
        made += [page.keys(CLASSES.values()), page.plot(drawn, "memory", "What one device holds, by class")]
    return "\n".join(made)


def memory_bar(row: Row, target: Target) -> Bar:
    """Bytes by class."""
    free = room(row, target)
    planned = "" if row.compiled else "planned, no activations"
    over = 0 if free is None else max(0, -free)
    return Bar(
        label=str(row.line),
        parts=_by_class(row.held),
        note=f"{gib(over)} too much" if over else planned,
        alert=bool(over),
    )


def _by_class(sizes: Mapping[str, int]) -> dict[str, int]:
    """The names of a ledger as those that are drawn."""
    parts = dict.fromkeys(CLASSES, 0)
    for name, size in sizes.items():
        parts[name if name in parts else "other"] += size
    return {name: size for name, size in parts.items() if size}


def _hosted(there: Sequence[Row], target: Target) -> str:
    """What lies in host memory, if anything does."""
    if not any(row.host for row in there):
        return ""
    bars = [host_bar(row, target) for row in there]
    drawn = plots.bars(bars, CLASSES, GIB, "GiB", lambda bytes: gib(round(bytes)))
    return "\n".join(
        [
            "<h2>In the host's memory, for each device, GiB</h2>",
            page.keys(CLASSES.values()),
            page.plot(drawn, "host", "What lies in the host's memory for one device, by class"),
        ]
    )


def host_bar(row: Row, target: Target) -> Bar:
    """Bytes by class."""
    node = f"{gib(row.in_host * target.per_node)} in a node" if row.host and target.per_node > 1 else ""
    return Bar(label=str(row.line), parts=_by_class(row.host), note=node)


def _sent(there: Sequence[Row]) -> str:
    if not there:
        return ""
    made = ["<h2>Sent by one device in a step, messages x GiB on the wire</h2>", page.summary(step_table(there))]
    bars = [traffic_bar(row) for row in there]
    if any(one.total for one in bars):
        drawn = plots.bars(bars, KINDS, GIB, "GiB on the wire", lambda bytes: gib(round(bytes)))
        made += [page.keys(page.used(there)), page.plot(drawn, "traffic", "What one device sends in a step, by kind")]
    return "\n".join(made)


def traffic_bar(row: Row) -> Bar:
    """Bytes on the wire by kind of collective."""
    totals = by_kind(row)
    return Bar(
        label=str(row.line),
        parts={kind: totals[kind][1] for kind in KINDS if kind in totals},
        note="" if row.compiled else "planned, the first device's",
    )


def _times(there: Sequence[Row]) -> str:
    bars = [time_bar(str(row.line), row.timeline) for row in there if row.timeline]
    if not any(one.total for one in bars):
        return ""
    used = {name for one in bars for name in one.parts}
    paints = KERNELS | KINDS
    return "\n".join(
        [
            "<h2>What a step takes, estimated, ms</h2>",
            "<p>Kernels by what bounds them, and after them, by kind, the messages that no kernel hides.</p>",
            page.keys(paint for name, paint in paints.items() if name in used),
            page.plot(plots.bars(bars, paints, 1e-3, "ms", ms), "times", "What the time of a step goes to"),
        ]
    )


def time_bar(label: str, found: Timeline) -> Bar:
    """Seconds by what bounds kernels, and of exposed messages by kind."""
    parts = {"matmul": found.matmul, "memory": found.memory, "host": found.host} | dict.fromkeys(KINDS, 0.0)
    for title, seconds in found.exposures.items():
        parts[title.partition(" over ")[0]] += seconds
    return Bar(
        label=label,
        parts={name: seconds for name, seconds in parts.items() if seconds},
        note=f"{ms(found.exposed)} exposed" if found.exposed else "",
    )


def _remarks(rows: Sequence[Row], target: Target) -> str:
    """The notes of `show`, but for problems, which stand in the table; what is broken stands with its line in full."""
    said = notes([row for row in rows if not row.problem], target)
    items = [f"<li>{escape(one)}</li>" for one in said if not one.startswith(" ")]
    return f"<ul>{''.join(items)}</ul>" if items else ""


def _lines(there: Sequence[Row], target: Target) -> list[str]:
    widths = timelines.scales(row.timeline for row in there if row.timeline)
    return [_line(i, row, target, widths) for i, row in enumerate(there)]


def _line(i: int, row: Row, target: Target, widths: Mapping[str, float]) -> str:
    short = [f"{gib(row.peak)} GiB held", f"{gib(row.wire_bytes)} GiB sent"]
    if row.timeline:
        short.insert(0, f"{ms(row.timeline.seconds)} ms")
    title = f'<strong>{escape(str(row.line))}</strong> <span class="quiet">{escape(", ".join(short))}</span>'
    parts = [page.facts(_facts(row, target))]
    if row.broken:
        parts.insert(0, f'<div class="broken">{escape(row.broken)}</div>')
    if row.timeline:
        kinds = {event.kind for one in row.timeline.passes for event in one.events}
        parts += [
            "<h3>Timeline, estimated</h3>",
            page.keys([paint for kind, paint in (KERNELS | KINDS).items() if kind in kinds], exposed=True),
            page.plot(timelines.draw(row.timeline, widths), f"timeline-{i}", f"The timeline of {row.line}"),
            "<h3>What takes the most of a step</h3>",
            _slowest(row.timeline),
        ]
    parts += ["<h3>Contract</h3>", _contract(row, target)]
    if row.whole:
        parts += ["<h3>Whole on every device</h3>", _whole(row)]
    shown = "".join(parts)
    return f'<details{" open" if i == 0 else ""}><summary>{title}</summary><div id="line-{i}">{shown}</div></details>'


def _facts(row: Row, target: Target) -> dict[str, str]:
    facts = {"mesh": " x ".join(f"{axis} {size}" for axis, size in row.mesh.items())}
    free = room(row, target)
    if free is not None:
        facts["memory"] = f"{gib(free)} GiB left" if free >= 0 else f"does not fit, {gib(-free)} GiB too much"
    if row.host:
        facts["in host memory"] = ", ".join(f"{gib(size)} GiB of {name}" for name, size in row.host.items())
    if row.link:
        facts["over the link to the host"] = "; ".join(
            f"{one.direction.replace('_', ' ')} {_number(one.planned)} B planned"
            + ("" if one.compiled is None else f", {_number(one.compiled)} B compiled")
            for one in row.link
        )
    if row.timeline:
        exposed = (f"{ms(x)} ms of {title}" for title, x in sorted(row.timeline.exposures.items()) if x)
        facts["bound by"] = row.timeline.bound_by
        facts["exposed"] = ", ".join(exposed) or "nothing"
    if row.estimate:
        facts["XLA's estimate"] = f"{ms(row.estimate.seconds)} ms, of which {ms(row.estimate.exposed)} ms exposed"
    elif row.unestimated:
        facts["XLA's estimate"] = f"none: {row.unestimated}"
    if row.compiled:
        facts["compiled in"] = f"{row.seconds:.0f} s"
    if row.notes:
        facts["notes"] = "; ".join(row.notes)
    return facts


def _slowest(found: Timeline) -> str:
    lines = []
    for x in found.slowest:
        label = " over ".join(timelines.leaves(x)) if x.lane == "collectives" else x.label
        lines.append((label, x.kind, ms(x.seconds), f"{x.seconds / found.seconds:.1%}"))
    return page.table(("", "kind, or bound by", "ms in a step", "of the step"), lines, text=(0, 1), free=(0,))


def _contract(row: Row, target: Target) -> str:
    """Planned beside compiled, by kind, dtype and axes."""
    before, after = _messages(row.contract), _messages(row.sent)
    lines = []
    for one in sent(row.contract, row.sent):
        key = one.kind, one.dtype, one.axes
        planned = _number(before[key]), _number(one.planned)
        compiled = (_number(after[key]), _number(one.compiled)) if row.compiled else ("not compiled", "")
        lines.append((one.kind, one.dtype, " x ".join(one.axes), *planned, *compiled))
    if not lines:
        return "<p>Nothing is sent.</p>"
    header = ("kind", "dtype", "over", "planned", "bytes planned", "compiled", "bytes compiled")
    said = (
        "Messages of a step, and the bytes of their whole buffers. The plan is the most that a step may send; a "
        "compiler may merge messages, and send equal ones once."
    )
    if target.source == "cpu":
        said += " CPUs send float32 in place of bfloat16."
    return page.table(header, lines, text=(0, 1, 2)) + f'<p class="quiet">{said}</p>'


def _messages(collectives: Iterable[Collective]) -> Counter[Any]:
    """How many there are, by kind, dtype and axes."""
    counts: Counter[Any] = Counter()
    for one in collectives:
        counts[one.kind, one.dtype, one.axes] += one.count
    return counts


def _number(number: int) -> str:
    return f"{number:,}" if number else "-"


def _whole(row: Row) -> str:
    lines = [
        (one.path, f"{one.dtype}[{','.join(map(str, one.shape))}]", f"{one.costs:,}", one.because)
        for one in sorted(row.whole, key=lambda one: -one.costs)
    ]
    return page.table(("leaf", "array", "bytes that splitting saves", "because"), lines, text=(0, 1, 3), free=(0, 3))
