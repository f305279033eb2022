"""States in host memory, updated without ever being on a device all at once.

An update that reads them all would have the compiler bring them all in, before the forward pass even: what was
offloaded would be on the device at the worst moment. So it is taken apart (`parts`), and each part brings one piece of
its arrays at a time, of `PIECE_BYTES` at most, after the gradients are there, updates it, and takes it back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import compute_on
from jax.extend.core import ClosedJaxpr, Var
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxshard.collectives import to_device, to_host
from jaxshard.jaxprs import shape_of
from jaxshard.parts import Part, parted, run, run_piece

PIECE_BYTES = 32 * 2**20
"""Of one array; at 55 GB/s it takes 0.6 ms, long beside what starting a transfer takes."""


@dataclass(frozen=True, kw_only=True)
class Home:
    """Where an array lies that an update reads.

    path: its name. spec: how it is split. hosted: in host memory. dim, axes: of what is here the update wants this
    device's piece alone, along `dim` over `axes`; ``()``: all of it. result: how the update gives it back; None if it
    does not.
    """

    spec: P
    path: str = ""
    hosted: bool = False
    dim: int | None = None
    axes: tuple[str, ...] = ()
    result: P | None = None

    @property
    def returns(self) -> bool:
        """Whether its new value takes its place, in host memory."""
        return self.hosted and self.result is not None and not self.axes


def streamed(
    fn: Callable[[Any, Any], Any],
    states: Any,
    others: Any,
    homes: Any,
    after: jax.Array,
    *,
    mesh: Mesh | None,
    buffers: int,
    by_host: bool = False,
) -> Any:
    """``fn(states, others)``, the new states, of which those that lay in host memory lie there again.

    homes: a `Home` for each array of ``(states, others)``. after: a value that is there when the first transfer may
    start. mesh: None for states that one device holds. buffers: how many pieces are on a device at a time. by_host:
    states in host memory stay there, and the host's processor updates them (ZeRO-Offload, arXiv 2101.06840); what is on
    the device is sent there, and back.
    """
    flat, structure = jax.tree.flatten((states, others))
    at = jax.tree.leaves(homes, is_leaf=lambda x: isinstance(x, Home))
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in flat]
    closed, wanted = jax.make_jaxpr(lambda *x: fn(*jax.tree.unflatten(structure, x)), return_shape=True)(*shapes)
    program = parted(closed, [one.hosted for one in at])
    closed, jaxpr = program.closed, program.closed.jaxpr
    values: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*closed.consts, *flat], strict=True))
    homed = dict(zip(jaxpr.invars, at, strict=True))
    run(program.shared, values)
    done: list[_Done] = []
    placed: set[int] = set()
    for part in program.parts:
        replaced = [jaxpr.invars[k] for k in part.results]
        if not any(homed[v].hosted for v in (*part.inputs, *replaced)):
            run(part.eqns, values)
            continue
        stream = _Stream.of(part, closed, homed, mesh, buffers, by_host)
        back = 1 if stream.cut.count > 1 or (done and done[-1].pieces > 1) else buffers
        waits = done[-back].results if len(done) >= back else [after]
        results = stream(values, waits)
        done.append(_Done(stream.cut.count, results))
        values.update(zip((jaxpr.outvars[k] for k in part.results), results, strict=True))
        placed.update(part.results)
    results = [values[v] if isinstance(v, Var) else jnp.asarray(v.val, shape_of(v).dtype) for v in jaxpr.outvars]
    for k, v in enumerate(jaxpr.outvars):
        if at[k].returns and k not in placed and v not in jaxpr.invars:  # a constant, or a small value
            results[k] = to_host(results[k], at[k].path)
    return jax.tree.unflatten(jax.tree.structure(wanted), results)


def zeros(shape: tuple[int, ...], dtype: Any, path: str) -> jax.Array:
    """Zeros in host memory, a piece of which is on the device at a time."""
    cut = Cut.of(shape, PIECE_BYTES // jnp.dtype(dtype).itemsize)

    def write(i, x):
        return lax.dynamic_update_slice(x, to_host(jnp.zeros(cut.piece, dtype), path), cut.start(i))

    # Where each piece is written, a compiler takes the first zeros for memory to be had, and makes none.
    begin = to_host(jnp.zeros(shape, dtype), path)
    return begin if cut.count == 1 else lax.fori_loop(0, cut.count, write, begin)


def total(x: jax.Array, fn: Callable[[jax.Array], jax.Array], after: jax.Array, path: str) -> jax.Array:
    """The sum of ``fn(piece)``, a float32 scalar, over the pieces of an array in host memory.

    after: a value that is there when the first piece may be fetched. With several pieces another order is summed in
    than on a device.
    """
    cut = Cut.of(x.shape, PIECE_BYTES // x.dtype.itemsize)
    x, _ = lax.optimization_barrier((x, after))

    def add(i, sum):
        return sum + fn(to_device(lax.dynamic_slice(x, cut.start(i), cut.piece), path))

    if cut.count == 1:
        return fn(to_device(x, path))
    return lax.fori_loop(0, cut.count, add, jnp.zeros((), jnp.float32))


def computed_by_host(fn: Callable[..., Any], results: int) -> Callable[..., Any]:
    """A function of arrays in host memory that the host's processor computes there; it gives a tuple of so many."""
    # JAX 0.12 gave the first the name, and the place, of the second.
    compute: Any = getattr(compute_on, "compute_on2", compute_on.compute_on)
    return compute(fn, compute_type="device_host", out_memory_spaces=(jax.memory.Space.Host,) * results)


@dataclass(frozen=True)
class _Done:
    """What one part has given, in how many pieces."""

    pieces: int
    results: list[jax.Array]


@dataclass(frozen=True, kw_only=True)
class Cut:
    """An array cut into pieces that are contiguous in memory: `rows` rows of a dim, at one place of the dims before."""

    shape: tuple[int, ...]
    dim: int
    rows: int

    @staticmethod
    def of(shape: tuple[int, ...], most: int) -> Cut:
        """Into the fewest pieces of at most so many elements; if only tiny ones divide it, into larger ones."""
        dim = next(d for d in range(len(shape)) if math.prod(shape[d + 1 :]) <= most)
        row = math.prod(shape[dim + 1 :])
        divisors = [rows for rows in range(1, shape[dim] + 1) if shape[dim] % rows == 0]
        fitting = max(rows for rows in divisors if rows * row <= most)
        if fitting * row < most / 16 and fitting < shape[dim]:
            fitting = min(rows for rows in divisors if rows * row >= most / 16 or rows == shape[dim])
        return Cut(shape=shape, dim=dim, rows=fitting)

    @property
    def piece(self) -> tuple[int, ...]:
        """The shape of a piece."""
        return (*(1,) * self.dim, self.rows, *self.shape[self.dim + 1 :])

    @property
    def count(self) -> int:
        """How many pieces there are."""
        return math.prod(self.shape) // math.prod(self.piece)

    def start(self, i: Any) -> list[Any]:
        """Where piece `i` begins."""
        per_dim = [size // piece for size, piece in zip(self.shape, self.piece, strict=True)]
        inner = [math.prod(per_dim[d + 1 :]) for d in range(len(per_dim))]
        return [i // after % pieces * size for pieces, after, size in zip(per_dim, inner, self.piece, strict=True)]


@dataclass(frozen=True, kw_only=True)
class _Stream:
    """How one part is updated.

    written: the state that each of its results replaces. outvars: its results in the program. cut: of
    this device's piece of each.
    """

    part: Part
    homes: Mapping[Var, Home]
    written: tuple[Var, ...]
    outvars: tuple[Any, ...]
    mesh: Mesh | None
    buffers: int
    by_host: bool
    cut: Cut

    @staticmethod
    def of(
        part: Part, closed: ClosedJaxpr, homes: Mapping[Var, Home], mesh: Mesh | None, buffers: int, by_host: bool
    ) -> _Stream:
        written = tuple(closed.jaxpr.invars[k] for k in part.results)
        like = max(written, key=lambda v: shape_of(v).size)
        shape, spec = shape_of(like).shape, homes[like].result
        local = shape if mesh is None or spec is None else NamedSharding(mesh, spec).shard_shape(shape)
        most = PIECE_BYTES // max(shape_of(v).dtype.itemsize for v in (*part.inputs, *written))
        return _Stream(
            part=part,
            homes=homes,
            written=written,
            outvars=tuple(closed.jaxpr.outvars[k] for k in part.results),
            mesh=mesh,
            buffers=buffers,
            by_host=by_host,
            cut=Cut.of(local, most) if part.elementwise and not by_host else Cut(shape=local, dim=0, rows=local[0]),
        )

    @property
    def hosted(self) -> list[Var]:
        """The inputs in host memory."""
        return [v for v in self.part.inputs if self.homes[v].hosted]

    def __call__(self, values: Mapping[Any, Any], waits: Sequence[jax.Array]) -> list[jax.Array]:
        """The results, after what is waited for."""
        hosted = list(dict.fromkeys([*self.hosted, *(v for v in self.written if self.homes[v].returns)]))
        gated, _ = lax.optimization_barrier(([values[v] for v in hosted], list(waits)))
        values = {**values, **dict(zip(hosted, gated, strict=True))}
        return self._by_pieces(values) if self.part.elementwise else self._whole(values)

    def _whole(self, values: dict[Any, Any]) -> list[jax.Array]:
        """All of it at once, over global arrays."""
        values |= {v: to_device(values[v], self.homes[v].path) for v in self.hosted}
        run(self.part.eqns, values)
        results = []
        for v, out in zip(self.written, self.outvars, strict=True):
            x, home = values[out], self.homes[v]
            if self.mesh is not None and home.result is not None:
                x = lax.with_sharding_constraint(x, NamedSharding(self.mesh, home.result))
            results.append(to_host(x, home.path) if home.returns else x)
        return results

    def _by_pieces(self, values: dict[Any, Any]) -> list[jax.Array]:
        arrays = list(dict.fromkeys([*self.part.inputs, *self.written]))
        shared = list(self.part.shared)

        def local(mine, known):
            how = self._computed_by_host if self.by_host else self._loop
            return how(dict(zip(arrays, mine, strict=True)), dict(zip(shared, known, strict=True)))

        given = [values[v] for v in arrays], [values[v] for v in shared]
        if self.mesh is None:
            return local(*given)
        specs = [self.homes[v].spec for v in arrays], [P()] * len(shared)
        results = [self.homes[v].result for v in self.written]
        return jax.shard_map(local, mesh=self.mesh, in_specs=specs, out_specs=results, check_vma=False)(*given)

    def _computed_by_host(self, mine: dict[Any, jax.Array], shared: dict[Any, jax.Array]) -> list[jax.Array]:
        """All of it at once, in host memory."""
        names, known = list(self.part.inputs), list(shared)
        begins = [self._begin(v, (0,) * len(self.cut.shape)) for v in names]

        def update(arrays, small, begins):
            values: dict[Any, Any] = dict(zip(known, small, strict=True))
            for v, x, begin in zip(names, arrays, begins, strict=True):
                values[v] = x if x.shape == self.cut.shape else lax.dynamic_slice(x, begin, self.cut.shape)
            run_piece(self.part.eqns, values, self.cut.shape)
            return tuple(values[out] for out in self.outvars)

        there = lambda x, path="": to_host(jnp.asarray(x), path)
        arrays = [mine[v] if self.homes[v].hosted else there(mine[v], self.homes[v].path) for v in names]
        given = arrays, [there(shared[v]) for v in known], jax.tree.map(there, begins)
        results = computed_by_host(update, len(self.outvars))(*given)
        return [
            x if self.homes[v].returns else to_device(x, self.homes[v].path)
            for v, x in zip(self.written, results, strict=True)
        ]

    def _begin(self, v: Var, start: Sequence[Any]) -> list[Any]:
        """Where in an input as it lies here the place `start` of this device's piece is."""
        home, begin = self.homes[v], list(start)
        if home.axes and home.dim is not None:
            begin[home.dim] += lax.axis_index(home.axes) * self.cut.shape[home.dim]
        return begin

    def _loop(self, mine: dict[Any, jax.Array], shared: dict[Any, jax.Array]) -> list[jax.Array]:
        """Piece by piece, with `buffers` of them on the device: while one is updated the next is on its way."""
        cut, count = self.cut, self.cut.count
        ahead = min(self.buffers - 1, count)
        begin = [mine[v] if not self.homes[v].axes else jnp.zeros(cut.shape, shape_of(v).dtype) for v in self.written]
        in_place = {v: k for k, v in enumerate(self.written) if not self.homes[v].axes}

        def slice_of(v: Var, i: Any, new: Sequence[jax.Array]) -> jax.Array:
            """Piece `i` of an input; one that is replaced is read where it is written."""
            begin = self._begin(v, cut.start(i))
            return lax.dynamic_slice(new[in_place[v]] if v in in_place else mine[v], begin, cut.piece)

        def fetch(i: Any, new: Sequence[jax.Array]) -> list[jax.Array]:
            return [to_device(slice_of(v, i, new), self.homes[v].path) for v in self.hosted]

        def update(i: Any, new: list[jax.Array], fetched: list[list[jax.Array]], *, more: bool):
            now, *fetched = fetched or [fetch(i, new)]
            values: dict[Any, Any] = shared | dict(zip(self.hosted, now, strict=True))
            values |= {v: slice_of(v, i, new) for v in self.part.inputs if v not in values}
            run_piece(self.part.eqns, values, cut.piece)
            results = [values[out] for out in self.outvars]
            if more:
                coming = fetch(i + ahead, new)
                # Written before the next is read, a whole array would be copied; so writing waits for reading.
                for k, v in enumerate(self.written):
                    if v in self.hosted:
                        j = self.hosted.index(v)
                        results[k], coming[j] = lax.optimization_barrier((results[k], coming[j]))
                fetched = [*fetched, coming]
            start = cut.start(i)
            placed = [
                to_host(x, self.homes[v].path) if self.homes[v].returns else x
                for v, x in zip(self.written, results, strict=True)
            ]
            return [lax.dynamic_update_slice(a, x, start) for a, x in zip(new, placed, strict=True)], fetched

        fetched = [fetch(i, begin) for i in range(ahead)]
        new, fetched = lax.fori_loop(
            0, count - ahead, lambda i, carry: update(i, *carry, more=ahead > 0), (begin, fetched)
        )
        for i in range(count - ahead, count):
            new, fetched = update(i, new, fetched, more=False)
        return new
