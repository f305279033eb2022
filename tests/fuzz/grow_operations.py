"""Rules for operations."""

from __future__ import annotations

import math
from dataclasses import replace

from hypothesis import strategies as st

from .grammar import SIZES, Type, grow, integer, is_float, is_open, is_whole, pick, rule, shares
from .nodes import IntLeaf
from .operations import (
    FUNCTIONS,
    LINEAR,
    OF_SCALARS,
    PAIRS,
    Apply,
    Broadcast,
    Cast,
    Concatenate,
    Mean,
    Pair,
    Piece,
    Product,
    Put,
    Reshape,
    Row,
    Slice,
    Take,
    Transpose,
    Window,
)


@rule("operation", 2)
def _apply(draw, t, scope, fuel):
    names = list(FUNCTIONS) if t.shape else OF_SCALARS
    return Apply(
        pick(draw, [name for name in names if t.dtype == "float32" or name in LINEAR]), grow(draw, t, scope, fuel)
    )


@rule("operation", 2)
def _pair(draw, t, scope, fuel):
    first, second = shares(draw, fuel, 2)
    other = replace(t, batched=t.batched and draw(st.booleans()))
    names = list(PAIRS) if t.dtype == "float32" and t.shape else ["add", "subtract_half"]
    return Pair(pick(draw, names), grow(draw, t, scope, first), grow(draw, other, scope, second))


@rule("product", 4, lambda t, scope: is_float(t, scope) and (t.batched or len(t.shape) == 2))
def _product(draw, t, scope, fuel):
    first, second = shares(draw, fuel, 2)
    *rows, columns = t.shape
    if scope.closed and t.batched:  # there is no other batched value to be had
        sizes = [x.shape[-1] for _, x in scope.variables if x.batched and x.shape[:-1] == tuple(rows)]
    else:
        sizes = [x.shape[0] for _, x in scope.variables if len(x.shape) == 2 and x.shape[1] == columns]
    between = pick(draw, sizes or SIZES)
    turned = draw(st.booleans())
    a = grow(draw, replace(t, shape=(*rows, between)), scope, first)
    b = grow(draw, Type((columns, between) if turned else (between, columns)), scope, second)
    return Product(a, b, turned)


@rule("operation", 1, lambda t, scope: is_float(t, scope) and is_whole(t, scope) and len(t.shape) < 3)
def _mean(draw, t, scope, fuel):
    dim = draw(st.integers(0, len(t.shape)))
    shape = (*t.shape[:dim], pick(draw, SIZES[:3]), *t.shape[dim:])
    return Mean(grow(draw, replace(t, shape=shape), scope, fuel), dim)


# Moves


@rule("move", 2, lambda t, scope: len(t.shape) > 1)
def _transpose(draw, t, scope, fuel):
    order = draw(st.permutations(range(len(t.shape))))
    shape = [0] * len(order)
    for to, d in enumerate(order):
        shape[d] = t.shape[to]
    return Transpose(grow(draw, replace(t, shape=tuple(shape)), scope, fuel), tuple(order))


@rule("move", 2, lambda t, scope: is_whole(t, scope) and len(t.shape) > 0)
def _reshape(draw, t, scope, fuel):
    size = math.prod(t.shape)
    shapes = [(size,), *((k, size // k) for k in (8, 4, 2, 3) if size % k == 0), (*t.shape, 1)]
    shapes += [(size // 8, 2, 4)] if size % 8 == 0 else []
    return Reshape(grow(draw, replace(t, shape=pick(draw, shapes)), scope, fuel), t.shape)


def _sized(t, dim, size):
    return replace(t, shape=(*t.shape[:dim], size, *t.shape[dim + 1 :]))


@rule("move", 1, lambda t, scope: is_whole(t, scope) and len(t.shape) > 0)
def _slice(draw, t, scope, fuel):
    dim = draw(st.integers(0, len(t.shape) - 1))
    start, stride, more = draw(st.integers(0, 2)), draw(st.integers(1, 2)), draw(st.integers(0, 2))
    size = start + t.shape[dim] * stride + more
    return Slice(grow(draw, _sized(t, dim, size), scope, fuel), dim, start, t.shape[dim], stride)


@rule("move", 1, lambda t, scope: is_whole(t, scope) and len(t.shape) > 0)
def _window(draw, t, scope, fuel):
    dim = draw(st.integers(0, len(t.shape) - 1))
    x = grow(draw, _sized(t, dim, t.shape[dim] * draw(st.integers(1, 2))), scope, fuel)
    return Window(x, dim, integer(draw, scope), t.shape[dim])


@rule("row", 3, lambda t, scope: is_whole(t, scope) and len(t.shape) < 3)
def _row(draw, t, scope, fuel):
    dim = draw(st.integers(0, len(t.shape)))
    shape = (*t.shape[:dim], pick(draw, (4, 3, 8)), *t.shape[dim:])
    return Row(grow(draw, replace(t, shape=shape), scope, fuel), dim, integer(draw, scope), draw(st.booleans()))


@rule("move", 1, lambda t, scope: is_whole(t, scope) and len(t.shape) > 0 and math.prod(t.shape) <= 64)
def _piece(draw, t, scope, fuel):
    dim, pieces = draw(st.integers(0, len(t.shape) - 1)), draw(st.integers(2, 3))
    x = grow(draw, _sized(t, dim, pieces * t.shape[dim]), scope, fuel)
    return Piece(x, dim, pieces, draw(st.integers(0, pieces - 1)))


@rule("move", 2, lambda t, scope: is_whole(t, scope) and len(t.shape) > 0 and max(t.shape) > 1)
def _concatenate(draw, t, scope, fuel):
    dim = pick(draw, [d for d, size in enumerate(t.shape) if size > 1])
    size = t.shape[dim]
    first = pick(draw, [size // 2, 1])
    parts = [
        grow(draw, _sized(t, dim, n), scope, f)
        for n, f in zip((first, size - first), shares(draw, fuel, 2), strict=True)
    ]
    return Concatenate(tuple(parts), dim)


@rule("move", 1, lambda t, scope: is_whole(t, scope) and len(t.shape) > 0)
def _broadcast(draw, t, scope, fuel):
    return Broadcast(grow(draw, replace(t, shape=t.shape[1:]), scope, fuel), t.shape[0])


@rule("cast", 1, lambda t, scope: is_whole(t, scope) and not scope.closed and t.dtype != "complex64")
def _cast(draw, t, scope, fuel):
    other = "float32" if t.dtype == "bfloat16" else pick(draw, ("bfloat16", "complex64"))
    return Cast(grow(draw, replace(t, dtype=other), scope, fuel), t.dtype)


@rule("take", 2, lambda t, scope: is_open(t, scope) and t.batched and not scope.alone and is_float(t, scope))
def _take(draw, t, scope, fuel):
    table = grow(draw, Type((pick(draw, SIZES), *t.shape)), scope, fuel)
    return Take(table)


@rule("take", 1, lambda t, scope: is_open(t, scope) and is_whole(t, scope) and t.shape[:1] == (8,))
def _take_by_leaf(draw, t, scope, fuel):
    return Take(
        grow(draw, replace(t, shape=(pick(draw, SIZES), *t.shape[1:])), scope, fuel), IntLeaf(draw(st.integers(0, 1)))
    )


@rule("move", 1, lambda t, scope: is_whole(t, scope) and len(t.shape) > 1)
def _put(draw, t, scope, fuel):
    first, second = shares(draw, fuel, 2)
    row = grow(draw, replace(t, shape=t.shape[1:]), scope, second)
    return Put(grow(draw, t, scope, first), integer(draw, scope), row)
