"""What an optimizer's update sends: nothing if it is elementwise, else what the compiler chooses.

Updates run over global arrays, so that norms and factored moments are right. What that takes stands in no jaxpr: the
compiler adds it, and it is counted in the update compiled alone.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxshard.compiled.hlo import parse
from jaxshard.compiled.traffic import compiled_collectives
from jaxshard.contract import Collective
from jaxshard.gradients import Gradients
from jaxshard.jaxprs import is_elementwise
from jaxshard.mesh import axis_sizes, size_over
from jaxshard.program import Program
from jaxshard.setup import Setup, shapes_of
from jaxshard.specs import shape_at, sharding, shardings
from jaxshard.update import apply_optimizer, updated


def update_collectives(made: Setup) -> tuple[Collective, ...]:
    """Every collective that the optimizer of a step makes the update send, as this mesh's compiler chooses.

    Compiles the update, unless it is elementwise or nothing is split.
    """
    program, where = made.program, made.where
    if program.pieces == 1 or not program.strategy.opt.axes:
        return ()
    state = made.state_shapes
    whole = sharding(P(), program.strategy.params, program.mesh)
    # Split as the optimizer's state is, and in the memory where gradients wait.
    waiting = replace(program.strategy.grads, axes=program.strategy.opt.axes)
    scalar: Any = jax.ShapeDtypeStruct((), jnp.float32, sharding=whole)
    result = Gradients(
        grads=program.learning(program.map(shape_at, shardings(program.layout, waiting, program.mesh))),
        factor=None,
        loss=scalar,
        metrics={},
        norm=scalar,
        extra=state.extra,
    )
    learning = program.learning(state.params)
    shapes = shapes_of((learning, state.opt, result.grads, scalar, scalar))
    if is_elementwise(
        jax.make_jaxpr(lambda p, o, g, x, y: apply_optimizer(made.optimizer, p, o, g, x, y, made.clip))(*shapes).jaxpr
    ):
        return ()

    def update(state, result):
        return updated(program, made.optimizer, where, state, result, made.clip)

    compiled = jax.jit(update, out_shardings=where.shardings).lower(state, result).compile()
    counted = compiled_collectives(parse(compiled.as_text() or ""), axis_sizes(program.mesh))
    # Gathers of updated slices stand in the contract; a compiler may have combined others with them.
    due = _gathered_slices(program)
    found = []
    for one in counted:
        over = one.bytes * one.count
        if one.purpose == "gather":
            in_contract = min(over, due[one.dtype])
            due[one.dtype] -= in_contract
            over -= in_contract
        if over:
            count = one.count if over == one.bytes * one.count else 1
            found.append(replace(one, purpose="update", leaf="", bytes=over // count, count=count))
    return tuple(found)


def _gathered_slices(program: Program) -> Counter[str]:
    """Bytes, by dtype, of parameters that every step gathers from their updated slices."""
    held = program.strategy.params.axes
    sizes: Counter[str] = Counter()
    for leaf in jax.tree.leaves(program.layout):
        if leaf.trainable and leaf.dim is not None and program.strategy.opt.axes != held:
            sizes[jnp.dtype(leaf.dtype).name] += leaf.bytes // size_over(program.mesh, held)
    return sizes
