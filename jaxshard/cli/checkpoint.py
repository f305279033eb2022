"""`jaxshard checkpoint show`, `verify` and `export`: what a checkpoint holds, on any machine and with no device."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from jaxshard.cli.options import override
from jaxshard.train.config import ConfigError, unknown
from jaxshard.train.description import (
    CheckpointError,
    Description,
    all_in,
    describe,
    find,
    is_unfinished,
    leftovers,
    some,
    steps,
)

USAGE = """\
usage: jaxshard checkpoint show DIR [--step N] [--digests] [--json]   what it holds, from its description alone
       jaxshard checkpoint verify DIR [--step N]                      read all of it, and prove it whole
       jaxshard checkpoint export DIR NAME.safetensors [--dtype bfloat16] [--step N] [--max-gb 5]
                                                                      its parameters, for other programs

DIR is the folder of a run, of its checkpoints, or of one step."""


@dataclass(frozen=True, kw_only=True)
class ShowOptions:
    """What a checkpoint holds, from its description alone."""

    step: int | None = None
    """Of which step; None: the newest."""
    digests: bool = False
    """Print nothing but each leaf's digest, shape and path: the same lines for the same values, whatever the mesh,
    the strategy and the memory they were saved from."""
    json: bool = False
    """Print all that is known, the caller's notes included, as JSON."""


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """Reads every leaf of checkpoints and compares it with the digest made before it was written."""

    step: int | None = None
    """Of which step; None: of all."""


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Writes the parameters of a checkpoint as safetensors."""

    dtype: str | None = None
    """The dtype of float leaves in the file, such as bfloat16; None: as they are."""
    step: int | None = None
    """Of which step; None: the newest."""
    max_gb: float = 5.0
    """Above this many GB (of 10^9 bytes) there are several files, and an index."""


def checkpoint(args: list[str]) -> int:
    """Runs `jaxshard checkpoint`. Returns 0, or 1 if a checkpoint that was to be verified is not whole."""
    if not args or args[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if args else 2
    command, *rest = args
    commands = {"show": _show, "verify": _verify, "export": _export}
    if command not in commands:
        raise ConfigError(unknown(command, list(commands)).replace("key", "command checkpoint", 1))
    return commands[command](rest)


def _show(args: list[str]) -> int:
    (folder,), options = _parsed(ShowOptions(), args, "show", ("DIR",))
    if options is None:
        return 0
    found = describe(folder, options.step)
    if options.json:
        print(json.dumps({"folder": str(found.folder), **found.to_json()}, indent=2))
    elif options.digests:
        for path, leaf in found.leaves.items():
            print(f"{leaf.digest}  {leaf}  {path}")
    else:
        _print(found)
    return 0


def _print(found: Description) -> None:
    mesh = " x ".join(f"{axis}={size}" for axis, size in (found.mesh or {}).items()) or "one device"
    processes = f"{found.processes} process" + ("es" if found.processes > 1 else "")
    print(f"{found.folder}: step {found.step}, {len(found.leaves)} leaves, {_size(found.bytes)}")
    print(f"saved from {mesh}, by {processes}, with jaxshard {found.jaxshard} and jax {found.jax}")
    print(f"notes: {', '.join(found.notes) or 'none'} (--json prints them)")
    if found.step in (beside := steps(found.folder.absolute().parent)):
        print(f"whole checkpoints there: {', '.join(map(str, beside))}")
    print()
    rows = [("leaf", "array", "split over", "memory")]
    rows += [(path, str(leaf), _split(leaf.spec), leaf.memory) for path, leaf in found.leaves.items()]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _split(spec: Sequence[Any] | None) -> str:
    """The dims that are split, and over what."""
    if spec is None:
        return "one device"
    named = ((dim, entry if isinstance(entry, list) else [entry]) for dim, entry in enumerate(spec) if entry)
    return ", ".join(f"dim {dim}: {' x '.join(axes)}" for dim, axes in named) or "whole"


def _size(size: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} GiB"


def _verify(args: list[str]) -> int:
    from jaxshard.train.stored import verify  # here, because it imports tensorstore and `show` needs none of it

    (folder,), options = _parsed(VerifyOptions(), args, "verify", ("DIR",))
    if options is None:
        return 0
    newest = find(folder, options.step)
    one = options.step is not None or newest == Path(folder)
    folders = [newest] if one else [newest.parent / str(step) for step in steps(newest.parent)]
    bad = 0
    for path in folders:
        try:
            found = verify(path)
        except CheckpointError as error:
            bad += 1
            print(f"{path}: not whole: {error}")
            continue
        if found.faults:
            bad += 1
            print(f"{path}: not whole: {some((f'{leaf} {fault}' for leaf, fault in found.faults.items()), 8)}")
        else:
            print(f"{path}: whole, {len(found.description.leaves)} leaves, {_size(found.description.bytes)}")
    if not one:
        for name in leftovers(all_in(folder)):
            bad += 1
            print(f"{all_in(folder) / name}: not whole: it has no description, or is no checkpoint")
        for entry in sorted(all_in(folder).iterdir()):
            if is_unfinished(entry.name):
                print(f"{entry}: unfinished; it is never read, and the next save clears it")
    return 1 if bad else 0


def _export(args: list[str]) -> int:
    from jaxshard.train.weights import export

    (folder, out), options = _parsed(ExportOptions(), args, "export", ("DIR", "NAME.safetensors"))
    if options is None:
        return 0
    if not 0 < options.max_gb < math.inf:
        raise ConfigError(f"max_gb = {options.max_gb}: a size above 0.")
    if not Path(folder).is_dir():
        raise CheckpointError(f"{folder} is no folder. Give the folder of a run, of its checkpoints, or of one step.")
    most = max(1, int(options.max_gb * 1e9))
    for file in export(folder, out, dtype=options.dtype, step=options.step, max_bytes=most):
        print(f"{file}: {_size(file.stat().st_size)}")
    return 0


def _parsed(default: Any, args: list[str], command: str, places: Sequence[str]) -> tuple[list[str], Any]:
    """What stands in the places, and the options; None for them after printing the help."""
    prog = f"jaxshard checkpoint {command}"
    given = []
    while args and not args[0].startswith("-"):
        given, args = [*given, args[0]], args[1:]
    if len(given) != len(places) and not {"-h", "--help"} & set(args):
        raise ConfigError(f"{prog} takes {' and '.join(places)}, and then options; {prog} --help lists them.")
    names = [field.name for field in fields(default)]
    return given or [""] * len(places), override(default, args, f"{prog} {' '.join(places)}", names, flags=True)
