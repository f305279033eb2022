"""Which values of a program may differ between devices.

What may differ must not choose where a shard is sliced, and is averaged where one value is kept for all devices.
"""

from __future__ import annotations

from collections.abc import Sequence

from jax.extend.core import Jaxpr, JaxprEqn, Var

from jaxshard.jaxprs import INLINED, REMAT, body_of, contains, scan_parts, subjaxprs

PER_DEVICE = (
    "axis_index",
    "pure_callback",
    "io_callback",
    "ppermute",
    "reduce_scatter",
    "all_to_all",
    "ragged_all_to_all",
)


def varying(jaxpr: Jaxpr, inputs: Sequence[bool]) -> set[Var]:
    """The variables of a program that may differ between devices, given which inputs do.

    Whatever is computed from such a variable may differ, and so may what asks for its device, or calls the host.
    """
    found = {v for v, flag in zip(jaxpr.invars, inputs, strict=True) if flag}
    for eqn in jaxpr.eqns:
        flags = [isinstance(v, Var) and v in found for v in eqn.invars]
        if any(flags) or _asks_where_it_is(eqn):
            # What is written to a reference is read from it later, by the same name.
            found.update(v for v in eqn.invars if isinstance(v, Var) and _is_reference(v))
            flags = [isinstance(v, Var) and v in found for v in eqn.invars]
            found.update(v for v, flag in zip(eqn.outvars, _varying_results(eqn, flags), strict=True) if flag)
    return found


def _is_reference(var: Var) -> bool:
    """Whether a variable stands for mutable memory (`jax.new_ref`), not for a value."""
    return hasattr(var.aval, "inner_aval")


def _varying_results(eqn: JaxprEqn, flags: list[bool]) -> list[bool]:
    if eqn.primitive.name == "scan":
        flags = varying_in_scan(eqn, flags)
    elif eqn.primitive.name not in INLINED + REMAT:
        return [True] * len(eqn.outvars)
    body, _ = body_of(eqn)
    inside = varying(body, flags)
    return [isinstance(v, Var) and v in inside for v in body.outvars]


def varying_in_scan(eqn: JaxprEqn, flags: Sequence[bool]) -> list[bool]:
    """Which inputs of a scan's body may differ between devices: a carry does if any iteration makes it so."""
    body, _ = body_of(eqn)
    constants, carries = scan_parts(eqn)
    flags = list(flags)
    while True:
        inside = varying(body, flags)
        after = [isinstance(v, Var) and v in inside for v in body.outvars[:carries]]
        merged = [before or now for before, now in zip(flags[constants : constants + carries], after, strict=True)]
        if merged == flags[constants : constants + carries]:
            return flags
        flags[constants : constants + carries] = merged


def _asks_where_it_is(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name in PER_DEVICE or any(contains(sub, PER_DEVICE) for sub in subjaxprs(eqn))
