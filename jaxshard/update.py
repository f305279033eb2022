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
from jax import lax
from jax.lax import with_sharding_constraint
from jax.sharding import PartitionSpec as P

from jaxshard import collectives
from jaxshard.gradients import Gradients, of_mean
from jaxshard.host_memory import Home, streamed
from jaxshard.precision import next_loss_scale
from jaxshard.program import Program
from jaxshard.specs import Leaf, in_host_memory, shardings
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
    slices = program.learning(shardings(program.layout, program.strategy.opt.on_device, program.mesh))
    finite = jnp.isfinite(result.norm) & jnp.isfinite(result.loss) if program.skips else None

    def advance(states, given):
        (params, opt), (grads, loss, norm, factor, finite) = states, given
        new = apply_optimizer(optimizer, params, opt, of_mean(program, grads, factor), loss, norm, clip)
        return new if finite is None else _where(finite, new, states)

    given = (result.grads, result.loss, result.norm, result.factor, finite)
    hosted = program.hosted_params
    old = program.map(
        lambda leaf, x, at: x if x is None or leaf.path in hosted else with_sharding_constraint(x, at),
        program.learning(state.params),
        slices,
    )
    homes = _homes(program, where, given)
    if any(home.hosted for home in jax.tree.leaves(homes, is_leaf=lambda x: isinstance(x, Home))):
        mesh = None if program.strategy.params.devices == "first" else program.mesh
        params, opt = streamed(
            advance,
            (old, state.opt),
            given,
            homes,
            result.norm,
            mesh=mesh,
            buffers=program.strategy.buffers,
            by_host=program.strategy.update == "host",
        )
    else:
        params, opt = advance((old, state.opt), given)
    step, scale, extra = state.step + 1, state.scale, result.extra
    if finite is not None:
        scale = None if scale is None else next_loss_scale(program.precision, scale, finite)
        step, extra = _where(finite, (step, extra), (state.step, state.extra))
    # Without these constraints the compiler may choose whole arrays for the update, and gather twice.
    params, opt = jax.tree.map(
        lambda x, home, at: x if home.returns else with_sharding_constraint(x, at),
        (params, opt),
        homes[0],
        (slices, where.shardings.opt),
    )
    params = program.map(lambda leaf, kept, new: kept if new is None else new, state.params, published(program, params))
    return replace(state, step=step, params=params, opt=opt, extra=extra, scale=scale)


def _where(chosen: jax.Array, new: Any, kept: Any) -> Any:
    return jax.tree.map(lambda new, kept: jnp.where(chosen, new, kept), new, kept)


def _homes(program: Program, where: StateLayout, given: Any) -> tuple[tuple[Any, Any], Any]:
    """Where the states that an update reads lie, and what else it is given."""
    strategy = program.strategy
    hosted, hosted_opt = program.hosted_params, in_host_memory(where.opt, strategy.opt)
    axes = tuple(axis for axis in strategy.opt.axes[len(strategy.params.axes) :] if program.sizes[axis] > 1)

    def param(leaf: Leaf) -> Home:
        slice_of, result = leaf.dim is not None and axes, leaf.spec(strategy.opt)
        if leaf.path not in hosted:
            return Home(spec=result, result=result)
        at_rest = leaf.spec(strategy.params)
        return Home(
            path=leaf.path, spec=at_rest, hosted=True, dim=leaf.dim, axes=axes if slice_of else (), result=result
        )

    def opt(leaf: Leaf) -> Home:
        spec = leaf.spec(strategy.opt)
        return Home(path=leaf.path, spec=spec, hosted=leaf.path in hosted_opt, result=spec)

    waiting = program.hosted_grads

    def grad(leaf: Leaf) -> Home:
        return Home(path=leaf.path, spec=leaf.spec(strategy.opt), hosted=leaf.path in waiting)

    grads = program.learning(program.map(grad))
    params = program.learning(program.map(param))
    return (params, jax.tree.map(opt, where.opt)), (grads, *(None if x is None else Home(spec=P()) for x in given[1:]))


def step_metrics(result: Gradients, new: TrainState) -> dict[str, jax.Array]:
    """What a step reports, as device scalars; the norm is the one before clipping."""
    metrics = {"loss": result.loss, "grad_norm": result.norm, **result.metrics}
    if new.scale is not None:
        metrics |= {"loss_scale": new.scale.scale, "skipped": new.scale.skipped}
    return metrics


def apply_optimizer(
    optimizer: optax.GradientTransformation,
    params: Any,
    opt: Any,
    grads: Any,
    loss: jax.Array,
    norm: jax.Array,
    clip: float | None,
) -> tuple[Any, Any]:
    """(new params, new optimizer state) from clipped gradients, all in the dtype they had."""
    factor = clip_factor(norm, clip)
    grads = jax.tree.map(
        lambda g, p: (g if factor is None else g * factor.astype(g.dtype)).astype(p.dtype),
        grads,
        params,
    )
    # optax mixes integer counts with floats, which a user's strict promotion would forbid.
    with jax.numpy_dtype_promotion("standard"):
        updates, new_opt = optax.with_extra_args_support(optimizer).update(grads, opt, params, value=loss)
        new = optax.apply_updates(params, updates)
    same = jax.tree.map(lambda x, kept: x.astype(kept.dtype), (new, new_opt), (params, opt))
    return same


def published(program: Program, params: Any) -> Any:
    """Updated slices gathered to where parameters live: over the axes of opt that params are not split over."""
    strategy = program.strategy
    axes = strategy.opt.axes[len(strategy.params.axes) :]
    if not axes:
        return params

    hosted = program.hosted_params
    done: list[jax.Array] = []

    def whole(leaf: Leaf, x: Any) -> Any:
        if x is None:
            return None
        waits = leaf.dim is not None and leaf.path in hosted
        if waits and done:  # one whole leaf at a time: the next is gathered when this one has left
            x, _ = lax.optimization_barrier((x, done[-1]))
        x = collectives.gather(x, leaf.dim, axes, program.sizes, leaf.path)
        if waits:
            done.append(collectives.to_host(x, leaf.path))
        return done[-1] if waits else x

    def gather(params):
        return program.map(whole, params)

    specs = [
        program.learning(program.map(lambda leaf, at=at: leaf.spec(at), *())) for at in (strategy.opt, strategy.params)
    ]
    return jax.shard_map(gather, mesh=program.mesh, in_specs=(specs[0],), out_specs=specs[1], check_vma=False)(params)
