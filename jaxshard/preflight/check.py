"""Holds a compiled program to its strategy's contract.

A compiler may combine messages, send equal ones once, move one out of a loop, and turn an all_reduce of which each
device only needs a slice into a reduce_scatter. It may not add, move into a loop, or widen. What it may send is
therefore a budget of bytes: for each leaf, kind, axes, dtype and place.
"""

from __future__ import annotations

from collections import Counter
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
    bills = _Bills(tuple(allowed), tuple(compiled))
    # What fits exactly is paid first. Where one message then took what another needs, it is paid from elsewhere.
    for fits in _FITS:
        for one in range(len(bills.compiled)):
            for of in range(len(bills.allowed)):
                if bills.owed[one] and bills.left[of] and fits(bills.compiled[one], bills.allowed[of]):
                    bills.pay([(one, of)], min(bills.owed[one], bills.left[of]))
    for one in range(len(bills.compiled)):
        while bills.owed[one] and (path := bills.path(one)):
            bills.pay(path, min(bills.owed[one], bills.left[path[-1][1]], *(bills.paid[x] for x in path[1::2])))
    return [(one, owed) for one, owed in zip(bills.compiled, bills.owed, strict=True) if owed]


class _Bills:
    """What compiled collectives owe, what allowed ones have left, and who paid whom: a flow of bytes."""

    def __init__(self, allowed: tuple[Collective, ...], compiled: tuple[Collective, ...]):
        self.allowed, self.compiled = allowed, compiled
        self.left = [one.bytes * one.count for one in allowed]
        self.owed = [one.bytes * one.count for one in compiled]
        self.paid: Counter[tuple[int, int]] = Counter()

    def path(self, start: int) -> list[tuple[int, int]]:
        """Pairs (compiled, allowed) from a debt to what is left: every second one is a payment to be taken back."""
        came: dict[int, list[tuple[int, int]]] = {start: []}
        pending = [start]
        while pending:
            one = pending.pop(0)
            for of in range(len(self.allowed)):
                if not any(fits(self.compiled[one], self.allowed[of]) for fits in _FITS):
                    continue
                if self.left[of]:
                    return [*came[one], (one, of)]
                for other in range(len(self.compiled)):
                    if self.paid[other, of] and other not in came:
                        came[other] = [*came[one], (one, of), (other, of)]
                        pending.append(other)
        return []

    def pay(self, path: list[tuple[int, int]], bytes: int) -> None:
        self.owed[path[0][0]] -= bytes
        self.left[path[-1][1]] -= bytes
        for i, pair in enumerate(path):
            self.paid[pair] += bytes if i % 2 == 0 else -bytes


def _exact(one: Collective, of: Collective) -> bool:
    return _combined(one, of) and of.leaf in one.leaf.split("+")


def _combined(one: Collective, of: Collective) -> bool:
    """Combined messages may have forgotten some leaves, or all."""
    return _moved_out(one, of) and one.loops == of.loops


def _moved_out(one: Collective, of: Collective) -> bool:
    inner, axes = iter(of.loops), set(of.axes) == set(one.axes)
    return axes and (one.kind, one.dtype) == (of.kind, of.dtype) and all(loop in inner for loop in one.loops)


def _sliced(one: Collective, of: Collective) -> bool:
    """A reduce_scatter in place of an all_reduce."""
    return (of.kind, one.kind) == ("all_reduce", "reduce_scatter") and _moved_out(replace(one, kind=of.kind), of)


def _added_up(one: Collective, of: Collective) -> bool:
    """Two gradients of one leaf, added up on the device in a wider dtype, and sent once: as many bytes as the two."""
    return _moved_out(replace(one, dtype=of.dtype), of) and of.leaf in one.leaf.split("+")


_FITS = (_exact, _combined, _moved_out, _sliced, _added_up)
"""What a compiler may have made of a message, from what leaves it as it is to what changes it most."""


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
