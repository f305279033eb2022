"""What a strategy holds and sends, from shapes alone: nothing is compiled, and no device needs to be there.

The figures are the library's own: the same layout, placements and contract that a training step is made of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, AxisType, Mesh

from jaxshard.contract import Collective, expected_collectives
from jaxshard.dp import DataParallel
from jaxshard.explain import held_bytes
from jaxshard.link import Direction, Transfer, host_bytes, link_bytes, transfers
from jaxshard.mesh import axis_sizes
from jaxshard.precision import Precision
from jaxshard.setup import Setup, setup
from jaxshard.specs import Leaf
from jaxshard.strategy import Placement, Strategy, name_of, named


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What one device holds and sends in a step; for `dp` the first device.

    held: bytes by class, params, grads (between the passes), opt and extra. host: of the same, what lies in the host's
    memory instead, for one device. link: what crosses the link to the host in a step. gathered: bytes of what is whole
    for a while besides: every weight under ``gather="step"``, the largest alone under ``gather="use"`` (it is the
    least: a compiler that gathers early holds two or more), for `dp` the gradients of all other devices. collectives:
    the most that a step sends. leaves: every parameter, with the reason why it stays whole if it does.

    Only a compiler knows the rest: activations, and what an optimizer that is not elementwise makes the update send.
    """

    strategy: str
    mesh: dict[str, int]
    held: dict[str, int]
    gathered: int
    collectives: tuple[Collective, ...]
    leaves: tuple[Leaf, ...]
    host: dict[str, int] = field(default_factory=dict)
    link: tuple[Transfer, ...] = ()

    @property
    def states(self) -> int:
        """Bytes of all that is held."""
        return sum(self.held.values())

    @property
    def in_host(self) -> int:
        """Bytes of all that lies in the host's memory for one device."""
        return sum(self.host.values())

    def crossed(self, direction: Direction) -> int:
        """Bytes over the link to the host in a step, ``to_device`` or ``to_host``."""
        return link_bytes(self.link)[direction]

    @property
    def wire_bytes(self) -> int:
        """Bytes that a device sends in a step."""
        return sum(one.wire_bytes for one in self.collectives)


def plan(
    params: Any,
    optimizer: optax.GradientTransformation,
    *,
    strategy: str | Strategy = "zero3",
    mesh: Mesh | AbstractMesh | Mapping[str, int],
    precision: Precision | None = None,
    accumulate: int = 1,
    trainable: Any = None,
    whole_budget: float = 0.01,
    loss_fn: Callable[..., Any] | None = None,
    batch: Any = None,
) -> Plan:
    """The plan of a training step.

    params, optimizer, strategy, precision, accumulate, trainable, whole_budget: as for `parallelize`; shapes suffice.
    mesh: a mesh, of devices or abstract, or its sizes: ``{"replica": 4, "shard": 256}``.
    loss_fn, batch: a loss and the shapes of a global batch, so that weights are gathered and gradients reduced as it
    uses them; without them, each float leaf is used once, by something whose derivative needs it, as a matrix product.

    Raises ValueError or TypeError as `parallelize` does, and for a loss without a batch.
    """
    if (loss_fn is None) != (batch is None):
        raise ValueError("plan: loss_fn and batch come together; leave both out for one use of each parameter.")
    mesh, strategy = _abstract(mesh), named(strategy)
    first = strategy.params.devices == "first"
    made = setup(
        loss_fn or _every_leaf_once,
        optimizer,
        params=params,
        batch=jax.ShapeDtypeStruct((mesh.size * accumulate,), jnp.float32) if batch is None else batch,
        mesh=mesh,  # pyright: ignore[reportArgumentType]: its axes and sizes are all that is asked of it
        strategy=replace(strategy, params=Placement(), grads=Placement(), opt=Placement()) if first else strategy,
        accumulate=accumulate,
        clip=None,
        skip_nonfinite=False,
        precision=Precision() if precision is None else precision,
        remat="none",
        trainable=trainable,
        whole_budget=whole_budget,
        warn_whole=1.0,  # the plan says it of each leaf
        axis_name=None,
        compiler_options={},
    )
    collectives = DataParallel(made).contract() if first else expected_collectives(made)
    return Plan(
        strategy=name_of(strategy),
        mesh=axis_sizes(mesh),  # pyright: ignore[reportArgumentType]
        held=held_bytes(made),
        gathered=_gathered(made, strategy, collectives),
        collectives=collectives,
        leaves=tuple(jax.tree.leaves(made.program.layout)),
        host=host_bytes(made),
        link=transfers(made),
    )


def _abstract(mesh: Mesh | AbstractMesh | Mapping[str, int]) -> AbstractMesh:
    sizes = dict(mesh) if isinstance(mesh, Mapping) else dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def _every_leaf_once(params: Any, batch: Any) -> jax.Array:
    floats = [x for x in jax.tree.leaves(params) if jnp.issubdtype(x.dtype, jnp.inexact)]
    return jnp.mean(batch) * sum(jnp.sum(jnp.real(jnp.square(x)).astype(jnp.float32)) for x in floats)


def gathered_by_first(collectives: Iterable[Collective]) -> int:
    """Bytes of the other devices' gradients, which under `dp` the first device holds all at once."""
    return sum(one.bytes * one.count * (one.devices - 1) for one in collectives if one.kind == "gather")


def _gathered(made: Setup, strategy: Strategy, collectives: tuple[Collective, ...]) -> int:
    if strategy.params.devices == "first":
        return gathered_by_first(collectives)
    over = tuple(axis for axis in strategy.params.axes if made.program.sizes[axis] > 1)
    weights = [one for one in collectives if one.kind == "all_gather" and one.purpose == "gather" and one.axes == over]
    if strategy.gather == "step":
        return sum(one.bytes * one.count for one in weights)
    return max((one.bytes for one in weights), default=0)
