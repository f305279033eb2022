"""Dtypes of a training step, and the loss scale that float16 needs."""

from __future__ import annotations

from dataclasses import dataclass, fields

import jax
import jax.numpy as jnp


@dataclass(frozen=True, kw_only=True)
class Precision:
    """The dtype of each stage.

    params: float parameters and optimizer state at rest; None keeps each as it was made (mostly float32).
    compute: float parameters as the loss function sees them; None: as they are at rest.
    reduce: every gradient collective (gradients are cast before the wire). accumulate: sums over microbatches.

    With ``compute="float16"`` the loss is scaled dynamically (Micikevicius et al. 2018, arXiv 1710.03740):
    from `initial_scale`, doubled after `growth_interval` steps without overflow, times `backoff` at each overflow.

    Raises ValueError for a dtype that is no float, and for float16 reductions or sums of a loss that is not scaled.
    """

    params: str | None = None
    compute: str | None = None
    reduce: str = "float32"
    accumulate: str = "float32"
    initial_scale: float = 2.0**16
    growth_interval: int = 2000
    backoff: float = 0.5

    def __post_init__(self):
        for field in fields(self)[:4]:
            value = getattr(self, field.name)
            if value is None and field.default is None:
                continue
            try:
                dtype = jnp.dtype(value)
            except TypeError:
                dtype = None
            if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
                raise ValueError(
                    f"Precision({field.name}={value!r}): a float dtype, such as 'float32', 'bfloat16' or 'float16'."
                )
            object.__setattr__(self, field.name, dtype.name)
        halves = [name for name in ("reduce", "accumulate") if getattr(self, name) == "float16"]
        if halves and not self.scaled:
            raise ValueError(
                f"Precision({halves[0]}='float16', compute={self.compute!r}): sums over items overflow float16 "
                "(65504), because only compute='float16' scales the loss. Use 'bfloat16' or 'float32', or compute in "
                "float16."
            )
        if not (self.initial_scale > 0 and self.growth_interval > 0 and 0 < self.backoff < 1):
            raise ValueError(
                f"Precision(initial_scale={self.initial_scale}, growth_interval={self.growth_interval}, "
                f"backoff={self.backoff}): scale and interval are above 0, backoff between 0 and 1."
            )

    @property
    def scaled(self) -> bool:
        """Whether the loss is scaled: float16 has too few small numbers to go without."""
        return self.compute == "float16"


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LossScale:
    """Dynamic loss scaling: float32 `scale`; int32 `good` steps since it changed; int32 `skipped` steps in all."""

    scale: jax.Array
    good: jax.Array
    skipped: jax.Array


def initial_loss_scale(precision: Precision) -> LossScale | None:
    """The scale at step 0, or None when the loss is not scaled."""
    if not precision.scaled:
        return None
    zero = jnp.zeros((), jnp.int32)
    return LossScale(jnp.full((), precision.initial_scale, jnp.float32), zero, zero)


def next_loss_scale(precision: Precision, scale: LossScale, finite: jax.Array) -> LossScale:
    """The scale after a step whose gradients were all `finite` (a bool scalar), or were not."""
    grown = scale.good + 1 >= precision.growth_interval
    # Doubling stops where float32 would overflow; halving stops at 1, below which float16 gains nothing.
    up = jnp.where(grown, jnp.minimum(scale.scale * 2, 2.0**100), scale.scale)
    down = jnp.maximum(scale.scale * precision.backoff, 1.0)
    return LossScale(
        scale=jnp.where(finite, up, down),
        good=jnp.where(finite & ~grown, scale.good + 1, 0),
        skipped=scale.skipped + jnp.where(finite, 0, 1),
    )


def cast_floats(tree, dtype: str | None):
    """Casts the float leaves of a tree; integer, bool, complex and PRNG-key leaves stay, and all do for None."""
    if dtype is None:
        return tree
    return jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)
