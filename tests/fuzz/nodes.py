"""The language's ground: what a node is and what it can see, and the nodes that have no nodes below them.

A node is a value of some shape. A batched one has the examples as one more, leading dim. All values are float32
except where a `Cast` makes them bfloat16 or complex for a while.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

IDS = 8
"""Examples and integer leaves hold integers in [0, IDS)."""


class Node:
    """A value. Its repr is the Python that builds it, without what is left at its default."""

    def value(self, env: Env) -> Any:
        raise NotImplementedError

    def __repr__(self):
        fields = dataclasses.fields(self)  # pyright: ignore[reportArgumentType]
        values = [getattr(self, field.name) for field in fields]
        while values and values[-1] == fields[len(values) - 1].default:
            values.pop()
        return f"{type(self).__name__}({', '.join(map(repr, values))})"


@dataclass(frozen=True)
class Env:
    """What a program can see: parameters by their nodes, one part of the batch, and the variables around a node."""

    params: Mapping[Any, Any]
    batch: Mapping[str, Any]
    bound: Mapping[str, Any]

    def bind(self, **more: Any) -> Env:
        return dataclasses.replace(self, bound={**self.bound, **more})

    def stopped(self) -> Env:
        """The same, of which no gradient is taken."""
        seen = (self.params, self.batch, self.bound)
        return Env(*({name: lax.stop_gradient(x) for name, x in values.items()} for values in seen))


def nodes(tree: Any) -> Iterator[Node]:
    """All nodes of a tree, parents first."""
    if isinstance(tree, Node):
        yield tree
        for field in dataclasses.fields(tree):  # pyright: ignore[reportArgumentType]
            yield from nodes(getattr(tree, field.name))
    elif isinstance(tree, tuple):
        for item in tree:
            yield from nodes(item)


def random_for(*names: Any) -> np.random.Generator:
    """Random numbers of their own for every name, the same in every process."""
    return np.random.default_rng(zlib.crc32(repr(names).encode()))


# Integers


@dataclass(frozen=True, repr=False)
class Int(Node):
    """The same number everywhere."""

    number: int

    def value(self, env):
        return self.number


@dataclass(frozen=True, repr=False)
class IntLeaf(Node):
    """A leaf of eight integers. As a value, its first."""

    which: int = 0

    def initial(self, seed):
        return random_for(self, seed).integers(0, IDS, IDS, dtype=np.int32)

    def value(self, env):
        return env.params[self][0]


@dataclass(frozen=True, repr=False)
class Index(Node):
    """The number of a loop's iteration, or an example's integer in a map over examples."""

    name: str

    def value(self, env):
        return env.bound[self.name]


@dataclass(frozen=True, repr=False)
class OfPart(Node):
    """The first example's integer: it differs between devices and microbatches."""

    def value(self, env):
        return env.batch["ids"][0]


# Values


@dataclass(frozen=True, repr=False)
class Leaf(Node):
    """A parameter. Equal nodes are one leaf, used more than once."""

    shape: tuple[int, ...]
    which: int = 0
    dtype: str = "float32"

    def initial(self, seed):
        random = random_for(self, seed)
        x = random.standard_normal(self.shape)
        x = x + 1j * random.standard_normal(self.shape) if self.dtype == "complex64" else x
        return np.asarray(x / 2).astype(self.dtype)

    def value(self, env):
        return env.params[self]


@dataclass(frozen=True, repr=False)
class Constant(Node):
    """A numpy array that the loss closes over."""

    shape: tuple[int, ...]

    def value(self, env):
        return jnp.asarray(random_for(self).standard_normal(self.shape).astype(np.float32) / 2)


@dataclass(frozen=True, repr=False)
class Data(Node):
    """A batched value, from the batch."""

    shape: tuple[int, ...]

    @property
    def key(self) -> str:
        return "x" + "x".join(map(str, self.shape))

    def value(self, env):
        return env.batch[self.key]


@dataclass(frozen=True, repr=False)
class Var(Node):
    name: str

    def value(self, env):
        return env.bound[self.name]
