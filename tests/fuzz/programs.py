"""Whole programs, drawn at random."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

# The rules are known once they are imported.
from . import grow_control, grow_operations  # noqa: F401
from .grammar import SIZES, Draw, Scope, Type, grow, pick
from .nodes import Leaf
from .program import Program


def programs(*kinds: str) -> st.SearchStrategy[Program]:
    """Programs whose root is of one of these kinds (any, if none is given)."""
    return _programs(kinds)


@st.composite
def _programs(draw: Draw, kinds: Sequence[str]) -> Program:
    fuel = draw(st.integers(2, 7))
    items = draw(st.booleans())
    scope = Scope(parts=pick(draw, (False, False, True)))
    width = pick(draw, SIZES[:3])
    hidden = grow(draw, Type((width,), batched=True), scope, fuel, kinds)
    penalty = None
    if not items and draw(st.booleans()):
        shape = pick(draw, [(), (8,), (4, 8), (3, 8, 4)])
        penalty = grow(draw, Type(shape), scope, draw(st.integers(0, 4)))
    unused = pick(draw, [(), (Leaf((8, 16), which=9),), (Leaf((0, 8), which=9), Leaf((), which=9, dtype="complex64"))])
    return Program(
        width=width,
        hidden=hidden,
        penalty=penalty,
        items=items,
        unused=unused,
        tree=pick(draw, ("d", "l", "t", "dl", "td", "ltd")),
    )
