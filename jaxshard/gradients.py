"""What one device computes in a step: the gradient of the mean loss over all items of the global batch.

Runs inside `shard_map`. The mean is over items: sums of losses and of items are added up over microbatches and
devices, and divided once at the end, whatever falls where.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Jaxpr
from jax.sharding import PartitionSpec as P

from jaxshard import collectives, host_memory
from jaxshard.host_memory import Home
from jaxshard.loss import Loss
from jaxshard.program import Program, gathered_for_step, held_params
from jaxshard.specs import Leaf, path_of, route, split_axes
from jaxshard.strategy import BATCH_AXES

MICROBATCHES = f"{collectives.SCOPE}.microbatches"
"""The name scope of the loop over microbatches."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Gradients:
    """What a step's forward and backward passes give.

    grads: like params, None for leaves that do not learn; in the dtype they were added up in, split as the optimizer
    state is. factor: what they are multiplied by to become those of the mean loss, in the accumulate dtype (see
    `of_mean`): that is done where they are used, because it may make them twice as large; None: nothing is left to do.
    loss: the mean. metrics: means by name. norm: global, before clipping. extra: the new one.
    """

    grads: Any
    factor: jax.Array | None
    loss: jax.Array
    metrics: dict[str, jax.Array]
    norm: jax.Array
    extra: Any


def device_gradients(program: Program, params: Any, extra: Any, batch: Any, key: jax.Array, scale: Any) -> Gradients:
    """The gradients of one step, as one device computes them inside `shard_map`.

    params, batch: this device's parts. key: of this step, the same on all devices. scale: the loss scale (float32
    scalar), or None.
    """
    grads, sums, extra = local_sums(program, params, extra, batch, key, scale)
    sums = collectives.total(sums, BATCH_AXES, program.sizes, "items")
    share = item_share(sums.weight)
    grads, factor = _finish(program, grads, share, scale)
    metrics = {name: value * share for name, value in sums.metrics.items()}
    norm = global_norm(program, grads, factor)
    return Gradients(grads, factor, sums.total * share, metrics, norm, extra)


def of_mean(program: Program, grads: Any, factor: jax.Array | None) -> Any:
    """The gradients of the mean loss, in the accumulate dtype, from those of a step; any piece of them will do."""

    if factor is None:
        return grads

    def finish(g):
        if jnp.issubdtype(g.dtype, jnp.floating):
            g = g.astype(program.precision.accumulate)
        return g * factor.astype(g.dtype)

    return jax.tree.map(finish, grads)


def local_sums(
    program: Program, params: Any, extra: Any, batch: Any, key: jax.Array, scale: Any
) -> tuple[Any, Loss, Any]:
    """(gradients as they leave their last use, this device's sums, the new extra) over all microbatches."""
    key = jax.random.fold_in(key, device_index(program))
    params = gathered_for_step(program, params)
    run = _microbatch(program, params, key, scale)
    zeros = _zeros(program)
    if program.accumulate == 1:
        return run(zeros, extra, batch, 0)
    return _accumulate(program, run, zeros, extra, batch)


def device_index(program: Program) -> jax.Array:
    return lax.axis_index(tuple(axis for axis in program.mesh.axis_names if axis in BATCH_AXES))


def item_share(weight: jax.Array) -> jax.Array:
    """1 / weight, what one of so many items counts; no item anywhere contributes 0, never NaN."""
    return jnp.where(weight > 0, 1 / jnp.where(weight > 0, weight, 1), 0)


def _zeros(program: Program) -> Any:
    """Slots: zeros as gradients are wanted at the use, None for leaves that do not learn."""

    hosted = program.hosted_grads

    def zero(leaf: Leaf):
        if not leaf.trainable:
            return None
        x = jnp.zeros(_slot_shape(program, leaf), slot_dtype(program, leaf))
        # Nobody reads a slot, so that no zeros are made.
        return collectives.to_host(x, leaf.path) if leaf.path in hosted and program.leaves_at_use(leaf) else x

    return program.map(zero)


def _slot_shape(program: Program, leaf: Leaf) -> tuple[int, ...]:
    shape = list(leaf.shape)
    if leaf.dim is not None:
        shape[leaf.dim] //= program.route(leaf).slot_pieces
    return tuple(shape)


def slot_dtype(program: Program, leaf: Leaf) -> Any:
    """The dtype in which a gradient leaves its last use: in which summands are added up, if there are any to add."""
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
        return leaf.dtype
    reduce, accumulate = jnp.dtype(program.precision.reduce), jnp.dtype(program.precision.accumulate)
    alone = leaf.read_once and program.accumulate == 1 and not program.deferred and not program.precision.scaled
    # As it arrives, it is the same value, and half as large until the update.
    return reduce if alone and reduce.itemsize < accumulate.itemsize else accumulate


def _microbatch(program: Program, params: Any, key: jax.Array, scale: Any) -> Callable[..., Any]:
    """(slots, extra, batch, index) -> (gradient of this microbatch's sum of losses, its sums, the new extra)."""

    def run(slots, extra, batch, index):
        def total(slots):
            held = held_params(program, params, slots)
            loss, new_extra = program.loss(program.choices, held, batch, jax.random.fold_in(key, index), extra)
            sums = Loss(loss.total.astype(jnp.float32), loss.weight, dict(loss.metrics))
            return loss.total, (sums, new_extra)

        value, pull, (sums, new_extra) = jax.vjp(total, slots, has_aux=True)
        if scale is None:
            (grads,) = pull(jnp.ones_like(value))
        else:
            # A scaled *sum* overflows float16, so the seed is the scale per item, over all devices.
            items = collectives.total(sums.weight, BATCH_AXES, program.sizes, "items")
            (grads,) = pull((scale * item_share(items)).astype(value.dtype))
            grads = jax.tree.map(lambda g: g * (items / scale).astype(g.dtype), grads)
        grads = _put(program, grads)
        return grads, sums, merge_extra(program, extra, new_extra, sums.weight)

    return run


def _put(program: Program, grads: Any) -> Any:
    """Gradients where they wait; those that left at their use are there."""
    hosted = program.hosted_grads

    def put(leaf: Leaf, g: Any):
        if g is None or leaf.path not in hosted or collectives.is_hosted(g):
            return g
        return collectives.to_host(g, leaf.path)

    return program.map(put, grads) if hosted else grads


def mean_dtype(dtype: Any) -> Any:
    """The dtype in which leaves of `extra` are averaged: a sum of many halves overflows."""
    return jnp.dtype(jnp.float32) if jnp.dtype(dtype).itemsize < 4 else jnp.dtype(dtype)


def merge_extra(program: Program, extra: Any, new_extra: Any, weight: jax.Array) -> Any:
    """One `extra` from all devices': leaves that may differ become their mean weighted by items, others agree."""
    if not any(program.loss.extra_differs):
        return new_extra
    items = collectives.total(weight, BATCH_AXES, program.sizes, "items")

    def merge(path, differs, old, new):
        if not differs:
            # Exactly as it is: the mean of a count, or of a decay, would drift by rounding.
            return new if new.dtype == old.dtype else new.astype(old.dtype)
        dtype = mean_dtype(old.dtype)
        # A device without items has nothing to say, and what it says may be NaN.
        share = jnp.where(weight > 0, new.astype(dtype), 0) * weight.astype(dtype)
        summed = collectives.total(share, BATCH_AXES, program.sizes, f"extra/{path_of(path)}")
        return jnp.where(items > 0, (summed * item_share(items).astype(dtype)).astype(old.dtype), old)

    differs = jax.tree.unflatten(jax.tree.structure(extra), program.loss.extra_differs)
    return jax.tree_util.tree_map_with_path(merge, differs, extra, new_extra, is_leaf=lambda x: isinstance(x, bool))


def _accumulate(program: Program, run: Callable[..., Any], zeros: Any, extra: Any, batch: Any) -> Any:
    """All microbatches in a loop; no gradient collective is inside it when the strategy reduces once a step."""
    k = program.accumulate
    parts = jax.tree.map(lambda x: x.reshape(k, x.shape[0] // k, *x.shape[1:]), batch)
    sums = jax.tree.map(lambda _: jnp.zeros((), jnp.float32), program.loss.result[0])

    def add(carry, part):
        grads, sums, extra = carry
        new_grads, new_sums, extra = run(zeros, extra, *part)
        sums = jax.tree.map(jnp.add, sums, new_sums)
        return (_added(program, grads, new_grads, sums.weight), sums, extra), None

    hosted = program.hosted_grads

    def begin(leaf: Leaf, slot):
        if leaf.path not in hosted or not leaf.trainable:
            return slot
        return host_memory.zeros(_slot_shape(program, leaf), slot_dtype(program, leaf), leaf.path)

    with jax.named_scope(MICROBATCHES):
        carry, _ = lax.scan(add, (program.map(begin, zeros), sums, extra), (parts, jnp.arange(k)))
    return carry


def _added(program: Program, sums: Any, grads: Any, after: jax.Array) -> Any:
    """The sum of two trees of gradients, where the first lie; after: a value that is there when the second are."""
    hosted = program.hosted_grads
    if not hosted:
        return jax.tree.map(jnp.add, sums, grads)
    waiting = [leaf.path in hosted for leaf in jax.tree.leaves(program.layout) if leaf.trainable]
    flat, structure = jax.tree.flatten(sums)
    homes = [Home(spec=P(), path="gradient", hosted=host, result=result) for result in (P(), None) for host in waiting]
    results = host_memory.streamed(
        lambda x, y: [a + b for a, b in zip(x, y, strict=True)],
        flat,
        jax.tree.leaves(grads),
        homes,
        after,
        mesh=None,
        buffers=program.strategy.buffers,
    )
    return jax.tree.unflatten(structure, results)


def _finish(program: Program, grads: Any, share: jax.Array, scale: Any) -> tuple[Any, jax.Array]:
    """(the accumulated sums, split as the optimizer state is; what makes them the gradient of the mean)."""
    opt = program.strategy.opt.axes
    # Reduced last, they are as large on the wire as at a use.
    sent, factor = None, share
    if scale is not None and program.deferred:
        sent, factor = share * scale, 1 / scale
    hosted = program.hosted_grads

    def finish(leaf: Leaf, g):
        if g is None:
            return None
        way = program.route(leaf)
        if leaf.path in hosted and (way.deferred or way.scatter != opt):
            g = collectives.to_device(g, leaf.path)
        if way.deferred:
            if jnp.issubdtype(g.dtype, jnp.floating):
                g = g.astype(program.precision.accumulate)
            g = g if sent is None else g * sent.astype(g.dtype)
            last = route(leaf, program.strategy, program.mesh, program.precision, to=program.strategy.opt)
            return collectives.reduce(g, leaf.dim, last, leaf.path).astype(g.dtype)
        return g if way.scatter == opt else collectives.own_piece(g, leaf.dim, opt[len(way.scatter) :], program.sizes)

    return _put(program, program.map(finish, grads)), factor


def global_norm(program: Program, grads: Any, factor: jax.Array | None) -> jax.Array:
    """The norm of the gradients of the mean loss, each element counted once whatever is split, whole or replicated.

    Every strategy adds up the same pieces in the same order (a device's own slices, then devices, then whole leaves),
    so that they agree to the bit. Gradients in host memory pass through the device piece by piece.
    """
    opt, axes = program.strategy.opt.axes, split_axes(program.strategy)
    split, whole = jnp.zeros((), jnp.float32), jnp.zeros((), jnp.float32)

    def square(leaf: Leaf, g):
        g = of_mean(program, g, factor)
        own = g if opt else collectives.own_piece(g, leaf.dim, axes, program.sizes)
        flat = jnp.abs(own).astype(jnp.float32).reshape(-1)
        # A product, not a sum of squares: a sum is fused with the slice before it, and adds in another order for that.
        return jnp.vdot(flat, flat, precision="highest")

    for leaf, g in zip(*_columns(program, grads), strict=True):
        if g is None:
            continue
        if not collectives.is_hosted(g):
            found = square(leaf, g)
        elif opt or leaf.dim is None or not program.pieces > 1:
            found = host_memory.total(g, lambda piece, leaf=leaf: square(leaf, piece), split + whole, leaf.path)
        else:
            found = square(leaf, collectives.to_device(g, leaf.path))
        if leaf.dim is None:
            whole += found
        else:
            split += found
    return jnp.sqrt(collectives.total(split, axes, program.sizes, "norm") + whole)


def _columns(program: Program, tree: Any) -> tuple[list[Leaf], list[Any]]:
    leaves, structure = jax.tree.flatten(program.layout)
    return leaves, structure.flatten_up_to(tree)


def forward_jaxpr(program: Program, params: Any, batch: Any, extra: Any) -> Jaxpr:
    """The forward pass over one microbatch as the devices run it, from the shapes of global arrays."""
    part = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((x.shape[0] // program.accumulate, *x.shape[1:]), x.dtype), batch
    )
    specs = jax.tree.map(lambda leaf: leaf.spec(program.strategy.params), program.layout)

    def forward(params, batch, key, extra):
        held = held_params(program, gathered_for_step(program, params), _zeros(program))
        return program.loss(program.choices, held, batch, key, extra)[0].total

    mapped = jax.shard_map(
        forward, mesh=program.mesh, in_specs=(specs, P(BATCH_AXES), P(), P()), out_specs=P(), check_vma=False
    )
    key = jax.eval_shape(lambda: jax.random.key(0))
    return jax.make_jaxpr(mapped)(params, part, key, extra).jaxpr
