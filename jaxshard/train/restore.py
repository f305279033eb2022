"""From a checkpoint to the devices of a training, of whatever strategy, mesh and memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Sharding

from jaxshard.mesh import unplaced
from jaxshard.specs import path_of
from jaxshard.train.description import CheckpointError, DamagedError, Description, StoredLeaf, describe, some
from jaxshard.train.digest import digests
from jaxshard.train.stored import read_to


@dataclass(frozen=True, kw_only=True)
class Restored:
    """state: a pytree of arrays, where the training has them. cast: the paths of the leaves that were cast."""

    step: int
    state: Any = field(repr=False)
    notes: Mapping[str, Any]
    cast: tuple[str, ...]


@unplaced()
def restore(folder: str | Path, training: Any, step: int | None = None, *, cast: Sequence[str] = ()) -> Restored:
    """The state of a checkpoint, exactly as it was, on the devices of a training: any strategy, mesh and memory.

    folder: of a run, of its checkpoints, or of one step. training: a `Training` or `DataParallel`, or a pytree of
    ShapeDtypeStructs that carry their shardings. step: the newest by default. cast: patterns of paths (``params/*``)
    whose float dtype may differ: what was saved is cast to what the training has.

    Each device reads its own part of each leaf, and every process calls this. Raises CheckpointError if there is no
    such checkpoint, if a leaf is missing, too many, of another shape or dtype, or of another kind of PRNG key, and if
    what has arrived on the devices is not bit for bit what was saved. Nothing on disk changes.
    """
    description = describe(folder, step)
    shapes = getattr(training, "state_shapes", training)
    wanted, structure = placed_shapes(shapes)
    casts = to_cast(f"checkpoint {description.folder}", description.leaves, wanted, cast, _SAME)
    # What was float64 comes to the devices as that, and only then is cast.
    wide = any(jnp.dtype(description.leaves[path].dtype).itemsize >= 8 for path in casts)
    with jax.enable_x64(True) if wide else nullcontext():
        arrays = {path: _read(description, path, shape) for path, shape in wanted.items()}
        _check_bits(description, arrays)
        for path in casts:
            arrays[path] = _cast(arrays[path], wanted[path].dtype)
    state = jax.tree.unflatten(structure, arrays.values())
    return Restored(step=description.step, state=state, notes=description.notes, cast=casts)


def placed_shapes(shapes: Any) -> tuple[dict[str, Any], Any]:
    """ShapeDtypeStructs that carry their shardings, by path, and their tree. Raises TypeError for one that does not."""
    named, structure = jax.tree_util.tree_flatten_with_path(shapes)
    wanted = {path_of(path): shape for path, shape in named}
    unplaced = [path for path, shape in wanted.items() if getattr(shape, "sharding", None) is None]
    if unplaced:
        raise TypeError(f"{unplaced[0]} has no sharding; pass a training, or ShapeDtypeStructs with shardings.")
    return wanted, structure


def to_cast(
    what: str, stored: Mapping[str, StoredLeaf], wanted: Mapping[str, Any], cast: Sequence[str], otherwise: str
) -> tuple[str, ...]:
    """The paths of leaves that must be cast.

    what: names what is read. cast: patterns of paths. otherwise: what to do about leaves that differ in more than a
    dtype. Raises CheckpointError unless the leaves that are stored are the wanted ones, but for dtypes that may differ.
    """
    patterns = (cast,) if isinstance(cast, str) else tuple(cast)
    useless = [pattern for pattern in patterns if not any(fnmatchcase(path, pattern) for path in wanted)]
    if useless:
        raise CheckpointError(f"cast {useless[0]!r} matches no leaf; their paths are like {some(list(wanted)[:3])}.")
    differ, advice, casts = [], [], []
    for path, shape in wanted.items():
        here = f"{shape.dtype}[{','.join(map(str, shape.shape))}]"
        if path not in stored:
            differ.append(f"{path} ({here}) is not in it")
            advice.append(_SCALE if path.startswith("scale/") else otherwise)
        elif str(stored[path]) != here:
            floats = _castable(stored[path], shape)
            if floats and any(fnmatchcase(path, pattern) for pattern in patterns):
                casts.append(path)
                continue
            differ.append(f"{path} is {stored[path]} in it and {here} here")
            advice.append(_CAST if floats else _KEYS if _both_keys(stored[path], shape) else otherwise)
    for path in stored:
        if path not in wanted:
            differ.append(f"{path} ({stored[path]}) is in it and not here")
            advice.append(_SCALE if path.startswith("scale/") else otherwise)
    if differ:
        many = f"{len(differ)} leaves differ" if len(differ) > 1 else "a leaf differs"
        raise CheckpointError(f"{what} does not fit: {many}: {some(differ)}. {' '.join(dict.fromkeys(advice))}")
    return tuple(casts)


_SAME = "Restore it with the model and the optimizer that it was saved with (its notes), or start in another folder."
_SCALE = "A loss scale is there with compute='float16' alone: use the precision that it was saved with."
_CAST = "Where only the dtype differs, cast=['PATH'] (--cast PATH) casts, with patterns such as 'params/*'."
_KEYS = "Keys of another kind: set jax_default_prng_impl as it was."


def _castable(stored: StoredLeaf, shape: Any) -> bool:
    """Whether only the dtype differs, and both are floats or both complex."""
    if stored.shape != tuple(shape.shape) or stored.is_key or jnp.issubdtype(shape.dtype, jax.dtypes.prng_key):
        return False
    kinds = (jnp.floating, jnp.complexfloating)
    return any(jnp.issubdtype(stored.dtype, kind) and jnp.issubdtype(shape.dtype, kind) for kind in kinds)


def _both_keys(stored: StoredLeaf, shape: Any) -> bool:
    return stored.is_key and jnp.issubdtype(shape.dtype, jax.dtypes.prng_key)


def _read(description: Description, path: str, shape: Any) -> jax.Array:
    """One leaf where the training has it, in the dtype that was stored."""
    leaf = description.leaves[path]
    if leaf.is_key:
        data = read_to(description, path, shape.sharding)
        impl = _impl(shape)
        return jax.jit(lambda data: jax.random.wrap_key_data(data, impl=impl), out_shardings=shape.sharding)(data)
    if leaf.empty:
        return jax.device_put(jnp.zeros(leaf.shape, leaf.dtype), shape.sharding)
    return read_to(description, path, shape.sharding)


def _impl(key: Any) -> Any:
    """The kind of a key, from its shape alone."""
    found = []
    jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), jax.ShapeDtypeStruct(key.shape, key.dtype))
    return found[0]


def _check_bits(description: Description, arrays: Mapping[str, jax.Array]) -> None:
    found = zip(arrays, digests(list(arrays.values())), strict=True)
    bad = [path for path, digest in found if digest != description.leaves[path].digest]
    if bad:
        raise DamagedError(
            f"checkpoint {description.folder} is damaged: other bits than were saved in {some(bad)}. Use another step, "
            "if there is one."
        )


def _cast(x: jax.Array, dtype: Any) -> jax.Array:
    """The same array in another dtype; one in host memory passes through its devices."""
    home: Sharding = x.sharding
    near = home.with_memory_kind(next(iter(home.device_set)).default_memory().kind)
    return jax.device_put(jax.jit(lambda x: x.astype(dtype), out_shardings=near)(jax.device_put(x, near)), home)
