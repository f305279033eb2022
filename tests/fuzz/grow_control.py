"""Rules for control flow, regions and derivatives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import strategies as st

from .control import POLICIES, Custom, Each, Gradient, Jit, Loop, Map, Remat, Switch, While
from .grammar import Draw, Scope, Type, grow, integer, is_float, is_whole, pick, rule, shares
from .nodes import Node, Var, nodes
from .operations import Apply, Mean, Pair


@rule("jit", 2)
def _jit(draw, t, scope, fuel):
    return Jit(grow(draw, t, scope, fuel, but="jit"))


@rule("remat", 2)
def _remat(draw, t, scope, fuel):
    return Remat(grow(draw, t, scope, fuel, but="remat"), pick(draw, list(POLICIES)), draw(st.booleans()))


@rule("branch", 3)
def _switch(draw, t, scope, fuel):
    parts = shares(draw, fuel, pick(draw, (2, 2, 3)))
    return Switch(integer(draw, scope), tuple(grow(draw, t, scope, part) for part in parts))


def _layers(draw: Draw, t: Type, count: int) -> list[Type]:
    """Types of layers that a body of this type may have a use for."""
    width = t.shape[-1] if t.shape else 8
    return [Type(pick(draw, [(width, width), (width,), (8, width), t.shape])) for _ in range(count)]


def _stacked(layers: Sequence[Type], length: int) -> list[Type]:
    return [replace(layer, shape=(length, *layer.shape)) for layer in layers]


def _body(draw: Draw, t: Type, scope: Scope, fuel: int, must: Sequence[Node]) -> Node:
    """A body that reads all these variables."""
    body = grow(draw, t, scope, fuel)
    for var in must:
        if var not in nodes(body):
            shape = next(type for name, type in scope.variables if name == var)
            body = Pair("add", body, _reduced(var, shape, t))
    return body


def _reduced(var: Node, have: Type, want: Type) -> Node:
    """A variable as it can be added to a value of another type."""
    if have.shape == want.shape:
        return Apply("tanh", var) if have.shape else var
    x, shape = var, have.shape
    while shape and shape != want.shape[len(want.shape) - len(shape) :]:
        x, shape = Mean(x, 0), shape[1:]
    return x


@rule("loop", 5, lambda t, scope: is_float(t, scope) and scope.depth < 5)
def _loop(draw, t, scope, fuel):
    how = pick(draw, ("scan", "indexed", "fori", "reversed", "unrolled", "python"))
    length = pick(draw, (2, 3, 4, 8) if how != "python" else (2, 3))
    layers = _layers(draw, t, pick(draw, (1, 1, 0, 2)))
    parts = shares(draw, fuel, len(layers) + 2)
    stacks = [grow(draw, s, scope, f) for s, f in zip(_stacked(layers, length), parts[2:], strict=True)]
    name, inside = scope.inside(*layers, index=True)
    inside = replace(inside, variables=(*inside.variables, (Var(name), t)))
    must = [Var(name), *(Var(f"{name}x{i}") for i in range(len(layers)))]
    body = _body(draw, t, inside, parts[1], must)
    return Loop(name, how, length, tuple(stacks), grow(draw, t, scope, parts[0]), body)


@rule("loop", 2, lambda t, scope: is_float(t, scope) and is_whole(t, scope) and len(t.shape) > 1 and scope.depth < 5)
def _map(draw, t, scope, fuel):
    how, one = pick(draw, ("scan", "map", "vmap")), replace(t, shape=t.shape[1:])
    layers = _layers(draw, one, pick(draw, (1, 2)))
    parts = shares(draw, fuel, len(layers) + 1)
    stacks = _stacked(layers, t.shape[0])
    dim = draw(st.integers(0, len(layers[0].shape))) if how == "vmap" else 0
    first = layers[0].shape
    stacks[0] = replace(stacks[0], shape=(*first[:dim], t.shape[0], *first[dim:]))
    grown = [grow(draw, s, scope, f) for s, f in zip(stacks, parts[1:], strict=True)]
    name, inside = scope.inside(*layers)
    must = [Var(f"{name}x{i}") for i in range(len(layers))]
    return Map(name, how, tuple(grown), _body(draw, one, inside, parts[0], must), dim)


@rule("each", 3, lambda t, scope: t.batched and not scope.closed and not scope.alone and scope.depth < 5)
def _each(draw, t, scope, fuel):
    inputs = [Type(pick(draw, (t.shape, (8,))), batched=True) for _ in range(pick(draw, (1, 1, 2)))]
    parts = shares(draw, fuel, len(inputs) + 1)
    how = pick(draw, ("map", "vmap"))
    # Variables with examples cannot be seen from inside.
    outside = replace(scope, variables=tuple((var, type) for var, type in scope.variables if not type.batched))
    name, inside = outside.inside(*(replace(x, batched=False) for x in inputs), index=True, alone=True)
    must = [Var(f"{name}x{i}") for i in range(len(inputs))]
    body = _body(draw, replace(t, batched=False), inside, parts[0], must)
    return Each(name, how, tuple(grow(draw, x, scope, f) for x, f in zip(inputs, parts[1:], strict=True)), body)


@rule("while", 1, lambda t, scope: is_float(t, scope) and not scope.closed and scope.depth < 5)
def _while(draw, t, scope, fuel):
    first, second = shares(draw, fuel, 2)
    name, inside = scope.inside()
    inside = replace(inside, variables=(*inside.variables, (Var(name), t)))
    body = Apply("tanh", _body(draw, t, inside, second, [Var(name)])) if t.shape else Var(name)
    return While(name, integer(draw, scope), grow(draw, t, scope, first), body)


@rule("custom", 3, lambda t, scope: is_float(t, scope) and scope.depth < 5)
def _custom(draw, t, scope, fuel):
    rule = "jvp" if scope.forward else pick(draw, ("vjp", "jvp"))
    inputs = [t, *_layers(draw, t, pick(draw, (1, 0, 2)))]
    parts = shares(draw, fuel, len(inputs) + 1)
    name, inside = Scope(depth=scope.depth).inside(*inputs, closed=True, forward=rule == "jvp")
    must = [Var(f"{name}x{i}") for i in range(len(inputs))]
    body = _body(draw, t, inside, parts[0], must)
    return Custom(name, rule, tuple(grow(draw, x, scope, f) for x, f in zip(inputs, parts[1:], strict=True)), body)


@rule("gradient", 1, lambda t, scope: is_float(t, scope) and scope.depth < 5)
def _gradient(draw, t, scope, fuel):
    first, second = shares(draw, fuel, 2)
    name, inside = scope.inside()
    inside = replace(inside, variables=(*inside.variables, (Var(name), t)))
    return Gradient(name, grow(draw, t, scope, first), _body(draw, t, inside, second, [Var(name)]))
