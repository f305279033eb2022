"""Everything that is known of a step before it runs, and parameters made ready for the loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Var
from jax.sharding import Mesh

from jaxshard import collectives
from jaxshard.checks import leaves_by_path
from jaxshard.collectives import Route
from jaxshard.gather import Choices, gather_at_use
from jaxshard.held import Held
from jaxshard.jaxprs import first_results, origin, trace
from jaxshard.loss import Loss, LossFunction
from jaxshard.mesh import axis_sizes, size_over
from jaxshard.precision import Precision, cast_floats
from jaxshard.specs import Leaf, in_host_memory, path_of, route, split_axes
from jaxshard.strategy import Placement, Strategy
from jaxshard.varying import varying


@dataclass(frozen=True, kw_only=True)
class TracedLoss:
    """A loss function as a jaxpr over whole parameters, for one device's part of a batch."""

    closed: ClosedJaxpr
    varies: tuple[bool, ...]  # which of its flat inputs differ between devices: the batch and the key
    result: Any  # (Loss, new_extra) as ShapeDtypeStructs
    extra_differs: tuple[bool, ...]  # which leaves of the new extra may differ between devices

    def __call__(self, choices: Choices, params: Any, batch: Any, key: Any, extra: Any) -> tuple[Loss, Any]:
        """Evaluates it; the leaves of params may be `Held`."""
        held = jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, Held))
        flat = [*held, *jax.tree.leaves((batch, key, extra))]
        return jax.tree.unflatten(
            jax.tree.structure(self.result), gather_at_use(self.closed, self.varies, choices)(*flat)
        )


def trace_loss(
    loss: LossFunction, mesh: Mesh, axis_name: str | None, params: Any, batch: Any, key: Any, extra: Any
) -> TracedLoss:
    """Traces a loss once, from ShapeDtypeStructs as one device sees them (parameters whole, in the compute dtype).

    Raises ValueError when a leaf of the new `extra` that is no float could differ between devices: floats are
    averaged, others have no mean; and when the loss changes a leaf of a module in `params` in place: that would be
    lost.
    """

    def called(params, batch, key, extra):
        return loss(params, batch, key, extra), _leaves_of_objects(params)

    closed, (shapes, after) = trace(called, mesh, axis_name, params, batch, key, extra)
    count = len(jax.tree.leaves(shapes))
    own = dict(zip(leaves_by_path(params), closed.jaxpr.invars, strict=False))
    left = dict(zip(sorted(after), closed.jaxpr.outvars[count:], strict=True))
    changed = [path for path, x in left.items() if path in own and origin(closed.jaxpr, x) is not own[path]]
    if changed:
        raise ValueError(
            f"loss_fn: {loss.name} changed {', '.join(changed[:8])} of params in place, and that would be lost. "
            "State is not trained: take it as `extra` and return the new one (with flax nnx, "
            "nnx.split(model, nnx.Param, ...) tells them apart)."
        )
    closed = first_results(closed, count)
    sizes = [len(jax.tree.leaves(x)) for x in (params, batch, key, extra)]
    varies = tuple(flag for flag, size in zip((False, True, True, False), sizes, strict=True) for _ in range(size))
    named = jax.tree_util.tree_leaves_with_path(shapes[1])
    found = varying(closed.jaxpr, varies)
    results = closed.jaxpr.outvars[len(closed.jaxpr.outvars) - len(named) :]
    flags = [isinstance(v, Var) and v in found for v in results]
    differ = [
        path_of(path)
        for (path, x), flag in zip(named, flags, strict=True)
        if flag and not jnp.issubdtype(x.dtype, jnp.inexact)
    ]
    if differ:
        raise ValueError(
            f"the leaves {differ} of extra are no floats and depend on the batch or the key, so devices would disagree "
            "about them and no mean exists. Make them floats, or let them depend on extra and params alone."
        )
    return TracedLoss(closed=closed, varies=varies, result=shapes, extra_differs=tuple(flags))


def _leaves_of_objects(params: Any) -> dict[str, Any]:
    """The leaves that modules hold. (Dicts and lists are the loss's own, to change as it likes.)"""
    plain = jax.tree_util.DictKey, jax.tree_util.SequenceKey
    named = jax.tree_util.tree_leaves_with_path(params)
    return {path_of(path): x for path, x in named if not all(isinstance(key, plain) for key in path)}


@dataclass(frozen=True, kw_only=True)
class Program:
    """Everything that is known of a step before it runs; all of it static."""

    loss: TracedLoss
    layout: Any  # a pytree of Leaf, like params
    strategy: Strategy
    mesh: Mesh
    precision: Precision
    accumulate: int
    choices: Choices
    deferred: bool  # gradients are not reduced at their use
    skips: bool  # a step that is not finite leaves the state as it was

    @property
    def sizes(self):
        return axis_sizes(self.mesh)

    @property
    def pieces(self) -> int:
        return size_over(self.mesh, split_axes(self.strategy))

    @property
    def at_use(self) -> Placement:
        """Where a gradient goes at its use: with one microbatch straight to where the optimizer state lives."""
        return self.strategy.opt if self.accumulate == 1 else self.strategy.grads

    def route(self, leaf: Leaf) -> Route:
        """How a leaf and its gradient travel at the use."""
        return route(leaf, self.strategy, self.mesh, self.precision, to=self.at_use, deferred=self.deferred)

    @property
    def hosted_params(self) -> frozenset[str]:
        """The paths of parameters that lie in host memory between steps."""
        return in_host_memory(self.layout, self.strategy.params)

    @property
    def fetched_at_use(self) -> frozenset[str]:
        """The paths of parameters that are in host memory when the loss reads them."""
        return self.hosted_params if self.strategy.gather == "use" else frozenset()

    @property
    def hosted_grads(self) -> frozenset[str]:
        """The paths of parameters whose gradients wait in host memory."""
        return in_host_memory([leaf for leaf in jax.tree.leaves(self.layout) if leaf.trainable], self.strategy.grads)

    def leaves_at_use(self, leaf: Leaf) -> bool:
        """Whether a gradient that waits in host memory goes there from its use: if that is all of it."""
        return leaf.read_once and not self.precision.scaled

    def compute_dtype(self, leaf: Leaf) -> Any:
        """The dtype of a leaf as the loss sees it."""
        is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
        return jnp.dtype(self.precision.compute) if is_float and self.precision.compute else leaf.dtype

    def map(self, fn: Callable[..., Any], *trees: Any) -> Any:
        """``fn(leaf, *arrays)`` over the parameters; a tree may have None where a leaf does not learn."""
        leaves, structure = jax.tree.flatten(self.layout)
        columns = [structure.flatten_up_to(tree) for tree in trees]
        return jax.tree.unflatten(structure, [fn(*row) for row in zip(leaves, *columns, strict=True)])

    def learning(self, params: Any) -> Any:
        """The same tree with None in place of leaves that do not learn."""
        return self.map(lambda leaf, x: x if leaf.trainable else None, params)


def held_params(program: Program, params: Any, slots: Any) -> Any:
    """Parameters as `Held`, ready for the loss. slots: a tree of arrays, or None to take no gradient."""
    slots = program.map(lambda leaf: None) if slots is None else slots
    hosted = program.fetched_at_use

    def hold(leaf: Leaf, x: jax.Array, slot: jax.Array | None) -> Held:
        dtype = program.compute_dtype(leaf)
        return Held(
            leaf=x,
            slot=slot,
            dtype=dtype,
            dim=leaf.dim,
            pieces=program.pieces,
            route=program.route(leaf),
            path=leaf.path,
            hosted=leaf.path in hosted,
        )

    return program.map(hold, params, slots)


def gathered_for_step(program: Program, params: Any) -> Any:
    """For strategies that gather at the step's start: parameters whole, in the compute dtype."""
    if program.strategy.gather == "use":
        return params
    axes = program.strategy.params.axes
    hosted = program.hosted_params
    params = program.map(lambda leaf, x: collectives.to_device(x, leaf.path) if leaf.path in hosted else x, params)
    params = cast_floats(params, program.precision.compute)
    return program.map(lambda leaf, x: collectives.gather(x, leaf.dim, axes, program.sizes, leaf.path), params)
