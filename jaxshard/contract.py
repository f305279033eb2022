"""What a step sends: counted in its jaxpr, and held to what its strategy may send.

The jaxpr, not the compiled text, is the primary count: it has the true dtypes and the lengths of the loops.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn

from jaxshard.collectives import SCOPE, Route, scope_name
from jaxshard.gradients import MICROBATCHES, forward_jaxpr, mean_dtype
from jaxshard.jaxprs import COLLECTIVES, Site, axes_of, shape_of, walk
from jaxshard.mesh import size_over
from jaxshard.setup import Setup
from jaxshard.specs import path_of, route, split_axes
from jaxshard.strategy import BATCH_AXES

_NAMED = re.compile(rf"{re.escape(SCOPE)}\.(use|gather|reduce|total|fetch|put):([\w.+-]*)")
# How often a buffer of B bytes passes a device's link among n devices, by the ring algorithms; dp's transfers are all
# to or from the first device, and its link is the one that counts.
_ON_THE_WIRE = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "permute": lambda n: 1,
    "broadcast": lambda n: n - 1,
    "gather": lambda n: n - 1,
}


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One kind of message, as often as a step sends it.

    kind: all_reduce, all_gather, reduce_scatter, all_to_all or permute; broadcast and gather for `dp`.
    purpose: gather, reduce or total (the library's), or loss (the loss function's own). leaf: whose.
    axes, devices: mesh axes and the product of their sizes.
    dtype, bytes: of the whole buffer (gathered, or before it is scattered). count: per step.
    loops: what it is inside of, outermost first: ``microbatches`` or ``scan``; in a compiled program also ``while``, a
    loop whose length is not known. asynchronous: whether a compiled program lets other work run meanwhile; None for
    what is not compiled.
    """

    kind: str
    purpose: str
    leaf: str
    axes: tuple[str, ...]
    devices: int
    dtype: str
    bytes: int
    count: int
    loops: tuple[str, ...] = ()
    asynchronous: bool | None = None

    @property
    def wire_bytes(self) -> int:
        """Bytes per step on the link of each device; of the first device for the transfers of `dp`."""
        return round(self.bytes * _ON_THE_WIRE[self.kind](self.devices)) * self.count

    def __str__(self) -> str:
        where = f" inside {' > '.join(self.loops)}" if self.loops else ""
        return (
            f"{self.count} x {self.kind} {self.dtype} {self.bytes:,} B over {' x '.join(self.axes)}{where} "
            f"({self.purpose} {self.leaf})"
        )


def count_collectives(jaxpr: Jaxpr, sizes: Mapping[str, int]) -> tuple[Collective, ...]:
    """Every collective of a program, equal ones together. Axes of size one send nothing and are left out."""
    counts: Counter[Collective] = Counter()
    for site in walk(jaxpr):
        kind = COLLECTIVES.get(site.eqn.primitive.name)
        axes = tuple(axis for axis in axes_of(site.eqn) if sizes.get(axis, 1) > 1)
        if kind is None or not axes:
            continue
        purpose, leaf = _name(site, "loss", "")
        for var, bytes in _buffers(site.eqn, kind):
            one = Collective(
                kind=kind,
                purpose=purpose,
                leaf=leaf,
                axes=axes,
                devices=math.prod(sizes[axis] for axis in axes),
                dtype=var.dtype.name,
                bytes=bytes,
                count=0,
                loops=_loops(site),
            )
            counts[one] += site.times
    return tuple(replace(one, count=count) for one, count in counts.items())


def _name(site: Site, purpose: str, leaf: str) -> tuple[str, str]:
    found = names_in(site.scope)
    return found[-1] if found else (purpose, leaf)


def names_in(scope: str) -> list[tuple[str, str]]:
    """(purpose, leaf) of every scope of the library in a name stack, outermost first."""
    return _NAMED.findall(scope)


def _loops(site: Site) -> tuple[str, ...]:
    return tuple(map(loop_name, site.loops))


def loop_name(scope: str) -> str:
    """What a loop of this name stack is: ``microbatches`` or ``scan``."""
    return "microbatches" if MICROBATCHES in scope.rsplit("/", 1)[-1] else "scan"


def _buffers(eqn: JaxprEqn, kind: str) -> list[tuple[Any, int]]:
    variables = eqn.outvars if kind == "all_gather" else eqn.invars
    return [(x, x.size * x.dtype.itemsize) for x in map(shape_of, variables)]


def expected_collectives(made: Setup) -> tuple[Collective, ...]:
    """The most that a step may send, from the placements of its strategy and the uses of each leaf in the loss.

    Counts of gathers are upper bounds (a backward pass that does not read a weight does not gather it again), and so
    are those of reductions (a use that nothing is differentiated through has none).
    """
    program = made.program
    strategy, sizes = program.strategy, program.sizes
    found: Counter[Collective] = Counter()

    def may(kind: str, purpose: str, leaf: str, axes: Iterable[str], dtype: Any, size: int, count: int, loops=()):
        axes = tuple(axis for axis in axes if sizes[axis] > 1)
        if axes:
            one = Collective(
                kind=kind,
                purpose=purpose,
                leaf=leaf,
                axes=axes,
                devices=math.prod(sizes[axis] for axis in axes),
                dtype=jnp.dtype(dtype).name,
                bytes=size * jnp.dtype(dtype).itemsize,
                count=0,
                loops=loops,
            )
            found[one] += count

    def may_reduce(name: str, way: Route, dim: int | None, size: int, dtype: Any, count: int, loops=()):
        size *= 1 + jnp.issubdtype(dtype, jnp.complexfloating)  # its two parts
        dtype = program.precision.reduce if jnp.issubdtype(dtype, jnp.inexact) else dtype
        scatter = way.scatter if dim is not None else ()
        may("reduce_scatter", "reduce", name, scatter, dtype, size, count, loops)
        rest = tuple(axis for axis in sizes if axis in BATCH_AXES and axis not in scatter)
        may("all_reduce", "reduce", name, rest, dtype, size // way.pieces(scatter), count, loops)

    by_name = {scope_name(leaf.path): leaf for leaf in jax.tree.leaves(program.layout)}
    inner = ("microbatches",) if program.accumulate > 1 else ()
    for site in walk(forward_jaxpr(program, made.params, made.batch, made.extra)):
        purpose, name = _name(site, "", "")
        if not name or not site.eqn.outvars:
            continue
        leaf, out = by_name[name.split("+")[0]], shape_of(site.eqn.outvars[0])
        count, loops = site.times * program.accumulate, (*inner, *_loops(site))
        if site.eqn.primitive.name in COLLECTIVES and purpose == "gather" and strategy.gather == "use":
            count *= 1 + max(site.remats, int(program.choices.regather))
            may("all_gather", "gather", name, strategy.params.axes, out.dtype, out.size, count, loops)
        elif site.eqn.primitive.name == "custom_vjp_call" and purpose == "use" and not program.deferred:
            may_reduce(name, program.route(leaf), leaf.dim, out.size, out.dtype, count, loops)
    held, updated = strategy.params.axes, strategy.opt.axes
    for leaf in jax.tree.leaves(program.layout):
        name, size = scope_name(leaf.path), math.prod(leaf.shape)
        if leaf.dim is not None and strategy.gather == "step":
            may("all_gather", "gather", name, held, program.compute_dtype(leaf), size, 1)
        if leaf.trainable and program.deferred:
            last = route(leaf, strategy, program.mesh, program.precision, to=strategy.opt)
            may_reduce(name, last, leaf.dim, size, leaf.dtype, 1)
        if leaf.trainable and leaf.dim is not None:
            piece = size // size_over(program.mesh, held)
            may("all_gather", "gather", name, updated[len(held) :], leaf.dtype, piece, 1)
    named = jax.tree_util.tree_leaves_with_path(made.extra)
    averaged = [one for one, differs in zip(named, program.loss.extra_differs, strict=True) if differs]
    sums = len(jax.tree.leaves(program.loss.result[0]))
    may("all_reduce", "total", "items", BATCH_AXES, "float32", 1, sums)
    per_microbatch = int(program.precision.scaled) + bool(averaged)
    may("all_reduce", "total", "items", BATCH_AXES, "float32", 1, per_microbatch * program.accumulate, inner)
    may("all_reduce", "total", "norm", split_axes(strategy), "float32", 1, 1)
    for path, x in averaged:
        name = scope_name(f"extra/{path_of(path)}")
        may("all_reduce", "total", name, BATCH_AXES, mean_dtype(x.dtype), x.size, program.accumulate, inner)
    return tuple(replace(one, count=count) for one, count in found.items() if count)


class ContractError(AssertionError):
    """A program sends what its strategy does not."""


def hold(expected: Iterable[Collective], counted: Iterable[Collective]) -> None:
    """Holds what a program sends to what it may send; the loss function's own collectives are its own business.

    A gather may move out of a loop in which its leaf does not change: JAX does that, and less is sent.

    Raises ContractError that lists each collective that is not in the contract, or is sent too often.
    """
    left = Counter({replace(one, count=0): one.count for one in expected})
    broken = []
    for one in sorted(counted, key=lambda one: -len(one.loops)):
        if one.purpose == "loss":
            continue
        place, missing = replace(one, count=0), one.count
        places = [place, *(other for other in left if _moved_out(place, other))]
        for found in places:
            paid = min(missing, left[found])
            left[found] -= paid
            missing -= paid
        if missing:
            covered = one.count - missing
            broken.append(f"{one}: " + (f"at most {covered} in the contract" if covered else "not in the contract"))
    if broken:
        raise ContractError("the step sends what its strategy does not:\n  " + "\n  ".join(broken))


def _moved_out(one: Collective, other: Collective) -> bool:
    """Whether `one` is the gather `other`, outside of some of its loops."""
    inner = iter(other.loops)
    fewer = len(one.loops) < len(other.loops) and all(loop in inner for loop in one.loops)
    return one.kind == "all_gather" and fewer and replace(one, loops=other.loops) == other
