"""What a step sends over the link between a device and its host, and what lies on the host's side."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxshard.collectives import scope_name
from jaxshard.contract import names_in
from jaxshard.gradients import forward_jaxpr, slot_dtype
from jaxshard.jaxprs import shape_of, walk
from jaxshard.mesh import platform_of
from jaxshard.setup import Setup
from jaxshard.specs import Leaf, bytes_per_device, in_host_memory
from jaxshard.strategy import Placement

PINNED = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
"""The environment variable that says how much memory of the host XLA's client for GPUs may pin; 64 without it."""

Direction = Literal["to_device", "to_host"]


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """Copies of one leaf in a step, on one device. bytes: of one copy. state: params, grads or opt."""

    state: str
    leaf: str
    direction: Direction
    bytes: int
    count: int


def host_bytes(made: Setup) -> dict[str, int]:
    """Bytes in host memory that belong to one device, by class; gradients as they are between the passes."""
    program, layout = made.program, made.program.layout
    waiting = [gradient(made, leaf) for leaf in jax.tree.leaves(layout) if leaf.path in program.hosted_grads]
    return {
        "params": _held(layout, program.strategy.params, made),
        "grads": bytes_per_device(waiting, gradients(made), program.mesh),
        "opt": _held(made.where.opt, program.strategy.opt, made),
    }


def gradients(made: Setup) -> Placement:
    """How gradients are held between the backward pass and the update."""
    return Placement() if made.program.deferred else made.program.at_use


def gradient(made: Setup, leaf: Leaf) -> Leaf:
    """A leaf's gradient as it leaves its last use."""
    return replace(leaf, dtype=slot_dtype(made.program, leaf))


def check_host_memory(made: Setup) -> None:
    """Raises ValueError when XLA's client for GPUs would not pin all the memory of the host that a step needs."""
    mesh = made.program.mesh
    if platform_of(mesh) not in ("gpu", "cuda"):
        return
    here = sum(device.process_index == jax.process_index() for device in mesh.devices.flat)
    needed, limit = here * sum(host_bytes(made).values()), int(os.environ.get(PINNED, 64)) * 10**9
    if needed > limit:
        raise ValueError(
            f"{needed / 1e9:.1f} GB of this process's states belong in host memory, and XLA pins {limit / 1e9:.0f} GB "
            f"at most. Set {PINNED}={math.ceil(needed * 1.1 / 1e9)} in the environment before JAX starts, if the host "
            "has as much."
        )


def hosted_leaves(made: Setup) -> tuple[frozenset[str], frozenset[str]]:
    """The paths of parameters, and of leaves of the optimizer's state, that are in host memory."""
    return made.program.hosted_params, in_host_memory(made.where.opt, made.program.strategy.opt)


def _held(layout: Any, placement: Placement, made: Setup) -> int:
    hosted = in_host_memory(layout, placement)
    leaves = [leaf for leaf in jax.tree.leaves(layout) if leaf.path in hosted]
    return bytes_per_device(leaves, placement, made.program.mesh)


def transfers(made: Setup) -> tuple[Transfer, ...]:
    """The most that a step sends: what the loss fetches at each use, and what the update reads and writes.

    A backward pass that does not read a parameter does not fetch it again.
    """
    return tuple(_sum([*_fetched(made), *_waiting(made), *_updated(made)]))


def link_bytes(given: Iterable[Transfer]) -> dict[Direction, int]:
    """Bytes by direction."""
    found: dict[Direction, int] = {"to_device": 0, "to_host": 0}
    for one in given:
        found[one.direction] += one.bytes * one.count
    return found


def _sum(given: Iterable[Transfer]) -> Iterable[Transfer]:
    counts: Counter[tuple[Any, ...]] = Counter()
    for one in given:
        counts[one.state, one.leaf, one.direction, one.bytes] += one.count
    for (state, leaf, direction, bytes), count in counts.items():
        yield Transfer(state=state, leaf=leaf, direction=direction, bytes=bytes, count=count)


def _fetched(made: Setup) -> Iterable[Transfer]:
    """Parameters, by the loss."""
    program = made.program
    hosted = program.hosted_params
    if not hosted:
        return
    if program.strategy.gather == "step":
        for leaf in jax.tree.leaves(program.layout):
            if leaf.path in hosted:
                size = bytes_per_device([leaf], program.strategy.params, program.mesh)
                yield Transfer(state="params", leaf=leaf.path, direction="to_device", bytes=size, count=1)
        return
    paths = {scope_name(leaf.path): leaf.path for leaf in jax.tree.leaves(program.layout)}
    for site in walk(forward_jaxpr(program, made.state_shapes.params, made.batch, made.extra)):
        named = names_in(site.scope)
        if site.eqn.primitive.name != "device_put" or not named or named[-1][0] != "fetch":
            continue
        count = site.times * program.accumulate * (1 + max(site.remats, int(program.choices.regather)))
        x = shape_of(site.eqn.outvars[0])
        size = math.prod(x.shape) * jnp.dtype(x.dtype).itemsize
        yield Transfer(state="params", leaf=paths[named[-1][1]], direction="to_device", bytes=size, count=count)


def _waiting(made: Setup) -> Iterable[Transfer]:
    """Gradients: out after each backward pass, in and out to be added up or reduced, in for the norm."""
    program, accumulate = made.program, made.program.accumulate
    for leaf in jax.tree.leaves(program.layout):
        if leaf.path not in program.hosted_grads:
            continue
        copy = partial(Transfer, state="grads", leaf=leaf.path)
        size = bytes_per_device([gradient(made, leaf)], gradients(made), program.mesh)
        last = bytes_per_device([gradient(made, leaf)], program.strategy.opt, program.mesh)
        yield copy(direction="to_host", bytes=size, count=accumulate)
        if accumulate > 1:  # beginning with zeros
            yield copy(direction="to_host", bytes=size, count=accumulate + 1)
            yield copy(direction="to_device", bytes=size, count=2 * accumulate)
        if last != size or program.deferred:
            yield copy(direction="to_device", bytes=size, count=1)
            yield copy(direction="to_host", bytes=last, count=1)
        yield copy(direction="to_device", bytes=last, count=1)


def _updated(made: Setup) -> Iterable[Transfer]:
    """What the update reads where it does not lie, and gives back.

    By the host or not, states in host memory pass the link both ways: what the host computes XLA gives memory of its
    own, and has the device copy it to where the state lies.
    """
    program, strategy = made.program, made.program.strategy
    params, opt = hosted_leaves(made)
    owners = {leaf.owner for leaf in jax.tree.leaves(made.where.opt) if leaf.path in opt}
    by_host = strategy.update == "host"

    def size(leaf: Leaf, placement: Placement = strategy.opt) -> int:
        return bytes_per_device([leaf], placement, program.mesh)

    for leaf in jax.tree.leaves(made.where.opt):
        if leaf.path in opt:
            yield Transfer(state="opt", leaf=leaf.path, direction="to_device", bytes=size(leaf), count=1)
            yield Transfer(state="opt", leaf=leaf.path, direction="to_host", bytes=size(leaf), count=1)
    for leaf in jax.tree.leaves(program.layout):
        waits, hosted = leaf.path in program.hosted_grads, leaf.path in params
        if not leaf.trainable or not (hosted or waits or leaf.path in owners):
            continue
        if waits != by_host:
            direction: Direction = "to_host" if by_host else "to_device"
            grad = gradient(made, leaf)
            yield Transfer(state="grads", leaf=leaf.path, direction=direction, bytes=size(grad), count=1)
        if hosted or by_host:
            back = size(leaf, strategy.params) if hosted else size(leaf)
            yield Transfer(state="params", leaf=leaf.path, direction="to_device", bytes=size(leaf), count=1)
            yield Transfer(state="params", leaf=leaf.path, direction="to_host", bytes=back, count=1)
