"""What of a compiled program runs, how often in a step, and inside of which loops."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from jaxshard.compiled.hlo import Computation, Instruction, Module
from jaxshard.contract import loop_name


@dataclass(frozen=True, kw_only=True)
class Site:
    """An instruction in its place.

    times: how often it runs in a step. loops: what it is inside of, outermost first: ``microbatches``, ``scan``, or
    ``while`` for a loop whose length is not known; what is inside of that counts as if it ran once, and so does each
    branch of a conditional. start: the asynchronous instruction that it is wrapped in, if it is.
    """

    instruction: Instruction
    computation: Computation
    times: int = 1
    loops: tuple[str, ...] = ()
    start: Instruction | None = None


def walk(module: Module) -> Iterator[Site]:
    """Every instruction that runs by itself: those of the entry, of loops, calls and branches, not those in fusions."""
    return _walk(module, module.entry, Site)


def _walk(module: Module, computation: Computation, around: Callable[..., Site]) -> Iterator[Site]:
    for one in computation.instructions.values():
        site = around(instruction=one, computation=computation)
        yield site
        if one.opcode == "while":
            trips = trip_count(module, computation, one)
            (body,), (condition,) = one.calls("body"), one.calls("condition")
            name = "while" if trips is None else _loop_name(one, module.computations[body], len(site.loops))
            for inner, runs in (body, 1 if trips is None else trips), (condition, (trips or 0) + 1):
                inside = functools.partial(replace, site, times=site.times * runs, loops=(*site.loops, name))
                yield from _walk(module, module.computations[inner], inside)
        elif one.opcode in ("call", "conditional"):
            for inner in one.calls("to_apply", "calls", "branch_computations", "true_computation", "false_computation"):
                yield from _walk(module, module.computations[inner], functools.partial(replace, site))
        elif one.opcode == "async-start":
            for inner in module.called(one):
                yield from _walk(module, inner, functools.partial(replace, site, start=one))


def _loop_name(loop: Instruction, body: Computation, depth: int) -> str:
    # Passes that rebuild a loop drop its name; the instructions of its body still have theirs, but for those that were
    # moved in from the loops around it.
    inside = "/while/body/"
    stacks = [one.op_name.rpartition(inside)[0] for one in body.instructions.values() if inside in one.op_name]
    stacks = [stack for stack in stacks if stack.count(inside) >= depth]
    return loop_name(loop.op_name.removesuffix("/while") or min(stacks, key=len, default=""))


def trip_count(module: Module, computation: Computation, loop: Instruction) -> int | None:
    """How often a loop runs: as the compiler says, or counted from a counter's start, step and bound; else None.

    The compiler forgets what it said when it pipelines a loop and doubles its body.
    """
    said = re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes)
    if said:
        return int(said[1])
    (body,), (condition,) = loop.calls("body"), loop.calls("condition")
    compared = _comparison(module, module.computations[condition])
    if compared is None:
        return None
    counter, bound = compared
    start = _result(module, computation, loop.operands[0], counter.element)
    step = _result(module, module.computations[body], module.computations[body].root, counter.element)
    if start is None or start.element is not None or step is None or step.element != counter.element:
        return None
    return max(0, -(-(bound - start.plus - counter.plus) // step.plus)) if step.plus > 0 else None


@dataclass(frozen=True)
class _Sum:
    """An integer: an element of what a computation is given, plus a constant; the constant alone for None."""

    element: int | None
    plus: int


def _comparison(module: Module, condition: Computation) -> tuple[_Sum, int] | None:
    """(counter, bound) of a loop that runs while the counter is below the bound."""
    root = condition.instructions[condition.root]
    given = [_sum(module, condition, name) for name in root.operands]
    while root.opcode in ("fusion", "call"):
        (inner,) = (module.computations[name] for name in root.calls("calls", "to_apply"))
        root = inner.instructions[inner.root]
        given = [_sum(module, inner, name, given) for name in root.operands]
    if root.opcode != "compare" or "direction=LT" not in root.attributes:
        return None
    counter, bound = given
    if counter is None or counter.element is None or bound is None or bound.element is not None:
        return None
    return counter, bound.plus


def _result(module: Module, computation: Computation, name: str, element: int | None) -> _Sum | None:
    """An element of a tuple that a computation makes."""
    made = computation.instructions[name]
    if element is None or made.opcode != "tuple":
        return None
    return _sum(module, computation, made.operands[element])


def _sum(module: Module, computation: Computation, name: str, given: list[_Sum | None] | None = None) -> _Sum | None:
    """An instruction of an integer as a sum, if it is one. given: the parameters of a fusion."""
    one = computation.instructions[name]
    if one.opcode == "constant":
        return _Sum(None, int(one.literal)) if re.fullmatch(r"-?\d+", one.literal) else None
    if one.opcode == "parameter":
        return None if given is None else given[int(one.literal)]
    if one.opcode == "get-tuple-element":
        whole = computation.instructions[one.operands[0]].opcode == "parameter" and given is None
        return _Sum(one.numbers("index")[0], 0) if whole else None
    operands = [_sum(module, computation, operand, given) for operand in one.operands]
    if one.opcode in ("copy", "bitcast", "convert"):
        return operands[0]
    if one.opcode == "add" and None not in operands:
        elements = [x.element for x in operands if x is not None and x.element is not None]
        total = sum(x.plus for x in operands if x is not None)
        return _Sum(elements[0] if elements else None, total) if len(elements) < 2 else None
    if one.opcode == "fusion":
        (inner,) = module.called(one)
        return _sum(module, inner, inner.root, operands)
    return None
