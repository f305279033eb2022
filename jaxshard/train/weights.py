"""Parameters as safetensors, out of a checkpoint or a live state and back: for other programs, and for other runs.

A leaf's name is its path with dots for slashes: ``blocks.0.mlp.kernel``. No more than one leaf is ever whole, and that
one on the host.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from safetensors import SafetensorError, safe_open

from jaxshard.mesh import assembled
from jaxshard.specs import path_of
from jaxshard.train.description import CheckpointError, StoredLeaf, describe
from jaxshard.train.restore import placed_shapes, to_cast
from jaxshard.train.stored import leaf_digest, read_whole, system_error

SUFFIX, INDEX = ".safetensors", ".safetensors.index.json"
CODES = {
    **{"bool": "BOOL", "int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64"},
    **{"uint8": "U8", "uint16": "U16", "uint32": "U32", "uint64": "U64"},
    **{"float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64", "complex64": "C64"},
}
"""What the format calls the dtypes that its numpy reader knows."""


@dataclass(frozen=True, kw_only=True)
class Weight:
    """One leaf to be written. fetch: brings it whole to the host, in its own dtype, not yet in `dtype`."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    fetch: Callable[[], np.ndarray]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize


def export(
    source: Any,
    path: str | Path,
    *,
    dtype: str | None = None,
    step: int | None = None,
    max_bytes: int = 5_000_000_000,
) -> list[Path]:
    """Writes parameters as safetensors. Returns the files.

    source: a checkpoint (the folder of a run, of its checkpoints, or of one step; `step` chooses), read with no device;
    or parameters, a pytree of JAX arrays such as ``state.params``. With several processes all of them call this, and
    the first one writes (the others return before it has).
    path: ``NAME.safetensors``. What is larger than `max_bytes` goes to ``NAME-00001-of-00003.safetensors`` and so on,
    with an index ``NAME.safetensors.index.json``. dtype: of the float leaves; None keeps what they have.

    Files get their names when all are whole. Raises CheckpointError if a file is there already or cannot be written,
    if the checkpoint is damaged, and for a dtype that the format does not have.
    """
    path = Path(path)
    if not path.name.endswith(SUFFIX):
        raise CheckpointError(f"{path}: the name of an export ends in {SUFFIX}.")
    if max_bytes < 1:
        raise ValueError(f"export(max_bytes={max_bytes}): a number of bytes, 1 or more.")
    on_disk = isinstance(source, str | os.PathLike)
    weights = list(_stored(Path(source), step) if on_disk else _live(source))
    weights = [_as_written(weight, dtype) for weight in weights]
    _check_names([weight.name for weight in weights])
    parts = _parts(weights, max_bytes)
    stem = path.name.removesuffix(SUFFIX)
    files = [path.with_name(f"{stem}-{i:05}-of-{len(parts):05}{SUFFIX}") for i in range(1, len(parts) + 1)]
    files = [path] if len(parts) == 1 else files
    index = path.with_name(stem + INDEX)
    if jax.distributed.is_initialized() and jax.process_index() > 0:
        for weight in (weight for part in parts for weight in part if not on_disk):
            weight.fetch()  # all processes bring a leaf to the host, the first one writes it
        return files
    there = [file for file in (path, index, *files) if file.exists()]
    if there:
        raise CheckpointError(f"{there[0]} is there already; delete it, or choose another name.")
    try:
        _write(files, parts, index)
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error.strerror}.") from error
    return files


def _write(files: Sequence[Path], parts: Sequence[Sequence[Weight]], index: Path) -> None:
    """All of the files under other names first, so that what bears its name is whole."""
    made: dict[Path, Path] = {}
    try:
        for file, part in zip(files, parts, strict=True):
            made[file] = file.with_name(f".{file.name}.unfinished")
            with made[file].open("wb") as out:
                out.write(_header(part))
                for weight in part:
                    out.write(np.ascontiguousarray(weight.fetch()).reshape(-1).view(np.uint8).data)
                out.flush()
                os.fsync(out.fileno())
        if len(files) > 1:
            made[index] = index.with_name(f".{index.name}.unfinished")
            total = sum(weight.bytes for part in parts for weight in part)
            places = {weight.name: file.name for file, part in zip(files, parts, strict=True) for weight in part}
            text = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
            made[index].write_text(json.dumps(text, indent=2) + "\n")
        for file, unfinished in made.items():
            os.rename(unfinished, file)
    finally:
        for unfinished in made.values():
            unfinished.unlink(missing_ok=True)


def _header(part: Sequence[Weight]) -> bytes:
    # Readers ask for the format; the layout is that of torch, row by row.
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for weight in part:
        offsets = [at, at := at + weight.bytes]
        table[weight.name] = {"dtype": CODES[weight.dtype], "shape": list(weight.shape), "data_offsets": offsets}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _parts(weights: Sequence[Weight], max_bytes: int) -> list[list[Weight]]:
    """The weights of each file, in order, no file above `max_bytes` unless one weight is."""
    parts: list[list[Weight]] = [[]]
    size = 0
    for weight in weights:
        if parts[-1] and size + weight.bytes > max_bytes:
            parts.append([])
            size = 0
        parts[-1].append(weight)
        size += weight.bytes
    # The widest dtypes first: then every array begins at a multiple of its element's size.
    return [sorted(part, key=lambda weight: -jnp.dtype(weight.dtype).itemsize) for part in parts]


def _stored(folder: Path, step: int | None) -> Iterator[Weight]:
    """The parameters of a checkpoint."""
    description = describe(folder, step)
    paths = [path for path in description.leaves if path == "params" or path.startswith("params/")]
    if not paths:
        raise CheckpointError(f"checkpoint {description.folder} has no params; export is for those of a TrainState.")

    def read(path: str) -> np.ndarray:
        data = read_whole(description, path)
        if leaf_digest(description.leaves[path], data) != description.leaves[path].digest:
            raise CheckpointError(
                f"checkpoint {description.folder} is damaged: {path} holds other bits than were saved. Export another "
                "step, if there is one."
            )
        return data

    for path in paths:
        leaf = description.leaves[path]
        name = _name(path.removeprefix("params/"))
        yield Weight(name=name, shape=leaf.shape, dtype=leaf.dtype, fetch=lambda path=path: read(path))


def _live(params: Any) -> Iterator[Weight]:
    """The parameters of a state."""
    for keys, x in jax.tree_util.tree_leaves_with_path(params):
        path = path_of(keys)
        if not isinstance(x, jax.Array):
            raise TypeError(
                f"export: {path} is a {type(x).__name__}; pass a checkpoint's folder or a tree of JAX arrays."
            )
        yield Weight(name=_name(path), shape=x.shape, dtype=str(x.dtype), fetch=lambda x=x: _to_host(x))


def _name(path: str) -> str:
    return path.replace("/", ".")


def _to_host(x: jax.Array) -> np.ndarray:
    if not (x.is_fully_addressable or x.is_fully_replicated):
        return np.asarray(multihost_utils.process_allgather(x, tiled=True))
    return np.asarray(jnp.copy(x))  # of a copy, because JAX keeps what it has brought to the host with its array


def _as_written(weight: Weight, dtype: str | None) -> Weight:
    """The weight in the dtype asked for. Raises CheckpointError for one that the format does not have."""
    key = weight.dtype.startswith("key<")
    if dtype is not None and not key and jnp.issubdtype(weight.dtype, jnp.floating):
        if dtype not in CODES or not jnp.issubdtype(dtype, jnp.floating):
            floats = [name for name in CODES if jnp.issubdtype(name, jnp.floating)]
            raise CheckpointError(f"dtype {dtype}: choose one of {', '.join(floats)}.")
        fetch = weight.fetch
        weight = Weight(
            name=weight.name, shape=weight.shape, dtype=dtype, fetch=lambda: fetch().astype(jnp.dtype(dtype))
        )
    if weight.dtype not in CODES:
        raise CheckpointError(
            f"{weight.name} is {weight.dtype}, which safetensors files for numpy do not hold"
            + ("; keep PRNG keys out of params." if key else "; dtype='bfloat16' (--dtype bfloat16) casts floats.")
        )
    return weight


def _check_names(names: Sequence[str]) -> None:
    twice = [name for i, name in enumerate(names) if name in names[:i]]
    if twice:
        raise CheckpointError(f"two leaves have the name {twice[0]} when dots stand for slashes; rename one.")


def load(path: str | Path, shapes: Any, *, cast: Sequence[str] = ()) -> Any:
    """Parameters from safetensors, each device reading its own part of each leaf.

    path: ``NAME.safetensors``, or its index, or that name where only its index is. shapes: a pytree of
    ShapeDtypeStructs that carry their shardings, such as ``training.state_shapes.params``. cast: patterns of paths
    (``blocks/*``) whose float dtype may differ; what is stored is cast to what `shapes` have.

    Returns a pytree of arrays. Raises CheckpointError if a file is missing, cut short or no safetensors, and if a leaf
    is missing, too many, or of another shape or dtype.
    """
    path = Path(path)
    wanted, structure = placed_shapes(shapes)
    with ExitStack() as stack:
        found = _opened(path, stack)
        leaves = {name: _leaf(file, name, where) for name, (file, where) in found.items()}
        named = {_name(leaf_path): leaf_path for leaf_path in wanted}
        _check_names([_name(leaf_path) for leaf_path in wanted])
        stored = {named.get(name, name): leaf for name, leaf in leaves.items()}
        to_cast(str(path), stored, wanted, cast, "Load it into the model that it was exported from.")
        arrays = [_read(found[_name(leaf_path)][0], _name(leaf_path), shape) for leaf_path, shape in wanted.items()]
    return jax.tree.unflatten(structure, arrays)


def _opened(path: Path, stack: ExitStack) -> dict[str, tuple[Any, Path]]:
    """The open file that holds each name, and its path."""
    index = path if path.name.endswith(INDEX) else path.with_name(path.name.removesuffix(SUFFIX) + INDEX)
    if path.name.endswith(INDEX) or (not path.exists() and index.exists()):
        places = _places(index)
        files = {file: _open(index.with_name(file), stack) for file in sorted(set(places.values()))}
        absent = [name for name, file in places.items() if name not in list(files[file].keys())]
        if absent:
            raise CheckpointError(f"{index} says that {absent[0]} is in {places[absent[0]]}, and it is not.")
        return {name: (files[file], index.with_name(file)) for name, file in places.items()}
    file = _open(path, stack)
    return {name: (file, path) for name in list(file.keys())}


def _places(index: Path) -> Mapping[str, str]:
    try:
        places = json.loads(index.read_bytes())["weight_map"]
        if not all(isinstance(file, str) and file and file == Path(file).name for file in places.values()):
            raise ValueError
    except OSError as error:
        raise CheckpointError(f"cannot read {index}: {error.strerror}.") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CheckpointError(
            f"{index} is no index of safetensors files: it has no weight_map of file names."
        ) from None
    return places


def _open(path: Path, stack: ExitStack) -> Any:
    if not path.is_file():
        raise CheckpointError(f"cannot read {path}: {'it is no file' if path.exists() else 'it does not exist'}.")
    try:
        return stack.enter_context(safe_open(path, framework="numpy"))
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {system_error(error) or error}.") from None
    except SafetensorError as error:
        raise CheckpointError(f"{path} is no whole safetensors file: {str(error).rstrip('.')}.") from None


def _leaf(file: Any, name: str, path: Path) -> StoredLeaf:
    part = file.get_slice(name)
    dtypes = {code: dtype for dtype, code in CODES.items()}
    if part.get_dtype() not in dtypes:
        raise CheckpointError(f"{path}: {name} is {part.get_dtype()}, which cannot be read.")
    dtype = dtypes[part.get_dtype()]
    return StoredLeaf(shape=tuple(part.get_shape()), dtype=dtype, spec=None, memory="", digest="")


def _read(file: Any, name: str, shape: jax.ShapeDtypeStruct) -> jax.Array:
    def begin(index: tuple[slice, ...]) -> Callable[[], np.ndarray]:
        # The reader knows no slices of empty arrays, nor of those without dims.
        whole = 0 in shape.shape or not shape.shape
        return lambda: (file.get_tensor(name) if whole else file.get_slice(name)[index]).astype(shape.dtype)

    assert shape.sharding is not None
    return assembled(tuple(shape.shape), shape.dtype, shape.sharding, begin)
