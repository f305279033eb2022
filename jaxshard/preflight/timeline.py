"""How long a step takes on GPUs that are not there, and what bounds it: a roofline of each instruction over XLA's
own schedule.

It ranks programs and says what bounds them; it does not promise times. A step of Llama-3 8B that torchtitan measured
on 8 H100s took 1.4 times as long as this says of the same step in JAX. It knows nothing of matrix products that are
slower than the best, of messages that slow the kernels beside them, of caches, of launches (a program of many tiny
kernels takes longer), of clocks that fall under load, of a device that waits for another, or of custom calls but
cuDNN's (see `work.uncounted`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from jaxshard.compiled.hlo import Computation, Module
from jaxshard.compiled.walk import walk
from jaxshard.preflight.lanes import TO_DEVICE, TO_HOST, Event, Lanes, simulate
from jaxshard.preflight.target import Target

__all__ = ["Event", "Pass", "Timeline", "timeline"]


@dataclass(frozen=True, kw_only=True)
class Pass:
    """One run of a loop's body, or of what is outside of all loops.

    name: ``forward``, ``backward``, ``forward and backward``, ``update`` (of what lies in host memory), or ``outside``.
    loops: as in `walk.Site`. times: runs in a step, of all loops that are alike. seconds: of one run, loops inside of
    it included. events: of one run, loops inside of it left out.
    """

    name: str
    loops: tuple[str, ...]
    times: int
    seconds: float
    events: tuple[Event, ...]


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """A step, in seconds.

    seconds: all of it; compute + exposed + host. compute: in which kernels run; matmul: of these, bound by FLOP/s;
    memory: bound by bytes. messages: what collectives take, hidden or not. exposed: in which only messages run, by
    kind and axes in `exposures`. host: in which only transfers to and from the host run, or its processor does;
    to_device, to_host: what the transfers take, hidden or not. passes: what is outside of all loops, and the loops',
    what takes the most first. slowest: kernels and messages that take the most in a step, over all their runs; start is
    that of the first.
    """

    seconds: float
    compute: float
    matmul: float
    memory: float
    messages: float
    exposed: float
    host: float
    exposures: dict[str, float]
    passes: tuple[Pass, ...]
    slowest: tuple[Event, ...]
    to_device: float = 0.0
    to_host: float = 0.0

    @property
    def hidden(self) -> float:
        """The share of the messages' time in which kernels run; 1.0 without messages."""
        return 1 - self.exposed / self.messages if self.messages else 1.0

    @property
    def bound_by(self) -> str:
        """What takes the largest part of the step: ``compute``, ``memory``, ``host``, ``all_gather over shard``, ..."""
        shares = {"compute": self.matmul, "memory": self.memory, "host": self.host, **self.exposures}
        return max(shares, key=shares.__getitem__)


def timeline(module: Module, mesh: Mapping[str, int], target: Target) -> Timeline:
    """The estimated step of a compiled program.

    mesh: size by axis name, in the order of its devices. target: whose devices they are, node by node.

    Kernels run one after another in the order of the text, each as long as its FLOPs at the rate that matrix products
    reach, or its bytes at 85 % of the memory's bandwidth, whichever is longer. Beside them messages run one at a time,
    from where they start to where they are waited for. So do transfers from the host's memory, and beside those
    transfers to it, at the bandwidth of the link, and what the host's processor does, as long as its bytes at the
    bandwidth of its memory. A loop's body is timed once, with nothing under way when it begins or ends, and counts as
    often as it runs: what its first and last run have less or more to wait for is left out. A message or transfer that
    is under way when a loop starts goes on beside it, and delays it only if the links cannot carry both. Of a
    conditional's branches the slowest counts; a loop of unknown length counts as one run.

    Raises ValueError for CPU devices: what their program would take says nothing of a GPU.
    """
    if target.device is None:
        raise ValueError(
            f"a timeline of {target}: CPU devices only stand in for others, and their times say nothing of a GPU. "
            "Compile for a GPU target, such as h100:8."
        )
    runs = simulate(module, mesh, target.device, target.per_node)
    step = runs[module.entry.name]
    passes = _passes(module, runs)
    return Timeline(
        seconds=step.now,
        compute=sum(step.busy.values()),
        matmul=step.busy["matmul"] + step.busy["attention"],
        memory=step.busy["memory"] + step.busy["host"],
        messages=step.messages,
        exposed=sum(step.exposures.values()),
        host=step.host,
        exposures=dict(step.exposures),
        passes=passes,
        slowest=_slowest(passes),
        to_device=step.offload[TO_DEVICE],
        to_host=step.offload[TO_HOST],
    )


def _passes(module: Module, runs: Mapping[str, Lanes]) -> tuple[Pass, ...]:
    sites = {site.computation.name: site for site in walk(module)}
    found: dict[tuple[Any, ...], Pass] = {}
    for name, run in runs.items():
        one = Pass(
            name="outside" if name == module.entry.name else _direction(module.computations[name], run),
            loops=sites[name].loops,
            times=sites[name].times,
            seconds=run.now,
            events=tuple(run.events),
        )
        # The compiler copies a loop that is inside of another one whose body it doubles.
        same = one.name, one.loops, one.seconds, tuple(replace(event, name="") for event in one.events)
        found[same] = replace(found[same], times=found[same].times + one.times) if same in found else one
    return tuple(sorted(found.values(), key=lambda one: -one.seconds * one.times))


def _direction(body: Computation, run: Lanes) -> str:
    """Which way through the model a loop's body goes, by JAX's names of what it does."""
    stacks = [one.op_name for one in body.instructions.values()]
    backward = any("transpose(jvp(" in stack for stack in stacks)
    forward = any("jvp(" in stack and "transpose(jvp(" not in stack for stack in stacks)
    if forward or backward:
        return " and ".join(["forward"] * forward + ["backward"] * backward)
    return "update" if run.offload[TO_HOST] else "forward"


def _slowest(passes: Iterable[Pass], count: int = 10) -> tuple[Event, ...]:
    found: dict[tuple[str, str, str], Event] = {}
    for one in passes:
        for event in one.events:
            key = event.lane, event.kind, event.label
            first = found.setdefault(key, replace(event, seconds=0.0))
            found[key] = replace(first, seconds=first.seconds + event.seconds * one.times)
    return tuple(sorted(found.values(), key=lambda event: -event.seconds)[:count])
