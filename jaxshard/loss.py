"""What a loss function may return, and one uniform way to call it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxshard.checks import check_params, described, kind_of, leaves_by_path, noted

OWN_METRICS = ("loss", "grad_norm", "loss_scale", "skipped")
"""What a step reports by itself."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Loss:
    """A sum of losses and the number of items it covers, so that a mean over devices and microbatches is over items.

    total: float scalar, the sum over the items. weight: real scalar, how many items (tokens, examples); it is taken as
    a constant, without a gradient. metrics: real scalars by name, sums over the same items; they come back divided by
    the items.
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
        """The loss with its weight, and the new `extra`. A plain scalar is the mean of an equal part: weight 1.

        Raises TypeError or ValueError for any other result. An error of the function's own is raised as it is, with a
        note on what the function was given.
        """
        named = ({"key": key} if self.takes_key else {}) | ({"extra": extra} if self.takes_extra else {})
        with noted(f"loss_fn: {self.name} was given one device's part of a batch: {described(batch)}."):
            result = self.fn(params, batch, **named)
        new_extra = extra
        if self.takes_extra:
            if not (isinstance(result, tuple) and len(result) == 2):
                raise TypeError(
                    f"loss_fn: {self.name} takes `extra`, so it must return (loss, new_extra); "
                    f"it returned {kind_of(result)}."
                )
            result, new_extra = result
            check_params(new_extra, f"the new extra of {self.name}")
            new_extra = jax.tree.map(lambda x: x if hasattr(x, "dtype") else jnp.asarray(x), new_extra)
            _check_extra(extra, new_extra, self.name)
        if not isinstance(result, Loss):
            total = self._scalar(result, "loss")
            weight = jax.tree.leaves(batch)[0].shape[0] if self.by_examples else 1
            # A half would overflow; evaluation takes no gradient.
            total = total.astype(jnp.float32) * weight if self.by_examples else total
            return Loss(total, jnp.full((), weight, jnp.float32), {}), new_extra
        if not isinstance(result.metrics, Mapping) or not all(isinstance(name, str) for name in result.metrics):
            raise TypeError(f"Loss.metrics of {self.name} is {result.metrics!r}; it must be a dict of scalars by name.")
        taken = [name for name in result.metrics if name in OWN_METRICS]
        if taken:
            raise ValueError(f"Loss.metrics of {self.name} are called {taken}; {OWN_METRICS} are jaxshard's own names.")
        metrics = {name: self._count(x, f"Loss.metrics[{name!r}]") for name, x in result.metrics.items()}
        weight = self._count(result.weight, "Loss.weight")
        if isinstance(result.weight, int | float) and result.weight < 0:
            raise ValueError(f"Loss.weight of {self.name} is {result.weight}; it is a number of items, 0 or more.")
        return Loss(self._scalar(result.total, "Loss.total"), weight, metrics), new_extra

    @property
    def name(self) -> str:
        return getattr(self.fn, "__name__", type(self.fn).__name__)

    def _scalar(self, value: Any, what: str) -> jax.Array:
        hint = "Take its mean or its sum over the examples."
        if isinstance(value, float | jax.Array | np.ndarray | np.generic):
            array = jnp.asarray(value)
            if not array.shape and jnp.issubdtype(array.dtype, jnp.floating):
                return array
            hint = hint if array.shape else "Only a real float has a gradient: cast it, or take its real part."
        elif isinstance(value, tuple):
            hint = "Metrics are returned in Loss.metrics; state is taken and returned by a loss_fn that names `extra`."
        raise TypeError(
            f"loss_fn: the {what} of {self.name} is {kind_of(value)}; it must be a float scalar (a mean), or a "
            f"jaxshard.Loss(total, weight). {hint}"
        )

    def _count(self, value: Any, what: str) -> jax.Array:
        """A sum over items as a float32 scalar."""
        array = jnp.asarray(value) if isinstance(value, float | int | jax.Array | np.ndarray | np.generic) else None
        kinds = (jnp.floating, jnp.integer, jnp.bool_)
        if array is None or array.shape or not any(jnp.issubdtype(array.dtype, kind) for kind in kinds):
            raise TypeError(f"{what} of {self.name} is {kind_of(value)}; it must be a real scalar.")
        return array.astype(jnp.float32)


def loss_function(fn: Callable[..., Any]) -> LossFunction:
    """Reads off the signature whether `fn` wants `key` and `extra`. Raises TypeError when it takes anything else."""
    if not callable(fn) or isinstance(fn, type):
        raise TypeError(f"loss_fn is {kind_of(fn)}; it must be a function (params, batch) -> loss.")
    signature = inspect.signature(fn)
    named = [name for name in ("key", "extra") if name in signature.parameters]
    try:
        signature.bind("params", "batch", **dict.fromkeys(named))
    except TypeError as error:
        called = ", ".join(["params", "batch", *(f"{name}=" for name in named)])
        raise TypeError(
            f"loss_fn takes {signature}, and is called as loss_fn({called}): {error}. "
            "Only key= and extra= are passed, if it names them; close over anything else."
        ) from None
    return LossFunction(fn=fn, takes_key="key" in named, takes_extra="extra" in named)


def _check_extra(extra: Any, new_extra: Any, name: str) -> None:
    old, new = jax.tree.structure(extra), jax.tree.structure(new_extra)
    if old != new:
        raise TypeError(f"{name} was given extra of structure {old} and returned {new}; both must be the same.")
    for (path, a), b in zip(leaves_by_path(extra).items(), jax.tree.leaves(new_extra), strict=True):
        floats = jnp.issubdtype(a.dtype, jnp.floating) and jnp.issubdtype(b.dtype, jnp.floating)
        if a.shape != b.shape or not (floats or a.dtype == b.dtype):
            raise TypeError(
                f"{name} was given {path or 'its leaf'} of extra as {a.dtype}{list(a.shape)} and returned "
                f"{b.dtype}{list(b.shape)}; shape and dtype must stay."
            )
