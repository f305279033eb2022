"""Gather and reduce with their adjoints: every collective that the library emits stands here.

Each is named after its leaf (`jax.named_scope`), so that profiles and contracts speak of leaves. An axis of size one
sends nothing, so it is left out of every collective.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

SCOPE = "jaxshard"
"""The first part of every scope name: ``jaxshard.WHAT:LEAF``."""
WHOLE = f"{SCOPE}.whole"
"""The name, for remat policies, of a leaf that was made whole."""


@dataclass(frozen=True, kw_only=True)
class Route:
    """How one leaf travels: over which axes it is gathered, and over which its gradient is reduced.

    sizes: size by name of the mesh axes. gather: axes over which the leaf is split. scatter: axes over which its
    gradient ends up split, all of which and `spread` are summed over. deferred: at its use the gradient is not reduced
    at all, because one reduction follows after the last microbatch. reduce_dtype: of gradients on the wire.
    """

    sizes: Mapping[str, int]
    gather: tuple[str, ...] = ()
    scatter: tuple[str, ...] = ()
    spread: tuple[str, ...] = ()
    deferred: bool = False
    reduce_dtype: str = "float32"

    def pieces(self, axes: Sequence[str]) -> int:
        return math.prod(self.sizes[axis] for axis in axes)

    @property
    def leaf_pieces(self) -> int:
        return self.pieces(self.gather)

    @property
    def slot_pieces(self) -> int:
        return 1 if self.deferred else self.pieces(self.scatter)

    def __hash__(self):
        return hash((self.gather, self.scatter, self.spread, self.deferred, self.reduce_dtype))


def _real(route_sizes: Mapping[str, int], axes: Sequence[str]) -> tuple[str, ...]:
    return tuple(axis for axis in axes if route_sizes[axis] > 1)


TOGETHER = "\n"
"""Stands between the paths of leaves that travel as one."""


def scope(what: str, path: str):
    """The named scope of a collective: what it does, and for which leaf."""
    return jax.named_scope(f"{SCOPE}.{what}:{scope_name(path)}")


def scope_name(path: str) -> str:
    """A leaf's path as it stands in scope names, which slashes and brackets would break."""
    return "+".join(re.sub(r"[^\w.-]", ".", one) for one in path.split(TOGETHER))


def gather(x: jax.Array, dim: int | None, axes: Sequence[str], sizes: Mapping[str, int], path: str) -> jax.Array:
    """A shard, split along `dim` over `axes`, made whole."""
    axes = _real(sizes, axes)
    if dim is None or not axes:
        return x
    with scope("gather", path):
        return lax.all_gather(x, axes, axis=dim, tiled=True)


def _cast(gradient: jax.Array, dtype: Any) -> jax.Array:
    if gradient.dtype.itemsize < jnp.dtype(dtype).itemsize:
        # XLA would have the matrix product give the wider dtype, which its scheduler takes to be 12 times as slow: it
        # then expects products to hide messages that they do not (64 H100s, Llama-3 8B: 65 % hidden in place of 96 %).
        gradient = lax.optimization_barrier(gradient)
    return gradient.astype(dtype)


def reduce(gradient: jax.Array, dim: int | None, route: Route, path: str) -> jax.Array:
    """The sum of a whole gradient over all batch axes; each device keeps its piece along `dim`.

    Floats are cast to ``route.reduce_dtype`` before the wire; the result has that dtype. Complex numbers travel
    as their two parts: XLA's CPU compiler aborts the process over a collective of complex constants (jax 0.10 to 0.12).
    """
    if jnp.iscomplexobj(gradient):
        parts = reduce(jnp.stack((gradient.real, gradient.imag), axis=-1), dim, route, path)
        return lax.complex(*(parts[..., i].astype(gradient.real.dtype) for i in range(2)))
    if jnp.issubdtype(gradient.dtype, jnp.floating):
        gradient = _cast(gradient, route.reduce_dtype)
    scatter = () if dim is None else _real(route.sizes, route.scatter)
    spread = _real(route.sizes, route.spread if dim is not None else (*route.spread, *route.scatter))
    # Axes in mesh order, so that every strategy adds in the same order.
    spread = tuple(axis for axis in route.sizes if axis in spread)
    with scope("reduce", path):
        if scatter and dim is not None:
            gradient = lax.psum_scatter(gradient, scatter, scatter_dimension=dim, tiled=True)
        if spread:
            gradient = lax.psum(gradient, spread)
    return gradient


def use(
    leaf: jax.Array,
    slot: jax.Array | None,
    dim: int | None,
    route: Route,
    path: str,
    *,
    turn: Sequence[int],
    dtype: Any,
    order: Sequence[int],
    fetched_as: Any = None,
) -> jax.Array:
    """A leaf made whole for the operation that reads it; the adjoint reduces its gradient into the slot.

    leaf: split along `dim` over ``route.gather``. slot: zeros of the shape and dtype in which the gradient is wanted
    (split over ``route.scatter``), or None for a leaf that does not learn. turn, dtype: the whole leaf is transposed
    and cast so. order: the dims of the result in the order in which the operation's adjoint computes them. The
    gradient is reduced in that order, and its piece is transposed: a transpose before the reduction would be merged
    into a matrix product, which XLA's fast CPU kernels then do not take. fetched_as: of a leaf in host memory, the
    dtype that it is cast to on the device before it is gathered.
    """

    def whole_leaf(leaf):
        leaf = leaf if fetched_as is None else to_device(leaf, path).astype(fetched_as)
        return lax.transpose(gather(leaf, dim, route.gather, route.sizes, path), tuple(turn)).astype(dtype)

    if slot is None and fetched_as is None:
        return lax.stop_gradient(whole_leaf(leaf))
    sent = [turn[d] for d in order]  # the leaf's dims in the order in which they are reduced
    slot_dtype = None if slot is None else slot.dtype
    leaves = slot is not None and is_hosted(slot)

    @jax.custom_vjp
    def whole(leaf, slot):
        # The name lets a remat policy recognise it.
        return checkpoint_name(whole_leaf(leaf), WHOLE)

    def forward(leaf, slot):
        return whole(leaf, slot), None

    def backward(_, gradient):
        if slot_dtype is None:
            return None, None
        # The first transpose cancels the one that the operation's adjoint ends with.
        gradient = lax.transpose(gradient, tuple(order))
        if not route.deferred:
            gradient = reduce(gradient, None if dim is None else sent.index(dim), route, path)
        back = [sent.index(d) for d in range(gradient.ndim)]
        gradient = lax.transpose(gradient, back).astype(slot_dtype)
        return None, to_host(gradient, path) if leaves else gradient

    whole.defvjp(forward, backward)
    with scope("frozen" if slot is None else "use", path):
        return whole(leaf, slot)


def is_hosted(x: jax.Array) -> bool:
    """Whether an array lies in host memory, by its type."""
    return jax.typeof(x).memory_space == jax.memory.Space.Host


def to_device(x: jax.Array, path: str) -> jax.Array:
    """A copy on the device of what lies in host memory."""
    with scope("fetch", path):
        return jax.device_put(x, jax.memory.Space.Device)


def to_host(x: jax.Array, path: str) -> jax.Array:
    """A copy in host memory."""
    with scope("put", path):
        return jax.device_put(x, jax.memory.Space.Host)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def tie(leaf: jax.Array, slot: jax.Array | None, activation: jax.Array, sent: Any):
    """The first three, of which the leaf cannot be gathered before the activation is there.

    In the backward pass, the activation's gradient does not go on before the leaf's is reduced: otherwise a compiler
    may put off products and reductions of weight gradients, and hold the activations of many layers for them. sent: the
    dtype in which the leaf's gradient arrives, and waits.
    """
    leaf, activation = lax.optimization_barrier((leaf, activation))
    return leaf, slot, activation


def _tie_forward(leaf, slot, activation, sent):
    return tie(leaf, slot, activation, sent), None


def _tie_backward(sent, _, gradients):
    _, slot, activation = gradients
    if slot is None:
        return None, slot, activation
    if is_hosted(slot):
        return None, *lax.optimization_barrier((slot, activation))
    # Not in the slot's dtype if that is wider: it would be held so until the update. (To and fro loses nothing.)
    narrow = sent if jnp.dtype(sent).itemsize < slot.dtype.itemsize else slot.dtype
    waits, activation = lax.optimization_barrier((slot.astype(narrow), activation))
    return None, waits.astype(slot.dtype), activation


tie.defvjp(_tie_forward, _tie_backward)


@jax.custom_vjp
def tie_gradients(weight: jax.Array, activation: jax.Array):
    """Both as they are; in the backward pass the activation's gradient waits for the weight's, unreduced."""
    return weight, activation


tie_gradients.defvjp(lambda *both: (both, None), lambda _, gradients: lax.optimization_barrier(gradients))


def own_piece(x: jax.Array, dim: int | None, axes: Sequence[str], sizes: Mapping[str, int]) -> jax.Array:
    """The piece of a whole array that this device would hold if it were split along `dim` over `axes`."""
    axes = _real(sizes, axes)
    if dim is None or not axes:
        return x
    size = x.shape[dim] // math.prod(sizes[axis] for axis in axes)
    return lax.dynamic_slice_in_dim(x, lax.axis_index(axes) * size, size, dim)


def total(x, axes: Sequence[str], sizes: Mapping[str, int], what: str):
    """The sum of a small pytree over all devices of `axes`."""
    axes = _real(sizes, axes)
    if not axes:
        return x
    with scope("total", what):
        return lax.psum(x, axes)
