"""Gather at use: any loss function becomes FSDP.

The loss is traced once, with whole parameters, and its jaxpr is evaluated again with each parameter `Held` as the
device holds it. An operation that reads a held leaf gathers it just before, and its adjoint reduces the gradient.
"Gather, apply, gather again for the backward pass" is right for every primitive; the rules below save memory and bytes.
Every strategy goes through here, whole leaves included: that is what makes their results equal to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from jaxshard.collectives import WHOLE, Route, tie, use
from jaxshard.jaxprs import (
    INLINED,
    REMAT,
    body_of,
    contains_remat,
    evaluate,
    product_order,
    scan_parts,
    stands_for,
    varying,
    varying_in_scan,
)
from jaxshard.onshard import move, read_by_rows

Policy = Callable[..., Any]
NEVER_SAVED = (WHOLE, "all_gather", "all_gather_invariant", "optimization_barrier")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Held:
    """A parameter, or a linear image of one, as a device holds it until the operation that needs it whole.

    leaf: the array at rest, split along `dim` over ``route.gather`` (dim None: never split).
    slot: zeros as its gradient is wanted; None when it does not learn.
    dtype: of the whole leaf as the loss sees it; the cast comes before the gather.
    pieces: how many pieces the layout splits `dim` into, whether this strategy does or not.
    """

    leaf: jax.Array
    slot: jax.Array | None
    dtype: Any = field(metadata={"static": True})
    dim: int | None = field(metadata={"static": True})
    pieces: int = field(metadata={"static": True})
    route: Route = field(metadata={"static": True})
    path: str = field(metadata={"static": True})

    @property
    def cast(self) -> jax.Array:
        """The leaf at rest, in the dtype of the whole."""
        return self.leaf if self.leaf.dtype == self.dtype else self.leaf.astype(self.dtype)

    @property
    def is_split(self) -> bool:
        return self.dim is not None and self.route.leaf_pieces > 1


@dataclass(frozen=True, kw_only=True)
class Choices:
    """What a strategy and a run choose about the evaluation.

    regather: gather again in the backward pass. tie: start a gather only when its operation can start.
    remat: wraps the body of each scan that consumes parameters, or None.
    """

    regather: bool = True
    tie: bool = False
    remat: Callable[[Callable], Callable] | None = None


@dataclass(frozen=True)
class _Place:
    """Where the interpreter is: inside a remat region a plain gather is enough; inside a scan no barrier may stand."""

    in_remat: bool = False
    in_scan: bool = False


def body_remat(remat: str | Policy, *, tie: bool) -> Callable[[Callable], Callable] | None:
    """What wraps the body of a scan over layers: ``"none"``, ``"full"``, ``"dots"``, or a jax.checkpoint policy.

    Raises ValueError for another word.
    """
    named: dict[str, Policy | None] = {"full": None, "dots": jax.checkpoint_policies.dots_saveable}
    if remat == "none":
        return None
    if not callable(remat) and remat not in named:
        raise ValueError(f"remat={remat!r}: 'none', 'full', 'dots', or a policy of jax.checkpoint_policies.")
    policy = remat if callable(remat) else named[remat]
    policy = None if policy is None else _recomputing_gathers(policy)
    return lambda body: jax.checkpoint(body, policy=policy, prevent_cse=tie)


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
        if any(isinstance(x, Held) for x in operands):
            flags = [isinstance(v, Var) and v in differ for v in eqn.invars]
            results = _apply(eqn, operands, flags, choices, place)
        else:
            results = evaluate(eqn, operands)
        values.update(zip(eqn.outvars, results, strict=True))
    return [read(v) for v in jaxpr.outvars]


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
    on_shard = None if any(varies) else _on_shard(eqn, operands)
    return on_shard or _gather_and_apply(eqn, operands, choices, place)


def _gather_and_apply(eqn: JaxprEqn, operands: list[Any], choices: Choices, place: _Place) -> list[Any]:
    """The rule that is always right: make whole, apply, and forget the whole leaf until the backward pass."""

    def apply(*operands):
        operands = _tied(operands) if choices.tie else operands
        return evaluate(eqn, [_whole(x, product_order(eqn, i)) for i, x in enumerate(operands)])

    # In a scan, what is saved is stacked, so there even a leaf that was whole is taken from its stack again.
    forgets = choices.regather and any(isinstance(x, Held) and x.is_split for x in operands)
    forgets = (forgets or place.in_scan) and not place.in_remat
    # A checkpoint outside would override the policies of those inside, and may not wrap effects.
    if forgets and not eqn.effects and not contains_remat(eqn):
        apply = jax.checkpoint(apply, policy=_recomputing_gathers(None), prevent_cse=not place.in_scan)
    return apply(*operands)


def _whole(x: Any, order: Sequence[int] | None = None) -> Any:
    if not isinstance(x, Held):
        return x
    return use(x.cast, x.slot, x.dim, x.route, x.path, range(x.leaf.ndim) if order is None else order)


def _whole_all(values: Sequence[Any]) -> list[Any]:
    return [_whole(x) for x in values]


def _on_shard(eqn: JaxprEqn, operands: list[Any]) -> list[Any] | None:
    """A linear equation applied to the shard and to its slot, or None when it needs the leaf whole."""
    held = [x for x in operands if isinstance(x, Held)]
    first, name = held[0], eqn.primitive.name
    if name == "stop_gradient":
        return [replace(first, slot=None)]
    if name == "concatenate":
        if len(held) != len(operands) or any(_kind(x) != _kind(first) for x in held):
            return None
    elif len(held) > 1 or (operands[0] is not first and name != "mul"):
        return None
    moved = move(eqn, first.dim, first.pieces)
    if moved is None:
        return None

    def apply(pieces: int, arrays: list[Any]):
        on_piece = move(eqn, first.dim, pieces)
        assert on_piece is not None, "what can be split into all pieces can be split into fewer"
        return evaluate(eqn.replace(params=on_piece[1]), arrays)

    leaves = apply(first.route.leaf_pieces, [x.cast if isinstance(x, Held) else x for x in operands])
    if first.slot is None:
        slots = [None] * len(leaves)
    elif name == "convert_element_type":
        slots = [first.slot]  # The adjoint of a cast is a cast, and `use` does that one after the reduction.
    elif name in ("mul", "div"):
        # The factor has the leaf's dtype, and the slot may have another.
        factor = next(jnp.asarray(v.val, first.slot.dtype) for v in eqn.invars if isinstance(v, Literal))
        slots = [first.slot * factor if name == "mul" else first.slot / factor]
    else:
        slots = apply(first.route.slot_pieces, [x.slot if isinstance(x, Held) else x for x in operands])
    dim, _ = moved
    path = "+".join(dict.fromkeys(x.path for x in held))
    return [
        None if leaf is None else replace(first, leaf=leaf, slot=slot, dtype=leaf.dtype, dim=dim, path=path)
        for leaf, slot in zip(leaves, slots, strict=True)
    ]


def _kind(x: Held) -> tuple[Any, ...]:
    return (x.dtype, x.dim, x.pieces, x.route, x.slot is None, None if x.slot is None else x.slot.dtype)


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
    policy = _recomputing_gathers(eqn.params["policy"]) if eqn.params["policy"] is not None else None
    return jax.checkpoint(run, policy=policy, prevent_cse=prevent_cse)(*operands)


def _recomputing_gathers(policy: Policy | None) -> Policy:
    """A remat policy that gathers again (and ties again), and leaves the rest to `policy` (None: save everything)."""

    def saves(primitive, *avals, **params):
        if stands_for(primitive.name, params, NEVER_SAVED):
            return False
        return True if policy is None else policy(primitive, *avals, **params)

    return saves


def _scan(eqn: JaxprEqn, operands: list[Any], varies: list[bool], choices: Choices, place: _Place) -> list[Any]:
    """A scan over layers: what it slices is gathered inside its body, layer by layer."""
    body, consts = body_of(eqn)
    constants, carries = scan_parts(eqn)
    varies = varying_in_scan(eqn, varies)
    stays = [
        isinstance(x, Held) and read_by_rows(body, var, varies)
        for x, var in zip(operands[:constants], body.invars[:constants], strict=True)
    ]
    layers = operands[constants + carries :]
    stays += [False] * carries + [isinstance(x, Held) and x.dim != 0 for x in layers]
    if not any(stays):
        return _gather_and_apply(eqn, operands, choices, place)
    operands = [x if stay else _whole(x) for x, stay in zip(operands, stays, strict=True)]
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


def _tied(operands: Sequence[Any]) -> list[Any]:
    """The same operands, with each split leaf tied to the first activation among them."""
    activation = next((i for i, x in enumerate(operands) if _is_activation(x)), None)
    if activation is None:
        return list(operands)
    operands = list(operands)
    for i, x in enumerate(operands):
        if isinstance(x, Held) and x.is_split:
            leaf, slot, operands[activation] = tie(x.leaf, x.slot, operands[activation])
            operands[i] = replace(x, leaf=leaf, slot=slot)
    return operands


def _is_activation(x: Any) -> bool:
    return isinstance(x, jax.Array) and x.ndim > 0 and jnp.issubdtype(x.dtype, jnp.floating)
