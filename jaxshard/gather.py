"""Gather at use: any loss function becomes FSDP.

The loss is traced once, with whole parameters, and its jaxpr is evaluated again with each parameter `Held` as the
device holds it. An operation that reads a held leaf gathers it just before, and its adjoint reduces the gradient.
"Gather, apply, gather again for the backward pass" is right for every primitive; the rules below save memory and bytes.
Every strategy goes through here, whole leaves included: that is what makes their results equal to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from jaxshard.collectives import tie, tie_gradients
from jaxshard.held import Held, on_shard, turned, whole
from jaxshard.jaxprs import (
    INLINED,
    REMAT,
    at,
    body_of,
    closed_over,
    contains_remat,
    evaluate,
    product_order,
    scan_parts,
    shape_of,
)
from jaxshard.onshard import read_by_rows
from jaxshard.remat import is_activation, offloads, recomputing_gathers, waiting_for_host
from jaxshard.varying import varying, varying_in_scan


@dataclass(frozen=True, kw_only=True)
class Choices:
    """What a strategy and a run choose about the evaluation.

    regather: gather again in the backward pass. tie: start a gather only when its operation can start.
    remat: wraps the body of each scan that consumes parameters, or None. product_order: reduce gradients with their
    dims in the order in which matrix products give them, which XLA's CPU kernels need; on GPUs it costs transposes.
    """

    regather: bool = True
    tie: bool = False
    remat: Callable[[Callable], Callable] | None = None
    product_order: bool = True


@dataclass(frozen=True)
class _Place:
    """Where the interpreter is: inside a remat region a plain gather is enough; inside a scan no barrier may stand."""

    in_remat: bool = False
    in_scan: bool = False


def gather_at_use(closed: ClosedJaxpr, varies: Sequence[bool], choices: Choices) -> Callable[..., list[jax.Array]]:
    """The program of `closed` as a function of its flat inputs, any of which may be `Held`.

    varies: which of them may differ between devices.
    """

    def run(*inputs: Any) -> list[jax.Array]:
        return _whole_all(_interpret(closed.jaxpr, closed.consts, inputs, varies, choices, _Place()))

    return run


def _interpret(
    jaxpr: Jaxpr, consts: Sequence[Any], inputs: Sequence[Any], varies: Sequence[bool], choices: Choices, place: _Place
) -> list[Any]:
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *inputs], strict=True))
    differ = varying(jaxpr, varies)

    def read(atom):
        return atom.val if isinstance(atom, Literal) else values[atom]

    for eqn in jaxpr.eqns:
        operands = [read(v) for v in eqn.invars]
        flags = [isinstance(v, Var) and v in differ for v in eqn.invars]
        held = any(isinstance(x, Held) for x in operands)
        with at(eqn):
            results = _apply(eqn, operands, flags, choices, place) if held else evaluate(eqn, operands)
        values.update(zip(eqn.outvars, results, strict=True))
    # A result may be a literal, and a literal a Python number. It stays a constant, of which a sum sends nothing.
    return [np.asarray(v.val, shape_of(v).dtype) if isinstance(v, Literal) else values[v] for v in jaxpr.outvars]


def _apply(eqn: JaxprEqn, operands: list[Any], varies: list[bool], choices: Choices, place: _Place) -> list[Any]:
    """One equation that reads a held leaf."""
    name = eqn.primitive.name
    if name in INLINED:
        return _inlined(eqn, operands, varies, choices, place)
    if name in REMAT and not eqn.params["differentiated"]:
        return _remat(eqn, operands, varies, choices, place)
    if name == "scan":
        return _scan(eqn, operands, varies, choices, place)
    # Devices that slice at different places hold pieces that do not fit together.
    results = None if any(varies) else on_shard(eqn, operands)
    return results or _gather_and_apply(eqn, operands, choices, place)


def _gather_and_apply(eqn: JaxprEqn, operands: list[Any], choices: Choices, place: _Place) -> list[Any]:
    """The rule that is always right: make whole, apply, and forget the whole leaf until the backward pass."""

    def apply(*operands):
        operands = [x.picked() if isinstance(x, Held) else x for x in operands]
        activation = _activation(operands, closed_over(eqn))
        if activation is not None:
            operands = _tied(operands, activation, choices, place)
        orders = [product_order(eqn, i) if choices.product_order else None for i in range(len(operands))]
        arrays = [whole(x, order) for x, order in zip(operands, orders, strict=True)]
        if choices.tie and activation is not None:
            arrays = _gradients_tied(operands, arrays, activation)
        return evaluate(eqn, arrays)

    # In a scan, what is saved is stacked, so there even a leaf that was whole is taken from its stack again.
    fetches = any(isinstance(x, Held) and x.hosted for x in operands)
    forgets = choices.regather and (fetches or any(isinstance(x, Held) and x.is_split for x in operands))
    forgets = (forgets or place.in_scan) and not place.in_remat
    # A checkpoint outside would override the policies of those inside, and may not wrap effects.
    if forgets and not eqn.effects and not contains_remat(eqn):
        apply = jax.checkpoint(apply, policy=recomputing_gathers(None), prevent_cse=not place.in_scan)
    return apply(*(x.as_it_came() if isinstance(x, Held) else x for x in operands))


def _whole_all(values: Sequence[Any]) -> list[Any]:
    return [whole(x) for x in values]


def _inlined(eqn: JaxprEqn, operands: list[Any], varies: list[bool], choices: Choices, place: _Place) -> list[Any]:
    body, consts = body_of(eqn)
    with jax.named_scope(eqn.params.get("name", eqn.primitive.name)):
        return _interpret(body, consts, operands, varies, choices, place)


def _remat(eqn: JaxprEqn, operands: list[Any], varies: list[bool], choices: Choices, place: _Place) -> list[Any]:
    """The user's checkpoint, rebuilt around a body that gathers; its policy still decides what else is saved."""
    body, consts = body_of(eqn)
    inside = replace(place, in_remat=True)

    def run(*operands):
        return _whole_all(_interpret(body, consts, operands, varies, choices, inside))

    # In a scan, a barrier on the gather's operand keeps the compiler's collective pipeliner away, and the loop already
    # keeps the two gathers apart. Elsewhere only the barrier does.
    prevent_cse = eqn.params["prevent_cse"] and (choices.tie or not place.in_scan)
    policy = recomputing_gathers(eqn.params["policy"]) if eqn.params["policy"] is not None else None
    recomputed = jax.checkpoint(run, policy=policy, prevent_cse=prevent_cse)
    # A loop sends what it offloads in the turn that made it.
    alone = not (place.in_scan or place.in_remat)
    sends = alone and policy is not None and offloads(policy, body)
    return waiting_for_host(recomputed, operands) if sends else recomputed(*operands)


def _scan(eqn: JaxprEqn, operands: list[Any], varies: list[bool], choices: Choices, place: _Place) -> list[Any]:
    """A scan over layers: what it slices is gathered inside its body, layer by layer."""
    body, consts = body_of(eqn)
    constants, carries = scan_parts(eqn)
    varies = varying_in_scan(eqn, varies)
    stays = [
        isinstance(x, Held) and read_by_rows(body, var, varies)
        for x, var in zip(operands[:constants], body.invars[:constants], strict=True)
    ]
    # Which dim a scan slices is seen after the transpose, which is not for the host to do.
    operands = [whole(x) if isinstance(x, Held) and x.in_host_memory and x.turn else x for x in operands]
    operands = [turned(x) if isinstance(x, Held) else x for x in operands]
    layers = operands[constants + carries :]
    # One that was made whole above has nothing left to be gathered.
    stays = [stay and isinstance(x, Held) for stay, x in zip(stays, operands[:constants], strict=True)]
    stays += [False] * carries + [isinstance(x, Held) and x.dim != 0 for x in layers]
    if not any(stays):
        return _gather_and_apply(eqn, operands, choices, place)
    operands = [x if stay else whole(x) for x, stay in zip(operands, stays, strict=True)]
    fixed, carry, layers = (
        operands[:constants],
        operands[constants : constants + carries],
        operands[constants + carries :],
    )
    inside = replace(place, in_scan=True, in_remat=place.in_remat or choices.remat is not None)

    def run(fixed, carry, layer):
        layer = [replace(x, dim=None if x.dim is None else x.dim - 1) if isinstance(x, Held) else x for x in layer]
        return _whole_all(_interpret(body, consts, [*fixed, *carry, *layer], varies, choices, inside))

    run = run if choices.remat is None else choices.remat(run)

    def step(carry, layer):
        results = run(fixed, carry, layer)
        return results[:carries], results[carries:]

    options = {key: eqn.params[key] for key in ("length", "reverse", "unroll")}
    carry, stacked = lax.scan(step, carry, layers, **options)
    return [*carry, *stacked]


def _activation(operands: Sequence[Any], constants: int) -> int | None:
    """Which operand is an activation: the first float array behind so many constants, if there is one."""
    return next((i for i, x in enumerate(operands) if i >= constants and is_activation(x)), None)


def _tied(operands: Sequence[Any], activation: int, choices: Choices, place: _Place) -> list[Any]:
    """The same operands, with the leaves that are to wait for the activation among them.

    By choice all that are split or in host memory; in any case those in host memory outside of loops, where nothing
    else keeps a compiler from fetching all of them at once.
    """
    operands = list(operands)
    for i, x in enumerate(operands):
        if isinstance(x, Held) and ((choices.tie and x.is_split) or (x.hosted and (choices.tie or not place.in_scan))):
            tied: Any = tie(x.leaf, x.slot, operands[activation], x.arrives)
            leaf, slot, operands[activation] = tied
            operands[i] = replace(x, leaf=leaf, slot=slot)
    return operands


def _gradients_tied(operands: Sequence[Any], arrays: list[Any], activation: int) -> list[Any]:
    """The arrays of the operands; the gradient of a leaf that was whole is computed before the activation's goes on.

    Otherwise a compiler may put off the sums that a norm's scale needs, and hold two activations for each.
    """
    leaf = next((i for i, x in enumerate(operands) if isinstance(x, Held) and x.slot is not None), None)
    if leaf is None or operands[leaf].is_split:
        return arrays
    arrays = list(arrays)
    both: Any = tie_gradients(arrays[leaf], arrays[activation])
    arrays[leaf], arrays[activation] = both
    return arrays
