"""Where states in host memory are updated: on the device, which brings them piece by piece, or by the host itself.

Both send something over the link and one of the two has a slow processor, so it is a matter of bytes and operations.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxshard.host_memory import PIECE_BYTES
from jaxshard.jaxprs import shape_of
from jaxshard.parts import Part, parted
from jaxshard.program import Program
from jaxshard.specs import Leaf, bytes_per_device, in_host_memory
from jaxshard.state import StateLayout
from jaxshard.strategy import HOST, Placement
from jaxshard.update import apply_optimizer

LINK = 55e9
"""Bytes/s one way over PCIe 5.0 x16, as measured between an H100 and its host; 63e9 is its peak."""
HOST_MEMORY, HOST_FLOPS = 77e9, 0.9e12
"""Of one GPU's share of a DGX H100's host: an eighth of two Xeon 8480C with eight channels of DDR5-4800 each (614
GB/s), and of their 112 cores at 2.0 GHz with two 512-bit fused multiply-adds (NVIDIA's user guide, Intel ARK)."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What an update takes of one device and its host.

    to_device, to_host: bytes over the link. memory, flops: bytes and operations of the host's processor.
    """

    to_device: int
    to_host: int
    memory: int = 0
    flops: int = 0

    @property
    def seconds(self) -> float:
        """The link carries both directions at once; the host computes when it has everything."""
        return max(self.to_device, self.to_host) / LINK + max(self.memory / HOST_MEMORY, self.flops / HOST_FLOPS)


@dataclass(frozen=True, kw_only=True)
class UpdatePlace:
    """by_host: whether the host updates. because: what that costs, beside the other choice, in a sentence."""

    by_host: bool
    because: str


def update_place(program: Program, optimizer: optax.GradientTransformation, where: StateLayout) -> UpdatePlace | None:
    """What a strategy's `update` comes to; None if no state is in host memory.

    Raises ValueError for ``update="host"`` with an optimizer that is not elementwise there: only the devices hold all
    of an array between them.
    """
    strategy = program.strategy
    if HOST not in (strategy.params.memory, strategy.opt.memory):
        return None
    parts = _hosted_parts(program, optimizer, where)
    tangled = [part for part in parts if not part.elementwise]
    if tangled and strategy.update == "host":
        raise ValueError(
            f"update='host': {len(tangled)} of {len(parts)} independent parts of this optimizer's update are not "
            "elementwise, and the host of one device has no more than its piece of an array. Use update='device'."
        )
    device, host = _costs(program, where, parts)
    streams = (
        f"on the device, in pieces of at most {PIECE_BYTES >> 20} MiB of an array, {strategy.buffers} at a time: "
        f"{device.to_device:,} B to the device and {device.to_host:,} B to the host, {device.seconds * 1e3:.3g} ms"
    )
    computes = (
        f"by the host: {host.to_device:,} B and {host.to_host:,} B over the link, {host.memory:,} B of its memory and "
        f"{host.flops:,} operations, {host.seconds * 1e3:.3g} ms"
    )
    if tangled:
        said = (
            f"updated {streams}; {len(tangled)} of {len(parts)} parts, which are not elementwise, whole arrays at once"
        )
        return UpdatePlace(by_host=False, because=said)
    by_host = strategy.update == "host" or (strategy.update == "auto" and host.seconds < device.seconds)
    chosen, other = (computes, streams) if by_host else (streams, computes)
    return UpdatePlace(by_host=by_host, because=f"updated {chosen} (update={strategy.update!r}); {other}")


def _hosted_parts(program: Program, optimizer: optax.GradientTransformation, where: StateLayout) -> list[Part]:
    """The independent parts of an update that read or write host memory."""
    strategy = program.strategy
    params = program.learning(where.shapes.params)
    grads = program.learning(program.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, _dtype(program, leaf))))
    scalar = jax.ShapeDtypeStruct((), jnp.float32)
    traced = jax.make_jaxpr(lambda p, o, g, loss, norm: apply_optimizer(optimizer, p, o, g, loss, norm, None))(
        params, where.shapes.opt, grads, scalar, scalar
    )
    hosted_params, hosted_opt = program.hosted_params, in_host_memory(where.opt, strategy.opt)
    hosted = [leaf.path in hosted_params for leaf in jax.tree.leaves(program.learning(program.layout))]
    hosted += [leaf.path in hosted_opt for leaf in jax.tree.leaves(where.opt)]
    inputs = [*hosted, *(False for _ in traced.jaxpr.invars[len(hosted) :])]
    apart = parted(traced, inputs)
    found = {v for v, host in zip(apart.closed.jaxpr.invars, inputs, strict=True) if host}
    return [part for part in apart.parts if found.intersection(part.inputs)]


def _dtype(program: Program, leaf: Leaf) -> Any:
    return program.precision.accumulate if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf.dtype


def _costs(program: Program, where: StateLayout, parts: list[Part]) -> tuple[Cost, Cost]:
    """(of an update on the device, of one by the host)."""
    strategy, mesh = program.strategy, program.mesh
    hosted_params, hosted_opt = program.hosted_params, in_host_memory(where.opt, strategy.opt)

    def size(leaves: Any, placement: Placement = strategy.opt) -> int:
        return bytes_per_device(leaves, placement, mesh)

    learning = [leaf for leaf in jax.tree.leaves(program.layout) if leaf.trainable]
    opt = [leaf for leaf in jax.tree.leaves(where.opt) if leaf.path in hosted_opt]
    owners = {leaf.owner for leaf in opt} | {leaf.path for leaf in learning if leaf.path in hosted_params}
    touched = [leaf for leaf in learning if leaf.path in owners]
    params = [leaf for leaf in touched if leaf.path in hosted_params]
    grads = size([replace(leaf, dtype=_dtype(program, leaf)) for leaf in touched])
    back = size(params, strategy.params)
    device = Cost(to_device=size(opt) + size(params), to_host=size(opt) + back)
    rest = size(touched) - size(params)  # parameters that the host does not have
    # XLA gives what the host computes memory of its own, and has the device copy it to where the state lies.
    copied = size(opt) + size(params)
    host = Cost(
        to_device=rest + copied,
        to_host=grads + rest + copied,
        memory=2 * size(opt) + 2 * size(touched) + grads,
        flops=sum(_operations(part) for part in parts) // max(1, program.pieces if strategy.opt.axes else 1),
    )
    return device, host


def _operations(part: Part) -> int:
    return sum(math.prod(shape_of(v).shape) for eqn in part.eqns for v in eqn.outvars)
