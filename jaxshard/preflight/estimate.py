"""What XLA's own scheduler expects of the programs that it schedules for GPUs: their time, and what is not hidden.

The scheduler says it on stderr, for each computation, in a process that was started with `ENVIRONMENT`::

    with capture() as said:
        compiled = lowered.compile()
    estimate = parse(said.text, hlo.parse(compiled.as_text()))

Its kernels run at rates from XLA's tables, its messages over links that nothing else uses: steps of Llama-3 8B took
1.7 times as long. It is there to compare with `timeline`, and to see how well a schedule hides messages.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from jaxshard.compiled.hlo import HOST, Computation, Instruction, Module
from jaxshard.compiled.traffic import KINDS
from jaxshard.compiled.walk import trip_count

# Its numbers are messages of the lowest level, which JAX turns off unless the environment says otherwise.
ENVIRONMENT = {"TF_CPP_MIN_LOG_LEVEL": "0", "TF_CPP_VMODULE": "latency_hiding_scheduler=1"}
"""For `process.run`: the scheduler speaks in a process that is started with these."""

_BRANCHES = ("branch_computations", "true_computation", "false_computation")
_SCHEDULER = b"latency_hiding_scheduler.cc:"
_MICROSECOND = 1e-6  # a "cycle" of the model that XLA has of Hopper and later


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Seconds of a step: all of it, and those in which messages alone run."""

    seconds: float
    exposed: float


@dataclass
class Said:
    """text: what the scheduler said, once the capture has ended."""

    text: str = ""


@contextlib.contextmanager
def capture() -> Iterator[Said]:
    """Keeps what the scheduler writes to the process's stderr within; all else is written there when it ends."""
    said = Said()
    sys.stderr.flush()
    with tempfile.TemporaryFile() as file:
        stderr = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield said
        finally:
            sys.stderr.flush()
            os.dup2(stderr, 2)
            os.close(stderr)
            file.seek(0)
            lines = file.readlines()
            said.text = b"".join(line for line in lines if _SCHEDULER in line).decode(errors="replace")
            with open(2, "wb", closefd=False) as real:
                real.writelines(line for line in lines if _SCHEDULER not in line)


def parse(text: str, module: Module) -> Estimate | None:
    """The estimate of a step, loops counted as often as they run, of a conditional the slower branch.

    text: what the scheduler said while `module` was compiled.

    None where there is none; `missing` says why.
    """
    if missing(text, module):
        return None
    cycles, wasted = _total(module, module.entry, _statistics(text))
    return Estimate(seconds=cycles * _MICROSECOND, exposed=wasted * _MICROSECOND)


def missing(text: str, module: Module) -> str:
    """Why there is no estimate; empty if there is one."""
    statistics = _statistics(text)
    if not statistics:
        return (
            "XLA's scheduler said nothing: the process was not started with estimate.ENVIRONMENT, or the scheduler is "
            "off, as it is for GPUs before Hopper unless xla_gpu_enable_latency_hiding_scheduler is set."
        )
    # In 6 digits at most, so that one large number can be whole by chance, but not all of them.
    if all(cycles.is_integer() and wasted.is_integer() for cycles, wasted in statistics.values()):
        return (
            "XLA's scheduler has no model of this GPU, or of one of the collectives: it orders instructions by sizes "
            "such as 1, 1000 and 5000, which are no times. It has one of Hopper and Blackwell."
        )
    inside = tuple(_inside(module, module.entry))
    if any(_transfers(one) for computation in inside for one in computation.instructions.values()):
        return "XLA's scheduler has no time for transfers to and from the host's memory, and takes 5000 us for each."
    if any(_asynchronous(module, one) for computation in inside for one in computation.instructions.values()):
        return (
            "XLA's scheduler (jax 0.12) has no time for the asynchronous fusions of this program, in which a loop "
            "writes what it keeps, and takes 5000 us for each. There are none without XLA's pass "
            "dynamic-slice-copy-fusion-async-wrapper."
        )
    absent = list(dict.fromkeys(one.name for one in inside if one.name not in statistics))
    if absent:
        said = f"{absent[0]} and {len(absent) - 1} more" if len(absent) > 1 else absent[0]
        return f"XLA's scheduler said nothing of {said}: it gives no time to loops and branches that send nothing."
    return ""


def _transfers(one: Instruction) -> bool:
    """Whether it starts a transfer to or from the host's memory, or what the host's processor does with it."""
    return one.opcode.endswith("-start") and any(array.space == HOST for array in one.arrays)


def _asynchronous(module: Module, one: Instruction) -> bool:
    """Whether it starts a kernel that is no message."""
    kernels = module.called(one) if one.opcode == "fusion-start" else []
    return any(not KINDS.keys() & {x.opcode for x in kernel.instructions.values()} for kernel in kernels)


def _statistics(text: str) -> dict[str, tuple[float, float]]:
    """(cycles, wasted cycles) as scheduled, by computation; of one that is scheduled again, the last."""
    found = {}
    for one in text.split("Statistics after scheduling")[1:]:
        name = re.search(r"For computation: ([^,\s]+)", one)
        wasted = re.search(r"Total wasted cycles: (\S+)", one)
        cycles = re.search(r"Total cycles: (\S+)", one)
        if name and wasted and cycles:
            found[name[1]] = float(cycles[1]), float(wasted[1])
    return found


def _inside(module: Module, computation: Computation) -> Iterator[Computation]:
    """A computation, and all loops and branches in it."""
    yield computation
    for one in computation.instructions.values():
        for name in _loops_and_branches(one):
            yield from _inside(module, module.computations[name])


def _loops_and_branches(one: Instruction) -> tuple[str, ...]:
    if one.opcode == "while":
        return one.calls("body")
    return one.calls(*_BRANCHES) if one.opcode == "conditional" else ()


def _total(
    module: Module, computation: Computation, statistics: Mapping[str, tuple[float, float]]
) -> tuple[float, float]:
    """(cycles, wasted cycles) of one run, with all that runs inside, of which the scheduler counts next to nothing."""
    cycles, wasted = statistics[computation.name]
    for one in computation.instructions.values():
        inner = [_total(module, module.computations[name], statistics) for name in _loops_and_branches(one)]
        if inner:
            trips = trip_count(module, computation, one) if one.opcode == "while" else 1
            slowest = max(inner)
            cycles += slowest[0] * (1 if trips is None else trips)
            wasted += slowest[1] * (1 if trips is None else trips)
    return cycles, wasted
