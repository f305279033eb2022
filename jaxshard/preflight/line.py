"""One line of a comparison: a strategy with its options, and what a compiler makes of it in a process of its own."""

from __future__ import annotations

import hashlib
import importlib.metadata
import inspect
import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import jax
from jax.stages import Lowered

import jaxshard
from jaxshard.compiler import options_for
from jaxshard.contract import Collective, ContractError
from jaxshard.dp import DataParallel
from jaxshard.explain import LeafRow
from jaxshard.mesh import axis_sizes, platform_of
from jaxshard.preflight import estimate, process, target
from jaxshard.preflight.check import check
from jaxshard.preflight.estimate import Estimate
from jaxshard.preflight.examine import examined
from jaxshard.preflight.ledger import Transferred, books, planned_link
from jaxshard.preflight.plan import gathered_by_first
from jaxshard.preflight.records import from_json, to_json
from jaxshard.preflight.target import Target
from jaxshard.preflight.timeline import Timeline, timeline
from jaxshard.step import Training
from jaxshard.strategy import STATES, Strategy, named, offload

CHANGES = {one.name for one in fields(Strategy)} - {*STATES, "min_replicas"}
OFFLOAD = ("offload", "offload_fraction")
"""Options that put states into host memory: what, and how much of it, as `jaxshard.strategy.offload` takes them."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """What is asked: a strategy by name, and options by name.

    options: those that are fields of `Strategy` (regather, prefer, reduce, gather, bucket_mb, update, buffers), and
    those of `OFFLOAD`, change the strategy; the others (accumulate, remat, ...) are given to the function that builds
    the training.
    """

    strategy: str
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return " ".join([self.strategy, *(f"{name}={_written(value)}" for name, value in self.options.items())])

    def resolve(self) -> tuple[Strategy, dict[str, Any]]:
        """(the strategy, what the building function is given). Raises ValueError for what is no strategy."""
        changes = {name: value for name, value in self.options.items() if name in CHANGES}
        others = {name: value for name, value in self.options.items() if name not in (*CHANGES, *OFFLOAD)}
        strategy = replace(named(self.strategy), **changes)
        if "offload" in self.options:
            fraction = self.options.get("offload_fraction", 1.0)
            strategy = offload(strategy, self.options["offload"], fraction=fraction)
        return strategy, others


def _written(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


@dataclass(frozen=True, kw_only=True)
class Whole:
    """A parameter that stays whole on every device. costs: bytes that splitting it would save on each."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    because: str
    costs: int


@dataclass(frozen=True, kw_only=True)
class Row:
    """What is known of a line; bytes are those of one device.

    problem: why there are no figures, ``""`` if there are. compiled: whether they are a compiler's; `dp`, which is
    several programs, is shown from its plan. held: bytes by class at the worst moment, as in `ledger.Ledger`; they add
    up to the peak. host: bytes in the host's memory by class, no part of that. link: what crosses the link to the host
    in a step. contract, sent: messages as planned, and as compiled. broken: what is sent against the contract. whole:
    leaves that stay whole. timeline, estimate: of GPUs; unestimated: why XLA has no estimate. notes: what a reader
    should know. seconds: of compiling.
    """

    line: Line
    mesh: dict[str, int] = field(default_factory=dict)
    problem: str = ""
    compiled: bool = True
    held: dict[str, int] = field(default_factory=dict)
    host: dict[str, int] = field(default_factory=dict)
    link: tuple[Transferred, ...] = ()
    contract: tuple[Collective, ...] = ()
    sent: tuple[Collective, ...] = ()
    broken: str = ""
    whole: tuple[Whole, ...] = ()
    timeline: Timeline | None = None
    estimate: Estimate | None = None
    unestimated: str = ""
    notes: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def peak(self) -> int:
        """Bytes that one device holds at the worst moment; 0 without figures."""
        return sum(self.held.values())

    @property
    def in_host(self) -> int:
        """Bytes in the host's memory for one device."""
        return sum(self.host.values())

    def crossed(self, direction: str) -> int:
        """Bytes over the link to the host in a step, ``to_device`` or ``to_host``: as compiled, else as planned."""
        return sum(
            one.planned if one.compiled is None else one.compiled for one in self.link if one.direction == direction
        )

    @property
    def messages(self) -> tuple[Collective, ...]:
        """What a step sends: as compiled, else as planned."""
        return self.sent if self.compiled else self.contract

    @property
    def wire_bytes(self) -> int:
        """Bytes that one device sends in a step."""
        return sum(one.wire_bytes for one in self.messages)


def start(
    build: Callable[..., Any] | str,
    line: Line,
    where: Target,
    *,
    replica: int | None,
    arguments: Mapping[str, Any],
    cache: Path | None,
) -> process.Call:
    """Begins to examine a line in a process of its own; `row` waits for what it finds."""
    if not isinstance(build, str):
        build = process.place_of(build)
    asked = {
        "build": build,
        "line": to_json(line),
        "where": str(where),
        "replica": replica,
        "arguments": dict(arguments),
        "cache": None if cache is None else str(cache),
    }
    environment = dict(estimate.ENVIRONMENT)
    if where.source == "local":  # its GPUs are what compiles, and several processes share them
        environment |= {"JAX_PLATFORMS": "cuda,cpu", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    return process.Call(_worker, asked, environment=environment, quiet=True)


def row(call: process.Call, line: Line) -> Row:
    """What the other process found; one that failed is a row with a problem."""
    try:
        return from_json(Row, call.result())
    except process.ProcessError as error:
        return Row(line=line, problem=str(error).splitlines()[0])


def _worker(
    build: str, line: dict[str, Any], where: str, replica: int | None, arguments: dict[str, Any], cache: str | None
) -> dict[str, Any]:
    asked = from_json(Line, line)
    folder = None if cache is None else Path(cache)
    try:
        return to_json(examine(process.load(build), asked, target.parse(where), replica, arguments, folder))
    except (ValueError, TypeError, RuntimeError, NotImplementedError) as error:
        said = " ".join(str(error).split()) or type(error).__name__
        return to_json(Row(line=asked, problem=said.encode(errors="backslashreplace").decode()))


def examine(
    build: Callable[..., Any],
    line: Line,
    where: Target,
    replica: int | None,
    arguments: Mapping[str, Any],
    cache: Path | None,
) -> Row:
    """Builds a line's training for a target, compiles it, and says all that is known of it.

    cache: a folder of rows of programs that were compiled before.
    """
    strategy, options = line.resolve()
    # Copies of the states lie on nodes of their own, so that what is gathered stays inside one.
    copies = max(replica or 1, strategy.min_replicas if where.nodes == 1 or strategy.min_replicas == 1 else where.nodes)
    mesh = where.mesh(replica=copies)
    training = build(mesh=mesh, strategy=strategy, **arguments, **options)
    if isinstance(training, DataParallel):
        return _planned(training, line)
    if not isinstance(training, Training):
        raise TypeError(
            f"the building function gave a {type(training).__name__}; it must return what parallelize gives."
        )
    lowered = training.lower()
    known = None if cache is None else cache / f"{_fingerprint(training, lowered, where)}.json"
    if known is not None and known.exists():
        with suppress(OSError, ValueError, TypeError, KeyError, AttributeError):  # a damaged one is made anew
            return replace(from_json(Row, json.loads(known.read_text())), line=line)
    found = _compiled(training, lowered, line, where)
    return found if known is None else _kept(known, found)


def _compiled(training: Training, lowered: Lowered, line: Line, where: Target) -> Row:
    with estimate.capture() as said:
        found = examined(training, lowered)
    made = books(training, found)
    try:
        check(training, found.facts.collectives)
        broken = ""
    except ContractError as error:
        broken = str(error)
    notes = [f"this compiler does not know {name}" for name in found.left_out]
    if found.facts.uncounted:
        notes.append(f"operations of {', '.join(found.facts.uncounted)} are in no estimate")
    if found.facts.unknown_loops:
        notes.append("a loop of unknown length counts as one run")
    on_gpu = where.device is not None
    return Row(
        line=line,
        mesh=axis_sizes(training.mesh),
        held={one.name: one.compiled or 0 for one in made.held if one.name != "peak"},
        host={one.name: one.compiled for one in made.host if one.compiled},
        link=made.link,
        contract=training.contract(),
        sent=found.facts.collectives,
        broken=broken,
        whole=_whole(training.explain().leaves),
        timeline=timeline(found.module, axis_sizes(training.mesh), where) if on_gpu else None,
        estimate=estimate.parse(said.text, found.module) if on_gpu else None,
        unestimated=estimate.missing(said.text, found.module) if on_gpu else "no times of CPU devices",
        notes=tuple(notes),
        seconds=found.seconds,
    )


def _planned(training: DataParallel, line: Line) -> Row:
    explained = training.explain()
    held = {name: size for name, size in explained.bytes_per_device.items() if name != "grads"}
    return Row(
        line=line,
        mesh=axis_sizes(training.mesh),
        compiled=False,
        held=held | {"gradients": explained.bytes_per_device["grads"] + gathered_by_first(explained.contract)},
        host={name: size for name, size in explained.host_bytes.items() if size},
        link=planned_link(explained.transfers),
        contract=explained.contract,
        notes=("from its plan, because it is several programs: the first device's, without activations",),
    )


def _whole(leaves: tuple[LeafRow, ...]) -> tuple[Whole, ...]:
    return tuple(
        Whole(
            path=one.leaf.path,
            shape=one.leaf.shape,
            dtype=str(one.leaf.dtype),
            because=one.leaf.whole_because,
            costs=one.whole_costs,
        )
        for one in leaves
        if one.leaf.whole_because
    )


def _fingerprint(training: Training, lowered: Lowered, where: Target) -> str:
    """What a row depends on: the program, the devices, the compiler, and the code that reads what it makes."""
    options = options_for(training.strategy, platform_of(training.mesh), training.setup.compiler_options)
    code = sorted(Path(inspect.getfile(jaxshard)).parent.rglob("*.py"))
    parts = [
        lowered.as_text(),
        repr((where, training.strategy, sorted(options.items()), jax.__version__, _compiler_version())),
        *(path.read_text() for path in code),
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _compiler_version() -> tuple[str, ...]:
    known = ("jaxlib", "jax-cuda12-pjrt", "jax-cuda13-pjrt", "nvidia-cuda-nvcc-cu12", "nvidia-cudnn-cu12")
    found = []
    for name in known:
        with suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{name} {importlib.metadata.version(name)}")
    return tuple(found)


def _kept(path: Path, found: Row) -> Row:
    """The row, which lies in the cache from now on, whole; or says why it does not."""
    half = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        half.write_text(json.dumps(to_json(found)))
        half.replace(path)
    except OSError as error:
        with suppress(OSError):
            half.unlink(missing_ok=True)
        return replace(found, notes=(*found.notes, f"not kept in the cache {path.parent}: {error.strerror}"))
    return found
