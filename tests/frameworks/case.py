"""One model in one framework, and what training it gives on one device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from oracle import Run

WIDTH, SIZE, STEPS = 16, 32, 3
SGD = optax.sgd(0.3)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One model: what is passed to `parallelize`, and the framework's own training on one device.

    init, loss: as for `parallelize`. train: trains over whole batches with `SGD` and returns (`Run`, the state that is
    not trained or None), with nothing of this library. axis_name: the model's own name for its batch axis.
    """

    init: Callable[[jax.Array], Any]
    loss: Callable[..., Any]
    train: Callable[[Sequence[Any]], tuple[Run, Any]]
    axis_name: str | None = None


def batches() -> list[dict[str, np.ndarray]]:
    """Global batches, every example of its own, and of another mean on every device."""
    random = np.random.default_rng(3)
    x = random.normal(size=(STEPS, SIZE, WIDTH)) + np.arange(SIZE)[:, None] / SIZE
    y = np.tanh(x @ random.normal(size=(WIDTH, WIDTH)) / 4)
    return [{"x": a, "y": b} for a, b in zip(x.astype(np.float32), y.astype(np.float32), strict=True)]


def mean_square(predicted: jax.Array, batch: Any) -> jax.Array:
    return jnp.mean((predicted - batch["y"]) ** 2)


def history(start: Any, end: Any, metrics: Sequence[tuple[Any, Any]]) -> Run:
    """A run from parameters at its start and end and each step's (loss, gradients)."""
    found = np.array([(loss, optax.tree.norm(grads)) for loss, grads in metrics], np.float32).T
    start, end = (jax.tree.map(np.asarray, tree) for tree in (start, end))
    return Run(start, end, *found)
