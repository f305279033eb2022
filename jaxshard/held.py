"""A parameter on its way to the operation that needs it whole.

Linear operations run on the shard, and on the slot that takes the gradient. A transpose and a widening cast are put off
until the leaf is whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn, Literal

from jaxshard.collectives import TOGETHER, Route, is_hosted, use
from jaxshard.jaxprs import evaluate
from jaxshard.onshard import move


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Held:
    """A parameter, or a linear image of one, as a device holds it until the operation that needs it whole.

    leaf: the array at rest, split along `dim` over ``route.gather`` (dim None: never split).
    slot: zeros as its gradient is wanted; None when it does not learn.
    dtype: in which it is gathered; the cast comes before.
    pieces: how many pieces the layout splits `dim` into, whether this strategy does or not.
    hosted: it lies in host memory, where nothing is computed: only what picks a part of it is done there, the rest
        when that has been fetched to become whole.
    origin, picks: of one in host memory, the array that `leaf` was picked from, and how (see `as_it_came`).
    turn, wide: what is still to be done to it once it is whole, a transpose (None: none) and a cast to a wider dtype.
        A transpose of shards would give the whole another layout in memory than a strategy that splits nothing has,
        and sums another order; a wider dtype before the gather would only send more.
    """

    leaf: jax.Array
    slot: jax.Array | None
    dtype: Any = field(metadata={"static": True})
    dim: int | None = field(metadata={"static": True})
    pieces: int = field(metadata={"static": True})
    route: Route = field(metadata={"static": True})
    path: str = field(metadata={"static": True})
    hosted: bool = field(default=False, metadata={"static": True})
    origin: jax.Array | None = None
    picks: tuple[Callable[[jax.Array], jax.Array], ...] = field(default=(), metadata={"static": True})
    turn: tuple[int, ...] | None = field(default=None, metadata={"static": True})
    wide: Any = field(default=None, metadata={"static": True})

    @property
    def cast(self) -> jax.Array:
        """The leaf at rest, in the dtype of the whole."""
        return self.leaf if self.leaf.dtype == self.dtype else self.leaf.astype(self.dtype)

    @property
    def in_host_memory(self) -> bool:
        """Whether it lies there, or its gradient is to."""
        return self.hosted or (self.slot is not None and is_hosted(self.slot))

    def as_it_came(self) -> Held:
        """Without its picks, which `picked` does again.

        So it goes into a checkpoint: what a scan has sliced off is saved as the array that is sliced. A part of that
        would be stacked, in host memory, where a GPU's compiler has no room for it.
        """
        return replace(self, leaf=self.origin, origin=None) if self.picks else self

    def picked(self) -> Held:
        """As it was before `as_it_came`."""
        leaf = reduce(lambda x, pick: pick(x), self.picks, self.leaf)
        return replace(self, leaf=leaf, picks=())

    @property
    def is_split(self) -> bool:
        return self.dim is not None and self.route.leaf_pieces > 1

    @property
    def arrives(self) -> Any:
        """The dtype in which its gradient arrives at the slot."""
        reduced = jnp.issubdtype(self.dtype, jnp.floating) and not self.route.deferred
        return self.route.reduce_dtype if reduced else self.wide or self.dtype


PICKS = ("slice", "dynamic_slice", "squeeze", "reshape")
"""What is done in host memory: it moves nothing, but says what a transfer takes."""
PUT_OFF = ("stop_gradient", "transpose", "convert_element_type")


def whole(x: Any, order: Sequence[int] | None = None) -> Any:
    """A held leaf made whole; anything else as it is. order: see `collectives.use`."""
    if not isinstance(x, Held):
        return x
    turn, dtype = _turn(x), x.wide or x.dtype
    order = range(x.leaf.ndim) if order is None else order
    leaf = x.leaf if x.hosted else x.cast
    sent = x.dtype if x.hosted else None
    return use(leaf, x.slot, x.dim, x.route, x.path, turn=turn, dtype=dtype, order=order, fetched_as=sent)


def on_shard(eqn: JaxprEqn, operands: list[Any]) -> list[Any] | None:
    """A linear equation applied to the shard and to its slot, or None when it needs the leaf whole."""
    name = eqn.primitive.name
    held = [x for x in operands if isinstance(x, Held)]
    if any(x.in_host_memory for x in held) and not ((name in PICKS and held[0].turn is None) or name in PUT_OFF):
        return None
    if name == "concatenate":
        operands = held = [_cast(turned(x)) for x in held]
        if len(held) != len(eqn.invars) or any(_kind(x) != _kind(held[0]) for x in held):
            return None
    elif len(held) > 1 or (operands[0] is not held[0] and name != "mul"):
        return None
    first = held[0]
    if name == "stop_gradient":
        return [replace(first, slot=None)]
    if name == "transpose":
        return [replace(first, turn=tuple(_turn(first)[d] for d in eqn.params["permutation"]))]
    if name == "convert_element_type":
        converted = _converted(first, eqn.params["new_dtype"])
        return None if converted is None else [converted]
    first = turned(first)
    moved = move(eqn, first.dim, first.pieces)
    if moved is None:
        return None
    if name in ("mul", "div"):
        return [_multiplied(eqn, _cast(first))]

    def apply(pieces: int, arrays: list[Any]):
        on_piece = move(eqn, first.dim, pieces)
        assert on_piece is not None, "what can be split into all pieces can be split into fewer"
        return evaluate(eqn.replace(params=on_piece[1]), arrays)

    arrays = [first if x is held[0] else x for x in operands]
    leaves = apply(first.route.leaf_pieces, [x.leaf if isinstance(x, Held) else x for x in arrays])
    slots: list[Any] = [None] * len(leaves)
    if first.slot is not None:
        slots = apply(first.route.slot_pieces, [x.slot if isinstance(x, Held) else x for x in arrays])
    path = TOGETHER.join(dict.fromkeys(x.path for x in held))
    origin, picks = None, ()
    if first.hosted and len(operands) == 1:
        origin = first.leaf if first.origin is None else first.origin
        picks = (*first.picks, lambda x: apply(first.route.leaf_pieces, [x])[0])
    return [
        None
        if leaf is None
        else replace(first, leaf=leaf, slot=slot, dim=moved[0], path=path, origin=origin, picks=picks)
        for leaf, slot in zip(leaves, slots, strict=True)
    ]


def _kind(x: Held) -> tuple[Any, ...]:
    return (x.dtype, x.leaf.dtype, x.dim, x.pieces, x.route, x.slot is None, None if x.slot is None else x.slot.dtype)


def _converted(x: Held, dtype: Any) -> Held | None:
    """A cast between floats. The adjoint of a cast is a cast, which `use` does after the reduction."""
    if not all(jnp.issubdtype(d, jnp.floating) for d in (x.dtype, dtype)):
        return None
    if jnp.dtype(dtype).itemsize <= jnp.dtype(x.dtype).itemsize:
        if x.hosted:  # there is one cast to put off, not two
            return replace(x, dtype=dtype, wide=None) if x.leaf.dtype == x.dtype or dtype == x.dtype else None
        return replace(x, leaf=x.cast.astype(dtype), dtype=dtype, wide=None)
    return replace(x, wide=dtype)


def _multiplied(eqn: JaxprEqn, x: Held) -> Held:
    """A product with, or a quotient by, a literal."""
    factor = next(v.val for v in eqn.invars if isinstance(v, Literal))

    def scaled(array):
        number = jnp.asarray(factor, x.dtype).astype(array.dtype)
        return array * number if eqn.primitive.name == "mul" else array / number

    return replace(x, leaf=scaled(x.cast), slot=None if x.slot is None else scaled(x.slot))


def _turn(x: Held) -> tuple[int, ...]:
    return x.turn or tuple(range(x.leaf.ndim))


def turned(x: Held) -> Held:
    """The same leaf with its transpose done on the shard."""
    if x.turn is None:
        return x
    dim = None if x.dim is None else x.turn.index(x.dim)
    slot = None if x.slot is None else lax.transpose(x.slot, x.turn)
    return replace(x, leaf=lax.transpose(x.leaf, x.turn), slot=slot, dim=dim, turn=None)


def _cast(x: Held) -> Held:
    """The same leaf with its casts done on the shard."""
    dtype = x.wide or x.dtype
    return replace(x, leaf=x.cast.astype(dtype), dtype=dtype, wide=None)
