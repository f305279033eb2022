"""`jaxshard compare CONFIG --target h100:64`: every strategy, compiled for devices that need not be there."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from jaxshard.cli.options import apart, override
from jaxshard.preflight import compare as comparison
from jaxshard.preflight import target as targets
from jaxshard.preflight.device import DeviceError
from jaxshard.preflight.line import Line, Row
from jaxshard.preflight.records import to_json
from jaxshard.preflight.show import show
from jaxshard.train import build
from jaxshard.train.config import ConfigError, dotted_keys, load


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """Compiles a configuration (CONFIG.toml, whose keys may follow as --KEY VALUE), or the training that a function of
    one's own makes (SCRIPT.py:FUNCTION, called with mesh= and strategy=), under every strategy with every combination
    of the options given."""

    target: str = ""
    """The devices: h100:64, h200:2x8, FILE.toml:8, cpu:8 or local."""
    strategies: tuple[str, ...] = comparison.USUAL
    """Strategies by name."""
    regather: tuple[Literal["true", "false"], ...] = ()
    """Whether the backward pass gathers split parameters again."""
    prefer: tuple[Literal["speed", "memory"], ...] = ()
    """Whether gathers may start early or are tied to their use."""
    offload: tuple[str, ...] = ()
    """What lies in host memory: none, all, or names out of params, grads and opt joined by +, such as opt+params."""
    offload_fraction: tuple[float, ...] = ()
    """How much of it, 0 to 1 by bytes, the largest leaves first."""
    update: tuple[Literal["auto", "device", "host"], ...] = ()
    """Where what lies in host memory is updated."""
    accumulate: tuple[int, ...] = ()
    """Microbatches in a step."""
    remat: tuple[str, ...] = ()
    """What the backward pass recomputes."""
    replica: int | None = None
    """Copies of the states, for every strategy; none: one, and for hsdp one for each node."""
    workers: int = 2
    """How many compile at a time."""
    cache: bool = True
    """Whether programs that were compiled before are taken from the cache, and new ones kept there."""
    json: bool = False
    """Print everything that is known as JSON, in place of the tables."""
    html: str | None = None
    """Write a report with plots to this file."""


WITHOUT_CUDNN = (
    "attention: in blocks, where attention = auto, because cuDNN is not here; with it a GPU takes less time and memory "
    "traffic. pip install 'jax[cuda12]' brings it, and needs no GPU."
)
CHOICES = ("regather", "prefer", "offload", "offload_fraction", "update", "accumulate", "remat")


def compare(args: list[str]) -> int:
    """Runs the command. Raises ConfigError for a mistake in what was asked."""
    place = args[0] if args and not args[0].startswith("-") else None
    changes, rest = apart(args[1:] if place else args, lambda name: "." in name)
    names = [*(one.name for one in fields(CompareOptions)), "no_cache"]
    options = override(CompareOptions(), rest, "jaxshard compare CONFIG", names, flags=True)
    if options is None:
        return 0
    if place is None:
        raise ConfigError("compare needs a TOML file, such as configs/llama3-8b.toml, or SCRIPT.py:FUNCTION.")
    if not options.target:
        raise ConfigError("compare needs --target: the devices to compile for, such as h100:64 or cpu:8.")
    if options.workers < 1:
        raise ConfigError(f"--workers {options.workers}: how many compile at a time, 1 or more.")
    if options.replica is not None and options.replica < 1:
        raise ConfigError(f"--replica {options.replica}: copies of the states, 1 or more.")
    if not options.strategies:
        raise ConfigError(f"--strategies: name at least one, such as {' '.join(comparison.USUAL)}.")
    if options.offload_fraction and not options.offload:
        raise ConfigError("--offload-fraction is how much of what --offload names; add --offload opt, or the like.")
    write = _report(options.html)
    function, arguments = _source(place, changes)
    try:
        target = targets.parse(options.target)
        lines = comparison.asked(options.strategies, _choices(options))
    except (ValueError, DeviceError) as error:
        raise ConfigError(str(error)) from None
    if target.source == "compiler" and not targets.compiler_installed():
        raise ConfigError(
            f"compiling for {target} needs XLA's GPU compiler, and no GPU: {targets.INSTALL} (about 220 MB)."
        )
    console = Console(stderr=True)
    try:
        cache = comparison.cache_folder() if options.cache else None
    except RuntimeError as error:
        raise ConfigError(f"no place for the cache ({error}); set XDG_CACHE_HOME, or add --no-cache.") from None
    rows, stopped = _rows(console, function, target, lines, arguments, options, cache)
    rows = comparison.ranked(rows, target)
    if write:
        write(rows, target)
    if options.json:
        print(json.dumps({"target": str(target), "rows": [_as_json(row, target) for row in rows]}, indent=2))
    else:
        show(Console(), rows, target)
        if "config" in arguments and target.source == "compiler" and not targets.cudnn_installed():
            print(WITHOUT_CUDNN)
    if stopped:
        print(f"jaxshard: stopped after {len(rows)} of {len(lines)} lines", file=sys.stderr)
        return 130
    return 1 if all(row.problem for row in rows) else 0


def _choices(options: CompareOptions) -> dict[str, Sequence[Any]]:
    given = {name: getattr(options, name) for name in CHOICES if getattr(options, name)}
    if "regather" in given:
        given["regather"] = [one == "true" for one in given["regather"]]
    return given


def _source(place: str, changes: list[str]) -> tuple[str, dict[str, Any]]:
    """(the building function's place, its arguments)."""
    script, colon, name = place.rpartition(":")
    if colon and script.endswith(".py"):
        if changes:
            raise ConfigError(f"{changes[0]} changes a key of a TOML file, and {place} is a function.")
        if not Path(script).exists():
            raise ConfigError(f"cannot read {script}: No such file or directory.")
        return f"{Path(script).resolve()}:{name}", {}
    config = override(load(place), changes, f"jaxshard compare {place}", dotted_keys())
    assert config is not None, "help is asked for among the other options"
    return f"{build.__name__}:{build.build.__name__}", {"config": asdict(config)}


def _rows(
    console: Console,
    function: str,
    target: targets.Target,
    lines: Sequence[Line],
    arguments: dict[str, Any],
    options: CompareOptions,
    cache: Path | None,
) -> tuple[list[Row], bool]:
    """(the rows, whether Ctrl-C ended it early)."""
    rows: list[Row] = []
    columns = (
        TextColumn("compiling"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=len(lines))
        found = comparison.compare(
            function,
            target,
            lines,
            replica=options.replica,
            arguments=arguments,
            workers=options.workers,
            cache=cache,
        )
        try:
            for row in found:
                rows.append(row)
                bar.update(task, completed=len(rows), description=f"compiled {row.line}")
                if not console.is_terminal:
                    print(f"{row.line}: {row.problem or f'compiled in {row.seconds:.0f} s'}", file=sys.stderr)
        except KeyboardInterrupt:
            return rows, True
        finally:
            found.close()
    return rows, False


def _as_json(row: Row, target: targets.Target) -> dict[str, Any]:
    extra = {"peak": row.peak, "left": comparison.room(row, target), "wire_bytes": row.wire_bytes}
    return to_json(row) | extra | {"in_host": row.in_host, "node_in_host": row.in_host * target.per_node}


def _report(path: str | None) -> Callable[[Sequence[Row], targets.Target], None] | None:
    """What writes the report, checked before anything is compiled."""
    if path is None:
        return None
    try:
        from jaxshard.preflight.report import report
    except ImportError as error:
        raise ConfigError(f"--html needs {error.name}: {targets.INSTALL}.") from None
    if Path(path).is_dir() or not Path(path).resolve().parent.is_dir():
        why = "it is a folder" if Path(path).is_dir() else f"there is no folder {Path(path).resolve().parent}"
        raise ConfigError(f"--html {path}: {why}; name a file.")

    def write(rows: Sequence[Row], target: targets.Target) -> None:
        try:
            Path(path).write_text(report(rows, target), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}.") from None

    return write
