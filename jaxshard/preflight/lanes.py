"""A compiled program as it runs on one device: kernels one after another, and beside them messages and transfers."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from jaxshard.compiled.hlo import Computation, Instruction, Module
from jaxshard.compiled.walk import trip_count
from jaxshard.preflight import messages
from jaxshard.preflight.device import Device
from jaxshard.preflight.messages import Message
from jaxshard.preflight.work import Work, work_of

# Shares of the peaks: of matrix products where the device does not say what they reach, of cuDNN's attention kernels,
# and of the memory's bandwidth.
_MATMUL, _ATTENTION, _MEMORY = 0.8, 0.55, 0.85

TO_DEVICE, TO_HOST, HOST = "to device", "to host", "host"
OFFLOAD = (TO_DEVICE, TO_HOST, HOST)
"""The lanes of transfers from the host's memory and to it, which pass each other, and of the host's own processor."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """One instruction that runs.

    lane: ``compute``, ``collectives``, or one of `OFFLOAD` for what is asynchronous there. kind: ``matmul``,
    ``attention``, ``memory`` or ``host``, what bounds it; of a message its kind, such as ``all_gather``. start: seconds
    since its pass began. label: of a message its leaves and axes; else where in the model it comes from, and the shape
    that it gives.
    """

    name: str
    lane: str
    kind: str
    start: float
    seconds: float
    label: str


def _zeros() -> defaultdict[str, float]:
    return defaultdict(float)


@dataclass
class Lanes:
    """The lanes while a computation runs; all are empty when it begins.

    now: when the compute lane is free. events: without those inside of loops; all other figures are with them.
    busy: seconds by kind of what runs on the compute lane. messages: of the collectives lane. offload: of those of
    `OFFLOAD`. exposures: seconds in which only messages run, by kind and axes. host: in which the compute lane waits
    for `OFFLOAD`.
    """

    now: float = 0.0
    events: list[Event] = field(default_factory=list)
    busy: defaultdict[str, float] = field(default_factory=_zeros)
    messages: float = 0.0
    offload: defaultdict[str, float] = field(default_factory=_zeros)
    exposures: defaultdict[str, float] = field(default_factory=_zeros)
    host: float = 0.0
    # When the other lanes are free, what lies on the collectives lane as (end, seconds, title), and the end of what
    # was started, by the names it is waited for by.
    _free: defaultdict[str, float] = field(default_factory=_zeros)
    _sent: list[tuple[float, float, str]] = field(default_factory=list)
    _ends: defaultdict[str, list[tuple[str, float]]] = field(default_factory=lambda: defaultdict(list))

    def compute(self, name: str, kind: str, seconds: float, label: str) -> None:
        if seconds:
            self.events.append(
                Event(name=name, lane="compute", kind=kind, start=self.now, seconds=seconds, label=label)
            )
        self.busy[kind] += seconds
        self.now += seconds

    def start(
        self, name: str, lane: str, kind: str, seconds: float, label: str, *, title: str = "", after: float = 0.0
    ) -> float:
        """Puts something on another lane, behind what is there, and says when it ends. after: the earliest moment."""
        begun = max(self.now, after, self._free[lane])
        self.events.append(Event(name=name, lane=lane, kind=kind, start=begun, seconds=seconds, label=label))
        self._free[lane] = begun + seconds
        self._ends[name].append((lane, begun + seconds))
        if lane == "collectives":
            self._sent.append((begun + seconds, seconds, title))
            self.messages += seconds
        else:
            self.offload[lane] += seconds
        return begun + seconds

    def rename(self, name: str, further: str) -> None:
        """What was started under a name goes on under another."""
        if name in self._ends:
            self._ends[further] = self._ends.pop(name)

    def wait(self, name: str) -> None:
        """Lets the compute lane wait for what was started under a name, if anything was."""
        for lane, end in self._ends.pop(name, ()):
            self._wait(lane, end)

    def include(self, other: Lanes) -> None:
        """Runs, once, what ran from empty lanes to empty lanes."""
        self.events += [replace(event, start=event.start + self.now) for event in other.events]
        self.repeat(other, 1)

    def wait_for_all(self) -> None:
        for name in tuple(self._ends):
            self.wait(name)

    def _wait(self, lane: str, until: float) -> None:
        waited = until - self.now
        if waited <= 0:
            return
        if lane == "collectives":
            for end, seconds, title in reversed(self._sent):
                if end <= self.now:
                    break
                self.exposures[title] += max(0.0, min(end, until) - max(end - seconds, self.now))
        else:
            self.host += waited
        self.now = until

    def repeat(self, body: Lanes, times: int) -> None:
        """Runs what ran from empty lanes to empty lanes, so many times.

        What is under way goes on beside it, and delays it only where a lane cannot carry both.
        """
        before = self.now
        self.now += body.now * times
        for total, once in (self.busy, body.busy), (self.exposures, body.exposures), (self.offload, body.offload):
            for key, seconds in once.items():
                total[key] += seconds * times
        self.messages += body.messages * times
        self.host += body.host * times
        for lane, busy in {"collectives": body.messages, **body.offload}.items():
            late = self._free[lane] + busy * times - self.now
            if busy and self._free[lane] > before and late > 0:
                if lane == "collectives":
                    self.exposures[self._sent[-1][2]] += late
                else:
                    self.host += late
                self.now += late


def simulate(module: Module, mesh: Mapping[str, int], device: Device, per_node: int) -> dict[str, Lanes]:
    """One run of the entry and of every loop's body, by the computation's name, inner loops first.

    mesh, per_node: as for `messages.message_of` and `messages.seconds`.
    """
    return _Simulation(module, mesh, device, per_node).runs


class _Simulation:
    def __init__(self, module: Module, mesh: Mapping[str, int], device: Device, per_node: int):
        self.module, self.mesh, self.device, self.per_node = module, mesh, device, per_node
        self.host_memory = device.host_memory_bandwidth or device.host_bandwidth
        self.runs: dict[str, Lanes] = {}
        self.runs[module.entry.name] = self._alone(module.entry)

    def _alone(self, computation: Computation) -> Lanes:
        lanes = Lanes()
        self._run(lanes, computation)
        lanes.wait_for_all()
        return lanes

    def _run(self, lanes: Lanes, computation: Computation) -> None:
        for one in computation.instructions.values():
            self._step(lanes, computation, one)

    def _step(self, lanes: Lanes, computation: Computation, one: Instruction) -> None:
        module = self.module
        if one.opcode == "while":
            (body,) = one.calls("body")
            if body not in self.runs:
                self.runs[body] = self._alone(module.computations[body])
            trips = trip_count(module, computation, one)
            lanes.repeat(self.runs[body], 1 if trips is None else trips)
        elif one.opcode == "conditional":
            names = one.calls("branch_computations", "true_computation", "false_computation")
            slowest = max((self._alone(module.computations[name]) for name in names), key=lambda run: run.now)
            lanes.include(slowest)
        elif one.opcode == "call":
            for name in one.calls("to_apply"):
                self._run(lanes, module.computations[name])
        elif one.opcode.endswith("-done"):
            lanes.wait(one.operands[0])
        elif one.opcode.endswith("-update") and one.operands:
            lanes.rename(one.operands[0], one.name)
        elif sent := messages.messages_in(module, computation, one, self.mesh):
            self._send(lanes, one, sent)
        elif one.opcode == "async-start":
            self._start(lanes, one)
        elif work := work_of(module, computation, one):
            kind, seconds = self._cost(work)
            made = " ".join((_scope(one), *_shape(one)))
            if kind == "host" and one.opcode.endswith("-start"):
                self._transfer(lanes, one.name, work, made)
            else:
                lanes.compute(one.name, kind, seconds, made)

    def _send(self, lanes: Lanes, one: Instruction, sent: list[Message]) -> None:
        first = sent[0].sent
        seconds = sum(messages.seconds(message, self.device, self.per_node) for message in sent)
        over = " x ".join(first.axes)
        leaves = "+".join(filter(None, dict.fromkeys(message.sent.leaf for message in sent)))
        lanes.start(
            one.name,
            "collectives",
            first.kind,
            seconds,
            f"{leaves or _scope(one)} over {over}",
            title=f"{first.kind} over {over}",
        )
        inner = [x for body in self.module.called(one) for x in body.instructions.values()]
        if not one.opcode.endswith("-start") or any('"is_sync":true' in x.attributes for x in (one, *inner)):
            lanes.wait(one.name)

    def _transfer(self, lanes: Lanes, name: str, work: Work, made: str) -> None:
        """What passes the link, both ways at once; or to the host, what its processor does, and back from there."""
        link, end = self.device.host_bandwidth, 0.0
        for lane, seconds in (
            (TO_HOST, work.to_host / link),
            (HOST, work.on_host / self.host_memory),
            (TO_DEVICE, work.to_device / link),
        ):
            if seconds:
                begun = end if work.on_host else 0.0
                end = lanes.start(name, lane, "host", seconds, made, after=begun)

    def _start(self, lanes: Lanes, one: Instruction) -> None:
        """What is wrapped to run asynchronously: on the host if it says so, else among the other kernels."""
        for body in self.module.called(one):
            if 'async_execution_thread="host"' in one.attributes:
                done = [work_of(self.module, body, x) for x in body.instructions.values()]
                moved = sum(work.bytes + work.to_device + work.to_host for work in done if work)
                lanes.start(one.name, HOST, "host", moved / self.host_memory, _scope(one))
            else:
                self._run(lanes, body)

    def _cost(self, work: Work) -> tuple[str, float]:
        """What bounds an instruction, and its time."""
        attention = "fmha" in work.target
        bounds = {
            "attention" if attention else "matmul": work.flops and work.flops / self._rate(work.dtype, attention),
            "memory": work.bytes / (self.device.memory_bandwidth * _MEMORY),
            "host": max(work.to_device, work.to_host, work.on_host) / self.device.host_bandwidth,
        }
        kind = max(bounds, key=bounds.__getitem__)
        return kind, bounds[kind]

    def _rate(self, dtype: str, attention: bool) -> float:
        """FLOP/s; of a dtype that the device says nothing of, those of its slowest."""
        peaks = self.device.flops
        peak = peaks.get(dtype, min(peaks.values()))
        return peak * _ATTENTION if attention else self.device.reached.get(dtype, peak * _MATMUL)


_WRAPPED = re.compile(r"(?:jit|jvp|transpose|vmap|remat|shard_map)\(([^()]*)\)")
_STRUCTURE = {
    "shard_map",
    "while",
    "body",
    "closed_call",
    "checkpoint",
    "rematted_computation",
    "remat",
    "cond",
    "eval_jaxpr",
    "",
}


def _shape(one: Instruction) -> list[str]:
    """Of its result, or the first of them, if it has one."""
    return [f"{array.dtype}[{','.join(map(str, array.dims))}]" for array in one.arrays[:1]]


def _scope(one: Instruction) -> str:
    """Where in the model an instruction comes from: its leaf, or the last scopes that are not JAX's own machinery."""
    stack, names = one.op_name, []
    while stack != (stack := _WRAPPED.sub(r"\1", stack)):
        pass
    for part in stack.split(";")[0].split("/"):
        if part not in _STRUCTURE and not part.startswith(("<", "branch_")):
            names.append(part.rpartition(":")[2] if part.startswith("jaxshard.") else part)
    return "/".join(names[-3:]) or one.name
