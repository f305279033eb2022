"""The arrays of a checkpoint as they lie on disk, read one at a time, with no device or straight to where they will be.

Orbax writes them (each a zarr array in one OCDBT database); tensorstore, which it writes them with, reads them here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tensorstore as ts
from jax.sharding import Sharding

from jaxshard.mesh import assembled
from jaxshard.train.description import STATE, DamagedError, Description, StoredLeaf, describe
from jaxshard.train.digest import host_digest, host_key_digest


class Unreadable(DamagedError):
    """A leaf whose data is missing or damaged, by its path. `reason`: why, in a few words."""

    def __init__(self, folder: Path, path: str, reason: str):
        super().__init__(f"checkpoint {folder} is damaged: {path} {reason}. Use another step, if there is one.")
        self.path, self.reason = path, reason


def open_leaf(description: Description, path: str) -> ts.TensorStore:
    """The array of one leaf (of PRNG keys: their data), not yet read. Raises Unreadable."""
    leaf = description.leaves[path]
    base = {"driver": "file", "path": f"{(description.folder / STATE).absolute()}/"}
    kvstore = {"driver": "ocdbt", "base": base, "path": path}
    try:
        store = ts.open({"driver": "zarr", "kvstore": kvstore}, open=True, read=True).result()
    except (ValueError, OSError, NotImplementedError) as error:
        raise Unreadable(description.folder, path, _reason(error)) from None
    shape = store.shape[: len(leaf.shape)] if leaf.is_key else store.shape
    dtype = "uint32" if leaf.is_key else leaf.dtype
    if tuple(shape) != leaf.shape or store.dtype.name != dtype:
        raise Unreadable(description.folder, path, f"is stored as {store.dtype.name}{list(store.shape)}, not as {leaf}")
    return store


def read_whole(description: Description, path: str) -> np.ndarray:
    """One leaf (of PRNG keys: their data), whole in host memory. Raises Unreadable."""
    leaf = description.leaves[path]
    if leaf.empty:
        return np.zeros(leaf.shape, np.uint32 if leaf.is_key else leaf.dtype)
    store = open_leaf(description, path)
    return _result(description, path, store.read())


def read_to(description: Description, path: str, sharding: Sharding) -> jax.Array:
    """One leaf (of PRNG keys: their data), each device's part of it read straight to that device. Raises Unreadable."""
    store = open_leaf(description, path)

    def begin(index: tuple[slice, ...]) -> Callable[[], np.ndarray]:
        read = store[index].read() if index else store.read()
        return lambda: _result(description, path, read)

    return assembled(tuple(store.shape), store.dtype.numpy_dtype, sharding, begin)


def _result(description: Description, path: str, read: Any) -> np.ndarray:
    try:
        return np.asarray(read.result())
    except (ValueError, OSError, NotImplementedError) as error:
        raise Unreadable(description.folder, path, _reason(error)) from None


def _reason(error: Exception) -> str:
    """What kind of failure it is, because tensorstore's message holds its whole specification."""
    if str(error).startswith("NOT_FOUND"):
        return "is missing, wholly or in part"
    said = system_error(error)
    return f"cannot be read ({said})" if said else "cannot be decoded"


def system_error(error: BaseException) -> str:
    """What the operating system said, if it is behind this error of Python or of tensorstore; otherwise nothing."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    code = re.search(r"os_error_code='(\d+)'", str(error))
    return os.strerror(int(code[1])) if code else ""


@dataclass(frozen=True, kw_only=True)
class Verified:
    """faults: what is wrong with a leaf, by path; empty when all that was saved is there, bit for bit."""

    description: Description
    faults: Mapping[str, str]


def verify(folder: str | Path, step: int | None = None) -> Verified:
    """Reads all of a checkpoint, leaf by leaf and with no device, and compares it with the digests made at the save.

    Raises CheckpointError if there is no such checkpoint, or its description is damaged.
    """
    description = describe(folder, step)
    return Verified(description=description, faults=dict(_faults(description)))


def _faults(description: Description) -> Iterator[tuple[str, str]]:
    for path, leaf in description.leaves.items():
        try:
            data = read_whole(description, path)
        except Unreadable as error:
            yield path, error.reason
            continue
        if leaf_digest(leaf, data) != leaf.digest:
            yield path, "holds other bits than were saved"


def leaf_digest(leaf: StoredLeaf, data: np.ndarray) -> str:
    """The digest of what was read of a leaf."""
    return host_key_digest(data, leaf.dtype, leaf.shape) if leaf.is_key else host_digest(data)
