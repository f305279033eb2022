"""The parts of a report's page: tables, plots, keys to colours and the legend. All texts are escaped here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from matplotlib.figure import Figure
from rich.table import Table

from jaxshard.preflight import plots
from jaxshard.preflight.line import Row
from jaxshard.preflight.palette import CLASSES, KERNELS, KINDS, Paint


def plot(drawn: Figure, name: str, title: str) -> str:
    """name: its own in the page."""
    return f'<div class="wide">{plots.svg(drawn, name, title)}</div>'


def facts(of: Mapping[str, str]) -> str:
    """Names and what is to say of each."""
    return f"<dl>{''.join(f'<dt>{escape(name)}</dt><dd>{escape(text)}</dd>' for name, text in of.items())}</dl>"


def keys(paints: Iterable[Paint], exposed: bool = False) -> str:
    """What the colours of a plot mean, in a line. exposed: whether it shows what of messages is."""
    keys = [f'<span class="key">{_swatch(one)}{escape(one.name)}</span>' for one in paints]
    if exposed:
        keys.append('<span class="key"><span class="swatch exposed"></span>only messages run</span>')
    return f'<div class="keys">{"".join(keys)}</div>'


def _swatch(paint: Paint) -> str:
    return f'<span class="swatch" style="background:{paint.fill}"></span>'


def table(header: Sequence[str], lines: Iterable[Sequence[str]], text: Sequence[int], free: Sequence[int] = ()) -> str:
    """text: the columns that are no numbers. free: those whose texts may break."""
    kinds = ["reason" if i in free else "" if i in text else "number" for i in range(len(header))]
    body = "".join(f"<tr>{_cells('td', line, kinds)}</tr>" for line in lines)
    return _scrolled(_cells("th", header, kinds), body)


def summary(printed: Table, missing: Iterable[tuple[str, str]] = ()) -> str:
    """A table of the terminal's, with links to the lines, without columns in which nothing stands.

    missing: lines to stand under it, with what is to say in place of figures.
    """
    first, *columns = printed.columns
    columns = [one for one in columns if any(one.cells)]
    kinds = ["number" if one.justify == "right" else "" for one in columns]
    body = ""
    for i, row in enumerate(printed.rows):
        name = escape(str(list(first.cells)[i]))
        figures = _cells("td", [str(list(one.cells)[i]) for one in columns], kinds)
        body += f'<tr class="{row.style or ""}"><th><a href="#line-{i}">{name}</a></th>{figures}</tr>'
    for name, reason in missing:
        why = f'<td colspan="{max(1, len(columns))}" class="reason alert">{escape(reason)}</td>'
        body += f"<tr><th>{escape(name)}</th>{why}</tr>"
    return _scrolled(_cells("th", [str(one.header) for one in (first, *columns)], ["", *kinds]), body)


def _cells(tag: str, texts: Sequence[str], kinds: Sequence[str]) -> str:
    return "".join(f'<{tag} class="{kind}">{escape(x)}</{tag}>' for x, kind in zip(texts, kinds, strict=True))


def _scrolled(heads: str, body: str) -> str:
    return f'<div class="wide"><table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>'


def used(rows: Iterable[Row]) -> list[Paint]:
    """The kinds of messages that any row has."""
    kinds = {one.kind for row in rows for one in (*row.contract, *row.sent)}
    return [paint for kind, paint in KINDS.items() if kind in kinds]


def legend(rows: Sequence[Row]) -> str:
    """How to read the page."""
    parts = [
        "<h2>How to read it</h2>",
        "<p>A line is a strategy with its options, compiled by itself. Lines that fit come first, those with the "
        "shortest estimated step before others; then those that do not fit, and those that do not compile. Bars and "
        "timelines have one scale for all lines. A bar with an arrow is cut off: it is more than ten times as long as "
        "most.</p>",
        "<p>What a device holds, by class, adds up to the peak; what lies in host memory is no part of it. On the wire "
        "are the bytes that pass a device's link by the ring algorithms.</p>",
        _meanings("What a device holds", CLASSES.values()),
    ]
    if sent := used(rows):
        parts.append(_meanings("What it sends", sent))
    if any(row.timeline for row in rows):
        parts += [
            _meanings("What bounds its kernels", KERNELS.values()),
            "<p>A timeline is a roofline of each kernel and each message over the compiled schedule. It ranks lines "
            "and says what bounds them, and promises no times: measured steps took up to 1.4 times as long. Messages "
            "are exposed where no kernel runs beside them. A loop, hatched, is timed once, with nothing under way when "
            "a run begins or ends; a compiler may put two layers into one run. Kernels too short to be seen are drawn "
            "with their neighbours, as what takes the most of them.</p>",
        ]
    return "\n".join(parts)


def _meanings(title: str, paints: Iterable[Paint]) -> str:
    terms = (f"<dt>{_swatch(one)}{escape(one.name)}</dt><dd>{escape(one.meaning)}</dd>" for one in paints)
    return f"<h3>{title}</h3><dl>{''.join(terms)}</dl>"
