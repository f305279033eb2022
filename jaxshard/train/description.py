"""What is known of a checkpoint without reading its arrays: one JSON file beside them, read on any machine.

A folder of checkpoints has a subfolder for each step. While it is being written, a checkpoint is in a folder of another
name; it gets its own when it is whole.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from jaxshard.train.config import ConfigError

FORMAT, VERSION = "jaxshard checkpoint", 1
STATE, DESCRIPTION = "state", "description"
"""The subfolders of a checkpoint: its arrays, and what this module reads."""
CHECKPOINTS = "checkpoints"
"""The folder of checkpoints in the folder of a run."""


class CheckpointError(ConfigError):
    """What is wrong with a checkpoint, or with writing one, in one line; and what to do."""


class DamagedError(CheckpointError):
    """Of a checkpoint that was whole, and is no more."""


@dataclass(frozen=True, kw_only=True)
class StoredLeaf:
    """One array of a checkpoint.

    dtype: its name; ``key<fry>`` or the like for PRNG keys, whose data is stored. spec: how it was split when it was
    saved, an entry for each dim (a list of mesh axes, or None), or None if one device held it. memory: the kind it was
    in. digest: of its bits, computed where it lay before it was written.
    """

    shape: tuple[int, ...]
    dtype: str
    spec: tuple[Any, ...] | None
    memory: str
    digest: str

    @property
    def is_key(self) -> bool:
        return self.dtype.startswith("key<")

    @property
    def empty(self) -> bool:
        """Whether it has no elements. Such a leaf stands in the description alone."""
        return math.prod(self.shape) == 0

    @property
    def bytes(self) -> int:
        """Of its elements, as an array in memory. Of PRNG keys 0, because how long one is is known to JAX alone."""
        return 0 if self.is_key else math.prod(self.shape) * jnp.dtype(self.dtype).itemsize

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True, kw_only=True)
class Description:
    """A checkpoint, without its arrays.

    folder: of this step. notes: what the caller of `Checkpoints.save` gave. mesh: sizes by axis, None without a mesh.
    processes: how many wrote it. jaxshard, jax: their versions. leaves: by path, in the order of the tree.
    """

    folder: Path
    step: int
    notes: Mapping[str, Any]
    mesh: Mapping[str, int] | None
    processes: int
    jaxshard: str
    jax: str
    leaves: Mapping[str, StoredLeaf]

    @property
    def bytes(self) -> int:
        return sum(leaf.bytes for leaf in self.leaves.values())

    def to_json(self) -> dict[str, Any]:
        """What is written, with a checksum of itself. Raises TypeError or ValueError for notes that are no JSON."""
        fields = {name: value for name, value in vars(self).items() if name != "folder"}
        body = {"format": FORMAT, "version": VERSION, **fields}
        body["leaves"] = {path: asdict(leaf) for path, leaf in self.leaves.items()}
        return {**body, "checksum": _checksum(body)}


def steps(folder: str | Path) -> list[int]:
    """The steps of the whole checkpoints in a folder, ascending; none if there is no such folder."""
    try:
        names = [entry.name for entry in Path(folder).iterdir() if _described(entry).is_file()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise CheckpointError(f"cannot read {folder}: {error.strerror}.") from None
    return sorted(int(name) for name in names if name.isdecimal() and str(int(name)) == name)


def find(folder: str | Path, step: int | None = None) -> Path:
    """The folder of one checkpoint: of this step, or the newest.

    folder: of a run, of its checkpoints, or of one step (a copy may have any name). Raises CheckpointError if it is
    not there.
    """
    folder = Path(folder)
    try:
        return _found(folder, step)
    except OSError as error:
        raise CheckpointError(f"cannot read {folder}: {error.strerror}.") from None


def _found(folder: Path, step: int | None) -> Path:
    name = folder.absolute().name
    if is_unfinished(name):
        raise CheckpointError(
            f"{folder} was never finished, or its deletion was not. Use another step, if there is one."
        )
    if _described(folder).is_file():
        if name.isdecimal() and step not in (None, int(name)):
            raise CheckpointError(f"{folder} is the checkpoint of step {name}, and step {step} was asked for.")
        return folder
    within = all_in(folder)
    there = steps(within)
    if not there:
        raise CheckpointError(f"{folder} holds no whole checkpoint: {_what_is_in(within)}. {_WHERE}")
    if step is not None and step not in there:
        raise CheckpointError(f"{within} has no checkpoint of step {step}; it has {', '.join(map(str, there))}.")
    return within / str(there[-1] if step is None else step)


_WHERE = "Give the folder of a run, of its checkpoints, or of one step."


def all_in(folder: str | Path) -> Path:
    """The folder of checkpoints, given it or the folder of its run."""
    folder = Path(folder)
    inner = folder / CHECKPOINTS
    return inner if inner.is_dir() and not steps(folder) else folder


def _what_is_in(folder: Path) -> str:
    if not folder.exists():
        return "it does not exist"
    if not folder.is_dir():
        return "it is a file"
    names = sorted(entry.name for entry in folder.iterdir())
    if not names:
        return "it is empty"
    halves = [name for name in names if is_unfinished(name)]
    if halves:
        return f"{', '.join(halves[:3])} was never finished"
    return f"it has {', '.join(names[:4])}" + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def is_unfinished(name: str) -> bool:
    """Whether a folder of this name is a checkpoint that was being written, or deleted, when its process ended."""
    step, _, rest = name.partition(".")
    return step.isdecimal() and (rest == "deleted" or rest.startswith("orbax-checkpoint-tmp"))


def leftovers(checkpoints: Path) -> list[str]:
    """What lies in a folder of checkpoints and is neither whole nor unfinished: it may be one that is damaged."""
    known = set(map(str, steps(checkpoints)))
    names = sorted(entry.name for entry in checkpoints.iterdir())
    return [name for name in names if not (name in known or is_unfinished(name) or name.startswith("."))]


def describe(folder: str | Path, step: int | None = None) -> Description:
    """A checkpoint without its arrays; reads one file, and needs no device.

    folder, step: as for `find`. Raises CheckpointError if it is not there, damaged, or of a later format.
    """
    found = find(folder, step)
    try:
        body = json.loads(_described(found).read_bytes(), parse_constant=_no_json)
    except OSError as error:
        raise CheckpointError(f"cannot read the description of checkpoint {found}: {error.strerror}.") from None
    except (ValueError, RecursionError):
        raise DamagedError(f"checkpoint {found} is damaged: its description is no JSON. {_OTHERS}") from None
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise CheckpointError(f"{found} is no checkpoint of jaxshard: another program wrote its description.")
    if body.get("version") != VERSION:
        raise CheckpointError(
            f"checkpoint {found} has format {body.get('version')}, written by jaxshard {body.get('jaxshard')}; this "
            f"jaxshard reads format {VERSION}. Read it with the jaxshard that wrote it."
        )
    if body.pop("checksum", None) != _checksum(body):
        raise DamagedError(f"checkpoint {found} is damaged: its description has another checksum. {_OTHERS}")
    try:
        known = {name: value for name, value in body.items() if name not in ("format", "version", "leaves")}
        leaves = {path: _leaf(leaf) for path, leaf in body["leaves"].items()}
        described = Description(folder=found, leaves=leaves, **known)
    except (KeyError, TypeError, ValueError, AttributeError):
        raise DamagedError(f"checkpoint {found} is damaged: its description is incomplete. {_OTHERS}") from None
    name = found.absolute().name
    if name.isdecimal() and described.step != int(name):
        raise CheckpointError(f"checkpoint {found} was saved as step {described.step}; give its folder that name back.")
    if step not in (None, described.step):
        raise CheckpointError(f"{found} is the checkpoint of step {described.step}, and step {step} was asked for.")
    return described


_OTHERS = "Use another step, if there is one."


def _no_json(constant: str) -> None:
    """Called for NaN and Infinity, which Python's reader takes."""
    raise ValueError(constant)


def _leaf(fields: dict[str, Any]) -> StoredLeaf:
    """Raises KeyError, TypeError or ValueError for what is no description of an array."""
    spec = fields["spec"]
    leaf = StoredLeaf(**{**fields, "shape": tuple(fields["shape"]), "spec": None if spec is None else tuple(spec)})
    if not all(isinstance(size, int) and size >= 0 for size in leaf.shape):
        raise ValueError(leaf.shape)
    if not leaf.is_key:
        jnp.dtype(leaf.dtype)
    return leaf


def _described(folder: Path) -> Path:
    return folder / DESCRIPTION / "metadata"


def _checksum(body: Mapping[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(body, sort_keys=True, allow_nan=False).encode(), digest_size=8).hexdigest()


def some(items: Iterable[str], most: int = 4) -> str:
    """The first of many, in a line."""
    items = list(items)
    return "; ".join(items[:most]) + (f"; and {len(items) - most} more" if len(items) > most else "")
