"""How programs are drawn at random: from the type of a value to the nodes that may stand there, root first.

So every tree that is drawn is a program, and hypothesis shrinks one by drawing it again with smaller choices. Of every
choice the first is the simplest. The rules themselves are in `grow_operations` and `grow_control`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import strategies as st

from .nodes import Constant, Data, Index, Int, IntLeaf, Leaf, Node, OfPart, Var

SIZES = (8, 4, 16, 3, 6)
"""Of dims: on a mesh of 4 or 8 some leaves can be split along each dim, some along one, some not at all."""


@dataclass(frozen=True)
class Type:
    """batched: the examples are one more, leading dim."""

    shape: tuple[int, ...]
    batched: bool = False
    dtype: str = "float32"


@dataclass(frozen=True)
class Scope:
    """What may be read.

    closed: variables alone, of a custom rule. forward: of a custom rule that takes derivatives forwards. alone: there
    is no batch, in a map over examples. parts: integers that differ between devices may decide. depth: of names.
    """

    variables: tuple[tuple[Var, Type], ...] = ()
    integers: tuple[Node, ...] = ()
    closed: bool = False
    forward: bool = False
    alone: bool = False
    parts: bool = False
    depth: int = 0

    def inside(self, *types: Type, index: bool = False, **changes: Any) -> tuple[str, Scope]:
        """A scope in this one, with more variables (called as `control` does, carry first), and its name."""
        name = "abcdefghijklmnopqrstuvwxyz"[self.depth]
        more = tuple((Var(f"{name}x{i}"), t) for i, t in enumerate(types))
        integers = (*self.integers, Index(name + "i")) if index else self.integers
        return name, replace(
            self, variables=(*self.variables, *more), integers=integers, depth=self.depth + 1, **changes
        )


Draw = Callable[[st.SearchStrategy], Any]


def pick(draw: Draw, choices: Sequence[Any]) -> Any:
    return draw(st.sampled_from(choices))


def shares(draw: Draw, fuel: int, count: int) -> list[int]:
    """Fuel split among the nodes below."""
    if fuel < 0:
        return [fuel] * count
    cuts = sorted(draw(st.integers(0, fuel)) for _ in range(count - 1))
    return [high - low for low, high in zip([0, *cuts], [*cuts, fuel], strict=True)]


def integer(draw: Draw, scope: Scope) -> Node:
    """Known when traced, the same everywhere, of the loop around, of the example, or of the part."""
    choices = [Int(draw(st.integers(0, 3))), *scope.integers]
    if not scope.closed:
        choices += [IntLeaf()]
        choices += [OfPart()] if scope.parts and not scope.alone else []
    return pick(draw, choices)


def leaf(draw: Draw, t: Type, scope: Scope) -> Node:
    """What stands at the end of a branch: most often something that was bound nearby."""
    near = [var for var, type in reversed(scope.variables) if type == t]
    if scope.closed:
        return pick(draw, near) if near else Constant(t.shape)
    if t.batched:
        return pick(draw, [Data(t.shape), *near, *near]) if near else Data(t.shape)
    own = [Leaf(t.shape, 0, t.dtype), Leaf(t.shape, 1, t.dtype)]
    own += [Constant(t.shape)] if t.dtype == "float32" and draw(st.booleans()) else []
    return pick(draw, [*near[:2] * 2, *own])


@dataclass(frozen=True)
class Rule:
    """A kind of node. weight: how often it is drawn, among those that fit."""

    fits: Callable[[Type, Scope], bool]
    grow: Callable[[Draw, Type, Scope, int], Node]
    weight: int
    kind: str


RULES: list[Rule] = []


def rule(kind: str, weight: int, fits: Callable[[Type, Scope], bool] = lambda t, scope: True):
    def add(function):
        RULES.append(Rule(fits, function, weight, kind))
        return function

    return add


def grow(draw: Draw, t: Type, scope: Scope, fuel: int, kinds: Sequence[str] = (), *, but: str = "") -> Node:
    """A value of this type of about `fuel` nodes. kinds: of which the first must be. but: a kind that it must not be.

    With no fuel left, what is not batched may still be a move of a leaf: those are what a sharded leaf is held for.
    """
    if fuel == 0 and not t.batched and draw(st.booleans()):
        kinds = ("move", "row", "cast")
    elif fuel <= 0:
        return leaf(draw, t, scope)
    rules = [rule for rule in RULES if rule.fits(t, scope) and (not kinds or rule.kind in kinds) and rule.kind != but]
    if not rules:
        return leaf(draw, t, scope)
    return pick(draw, [rule for rule in rules for _ in range(rule.weight)]).grow(draw, t, scope, fuel - 1)


def is_float(t: Type, scope: Scope) -> bool:
    return t.dtype == "float32"


def is_whole(t: Type, scope: Scope) -> bool:
    return not t.batched


def is_open(t: Type, scope: Scope) -> bool:
    return not scope.closed
