"""An optimizer's update taken apart: what becomes of one parameter's states depends on no other's.

Optax goes over all leaves in every stage, so the equations of one leaf are scattered over the whole program. They are
put together again here by what they read: two arrays belong together if some equation reads or gives both. What is
small and known beforehand, such as a step count, a learning rate or a global norm, may be read by all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from jaxshard.jaxprs import ELEMENTWISE, INLINED, at, body_of, evaluate, needed_for, shape_of

SMALL = 1024
"""Elements of the largest array that all parts may share."""
CALLS = (*INLINED, "custom_jvp_call")


@dataclass(frozen=True, kw_only=True)
class Part:
    """Equations that share nothing but small values with the rest of their program.

    inputs: the program's inputs that they read. shared: small values that they read. results: positions among the
    program's results.
    """

    eqns: tuple[JaxprEqn, ...]
    inputs: tuple[Var, ...]
    shared: tuple[Var, ...]
    results: tuple[int, ...]

    @property
    def elementwise(self) -> bool:
        """Whether any piece of the results comes from the same piece of all inputs."""
        shapes = {shape_of(x).shape for x in self.inputs}
        scalars = all(not shape_of(x).shape for x in self.shared)
        return len(shapes) == 1 and scalars and all(_elementwise(eqn, *shapes) for eqn in self.eqns)


@dataclass(frozen=True, kw_only=True)
class Parted:
    """A program as equations that give the small values, and parts that read them."""

    closed: ClosedJaxpr
    shared: tuple[JaxprEqn, ...]
    parts: tuple[Part, ...]


def parted(closed: ClosedJaxpr, hosted: Sequence[bool]) -> Parted:
    """Takes a program apart, with what its `jit` equations hold. hosted: which of its inputs lie in host memory."""
    closed = inlined(closed)
    jaxpr = closed.jaxpr
    dependent = {v for v, host in zip(jaxpr.invars, hosted, strict=True) if host}
    for eqn in jaxpr.eqns:
        if any(isinstance(v, Var) and v in dependent for v in eqn.invars):
            dependent.update(eqn.outvars)

    shared = set(jaxpr.constvars) | {v for v in jaxpr.invars if v not in dependent and not shape_of(v).shape}

    def is_shared(eqn: JaxprEqn) -> bool:
        """Whether it gives numbers, or small arrays that come from shared values alone, such as PRNG keys."""
        if any(v in dependent for v in eqn.outvars):
            return False
        known = all(isinstance(v, Literal) or v in shared for v in eqn.invars)
        return all(not shape_of(v).shape or (known and shape_of(v).size <= SMALL) for v in eqn.outvars)

    kept = []
    for eqn in jaxpr.eqns:
        if is_shared(eqn):
            shared.update(eqn.outvars)
        else:
            kept.append(eqn)
    joined = _Joined()
    for eqn in kept:
        joined.join([v for v in (*eqn.invars, *eqn.outvars) if isinstance(v, Var) and v not in shared])
    members: dict[Var, tuple[list[JaxprEqn], list[Var], dict[Var, None], list[int]]] = {}

    def member(v: Var):
        return members.setdefault(joined.root(v), ([], [], {}, []))

    for v in jaxpr.invars:
        if v not in shared:
            member(v)[1].append(v)
    for eqn in kept:
        eqns, _, read, _ = member(next(v for v in eqn.outvars if v not in shared))
        eqns.append(eqn)
        read.update((v, None) for v in eqn.invars if isinstance(v, Var) and v in shared)
    given = set(jaxpr.invars)
    for position, v in enumerate(jaxpr.outvars):
        if isinstance(v, Var) and v not in shared and v not in given:
            member(v)[3].append(position)
    parts = tuple(
        Part(eqns=tuple(eqns), inputs=tuple(inputs), shared=tuple(read), results=tuple(results))
        for eqns, inputs, read, results in members.values()
        if results
    )
    wanted = {v for part in parts for v in part.shared} | {
        v for v in jaxpr.outvars if isinstance(v, Var) and v in shared
    }
    return Parted(closed=closed, shared=needed_for(jaxpr, wanted), parts=parts)


def inlined(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The same program with the bodies of its `jit` equations in their place: one may hold all leaves of a tree."""

    def evaluated(jaxpr: Jaxpr, consts: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
        values: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *inputs], strict=True))

        for eqn in jaxpr.eqns:
            operands = _read(eqn.invars, values)
            with at(eqn):
                within = eqn.primitive.name in INLINED
                results = evaluated(*body_of(eqn), operands) if within else evaluate(eqn, operands)
            values.update(zip(eqn.outvars, results, strict=True))
        return _read(jaxpr.outvars, values)

    return jax.make_jaxpr(lambda *x: evaluated(closed.jaxpr, closed.consts, x))(*map(shape_of, closed.jaxpr.invars))


def run(eqns: Sequence[JaxprEqn], values: dict[Any, Any]) -> None:
    """Evaluates equations, and adds what they give to the values by variable."""
    for eqn in eqns:
        operands = _read(eqn.invars, values)
        with at(eqn):
            values.update(zip(eqn.outvars, evaluate(eqn, operands), strict=True))


def run_piece(eqns: Sequence[JaxprEqn], values: dict[Any, Any], shape: tuple[int, ...]) -> None:
    """The same for elementwise equations on pieces, of this shape, of the arrays that they were traced for."""
    for eqn in eqns:
        operands = _read(eqn.invars, values)
        if eqn.primitive.name in CALLS:
            body, consts = body_of(eqn)
            inside = dict(zip([*body.constvars, *body.invars], [*consts, *operands], strict=True))
            run_piece(body.eqns, inside, shape)
            results = _read(body.outvars, inside)
        elif eqn.primitive.name == "broadcast_in_dim":
            wanted = shape if shape_of(eqn.outvars[0]).shape else ()
            results = [jnp.broadcast_to(operands[0], wanted)]
        else:
            with at(eqn):
                results = evaluate(eqn, operands)
        values.update(zip(eqn.outvars, results, strict=True))


def _read(atoms: Sequence[Any], values: dict[Any, Any]) -> list[Any]:
    return [atom.val if isinstance(atom, Literal) else values[atom] for atom in atoms]


def _elementwise(eqn: JaxprEqn, shape: tuple[int, ...]) -> bool:
    shapes = {shape_of(x).shape for x in (*eqn.invars, *eqn.outvars)} - {()}
    if not shapes <= {shape}:
        return False
    if eqn.primitive.name in CALLS:
        return all(_elementwise(inner, shape) for inner in body_of(eqn)[0].eqns)
    if eqn.primitive.name == "broadcast_in_dim":
        return not shape_of(eqn.invars[0]).shape
    return not shapes or eqn.primitive.name in ELEMENTWISE


class _Joined:
    """Which variables belong together."""

    def __init__(self):
        self.parents: dict[Var, Var] = {}

    def root(self, v: Var) -> Var:
        while self.parents.get(v, v) is not v:
            v = self.parents[v]
        return v

    def join(self, group: Sequence[Var]) -> None:
        first = self.root(group[0])
        for v in group:
            self.parents[self.root(v)] = first
            self.parents[v] = first
