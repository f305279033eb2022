"""What a step holds and sends, planned beside compiled (and beside measured): class by class, with the rest named."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxshard.contract import Collective
from jaxshard.dp import DataParallel
from jaxshard.explain import Explanation, table
from jaxshard.link import Transfer, link_bytes
from jaxshard.mesh import platform_of, size_over
from jaxshard.preflight.examine import Examined, examined
from jaxshard.preflight.peak import Buffer
from jaxshard.specs import Leaf
from jaxshard.state import TrainState
from jaxshard.step import Training
from jaxshard.strategy import HOST, name_of

STATES = ("params", "opt", "extra")
DIRECTIONS = ("to_device", "to_host")
RESIDUAL = ("gathered weights", "gradients", "logits", "activations", "temporaries", "gaps")
"""What temporary memory holds at its worst moment, by class; see `classes`."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """Bytes of one class on one device; None where a column does not know it."""

    name: str
    planned: int | None = None
    compiled: int | None = None
    measured: int | None = None


@dataclass(frozen=True, kw_only=True)
class Sent:
    """Bytes of whole buffers in a step, of one kind of message."""

    kind: str
    dtype: str
    axes: tuple[str, ...]
    planned: int
    compiled: int


@dataclass(frozen=True, kw_only=True)
class Transferred:
    """Bytes that cross the link between a device and its host in a step.

    direction: ``to_device`` or ``to_host``. compiled: None for CPU devices, which have no such link.
    """

    direction: str
    planned: int
    compiled: int | None = None


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """The books of one step; ``str()`` prints them.

    held: what is there between steps (params, opt, extra, the rest of the state), the batch, and at the worst moment of
    temporary memory what `RESIDUAL` names. sent: every kind of message. largest: the largest temporary buffers.
    host: what is in the host's memory for this device, which is no part of `held` and its peak: states between steps,
    and ``temporaries``. link: both directions, if there is anything in host memory.
    """

    strategy: str
    held: tuple[Line, ...]
    sent: tuple[Sent, ...]
    largest: tuple[Buffer, ...]
    host: tuple[Line, ...] = ()
    link: tuple[Transferred, ...] = ()

    def __getitem__(self, name: str) -> Line:
        return next(line for line in self.held if line.name == name)

    def __str__(self) -> str:
        measured = any(line.measured is not None for line in self.held)
        header = ("B/device", "planned", "compiled", *(["measured"] if measured else []))

        def rows(lines: Sequence[Line]) -> list[tuple[str, ...]]:
            figures = ((one.planned, one.compiled, *([one.measured] if measured else [])) for one in lines)
            return [
                (one.name, *("-" if size is None else f"{size:,}" for size in sizes))
                for one, sizes in zip(lines, figures, strict=True)
            ]

        link = [
            (one.direction, f"{one.planned:,}", "-" if one.compiled is None else f"{one.compiled:,}")
            for one in self.link
        ]
        in_host = [
            "in the host's memory, for each device:\n" + table(header, rows(self.host)),
            "over the link to the host in a step, bytes:\n" + table(("", "planned", "compiled"), link),
        ]
        messages = [
            (f"{one.kind} {one.dtype} over {' x '.join(one.axes)}", f"{one.planned:,}", f"{one.compiled:,}")
            for one in self.sent
        ]
        buffers = [
            (f"{one.bytes:,}", f"{one.array.dtype}{list(one.array.dims)}", _short(one.scope)) for one in self.largest
        ]
        return "\n\n".join(
            [
                f"{self.strategy}, held:\n" + table(header, rows(self.held)),
                *(in_host if self.host else []),
                "sent in a step, bytes of whole buffers:\n" + table(("", "planned", "compiled"), messages),
                "the largest temporary buffers at the worst moment:\n" + table(("B", "array", "made by"), buffers),
            ]
        )


def ledger(training: Training | DataParallel, state: TrainState | None = None) -> Ledger:
    """Plans a step, compiles it for the devices of its mesh, and sets the figures side by side.

    state: one that lives on devices, so that what it takes of the first is measured too, with the peak where the device
    counts it (GPUs do; run a step first).

    Raises TypeError for `dp`, which is several programs: `explain` and `plan` show what it holds and sends.
    """
    if isinstance(training, DataParallel):
        raise TypeError("dp is several programs, not one; `explain` and `plan` show what it holds and sends.")
    return books(training, examined(training), state)


def books(training: Training, found: Examined, state: TrainState | None = None) -> Ledger:
    """The ledger of a step that has been examined."""
    explained = training.explain()
    planned = explained.bytes_per_device
    given = _given(found.arguments)
    measured = {} if state is None else _measured(state, in_host=False)
    lines = [
        Line(name=name, planned=planned[name], compiled=given.pop(name, 0), measured=measured.get(name))
        for name in STATES
    ]
    lines += [Line(name=name, compiled=bytes, measured=measured.get(name)) for name, bytes in given.items()]
    temps = classes(training, found)
    gradients = planned["grads"]
    lines += [
        Line(name=name, planned=gradients if name == "gradients" else None, compiled=temps[name]) for name in RESIDUAL
    ]
    results = found.facts.memory.outputs - found.facts.memory.aliased
    lines.append(Line(name="metrics", compiled=results))
    lines.append(Line(name="peak", compiled=found.peak_bytes, measured=measured.get("peak")))
    host = _host(explained, found, {} if state is None else _measured(state, in_host=True))
    return Ledger(
        strategy=name_of(training.strategy),
        held=tuple(lines),
        sent=sent((*training.contract(), *explained.update), found.facts.collectives),
        largest=found.peak.buffers[:8],
        host=host,
        link=_link(explained, found, there=platform_of(training.mesh) != "cpu") if host else (),
    )


def _host(explained: Explanation, found: Examined, measured: Mapping[str, int]) -> tuple[Line, ...]:
    """What is in the host's memory, class by class, without those of which there is nothing."""
    planned, given = Counter(explained.host_bytes), _given(found.host_arguments)
    memory = found.facts.host_memory
    lines = [
        Line(name=name, planned=planned[name], compiled=given[name], measured=measured.get(name)) for name in STATES
    ]
    lines.append(Line(name="gradients", planned=planned["grads"]))
    lines.append(Line(name="temporaries", compiled=memory.peak - memory.arguments))
    return tuple(one for one in lines if one.planned or one.compiled or one.measured)


def planned_link(planned: Iterable[Transfer]) -> tuple[Transferred, ...]:
    """What a step is planned to send over the link to the host, in both directions; () if that is nothing."""
    sizes = link_bytes(planned)
    return (
        tuple(Transferred(direction=name, planned=size) for name, size in sizes.items()) if any(sizes.values()) else ()
    )


def _link(explained: Explanation, found: Examined, *, there: bool) -> tuple[Transferred, ...]:
    """The same, planned beside compiled. there: whether the compiled program has such a link."""
    planned = link_bytes(explained.transfers)
    compiled = {"to_device": found.facts.to_device, "to_host": found.facts.to_host}
    return tuple(
        Transferred(direction=name, planned=size, compiled=compiled[name] if there else None)
        for name, size in planned.items()
    )


def _given(arguments: dict[str, int]) -> Counter[str]:
    """Bytes of what a step is given, by class."""
    totals: Counter[str] = Counter()
    for path, bytes in arguments.items():
        root, _, field = re.split(r"[\[(]", path)[0].partition(".")
        totals[field.split(".")[0] if field.split(".")[0] in STATES else f"{root}'s rest" if field else root] += bytes
    return totals


def _measured(state: TrainState, *, in_host: bool) -> dict[str, int]:
    """Bytes that a state takes of the first device (or of its host's memory), by class, and the most that the device
    ever held, if it says."""
    first = min((d for x in jax.tree.leaves(state) for d in x.devices()), key=lambda device: device.id)

    def here(tree: Any) -> int:
        arrays = [x for x in jax.tree.leaves(tree) if (x.sharding.memory_kind == HOST) == in_host]
        shards = [shard for x in arrays for shard in _data(x).addressable_shards]
        return sum(shard.data.nbytes for shard in shards if shard.device == first)

    found = {name: here(getattr(state, name)) for name in STATES}
    if in_host:
        return found
    found["state's rest"] = here((state.step, state.key, state.scale))
    stats = first.memory_stats() or {}
    return found | ({"peak": stats["peak_bytes_in_use"]} if "peak_bytes_in_use" in stats else {})


def _data(x: jax.Array) -> jax.Array:
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x


def classes(training: Training, found: Examined) -> dict[str, int]:
    """Bytes of temporary memory at its worst moment, by the names of `RESIDUAL`.

    By the scope in which a buffer is made, and its shape: *gathered weights*, what a gather made; *gradients*, of a
    parameter's shape (or its shard's, or one layer's) from the backward pass; *logits*, floats with the wider dim of a
    matrix, if no more than two leaves have it (a vocabulary); *activations*, values of the forward pass, saved or
    recomputed; *temporaries*, all else: gradients of activations, workspaces, the update; *gaps*, room in which no
    value lies.
    """
    program = training.setup.program
    leaves = [leaf for leaf in jax.tree.leaves(program.layout) if leaf.shape]
    shapes = {shape for leaf in leaves for shape in _shapes(leaf, size_over(program.mesh, program.strategy.opt.axes))}
    widths = _logit_widths(leaves)
    totals: dict[str, int] = dict.fromkeys(RESIDUAL, 0)
    for one in found.peak.buffers:
        totals[_class(one, shapes, widths)] += one.bytes
    return totals | {"gaps": found.peak.gaps}


def _class(one: Buffer, shapes: set[tuple[int, ...]], widths: set[int]) -> str:
    dims = tuple(sorted(size for size in one.array.dims if size > 1))
    is_float = "float" in one.array.dtype
    backward = "transpose(" in one.scope and "rematted_computation" not in one.scope
    if one.array.dtype == "int8" and len(one.array.dims) == 1:  # a library's workspace
        return "temporaries"
    if "jaxshard.gather:" in one.scope and "jaxshard.reduce:" not in one.scope:
        return "gathered weights"
    if "jaxshard.reduce:" in one.scope or (is_float and backward and dims in shapes):
        return "gradients"
    if is_float and len(dims) > 1 and widths & set(dims) and dims not in shapes:
        return "logits"
    if "jvp(" in one.scope and not backward:
        return "activations"
    return "temporaries"


def _shapes(leaf: Leaf, pieces: int) -> set[tuple[int, ...]]:
    """The shapes that a leaf's gradient may have, dims of one left out, in any order: whole, one layer's, a shard."""
    shapes = [leaf.shape]
    if leaf.dim is not None:
        shapes.append(tuple(size // (pieces if dim == leaf.dim else 1) for dim, size in enumerate(leaf.shape)))
    shapes += [shape[1:] for shape in shapes]
    return {tuple(sorted(size for size in shape if size > 1)) for shape in shapes} - {()}


def _logit_widths(leaves: Iterable[Leaf]) -> set[int]:
    matrices = [leaf.shape for leaf in leaves if len(leaf.shape) == 2]
    having = Counter(size for leaf in leaves for size in set(leaf.shape))
    return {size for shape in matrices for size in shape if size == max(shape) > min(shape) and having[size] <= 2}


def sent(planned: Iterable[Collective], compiled: Iterable[Collective]) -> tuple[Sent, ...]:
    """Messages by kind, dtype and axes, planned beside compiled; not by loop, because a compiler may peel one."""
    before, after = _totals(planned), _totals(compiled)
    return tuple(
        Sent(kind=key[0], dtype=key[1], axes=key[2], planned=before[key], compiled=after[key])
        for key in sorted({*before, *after})
    )


def _totals(collectives: Iterable[Collective]) -> Counter[tuple[str, str, tuple[str, ...]]]:
    totals: Counter[tuple[str, str, tuple[str, ...]]] = Counter()
    for one in collectives:
        totals[one.kind, one.dtype, one.axes] += one.bytes * one.count
    return totals


def _short(scope: str) -> str:
    """A name stack without what every one of them has."""
    return re.sub(r"^jit\([^/]*\)/(shard_map/)?", "", scope)[:100]
