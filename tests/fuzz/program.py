"""A tree made a loss function, with its parameters, its batches, and the gradient that one device takes of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jaxshard as js

from .nodes import IDS, Data, Env, IntLeaf, Leaf, Node, OfPart, nodes, random_for
from .operations import Cast

EXAMPLES = 48
"""The global batch: divides by 8 devices with 1, 2 and 3 microbatches."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """A loss: the squared error of a prediction for each example.

    hidden: batched, of shape (width,); one more leaf of that shape, the head, makes a number of it, and has a gradient
        whatever else has none. penalty: any value that is not batched; its mean square is part of the loss.
    items: the loss is a `Loss` whose items are weighted, and some devices have none; otherwise a plain mean.
    unused: leaves that the loss does not read. tree: the containers of the parameters, outermost first.
    """

    width: int
    hidden: Node
    penalty: Node | None = None
    items: bool = False
    unused: tuple[Leaf, ...] = ()
    tree: str = "d"

    @cached_property
    def leaves(self) -> tuple[Leaf | IntLeaf, ...]:
        """The head, then all others in the order in which they stand in the program."""
        found = [x for x in nodes((self.hidden, self.penalty, self.unused)) if isinstance(x, Leaf | IntLeaf)]
        return tuple(dict.fromkeys([Leaf((self.width,), which=-1), *found]))

    @cached_property
    def low_precision(self) -> bool:
        """Whether something in it has 8 bits."""
        return any(x.dtype == "bfloat16" for x in nodes((self.hidden, self.penalty)) if isinstance(x, Leaf | Cast))

    @cached_property
    def sees_parts(self) -> bool:
        """Whether the loss of an example depends on which others are in its part."""
        return any(isinstance(x, OfPart) for x in nodes((self.hidden, self.penalty)))

    def init(self, seed: int) -> Any:
        """Parameters: a pytree of numpy arrays."""
        return arranged([leaf.initial(seed) for leaf in self.leaves], self.tree)

    def batch(self, seed: int) -> dict[str, np.ndarray]:
        """A global batch, every example of its own. The first sixth weighs nothing."""
        random = random_for("batch", seed)
        data = {x.key: x.shape for x in nodes((self.hidden, self.penalty)) if isinstance(x, Data)}
        values = {key: random.standard_normal((EXAMPLES, *shape), np.float32) for key, shape in data.items()}
        weight = (np.arange(EXAMPLES) >= EXAMPLES // 6) * random.integers(1, 4, EXAMPLES)
        return {
            "ids": random.integers(0, IDS, EXAMPLES, dtype=np.int32),
            "y": random.standard_normal(EXAMPLES, np.float32),
            "weight": weight.astype(np.float32),
            **values,
        }

    def loss(self, params: Any, batch: Mapping[str, jax.Array]) -> Any:
        env = Env(dict(zip(self.leaves, jax.tree.leaves(params), strict=True)), batch, {})
        # With the 1, the head has a gradient even where all else is zero.
        errors = ((1 + self.hidden.value(env)) @ env.params[self.leaves[0]] - batch["y"]) ** 2
        if self.items:
            return js.Loss(jnp.sum(errors * batch["weight"]), jnp.sum(batch["weight"]))
        penalty = 0 if self.penalty is None else jnp.mean(self.penalty.value(env) ** 2)
        return jnp.mean(errors) + penalty

    def reference(self, parts: int) -> Any:
        """The loss of the whole batch on one device. parts: into how many the devices and microbatches cut it."""

        def sums(params, batch):
            loss = self.loss(params, batch)
            return (loss.total, loss.weight) if self.items else (loss, jnp.ones(()))

        def mean(params, batch):
            if not self.sees_parts:
                total, weight = sums(params, batch)
                return total / weight
            batch = jax.tree.map(lambda x: x.reshape(parts, -1, *x.shape[1:]), batch)
            totals, weights = lax.map(lambda part: sums(params, part), batch)
            return jnp.sum(totals) / jnp.sum(weights)

        return mean


def arranged(leaves: Sequence[Any], containers: str) -> Any:
    """The leaves as a pytree with the same order. containers: "d" dict, "l" list, "t" tuple; the last one is flat."""
    if len(containers) > 1 and len(leaves) > 1:
        middle = math.ceil(len(leaves) / 2)
        leaves = [arranged(half, containers[1:]) for half in (leaves[:middle], leaves[middle:])]
    match containers[0]:
        case "d":
            return {f"p{i:02}": leaf for i, leaf in enumerate(leaves)}
        case "t":
            return tuple(leaves)
    return list(leaves)
