"""What a program is, and the few helpers that keep each one to a handful of lines.

Nothing here, or in the other files of this package, computes with JAX when it is imported: the number of
CPU devices must still be free to choose.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

EXAMPLES = 16
"""The global batch: leading dim of every leaf of every batch."""

AXES = ("replica", "shard")


@dataclass(frozen=True, kw_only=True)
class Program:
    """A complete loss function with everything it takes to train it.

    `init(key)` gives the parameters, `batch()` a pytree of numpy arrays with leading dim `EXAMPLES`, and
    `loss(params, batch)` a float32 scalar: a mean over the examples of whatever part of the batch it is
    given, so that the mean over equal parts is the mean over the whole.

    per_example: False where that last statement does not hold (the examples of a part see each other).
    names_axes: the loss uses `AXES` in collectives, and must be run where they exist.
    single_device_loss: for such a loss, the same number written without axes, on the whole batch.
    zero_grads: paths (`"a/0/b"`) of the leaves whose gradient is zero, by intent.
    low_precision: computes in bfloat16 somewhere; compare with a tolerance to match.
    """

    name: str
    init: Callable[[jax.Array], Any]
    loss: Callable[[Any, Any], jax.Array]
    batch: Callable[[], Any]
    notes: str = ""
    per_example: bool = True
    names_axes: bool = False
    single_device_loss: Callable[[Any, Any], jax.Array] | None = None
    zero_grads: tuple[str, ...] = ()
    low_precision: bool = False

    def reference(self, replica: int = 1, shard: int = 8) -> Callable[[Any, Any], jax.Array]:
        """The loss of the whole batch on one device, which `replica x shard` devices must equal."""
        if self.single_device_loss is not None:
            return self.single_device_loss
        if self.per_example and not self.names_axes:
            return self.loss
        on_parts = self.loss
        for axis in reversed(AXES):
            on_parts = jax.vmap(on_parts, in_axes=(None, 0), axis_name=axis)

        def mean_over_parts(params, batch):
            parts = jax.tree.map(lambda x: x.reshape(replica, shard, -1, *x.shape[1:]), batch)
            return on_parts(params, parts).mean()

        return mean_over_parts


@dataclass(frozen=True)
class Below:
    """Integers in [0, high) of this shape for each example."""

    high: int
    shape: tuple[int, ...] = ()


def examples(**entries: tuple[int, ...] | Below) -> Callable[[], dict[str, np.ndarray]]:
    """A batch: for each entry standard normal float32 of that shape per example, or int32 `Below` a bound."""

    def batch():
        rng = np.random.default_rng(0)
        return {
            name: rng.integers(0, entry.high, (EXAMPLES, *entry.shape), dtype=np.int32)
            if isinstance(entry, Below)
            else rng.standard_normal((EXAMPLES, *entry), dtype=np.float32)
            for name, entry in entries.items()
        }

    return batch


def normal(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """float32 weights that keep a signal's size: variance 1 / fan-in, or 1/4 for vectors and scalars."""
    return jax.random.normal(key, shape, jnp.float32) * (shape[-2] ** -0.5 if len(shape) > 1 else 0.5)


def normals(**shapes: tuple[int, ...]) -> Callable[[jax.Array], dict[str, Any]]:
    """An `init` that gives a dict of `normal` leaves."""
    return lambda key: {
        name: normal(jax.random.fold_in(key, index), shape) for index, (name, shape) in enumerate(shapes.items())
    }


VECTORS = examples(x=(8,), y=())
"""The default batch: x (16, 8) and y (16,), float32."""


def program(
    *,
    init: Callable[[jax.Array], Any],
    batch: Callable[[], Any] = VECTORS,
    name: str | None = None,
    **flags: Any,
) -> Callable[[Callable[[Any, Any], jax.Array]], Program]:
    """Make a loss function a `Program` of the same name, its docstring the notes."""
    return lambda loss: Program(
        name=name or loss.__name__, init=init, loss=loss, batch=batch, notes=loss.__doc__ or "", **flags
    )


def squared_error(prediction: jax.Array, batch: dict[str, Any]) -> jax.Array:
    """Mean over the examples of (prediction - batch["y"])^2; `prediction` has one number per example."""
    return jnp.mean(jnp.square(prediction - batch["y"]))


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean over examples (and positions) of -log p(label)."""
    log_probs = jax.nn.log_softmax(logits)
    return -jnp.mean(jnp.take_along_axis(log_probs, labels[..., None], axis=-1))


def layer(h: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
    """One tanh layer, in the form that `lax.scan` wants of a body."""
    return jnp.tanh(h @ w), None


def unit(shape: tuple[int, ...]) -> np.ndarray:
    """A fixed float32 array of entries near 1, for constants that a loss closes over."""
    return np.cos(np.linspace(0, 1, math.prod(shape), dtype=np.float32)).reshape(shape)
