"""From gradients to new parameters: any optax optimizer, right by construction.

The update runs over global arrays, outside `shard_map`: norms and factored moments see the whole array, and elementwise
optimizers compile to no communication. Each device updates the slice of its optimizer state.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.lax import with_sharding_constraint

from jaxshard import collectives
from jaxshard.gradients import Gradients
from jaxshard.precision import next_loss_scale
from jaxshard.program import Program
from jaxshard.specs import shardings
from jaxshard.state import StateLayout, TrainState


def clip_factor(norm: jax.Array, clip: float | None) -> jax.Array | None:
    """What to multiply gradients by so that their global norm is at most `clip`."""
    return None if clip is None else jnp.where(norm > clip, clip / norm, 1)


def updated(
    program: Program,
    optimizer: optax.GradientTransformation,
    where: StateLayout,
    state: TrainState,
    result: Gradients,
    clip: float | None,
) -> TrainState:
    """The state after one step. Where the program skips what is not finite, such a step leaves the state as it was, but
    for a smaller loss scale."""
    slices = program.learning(shardings(program.layout, program.strategy.opt, program.mesh))
    old = with_sharding_constraint(program.learning(state.params), slices)
    params, opt = apply_optimizer(optimizer, old, state.opt, result, clip)
    step, scale = state.step + 1, state.scale
    if program.skips:
        finite = jnp.isfinite(result.norm) & jnp.isfinite(result.loss)
        params, opt, step = jax.tree.map(
            lambda new, kept: jnp.where(finite, new, kept), (params, opt, step), (old, state.opt, state.step)
        )
        scale = None if scale is None else next_loss_scale(program.precision, scale, finite)
        extra = jax.tree.map(lambda new, kept: jnp.where(finite, new, kept), result.extra, state.extra)
        result = replace(result, extra=extra)
    # Without these constraints the compiler may choose whole arrays for the update, and gather twice.
    params = with_sharding_constraint(params, slices)
    opt = with_sharding_constraint(opt, where.shardings.opt)
    params = program.map(lambda leaf, kept, new: kept if new is None else new, state.params, published(program, params))
    return replace(state, step=step, params=params, opt=opt, extra=result.extra, scale=scale)


def step_metrics(result: Gradients, new: TrainState) -> dict[str, jax.Array]:
    """What a step reports, as device scalars; the norm is the one before clipping."""
    metrics = {"loss": result.loss, "grad_norm": result.norm, **result.metrics}
    if new.scale is not None:
        metrics |= {"loss_scale": new.scale.scale, "skipped": new.scale.skipped}
    return metrics


def apply_optimizer(
    optimizer: optax.GradientTransformation, params: Any, opt: Any, result: Gradients, clip: float | None
) -> tuple[Any, Any]:
    """(new params, new optimizer state) from clipped gradients, all in the dtype they had."""
    factor = clip_factor(result.norm, clip)
    grads = jax.tree.map(
        lambda g, p: (g if factor is None else g * factor.astype(g.dtype)).astype(p.dtype),
        result.grads,
        params,
    )
    # optax mixes integer counts with floats, which a user's strict promotion would forbid.
    with jax.numpy_dtype_promotion("standard"):
        updates, new_opt = optax.with_extra_args_support(optimizer).update(grads, opt, params, value=result.loss)
        new = optax.apply_updates(params, updates)
    same = jax.tree.map(lambda x, kept: x.astype(kept.dtype), (new, new_opt), (params, opt))
    return same


def published(program: Program, params: Any) -> Any:
    """Updated slices gathered to where parameters live: over the axes of opt that params are not split over."""
    strategy = program.strategy
    axes = strategy.opt.axes[len(strategy.params.axes) :]
    if not axes:
        return params

    def gather(params):
        return program.map(
            lambda leaf, x: None if x is None else collectives.gather(x, leaf.dim, axes, program.sizes, leaf.path),
            params,
        )

    specs = [
        program.learning(program.map(lambda leaf, at=at: leaf.spec(at), *())) for at in (strategy.opt, strategy.params)
    ]
    return jax.shard_map(gather, mesh=program.mesh, in_specs=(specs[0],), out_specs=specs[1], check_vma=False)(params)
