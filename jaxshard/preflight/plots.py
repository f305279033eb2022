"""The bars of a report, drawn without a screen: figures whose texts stay text, and whose lines take the page's colour.

One unit of a figure is one pixel of the page.
"""

from __future__ import annotations

import html
import io
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from jaxshard.preflight.palette import Paint

WIDTH = 1040
# Stand for colours of the page, which are others in the dark; see `svg`.
INK, QUIET, FAINT, PAPER, ALERT = "#010203", "#020304", "#040506", "#070809", "#0a0b0c"
_PAGE = {
    INK: "currentColor",
    QUIET: "var(--quiet)",
    FAINT: "var(--faint)",
    PAPER: "var(--paper)",
    ALERT: "var(--alert)",
}
_ROW = 26
_CUT = "\N{RIGHTWARDS ARROW} "


@contextmanager
def style() -> Iterator[None]:
    """What figures are made and drawn within: nothing of a user's own matplotlib settings, and no formulas in texts."""
    ours: dict[Any, Any] = {
        "font.family": "DejaVu Sans",  # to measure by, the same everywhere; the page's own is as narrow or narrower
        "font.size": 11,
        "text.color": INK,
        "text.parse_math": False,
        "axes.edgecolor": FAINT,
        "axes.labelcolor": INK,
        "xtick.color": FAINT,
        "xtick.labelcolor": INK,
        "hatch.linewidth": 0.8,
        "svg.fonttype": "none",
    }
    with mpl.rc_context(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # the page's own may have it
        mpl.rcdefaults()
        mpl.rcParams.update(ours)
        yield


def figure(height: float) -> Figure:
    """An empty one, as wide as the page."""
    made = Figure(figsize=(WIDTH / 72, height / 72), dpi=72)
    FigureCanvasSVG(made)
    made.patch.set_visible(False)
    return made


def svg(made: Figure, name: str, title: str) -> str:
    """A figure as text to stand in a page. name: its own in the page. title: for those who cannot see it."""
    out = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": name}):
        made.savefig(out, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    text = out.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<svg[^>]*>", f'<svg viewBox="0 0 {made.bbox.width:g} {made.bbox.height:g}" role="img">', text)
    text = text.replace(">", f"><title>{html.escape(title)}</title>", 1)
    text = re.sub(r'<g id="[^"]*"', "<g", text)  # every figure has an axes_1
    text = re.sub(r"font: ((?:\w+ )?)([\d.]+px) [^;\"]*", _font, text)
    for stand_in, colour in _PAGE.items():
        text = text.replace(stand_in, colour)
    return text


def _font(found: re.Match[str]) -> str:
    weight = f"font-weight: {found[1].strip()}; " if found[1] else ""
    return f"{weight}font-size: {found[2]}"


def text_width(text: str, size: float = 11) -> float:
    """About how wide a text is, in pixels."""
    return 0.6 * size * len(text)


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A line of a plot. parts: by name. note: after the total. alert: whether the note says that something is wrong."""

    label: str
    parts: Mapping[str, float]
    note: str = ""
    alert: bool = False

    @property
    def total(self) -> float:
        return sum(self.parts.values())


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A line across the bars. reserved: from where to it room is taken."""

    at: float
    reserved: float
    label: str


def bars(
    lines: Sequence[Bar],
    paints: Mapping[str, Paint],
    unit: float,
    axis: str,
    say: Callable[[float], str],
    mark: Mark | None = None,
) -> Figure:
    """Bars of stacked parts on one scale. unit: one of the axis. say: a figure as text.

    A bar ten times as long as most is cut off at the edge, and its total says how long it is.
    """
    gutter = min(360.0, max(text_width(one.label, 12) for one in lines) + 12)
    top = 22 if mark else 4
    made = figure(top + _ROW * len(lines) + 40)
    right = max(_total_width(one, say) for one in lines)
    wide, high = WIDTH - gutter - right, _ROW * len(lines)
    axes = made.add_axes((gutter / WIDTH, 40 / made.bbox.height, wide / WIDTH, high / made.bbox.height))
    reach = _reach([one.total for one in lines], mark)
    axes.set_xlim(0, reach / unit)
    axes.set_ylim(len(lines) - 0.5, -0.5)
    _frame(axes, axis)
    pixels = wide / reach
    if mark:
        _mark(axes, mark, reach, unit)
    for i, one in enumerate(lines):
        axes.text(-8 / pixels / unit, i, _fit(one.label, gutter), ha="right", va="center", size=12)
        begin = 0.0
        for name, size in one.parts.items():
            paint = paints[name]
            axes.barh(
                i, size / unit, left=begin / unit, height=0.72, color=paint.fill, edgecolor=PAPER, lw=0.6, gid=name
            )
            shown = min(begin + size, reach) - begin
            for text in (f"{paint.name} {say(size)}", say(size)):
                if text_width(text, 10) + 6 < shown * pixels:
                    middle = (begin + shown / 2) / unit
                    axes.text(middle, i, text, ha="center", va="center_baseline", size=10, color=paint.ink)
                    break
            begin += size
        end = min(one.total, reach) / unit
        total = f"{_CUT if one.total > reach else ''}{say(one.total)}"
        axes.annotate(total, (end, i), (6, 0), textcoords="offset points", va="center", weight="bold")
        if one.note:
            at = 12 + text_width(total, 12)
            colour = ALERT if one.alert else INK
            axes.annotate(one.note, (end, i), (at, 0), textcoords="offset points", va="center", color=colour, size=10)
    return made


def _total_width(one: Bar, say: Callable[[float], str]) -> float:
    return 24 + text_width(_CUT + say(one.total), 12) + text_width(one.note, 10)


def _reach(totals: Sequence[float], mark: Mark | None) -> float:
    """The end of the axis."""
    there = sorted(total for total in totals if total > 0)
    usual = there[(len(there) - 1) // 2]
    longest = max(total for total in there if total <= 10 * usual)
    return max(longest, mark.at) * 1.02 if mark and mark.at <= 4 * longest else longest


def _frame(axes: Axes, label: str) -> None:
    axes.patch.set_visible(False)
    for side in axes.spines.values():
        side.set_visible(False)
    axes.set_yticks([])
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    axes.tick_params("x", length=0, labelsize=10)
    axes.grid(axis="x", color=FAINT, lw=0.6)
    axes.set_axisbelow(True)
    axes.set_xlabel(label, size=10, loc="left")


def _mark(axes: Axes, mark: Mark, reach: float, unit: float) -> None:
    if mark.at > reach:
        axes.annotate(f"{mark.label} {_CUT}", (1, 1), (0, 4), "axes fraction", textcoords="offset points", ha="right")
        return
    axes.axvspan(mark.reserved / unit, mark.at / unit, facecolor="none", edgecolor=FAINT, hatch="////", lw=0, zorder=0)
    axes.axvline(mark.at / unit, color=INK, lw=1.2, zorder=3)
    side = "right" if mark.at > reach / 3 else "left"
    axes.annotate(
        mark.label, (mark.at / unit, 1), (0, 4), ("data", "axes fraction"), textcoords="offset points", ha=side
    )


def _fit(label: str, wide: float) -> str:
    most = int((wide - 12) / text_width("x", 12))
    return label if len(label) <= most else f"{label[: most - 1]}\N{HORIZONTAL ELLIPSIS}"
