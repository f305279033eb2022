"""The timeline of a report's line, drawn: kernels, messages and transfers as lanes, and what of them is exposed."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch
from matplotlib.path import Path
from matplotlib.ticker import MaxNLocator

from jaxshard.preflight.idle import Idle, idle
from jaxshard.preflight.lanes import OFFLOAD, Event
from jaxshard.preflight.palette import KERNELS, KINDS, Paint
from jaxshard.preflight.plots import ALERT, FAINT, INK, PAPER, QUIET, WIDTH, figure, text_width
from jaxshard.preflight.timeline import Pass, Timeline

_GUTTER, _RIGHT = 84, 16
_WIDE = WIDTH - _GUTTER - _RIGHT
_TITLE, _LANE, _STRIP, _LABEL, _AXIS = 22, 26, 9, 14, 32  # heights
_LABELS = 3  # rows of labels under the messages
_EVENTS = 80  # in a window


@dataclass(frozen=True, kw_only=True)
class Panel:
    """A part of a timeline, from `start` on for `seconds`. kind: panels of one kind have one scale in all lines."""

    kind: str
    title: str
    run: Pass
    start: float
    seconds: float


def panels(found: Timeline) -> tuple[Panel, ...]:
    """The whole step; a run of the loop over microbatches; of the loops over layers, forward and backward, those that
    take the most; and where most of the time is in no such loop, two windows, the first a sixth of the way (the forward
    pass, which is a third of the work or less) and the second half way; and of the loops that update what lies in host
    memory the one that takes the most."""
    step = next(one for one in found.passes if one.name == "outside")
    batches = [one for one in found.passes if one.loops == ("microbatches",)][:1]
    around = batches[0] if batches else step
    updates = [one for one in found.passes if one.name == "update"]
    inside = [one for one in found.passes if one.loops == (*around.loops, "scan") and one not in updates]
    names = ("forward", "backward", "forward and backward")
    layers = [one for name in names for one in [x for x in inside if x.name == name][:1]]
    made = [Panel(kind="step", title="the step", run=step, start=0.0, seconds=step.seconds)]
    made += [_run(one, "microbatches", "microbatches") for one in batches]
    made += [_run(one, "layer", one.name) for one in layers]
    if 2 * sum(one.seconds * one.times for one in inside) < around.seconds * around.times and around.events:
        seconds = around.seconds * min(1, _EVENTS / len(around.events))
        begins = dict.fromkeys(min(around.seconds / part, around.seconds - seconds) for part in (6, 2))
        made += [Panel(kind="window", title="", run=around, start=begin, seconds=seconds) for begin in begins]
    return (*made, *(_run(one, "update", "update") for one in updates[:1]))


def _run(one: Pass, kind: str, title: str) -> Panel:
    return Panel(kind=kind, title=title, run=one, start=0.0, seconds=one.seconds)


def scales(timelines: Iterable[Timeline]) -> dict[str, float]:
    """The seconds that each kind of panel is wide, the same for all lines."""
    longest: dict[str, float] = {}
    for found in timelines:
        for one in panels(found):
            longest[one.kind] = max(longest.get(one.kind, 0.0), one.seconds)
    return longest


def draw(found: Timeline, widths: Mapping[str, float]) -> Figure:
    """The panels of a timeline, one under the other. widths: `scales` of all timelines that are shown."""
    shown = panels(found)
    heights = [_height(one, widths[one.kind]) for one in shown]
    made = figure(sum(heights))
    top = sum(heights)
    for one, high in zip(shown, heights, strict=True):
        body = high - _TITLE - _AXIS
        place = _GUTTER / WIDTH, (top - _TITLE - body) / sum(heights), _WIDE / WIDTH, body / sum(heights)
        axes = made.add_axes(place)
        _panel(axes, one, widths[one.kind], body, idle(one.run, found.passes))
        made.text(0, (top - 14) / sum(heights), _title(one), size=12, va="baseline")
        top -= high
    return made


def _height(one: Panel, width: float) -> float:
    """Title, lanes, captions and axis."""
    captions = max((row + 1 for row, _, _ in _captions(one, width)), default=0)
    return _TITLE + _LANE + _STRIP + 6 + _LANE * len(_lanes(one)) + _LABEL * captions + 2 + _AXIS


def _lanes(one: Panel) -> list[str]:
    """Those under the compute lane."""
    used = {event.lane for event in one.run.events}
    return ["collectives", *(lane for lane in OFFLOAD if lane in used)]


def _title(one: Panel) -> str:
    if one.kind == "window":
        return f"{_time(one.seconds)} of {_time(one.run.seconds)}, from {_time(one.start)} on"
    runs = f"one of {one.run.times} runs" if one.run.times > 1 else "the one run"
    of = "" if one.kind == "step" else f", {runs} of its loop"
    return f"{one.title}{of}: {_time(one.seconds)}"


def _panel(axes: Axes, one: Panel, width: float, high: float, gaps: Sequence[Idle]) -> None:
    axes.set_xlim(one.start, one.start + width)
    axes.set_ylim(high, 0)  # in pixels, from the top
    _frame(axes, one.start + width)
    pixels = _WIDE / width
    inside = [x for x in one.run.events if _shows(x, one)]
    kernels = [x for x in inside if x.lane == "compute"]
    _lane(axes, kernels, KERNELS, 0, pixels)
    for x in kernels:
        short = x.label.rpartition("/")[2]
        _write(axes, (x.label, short, short.split(" ")[0]), x, one, pixels, KERNELS[x.kind].ink)
    for x in (gap for gap in gaps if _shows(gap, one)):
        if x.kind == "loop":
            box = _boxes([(x.start, x.seconds)], 2, _LANE - 4)
            axes.add_patch(PathPatch(box, facecolor="none", edgecolor=FAINT, hatch="////", lw=0.8))
            runs = x.label.partition(" x ")[0]
            _write(axes, (x.label, f"{runs} x loop"), x, one, pixels, INK)
    _label(axes, "compute", _LANE / 2)
    strip = _LANE + 3
    exposed = [(x.start, x.seconds) for x in gaps if x.kind == "exposed" and _shows(x, one)]
    if exposed:
        patch = PathPatch(_boxes(exposed, strip, _STRIP), facecolor=ALERT, edgecolor=ALERT, lw=0.5, gid="exposed")
        axes.add_patch(patch)
    _label(axes, "exposed", strip + _STRIP / 2, ALERT if exposed else QUIET)
    top = strip + _STRIP + 3
    for lane in _lanes(one):
        sent = [x for x in inside if x.lane == lane]
        paints = KINDS if lane == "collectives" else KERNELS
        _lane(axes, sent, paints, top, pixels)
        _label(axes, lane, top + _LANE / 2)
        top += _LANE
    for row, begin, text in _captions(one, width):
        axes.text(begin, top + 1 + _LABEL * (row + 0.5), text, va="center", size=10)


def _shows(x: Event | Idle, one: Panel) -> bool:
    return x.start + x.seconds > one.start and x.start < one.start + one.seconds


def _frame(axes: Axes, longest: float) -> None:
    axes.patch.set_visible(False)
    for side in axes.spines.values():
        side.set_visible(False)
    axes.set_yticks([])
    unit, name = (1e-3, "ms") if longest >= 1e-3 else (1e-6, "\N{MICRO SIGN}s")
    axes.xaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(lambda x, _: f"{x / unit:g} {name}")
    axes.tick_params("x", length=0, labelsize=10)
    axes.grid(axis="x", color=FAINT, lw=0.6)
    axes.set_axisbelow(True)


def _label(axes: Axes, text: str, y: float, colour: str = INK) -> None:
    axes.annotate(
        text,
        (0, y),
        (-8, 0),
        ("axes fraction", "data"),
        "offset points",
        ha="right",
        va="center",
        size=10,
        color=colour,
    )


def _lane(axes: Axes, events: Sequence[Event], paints: Mapping[str, Paint], top: float, pixels: float) -> None:
    """One shape for each kind."""
    blocks = _blocks(events, 1.5 / pixels)
    for kind in dict.fromkeys(kind for _, _, kind in blocks):
        spans = [(start, seconds) for start, seconds, of in blocks if of == kind]
        box = _boxes(spans, top + 2, _LANE - 4)
        axes.add_patch(PathPatch(box, facecolor=paints[kind].fill, edgecolor=PAPER, lw=0.4, gid=kind))


def _blocks(events: Sequence[Event], least: float) -> list[tuple[float, float, str]]:
    """(start, seconds, kind): events, but what is too short to be seen together with what follows, as what takes the
    most of it."""
    blocks: list[tuple[float, float, str]] = []
    held: dict[str, float] = {}
    begin = end = 0.0
    for x in sorted(events, key=lambda x: x.start):
        if held and (end - begin >= least or x.start - end > least):
            blocks.append((begin, end - begin, max(held, key=held.__getitem__)))
            held = {}
        if not held:
            begin = x.start
        held[x.kind] = held.get(x.kind, 0.0) + x.seconds
        end = x.start + x.seconds
    return [*blocks, (begin, end - begin, max(held, key=held.__getitem__))] if held else blocks


def _boxes(spans: Iterable[tuple[float, float]], top: float, high: float) -> Path:
    """Rectangles as one path."""
    corners, codes = [], []
    for start, seconds in spans:
        end, low = start + seconds, top + high
        corners += [(start, top), (end, top), (end, low), (start, low), (start, top)]
        codes += [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY]
    return Path(corners, codes)


def _write(axes: Axes, texts: Iterable[str], x: Event | Idle, one: Panel, pixels: float, colour: str) -> None:
    """Writes the first text that fits into what lies on the compute lane."""
    begin, end = max(x.start, one.start), min(x.start + x.seconds, one.start + one.seconds)
    fits = (text for text in texts if text_width(text, 9) + 6 < (end - begin) * pixels)
    for text in itertools.islice(fits, 1):
        axes.text((begin + end) / 2, _LANE / 2, text, ha="center", va="center_baseline", size=9, color=colour)


def _captions(one: Panel, width: float) -> list[tuple[int, float, str]]:
    """(row, second, text): what messages carry, under them, the longest first, as far as there is room."""
    if one.kind == "step":
        return []
    found: list[tuple[int, float, str]] = []
    taken: list[tuple[int, float, float]] = []
    second = width / _WIDE  # of a pixel
    stop = one.start + one.seconds
    for x in sorted(
        (x for x in one.run.events if x.lane == "collectives" and _shows(x, one)), key=lambda x: -x.seconds
    ):
        text = f"{x.kind} {leaves(x)[0]}, {_time(x.seconds)}"
        wide = text_width(text, 10) * second
        begin = max(one.start, x.start)
        if begin + wide > one.start + width:  # over the edge
            begin = min(x.start + x.seconds, stop) - wide
        for row in range(_LABELS):
            if all(other != row or begin > right or begin + wide < left for other, left, right in taken):
                found.append((row, begin, text))
                taken.append((row, begin, begin + wide + 10 * second))
                break
    return found


def leaves(x: Event) -> tuple[str, str]:
    """What a message carries, ``blocks.mlp.up.kernel + 5``, and its axes."""
    names, _, axes = x.label.partition(" over ")
    first, *others = names.split("+")
    return f"{first} + {len(others)}" if others else first, axes


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:,.4g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:,.3g} \N{MICRO SIGN}s"
