"""What a loss function may return, and one uniform way to call it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

OWN_METRICS = ("loss", "grad_norm", "loss_scale", "skipped")
"""What a step reports by itself."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Loss:
    """A sum of losses and the number of items it covers, so that a mean over devices and microbatches is over items.

    total: float scalar, the sum over the items. weight: scalar, how many items (tokens, examples).
    metrics: scalars by name, sums over the same items; they come back divided by the items.
    """

    total: jax.Array
    weight: jax.Array
    metrics: Mapping[str, jax.Array] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class LossFunction:
    """A user's loss function, called in one way whatever its signature and its result."""

    fn: Callable[..., Any]
    takes_key: bool
    takes_extra: bool
    by_examples: bool = False  # weigh a plain scalar by the size of its part, for parts that are not equal

    def __call__(self, params: Any, batch: Any, key: jax.Array, extra: Any) -> tuple[Loss, Any]:
        """The loss with its weight, and the new `extra`. A plain scalar is the mean of an equal part: weight 1."""
        named = ({"key": key} if self.takes_key else {}) | ({"extra": extra} if self.takes_extra else {})
        result = self.fn(params, batch, **named)
        new_extra = extra
        if self.takes_extra:
            if not (isinstance(result, tuple) and len(result) == 2):
                raise TypeError(
                    f"{self.name} takes `extra`, so it must return (loss, new_extra); it returned {_kind(result)}."
                )
            result, new_extra = result
            new_extra = jax.tree.map(lambda x: x if hasattr(x, "dtype") else jnp.asarray(x), new_extra)
            _check_extra(extra, new_extra, self.name)
        if not isinstance(result, Loss):
            total = self._scalar(result, "loss")
            weight = jax.tree.leaves(batch)[0].shape[0] if self.by_examples else 1
            return Loss(total * weight, jnp.full((), weight, jnp.float32), {}), new_extra
        weight = jnp.asarray(result.weight)
        if weight.shape:
            raise TypeError(f"Loss.weight of {self.name} has shape {weight.shape}; it must be a scalar.")
        metrics = {}
        taken = [name for name in result.metrics if name in OWN_METRICS]
        if taken:
            raise ValueError(f"Loss.metrics of {self.name} are called {taken}; {OWN_METRICS} are jaxshard's own names.")
        for name, value in result.metrics.items():
            value = jnp.asarray(value)
            if value.shape:
                raise TypeError(f"Loss.metrics[{name!r}] of {self.name} has shape {value.shape}; it must be a scalar.")
            metrics[name] = value.astype(jnp.float32)
        return Loss(self._scalar(result.total, "Loss.total"), weight.astype(jnp.float32), metrics), new_extra

    @property
    def name(self) -> str:
        return getattr(self.fn, "__name__", type(self.fn).__name__)

    def _scalar(self, value: Any, what: str) -> jax.Array:
        array = jnp.asarray(value) if isinstance(value, jax.Array | float | int) else None
        if array is None or array.shape or not jnp.issubdtype(array.dtype, jnp.floating):
            raise TypeError(
                f"the {what} of {self.name} is {_kind(value)}; it must be a float scalar "
                "(a mean), or a jaxshard.Loss(total, weight). Take its mean or its sum over the examples."
            )
        return array


def loss_function(fn: Callable[..., Any]) -> LossFunction:
    """Reads off the signature whether `fn` wants `key` and `extra`. Raises TypeError for any other argument."""
    if not callable(fn):
        raise TypeError(f"loss_fn is {_kind(fn)}; it must be a function (params, batch) -> loss.")
    parameters = inspect.signature(fn).parameters.values()
    names = {p.name for p in parameters}
    required = [
        p.name
        for p in parameters
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and p.name not in ("key", "extra")
    ]
    if len(required) > 2:
        raise TypeError(
            f"loss_fn takes {required}; it is called as loss_fn(params, batch), with key= and extra= if it names them. "
            "Close over anything else."
        )
    return LossFunction(fn=fn, takes_key="key" in names, takes_extra="extra" in names)


def _check_extra(extra: Any, new_extra: Any, name: str) -> None:
    old, new = jax.tree.structure(extra), jax.tree.structure(new_extra)
    if old != new:
        raise TypeError(f"{name} was given extra of structure {old} and returned {new}; both must be the same.")
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(extra), jax.tree.leaves(new_extra), strict=True):
        floats = jnp.issubdtype(a.dtype, jnp.floating) and jnp.issubdtype(b.dtype, jnp.floating)
        if a.shape != b.shape or not (floats or a.dtype == b.dtype):
            where = jax.tree_util.keystr(path, simple=True, separator="/") or "extra"
            raise TypeError(
                f"{name} was given {where} of extra as {a.dtype}{list(a.shape)} and returned {b.dtype}{list(b.shape)}; "
                "shape and dtype must stay."
            )


def _kind(value: Any) -> str:
    if isinstance(value, jax.Array):
        return f"an array of shape {value.shape} and dtype {value.dtype}"
    return f"a {type(value).__name__}"
