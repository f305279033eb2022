"""The structure of jaxprs: the one place that knows how JAX's higher-order primitives hold their programs.

Equations are evaluated as one-equation jaxprs, so that name stacks, tracebacks and call parameters stay JAX's own
business. What remains to be known is the few names and parameters below; `scan` differs between releases.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun
from jax.extend.core.primitives import copy_p
from jax.extend.source_info_util import current_name_stack, new_name_stack, user_context
from jax.interpreters.partial_eval import dce_jaxpr
from jax.sharding import Mesh

from jaxshard.mesh import unplaced

INLINED = ("jit", "pjit", "closed_call", "core_call")
REMAT = ("remat2", "remat", "checkpoint")
ELEMENTWISE = frozenset(
    re.findall(
        r"\w+",
        """
        abs acos acosh add and asin asinh atan atan2 atanh cbrt ceil clamp conj convert_element_type copy
        copy_p cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt imag integer_pow
        is_finite le lgamma log log1p logistic lt max min mul ne neg nextafter not or pow real
        reduce_precision rem round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign
        sin sinh sqrt square stop_gradient sub tan tanh xor
        """,
    )
)
COLLECTIVES = {
    "psum": "all_reduce",
    "psum_invariant": "all_reduce",
    "pmax": "all_reduce",
    "pmin": "all_reduce",
    "all_gather": "all_gather",
    "all_gather_invariant": "all_gather",
    "all_gather_reduced": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "all_to_all": "all_to_all",
    "ragged_all_to_all": "all_to_all",
    "ppermute": "permute",
}


def trace(fn: Callable[..., Any], mesh: Mesh, axis_name: str | None, *args: Any) -> tuple[ClosedJaxpr, Any]:
    """The jaxpr of ``fn(*args)`` as one device of `mesh` runs it, and the shapes of its result.

    args: pytrees of ShapeDtypeStructs with the shapes that one device sees. The mesh axes have names, as in
    `shard_map`; `axis_name` is one more, for all batch axes together, and is replaced by them in the result. One
    device's part has no layout: no mesh is set, so frameworks find none to constrain to, and sharding constraints that
    bring a mesh of their own are taken out.

    An error of the function's own is raised as it is; one about the name of an axis has a note with those there are.
    """
    names = list(zip(mesh.axis_names, mesh.axis_sizes, strict=True))
    names += [] if axis_name is None else [(axis_name, mesh.size)]
    with unplaced():
        # A fresh function: JAX caches traces by the function's identity.
        try:
            closed, shapes = jax.make_jaxpr(lambda *a: fn(*a), return_shape=True, axis_env=names)(*args)
        except NameError as error:
            if error.name is None:  # Python's own errors say which variable has no value; JAX's speak of an axis.
                error.add_note(
                    f"loss_fn: the mesh has the axes {mesh.axis_names}. A model's own name for all of them together "
                    f"is given as axis_name=; it is {axis_name!r}."
                )
            raise
        index = jax.make_jaxpr(jax.jit(lambda: lax.axis_index(mesh.axis_names)), axis_env=names)().jaxpr.eqns[0]
    jaxpr = closed.jaxpr
    if contains(jaxpr, ("sharding_constraint",)):
        jaxpr = _rewritten(jaxpr, _without_constraint)
    if axis_name is not None:
        jaxpr = _rewritten(jaxpr, partial(_with_axes, name=axis_name, axes=mesh.axis_names, index=index))
    return ClosedJaxpr(jaxpr, closed.consts), shapes


def at(eqn: JaxprEqn) -> AbstractContextManager[None]:
    """Inside, whatever is computed stands where an equation stands in the user's program: on its line, in its scopes.

    Profiles and the compiler's reports then name the user's layers, also for what is computed in an equation's stead.
    """
    info = eqn.source_info
    return user_context(info.traceback, name_stack=current_name_stack() + info.name_stack)


def first_results(closed: ClosedJaxpr, count: int) -> ClosedJaxpr:
    """The same program with its first `count` results alone, and without what only the others need.

    Nor what nobody reads: flax nnx's `remat` and `scan` return every parameter, which would be gathered for it.
    """
    wanted = [i < count for i in range(len(closed.jaxpr.outvars))]
    return ClosedJaxpr(dce_jaxpr(closed.jaxpr, wanted, instantiate=True)[0], closed.consts)


def only(closed: ClosedJaxpr, results: Sequence[int]) -> tuple[ClosedJaxpr, list[bool]]:
    """(a program that gives some of the results alone, which of the inputs it takes). results: ascending positions."""
    wanted = [i in set(results) for i in range(len(closed.jaxpr.outvars))]
    jaxpr, read = dce_jaxpr(closed.jaxpr, wanted)
    return ClosedJaxpr(jaxpr, closed.consts), read


def constant_of(jaxpr: Jaxpr, atom: Any) -> Any:
    """The number that each element of a result is, whatever the inputs; None if there is none."""
    if isinstance(atom, Literal):
        return atom.val
    maker = next((eqn for eqn in jaxpr.eqns if atom in eqn.outvars), None)
    if maker is None:
        return None
    if maker.primitive.name in INLINED:
        body, _ = body_of(maker)
        return constant_of(body, body.outvars[maker.outvars.index(atom)])
    return constant_of(jaxpr, maker.invars[0]) if maker.primitive.name == "broadcast_in_dim" else None


def needed_for(jaxpr: Jaxpr, wanted: Iterable[Var]) -> tuple[JaxprEqn, ...]:
    """The equations of a program, in its order, that some of its variables come from."""
    needed, kept = set(wanted), []
    for eqn in reversed(jaxpr.eqns):
        if needed.intersection(eqn.outvars):
            needed.update(v for v in eqn.invars if isinstance(v, Var))
            kept.append(eqn)
    return tuple(reversed(kept))


def origin(jaxpr: Jaxpr, atom: Any) -> Any:
    """The input that a variable is, unchanged, however many `jit`, `remat` and `scan` pass it on; else the variable."""
    maker = next((eqn for eqn in jaxpr.eqns if atom in eqn.outvars), None)
    if maker is None or maker.primitive.name not in (*INLINED, *REMAT, "scan"):
        return atom
    body, _ = body_of(maker)
    position = maker.outvars.index(atom)
    inside = origin(body, body.outvars[position])
    if inside not in body.invars:
        return atom
    source = body.invars.index(inside)
    if maker.primitive.name == "scan":
        constants, carries = scan_parts(maker)
        same = position + constants == source if position < carries else source >= constants + carries
        if not same:
            return atom
    return origin(jaxpr, maker.invars[source])


def evaluate(eqn: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
    """The results of one equation, in the order of its outvars; None for those that nobody reads.

    Called inside `at`, which has entered the equation's scopes already.
    """
    eqn = eqn.replace(source_info=eqn.source_info.replace(name_stack=new_name_stack()))
    values = {v: x for v, x in zip(eqn.invars, operands, strict=True) if isinstance(v, Var)}
    kept = [v for v in eqn.outvars if not is_dropped(v)]
    jaxpr = Jaxpr(
        constvars=(),
        invars=list(values),
        outvars=kept,
        eqns=[eqn],
        effects=eqn.effects,
        debug_info=_NO_DEBUG_INFO,
    )
    results = iter(jaxpr_as_fun(ClosedJaxpr(jaxpr, ()))(*values.values()))
    return [None if is_dropped(v) else next(results) for v in eqn.outvars]


def shape_of(atom: Any) -> jax.ShapeDtypeStruct:
    """The shape and dtype of a jaxpr's variable or literal."""
    return jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype)


def is_dropped(var: Var) -> bool:
    return type(var).__name__ == "DropVar"


_NO_DEBUG_INFO = jax.make_jaxpr(lambda: ())().jaxpr.debug_info.with_unknown_names()


def subjaxprs(eqn: JaxprEqn) -> list[Jaxpr]:
    """Every program that an equation holds."""
    found = []
    for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: isinstance(x, ClosedJaxpr | Jaxpr)):
        if isinstance(value, ClosedJaxpr):
            found.append(value.jaxpr)
        elif isinstance(value, Jaxpr):
            found.append(value)
    return found


def body_of(eqn: JaxprEqn) -> tuple[Jaxpr, Sequence[Any]]:
    """The program of a `jit`, `remat` or `scan` equation, with its constants."""
    body = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
    if isinstance(body, ClosedJaxpr):
        return body.jaxpr, body.consts
    if isinstance(body, Jaxpr):
        return body, getattr(body, "consts", ())
    raise NotImplementedError(
        f"this JAX ({jax.__version__}) keeps the program of {eqn.primitive.name!r} in a way that is not known here; "
        f"its parameters are {sorted(eqn.params)}."
    )


def scan_parts(eqn: JaxprEqn) -> tuple[int, int]:
    """How many operands of a `scan` are constants, and how many its carry; the rest are sliced.

    Read off the ranks: a sliced operand, or a stacked result, has one dim more outside than inside. (Up to JAX 0.10
    these counts are parameters of the equation, later they are not.)
    """
    body, _ = body_of(eqn)
    carries = sum(shape_of(o).ndim == shape_of(i).ndim for o, i in zip(eqn.outvars, body.outvars, strict=True))
    sliced = sum(shape_of(o).ndim != shape_of(i).ndim for o, i in zip(eqn.invars, body.invars, strict=True))
    return len(eqn.invars) - carries - sliced, carries


def closed_over(eqn: JaxprEqn) -> int:
    """How many of the first operands a custom derivative rule closes over: it has no derivative for them."""
    return eqn.params.get("num_consts", 0) if eqn.primitive.name.startswith("custom_") else 0


def contains(jaxpr: Jaxpr, names: Sequence[str]) -> bool:
    """Whether a primitive of one of these names stands anywhere in a program."""
    return any(eqn.primitive.name in names or any(contains(sub, names) for sub in subjaxprs(eqn)) for eqn in jaxpr.eqns)


def contains_remat(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name in REMAT or any(contains(sub, REMAT) for sub in subjaxprs(eqn))


def stands_for(name: str, params: Mapping[str, Any], names: Sequence[str]) -> bool:
    """Whether a primitive with these parameters is, or bears, one of `names`, or is a custom_vjp call around one."""
    if name == "custom_vjp_call":
        return any(stands_for(eqn.primitive.name, eqn.params, names) for eqn in params["call_jaxpr"].eqns)
    return name in names or (name == "name" and params["name"] in names)


def product_order(eqn: JaxprEqn, position: int) -> tuple[int, ...]:
    """The order in which the adjoint of an equation computes the dims of an operand's gradient.

    For a matrix product batch dims come first, then those the operand keeps, then those it is contracted over.
    """
    dims = range(shape_of(eqn.invars[position]).ndim)
    if eqn.primitive.name != "dot_general":
        return tuple(dims)
    contracted, batch = (eqn.params["dimension_numbers"][kind][position] for kind in (0, 1))
    kept = [d for d in dims if d not in contracted and d not in batch]
    return (*batch, *kept, *sorted(contracted))


@dataclass(frozen=True, kw_only=True)
class Site:
    """An equation in its place: how often it runs, the name scopes it stands in, and what is around it.

    loops: the name scope of each scan around it, outermost first. remats: how many remat regions are around it.
    """

    eqn: JaxprEqn
    times: int = 1
    scope: str = ""
    loops: tuple[str, ...] = ()
    remats: int = 0


def walk(jaxpr: Jaxpr, around: Site | None = None) -> Iterator[Site]:
    """Every equation of a program at any depth.

    A `while` loop, whose length no one knows, counts once; so does each branch of a `cond`.
    """
    for eqn in jaxpr.eqns:
        site = replace(around, eqn=eqn) if around else Site(eqn=eqn)
        site = replace(site, scope=f"{site.scope}/{eqn.source_info.name_stack}")
        yield site
        if eqn.primitive.name == "scan":
            site = replace(site, times=site.times * eqn.params["length"], loops=(*site.loops, site.scope))
        if eqn.primitive.name in REMAT:
            site = replace(site, remats=site.remats + 1)
        for sub in subjaxprs(eqn):
            yield from walk(sub, site)


def is_elementwise(jaxpr: Jaxpr) -> bool:
    """Whether each element of every array comes from the same elements of others, and from scalars, alone."""

    def local(eqn: JaxprEqn) -> bool:
        shapes = {shape_of(x).shape for x in (*eqn.invars, *eqn.outvars)} - {()}
        if eqn.primitive.name == "broadcast_in_dim":
            return shape_of(eqn.invars[0]).shape == ()
        return not shapes or bool(subjaxprs(eqn)) or (eqn.primitive.name in ELEMENTWISE and len(shapes) == 1)

    return all(local(site.eqn) for site in walk(jaxpr))


def axes_of(eqn: JaxprEqn) -> tuple[str, ...]:
    """The mesh axes of a collective's equation."""
    axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    axes = axes if isinstance(axes, tuple | list) else (axes,)
    return tuple(axis for axis in axes if isinstance(axis, str))


def _rewritten(jaxpr: Jaxpr, rule: Callable[[JaxprEqn], JaxprEqn]) -> Jaxpr:
    """The same program with a rule applied to each equation at any depth, outermost first."""

    def inside(value: Any) -> Any:
        if isinstance(value, tuple | list):
            if not _holds_programs(value):
                return value
            items = [inside(v) for v in value]
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        if isinstance(value, Jaxpr):
            return _rewritten(value, rule)
        if isinstance(value, ClosedJaxpr):
            return ClosedJaxpr(_rewritten(value.jaxpr, rule), value.consts)
        return value

    eqns = [rule(eqn) for eqn in jaxpr.eqns]
    return jaxpr.replace(
        eqns=[eqn.replace(params={key: inside(value) for key, value in eqn.params.items()}) for eqn in eqns]
    )


def _without_constraint(eqn: JaxprEqn) -> JaxprEqn:
    """A sharding constraint as the identity, on a shard as well."""
    return eqn.replace(primitive=copy_p, params={}) if eqn.primitive.name == "sharding_constraint" else eqn


def _with_axes(eqn: JaxprEqn, *, name: str, axes: tuple[str, ...], index: JaxprEqn) -> JaxprEqn:
    """An equation with the axis `name` replaced by `axes`.

    index: an equation whose result is the device's index along all `axes` (the primitive itself takes one axis only).
    """
    if eqn.primitive.name == "axis_index" and axes_of(eqn) == (name,):
        return index.replace(outvars=eqn.outvars)
    if eqn.primitive.name in ("custom_vjp_call", "custom_jvp_call") and any(
        name in axes_of(site.eqn) for sub in subjaxprs(eqn) for site in walk(sub)
    ):
        raise NotImplementedError(
            f"axis_name={name!r} is used inside a custom derivative rule, where it cannot be replaced by {axes}. "
            f"Name the axes {axes} there instead."
        )
    params = dict(eqn.params)
    for key in ("axes", "axis_name"):
        if key in params and name in axes_of(eqn):
            old = params[key] if isinstance(params[key], tuple) else (params[key],)
            params[key] = tuple(a for axis in old for a in (axes if axis == name else (axis,)))
    return eqn.replace(params=params)


def _holds_programs(value: tuple | list) -> bool:
    return any(isinstance(v, ClosedJaxpr | Jaxpr) for v in value)
