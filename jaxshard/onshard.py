"""Operations that may run on a shard before it is gathered: linear ones that keep a leaf's split dim.

Only linear ones: the gradient is taken with respect to a zero "slot" that travels beside the shard, and a square of
zero has the wrong derivative. Whatever is not listed here is right as well; the leaf is gathered first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from jaxshard.jaxprs import INLINED, REMAT, body_of, scan_parts, shape_of
from jaxshard.varying import varying, varying_in_scan

Params = dict[str, Any]
Rule = Callable[[JaxprEqn, int, int], tuple[int, Params] | None]
"""(equation, split dim, pieces) -> (that dim in the results, the equation's parameters on one piece)."""

SLICES = ("slice", "dynamic_slice", "split")


def move(eqn: JaxprEqn, dim: int | None, pieces: int) -> tuple[int | None, Params] | None:
    """Where an equation takes the split dim of the leaf it reads, and its parameters on one of the pieces.

    The leaf is its first operand, or any factor of a product. None when the equation is not linear, or needs the leaf
    whole. `dim` None is a leaf that is not split.
    """
    name = eqn.primitive.name
    if name not in _RULES or not _linear_in_first(eqn):
        return None
    if dim is None:
        return None, eqn.params
    return _RULES[name](eqn, dim, pieces)


def _linear_in_first(eqn: JaxprEqn) -> bool:
    shape, first = _shape(eqn), shape_of(eqn.outvars[0])
    match eqn.primitive.name:
        case "mul" | "div":
            factors = eqn.invars if eqn.primitive.name == "mul" else eqn.invars[1:]
            return any(isinstance(factor, Literal) and not jnp.shape(factor.val) for factor in factors)
        case "convert_element_type":
            old, new = shape_of(eqn.invars[0]).dtype, first.dtype
            floats = all(jnp.issubdtype(dtype, jnp.floating) for dtype in (old, new))
            return floats and new.itemsize <= old.itemsize
        case "broadcast_in_dim":
            return len(eqn.invars) == 1 and math.prod(first.shape) == math.prod(shape)
        case "reshape":
            return eqn.params.get("dimensions") is None and len(eqn.invars) == 1
    return True


def _shape(eqn: JaxprEqn) -> tuple[int, ...]:
    return shape_of(eqn.invars[0]).shape


def _elementwise(eqn: JaxprEqn, dim: int, pieces: int):
    return dim, eqn.params


def _transpose(eqn: JaxprEqn, dim: int, pieces: int):
    return eqn.params["permutation"].index(dim), eqn.params


def _squeeze(eqn: JaxprEqn, dim: int, pieces: int):
    gone = eqn.params["dimensions"]
    return None if dim in gone else (dim - sum(d < dim for d in gone), eqn.params)


def _broadcast_in_dim(eqn: JaxprEqn, dim: int, pieces: int):
    new = eqn.params["broadcast_dimensions"][dim]
    return new, {**eqn.params, "shape": _divided(eqn.params["shape"], new, pieces)}


def _reshape(eqn: JaxprEqn, dim: int, pieces: int):
    """A piece stays a piece when the dims before the split one hold as many elements before as after."""
    old, new = _shape(eqn), eqn.params["new_sizes"]
    before = math.prod(old[:dim])
    for k, size in enumerate(new):
        if math.prod(new[:k]) == before and size % pieces == 0 and (size > 1 or old[dim] == 1):
            return k, {**eqn.params, "new_sizes": _divided(new, k, pieces)}
    return None


def _slice(eqn: JaxprEqn, dim: int, pieces: int):
    start, limit, strides = (eqn.params[key] for key in ("start_indices", "limit_indices", "strides"))
    if start[dim] != 0 or limit[dim] != _shape(eqn)[dim] or (strides is not None and strides[dim] != 1):
        return None
    return dim, {**eqn.params, "limit_indices": _divided(limit, dim, pieces)}


def _dynamic_slice(eqn: JaxprEqn, dim: int, pieces: int):
    sizes = eqn.params["slice_sizes"]
    if sizes[dim] != _shape(eqn)[dim]:
        return None
    return dim, {**eqn.params, "slice_sizes": _divided(sizes, dim, pieces)}


def _along_other_dims(param: str) -> Rule:
    return lambda eqn, dim, pieces: None if eqn.params[param] == dim else (dim, eqn.params)


def _divided(shape: Sequence[int], dim: int, pieces: int) -> tuple[int, ...]:
    return tuple(size // pieces if d == dim else size for d, size in enumerate(shape))


_RULES: dict[str, Rule] = {
    "broadcast_in_dim": _broadcast_in_dim,
    "concatenate": _along_other_dims("dimension"),
    "convert_element_type": _elementwise,
    "copy": _elementwise,
    "copy_p": _elementwise,
    "div": _elementwise,
    "dynamic_slice": _dynamic_slice,
    "mul": _elementwise,
    "name": _elementwise,
    "neg": _elementwise,
    "reshape": _reshape,
    "slice": _slice,
    "split": _along_other_dims("axis"),
    "squeeze": _squeeze,
    "transpose": _transpose,
}


def sliced_dims(jaxpr: Jaxpr, leaves: int, pieces: int) -> list[set[int]]:
    """For each of the first `leaves` inputs, the dims along which the program takes it layer by layer.

    These are the dims a leaf must not be split along: a `scan` slices it there, or the program reads rows of it.
    They are found by following the leaf through casts, transposes, reshapes, jit, remat and nested scans.
    """
    found: list[set[int]] = [set() for _ in range(leaves)]
    # For each variable: (leaf, dim of the leaf) -> dim of the variable.
    places = {
        var: {(leaf, dim): dim for dim in range(shape_of(var).ndim)} for leaf, var in enumerate(jaxpr.invars[:leaves])
    }
    _follow(jaxpr, places, pieces, found)
    return found


_Places = dict[tuple[int, int], int]


def _follow(jaxpr: Jaxpr, places: dict[Var, _Places], pieces: int, found: list[set[int]]) -> None:
    for eqn in jaxpr.eqns:
        at = [places.get(v, {}) if isinstance(v, Var) else {} for v in eqn.invars]
        if not any(at):
            continue
        name = eqn.primitive.name
        if name in INLINED + REMAT:
            inner, _ = body_of(eqn)
            inside = dict(zip(inner.invars, at, strict=True))
            _follow(inner, inside, pieces, found)
            results = [inside.get(v, {}) if isinstance(v, Var) else {} for v in inner.outvars]
            places.update(zip(eqn.outvars, results, strict=True))
        elif name == "scan":
            inner, _ = body_of(eqn)
            constants, carries = scan_parts(eqn)
            inside = dict(zip(inner.invars[:constants], at[:constants], strict=True))
            for var, place in zip(inner.invars[constants + carries :], at[constants + carries :], strict=True):
                for (leaf, dim), now in place.items():
                    if now == 0:
                        found[leaf].add(dim)
                inside[var] = {key: now - 1 for key, now in place.items() if now > 0}
            _follow(inner, inside, pieces, found)
        else:
            operands = at if name in ("concatenate", "mul") else at[:1]
            moved: _Places = {}
            for (leaf, dim), now in (item for place in operands for item in place.items()):
                step = move(eqn, now, 1)
                if step is not None and step[0] is not None:
                    moved[leaf, dim] = step[0]
                elif name in SLICES and _keeps_a_dim(eqn):
                    found[leaf].add(dim)
            for var in eqn.outvars:
                places[var] = dict(moved)


def _keeps_a_dim(eqn: JaxprEqn) -> bool:
    """Whether a slice leaves some dim as long as it is: a row does, a single element does not."""
    shape = _shape(eqn)
    return any(size > 1 and move(eqn, dim, 1) is not None for dim, size in enumerate(shape))


def read_once(jaxpr: Jaxpr, var: Var) -> bool:
    """Whether a program reads an input in one place alone, whole, once cast and transposed or not.

    Its gradient is then one summand, or one for each layer of a stack. What is not sure counts as read more often.
    """
    readers = [(eqn, i) for eqn in jaxpr.eqns for i, x in enumerate(eqn.invars) if x is var]
    if var in jaxpr.outvars or len(readers) != 1:
        return False
    ((eqn, i),) = readers
    name = eqn.primitive.name
    if name in ("convert_element_type", "transpose"):
        return read_once(jaxpr, eqn.outvars[0])
    if name in INLINED + REMAT:
        inner, _ = body_of(eqn)
        return read_once(inner, inner.invars[i])
    if name == "scan":
        inner, _ = body_of(eqn)
        return i >= sum(scan_parts(eqn)) and read_once(inner, inner.invars[i])
    return all(move(eqn, dim, 1) is None for dim in range(shape_of(var).ndim))


def read_by_rows(jaxpr: Jaxpr, var: Var, inputs: Sequence[bool]) -> bool:
    """Whether a program reads an input only by slices, so that it never needs all of it at once.

    inputs: which inputs of the program may differ between devices. Slices whose place may differ do not count: pieces
    of different rows make no row.
    """
    if var in jaxpr.outvars:
        return False
    differ = varying(jaxpr, inputs)

    def reads_rows(eqn: JaxprEqn, position: int) -> bool:
        name = eqn.primitive.name
        flags = [isinstance(v, Var) and v in differ for v in eqn.invars]
        if name in ("convert_element_type", "transpose", "neg", "mul", "div"):
            return _linear_in_first(eqn) and read_by_rows(jaxpr, eqn.outvars[0], inputs)
        if name in ("slice", "dynamic_slice"):
            fewer = shape_of(eqn.outvars[0]).size < math.prod(_shape(eqn))
            return position == 0 and fewer and not any(flags)
        if name in INLINED + REMAT:
            inner, _ = body_of(eqn)
            return read_by_rows(inner, inner.invars[position], flags)
        if name == "scan":
            inner, _ = body_of(eqn)
            constants, carries = scan_parts(eqn)
            if position < constants:
                return read_by_rows(inner, inner.invars[position], varying_in_scan(eqn, flags))
            return position >= constants + carries
        return False

    return all(reads_rows(eqn, position) for eqn in jaxpr.eqns for position, v in enumerate(eqn.invars) if v is var)
