"""What happens while no kernel of a pass runs: a loop inside of it, or a wait for messages or the host.

A pass has no events of the loops inside of it, only the time that they take. Where a loop lies is found by its length:
a whole number of runs fills a gap between kernels, or what waits before and after it leave of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jaxshard.preflight.lanes import Event
from jaxshard.preflight.timeline import Pass


@dataclass(frozen=True, kw_only=True)
class Idle:
    """Time in which no kernel of a pass runs.

    kind: ``loop``, ``exposed`` (only messages run) or ``host`` (only transfers do, or the host's processor). start:
    seconds since the pass began. label: of a loop which it is and how often it runs, where that is known.
    """

    kind: str
    start: float
    seconds: float
    label: str = ""


def idle(one: Pass, passes: Iterable[Pass]) -> tuple[Idle, ...]:
    """The gaps between the kernels of a pass. passes: all those of its timeline."""
    inner = [other for other in passes if other.loops[:-1] == one.loops and other.loops != one.loops]
    near = 1e-9 * one.seconds  # sums of times, in another order
    others = [event for event in one.events if event.lane != "compute"]
    found: list[Idle] = []
    for begin, end in _gaps(one, near):
        stops = [x for x in sorted(event.start + event.seconds for event in others) if begin < x < end]
        starts = [x for x in sorted((event.start for event in others), reverse=True) if begin < x < end]
        loop = _loop((begin, *stops), (end, *starts), inner)
        found += _wait(begin, loop.start if loop else end, others, near)
        found += [loop, *_wait(loop.start + loop.seconds, end, others, near)] if loop else []
    return tuple(found)


def _gaps(one: Pass, near: float) -> list[tuple[float, float]]:
    kernels = sorted((x.start, x.start + x.seconds) for x in one.events if x.lane == "compute")
    edges = itertools.pairwise([(0.0, 0.0), *kernels, (one.seconds, one.seconds)])
    return [(end, start) for (_, end), (start, _) in edges if start - end > near]


def _loop(begins: Sequence[float], ends: Iterable[float], inner: Sequence[Pass]) -> Idle | None:
    """A loop that begins and ends at such moments."""
    for end, begin, one in itertools.product(ends, begins, inner):
        runs = (end - begin) / one.seconds
        if round(runs) > 0 and abs(runs - round(runs)) < 1e-6:
            return Idle(kind="loop", start=begin, seconds=end - begin, label=f"{round(runs)} x {one.name} loop")
    return None


def _wait(begin: float, end: float, others: Iterable[Event], near: float) -> list[Idle]:
    if end - begin <= near:
        return []
    lanes = {x.lane for x in others if abs(x.start + x.seconds - end) <= near}
    if not lanes:  # several loops, or one that messages of its own held up
        return [Idle(kind="loop", start=begin, seconds=end - begin, label="loops")]
    return [Idle(kind="exposed" if lanes == {"collectives"} else "host", start=begin, seconds=end - begin)]
