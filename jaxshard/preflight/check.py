"""Holds a compiled program to its strategy's contract.

A compiler may combine messages, send equal ones once, move one out of a loop, and turn an all_reduce of which each
device only needs a slice into a reduce_scatter. It may not add, move into a loop, or widen. What it may send is
therefore a budget of bytes: for each leaf, kind, axes, dtype and place.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from jaxshard.contract import Collective, ContractError
from jaxshard.dp import DataParallel
from jaxshard.mesh import platform_of
from jaxshard.preflight.facts import facts
from jaxshard.step import Training
from jaxshard.strategy import name_of

# XLA's compiler for CPUs has no collectives in these, and sends wider ones.
_ON_CPU = {
    "bfloat16": ("float32", 2),
    "float8_e4m3fn": ("float16", 2),
    "float8_e5m2": ("float16", 2),
}


def check(training: Training | DataParallel, compiled: Iterable[Collective] | None = None) -> tuple[Collective, ...]:
    """Raises ContractError if the step, compiled for the devices of its mesh, sends what its contract has not.

    compiled: what a program sends, if not `Training.built`'s own; as `facts` finds it. Returns what was checked.
    What the loss sends by itself, and what an optimizer that is not elementwise makes the update send, is held to what
    its jaxpr, or the update compiled alone, says.

    Raises TypeError for `dp`, which is several programs: its contract is its plan.
    """
    if isinstance(training, DataParallel):
        raise TypeError(
            "dp is several programs, not one that could be checked; `explain` and `plan` show what it sends."
        )
    mesh = training.mesh
    if compiled is None:
        compiled = facts(training.built().compiled, mesh).collectives
    compiled = tuple(compiled)
    allowed = (*training.contract(), *training.explain().update)
    if platform_of(mesh) == "cpu":
        allowed = tuple(map(_as_cpus_send, allowed))
    over = exceeding(allowed, compiled)
    if over:
        lines = [_broken(one, bytes, allowed, name_of(training.strategy)) for one, bytes in over]
        raise ContractError("the compiled step sends what its strategy does not:\n  " + "\n  ".join(lines))
    return compiled


def _as_cpus_send(one: Collective) -> Collective:
    dtype, times = _ON_CPU.get(one.dtype, (one.dtype, 1))
    return replace(one, dtype=dtype, bytes=one.bytes * times)


def exceeding(allowed: Iterable[Collective], compiled: Iterable[Collective]) -> list[tuple[Collective, int]]:
    """(compiled collective, bytes of whole buffers too many) for each that the allowed ones do not cover."""
    budget = [(one, one.bytes * one.count) for one in allowed]
    needed = [(one, one.bytes * one.count) for one in compiled]
    # What fits exactly is paid first, so that a message which was changed does not take another's place.
    for fits in (_exact, _combined, _moved_out, _sliced, _added_up):
        for i, (one, missing) in enumerate(needed):
            for j, (of, left) in enumerate(budget):
                if missing and left and set(of.axes) == set(one.axes) and fits(one, of):
                    paid = min(missing, left)
                    missing, budget[j] = missing - paid, (of, left - paid)
            needed[i] = one, missing
    return [(one, missing) for one, missing in needed if missing]


def _exact(one: Collective, of: Collective) -> bool:
    return _combined(one, of) and of.leaf in one.leaf.split("+")


def _combined(one: Collective, of: Collective) -> bool:
    """Combined messages may have forgotten some leaves, or all."""
    return (one.kind, one.dtype, one.loops) == (of.kind, of.dtype, of.loops)


def _moved_out(one: Collective, of: Collective) -> bool:
    inner = iter(of.loops)
    return (one.kind, one.dtype) == (of.kind, of.dtype) and all(loop in inner for loop in one.loops)


def _sliced(one: Collective, of: Collective) -> bool:
    """A reduce_scatter in place of an all_reduce."""
    return (of.kind, one.kind) == ("all_reduce", "reduce_scatter") and _moved_out(replace(one, kind=of.kind), of)


def _added_up(one: Collective, of: Collective) -> bool:
    """Two gradients of one leaf, added up on the device in a wider dtype, and sent once: as many bytes as the two."""
    return _moved_out(replace(one, dtype=of.dtype), of) and of.leaf in one.leaf.split("+")


def _broken(one: Collective, bytes: int, allowed: Iterable[Collective], strategy: str) -> str:
    """``all_reduce float32 350.0 MiB over shard inside microbatches (reduce w): not in zero1's contract``."""
    alike = [of for of in allowed if of.kind == one.kind and set(of.axes) == set(one.axes)]
    said = f"{_sized(one, bytes)}: not in {strategy}'s contract"
    if not alike:
        return f"{said}, which has no {one.kind} over {' x '.join(one.axes)}"
    near = [of for of in alike if of.leaf in one.leaf.split("+")] or alike
    return f"{said}, which has " + "; ".join(_sized(of, of.bytes * of.count) for of in near[:3])


def _sized(one: Collective, bytes: int) -> str:
    size = f"{bytes / 2**20:,.1f} MiB" if bytes >= 2**20 else f"{bytes:,} B"
    where = f" inside {' > '.join(one.loops)}" if one.loops else ""
    named = f" ({one.purpose} {one.leaf})".replace(" )", ")") if one.purpose else ""
    return f"{one.kind} {one.dtype} {size} over {' x '.join(one.axes)}{where}{named}"
