"""The language's operations: what is one operation on one or two values. Moves are linear, and keep elements."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from .nodes import IntLeaf, Node

# Moves


@dataclass(frozen=True, repr=False)
class Cast(Node):
    x: Node
    dtype: str

    def value(self, env):
        x = self.x.value(env)
        if jnp.iscomplexobj(x):
            return (x * (0.6 + 0.8j)).real + x.imag
        return x.astype(self.dtype)


@dataclass(frozen=True, repr=False)
class Transpose(Node):
    x: Node
    order: tuple[int, ...]

    def value(self, env):
        x = self.x.value(env)
        lead = x.ndim - len(self.order)
        return jnp.transpose(x, (*range(lead), *(lead + d for d in self.order)))


@dataclass(frozen=True, repr=False)
class Reshape(Node):
    """Of a value that is not batched."""

    x: Node
    shape: tuple[int, ...]

    def value(self, env):
        return self.x.value(env).reshape(self.shape)


@dataclass(frozen=True, repr=False)
class Slice(Node):
    x: Node
    dim: int
    start: int
    size: int
    stride: int = 1

    def value(self, env):
        stop = self.start + self.size * self.stride - self.stride + 1
        return lax.slice_in_dim(self.x.value(env), self.start, stop, self.stride, self.dim)


@dataclass(frozen=True, repr=False)
class Window(Node):
    """A slice whose place is computed."""

    x: Node
    dim: int
    start: Node
    size: int

    def value(self, env):
        x = self.x.value(env)
        # Within bounds: what XLA does beyond them has differed between a slice and its adjoint (JAX 0.10).
        start = self.start.value(env) % (x.shape[self.dim] - self.size + 1)
        return lax.dynamic_slice_in_dim(x, start, self.size, self.dim)


@dataclass(frozen=True, repr=False)
class Row(Node):
    """One row along a dim, which goes away."""

    x: Node
    dim: int
    at: Node
    dynamic: bool = False

    def value(self, env):
        x = self.x.value(env)
        at = self.at.value(env) % x.shape[self.dim]
        if self.dynamic:
            return lax.dynamic_index_in_dim(x, at, self.dim, keepdims=False)
        return jnp.moveaxis(x, self.dim, 0)[at]


@dataclass(frozen=True, repr=False)
class Piece(Node):
    """One of the equal pieces of a split along a dim."""

    x: Node
    dim: int
    pieces: int
    which: int

    def value(self, env):
        return jnp.split(self.x.value(env), self.pieces, self.dim)[self.which]


@dataclass(frozen=True, repr=False)
class Concatenate(Node):
    parts: tuple[Node, ...]
    dim: int

    def value(self, env):
        return jnp.concatenate([part.value(env) for part in self.parts], self.dim)


@dataclass(frozen=True, repr=False)
class Broadcast(Node):
    """To a new leading dim."""

    x: Node
    size: int

    def value(self, env):
        x = self.x.value(env)
        return jnp.broadcast_to(x, (self.size, *x.shape))


# Operations


def _normalised(x: jax.Array) -> jax.Array:
    return x * lax.rsqrt(1 + jnp.mean(x * x, -1, keepdims=True))


FUNCTIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "negative": lambda x: -x,
    "half": lambda x: 0.5 * x,
    "over_three": lambda x: x / 3,
    "tanh": jnp.tanh,
    "sin": jnp.sin,
    "named": lambda x: checkpoint_name(x, "named"),
    "copy": jnp.copy,
    "reversed": lambda x: x[..., ::-1],
    "rolled": lambda x: jnp.roll(x, 1, -1),
    "normalised": _normalised,
    "softmax": lambda x: jax.nn.softmax(x, -1),
    "cumulative": lambda x: jnp.cumsum(x, -1) / x.shape[-1],
    "stop_gradient": lax.stop_gradient,
}
LINEAR = ("negative", "half", "over_three", "named", "copy", "reversed", "rolled")
"""Of these functions, those that bfloat16 and complex values are given to."""
OF_SCALARS = ("negative", "half", "tanh", "sin", "named", "copy", "stop_gradient")

PAIRS: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "add": lambda a, b: a + b,
    "multiply": lambda a, b: a * b,
    "subtract_half": lambda a, b: a - 0.5 * b,
    "choose": lambda a, b: jnp.where(jnp.arange(b.shape[-1]) % 2 == 0, a, b),
}


@dataclass(frozen=True, repr=False)
class Apply(Node):
    function: str
    x: Node

    def value(self, env):
        return FUNCTIONS[self.function](self.x.value(env))


@dataclass(frozen=True, repr=False)
class Pair(Node):
    function: str
    a: Node
    b: Node

    def value(self, env):
        return PAIRS[self.function](self.a.value(env), self.b.value(env))


@dataclass(frozen=True, repr=False)
class Mean(Node):
    x: Node
    dim: int

    def value(self, env):
        return jnp.mean(self.x.value(env), self.dim)


@dataclass(frozen=True, repr=False)
class Product(Node):
    """a @ b, or a @ b.T, of a size that does not grow with the dim between."""

    a: Node
    b: Node
    transposed: bool = False

    def value(self, env):
        a, b = self.a.value(env), self.b.value(env)
        return a @ (b.T if self.transposed else b) / np.float32(a.shape[-1] ** 0.5)


@dataclass(frozen=True, repr=False)
class Take(Node):
    """Rows of a table: one for each example, or those that an integer leaf names."""

    table: Node
    ids: IntLeaf | None = None

    def value(self, env):
        table = self.table.value(env)
        return table[(env.batch["ids"] if self.ids is None else env.params[self.ids]) % table.shape[0]]


@dataclass(frozen=True, repr=False)
class Put(Node):
    """A value with one of its rows replaced."""

    x: Node
    at: Node
    row: Node

    def value(self, env):
        x = self.x.value(env)
        return lax.dynamic_update_index_in_dim(x, self.row.value(env), self.at.value(env) % x.shape[0], 0)
