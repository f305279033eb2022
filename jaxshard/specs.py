"""From the loss function, the parameters and the mesh to where every leaf lives, and why.

One layout serves all strategies: which dim of a leaf may be split, and which leaves stay whole, does not depend on the
strategy. So strategies can be compared leaf by leaf, and those that reduce at the same moment agree to the bit.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr
from jax.sharding import Mesh, NamedSharding, Sharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from jaxshard.collectives import Route
from jaxshard.mesh import axis_sizes, size_over
from jaxshard.onshard import read_once, sliced_dims
from jaxshard.precision import Precision
from jaxshard.strategy import BATCH_AXES, HOST, SHARD, Placement, Strategy


@dataclass(frozen=True, kw_only=True)
class Leaf:
    """One array of a pytree and what may be done with it.

    dim: the dim that strategies may split, None for a leaf that always stays whole. whole_because: why it does, and
    what would split it. trainable: whether it has a gradient. read_once: whether the loss reads it in one place alone.
    owner: for a leaf of an optimizer's state, the path of the parameter it belongs to.
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any
    dim: int | None
    trainable: bool = True
    whole_because: str = ""
    read_once: bool = False
    owner: str = ""

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * _itemsize(self.dtype)

    def spec(self, placement: Placement) -> P:
        """The PartitionSpec of this leaf under a placement."""
        return spec_of(self.dim, placement.axes)


def spec_of(dim: int | None, axes: Sequence[str]) -> P:
    return P() if dim is None or not axes else P(*(None,) * dim, tuple(axes))


def _is_key(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jax.dtypes.prng_key)


def _itemsize(dtype: Any) -> int:
    if _is_key(dtype):
        return math.prod(jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct((), dtype)).shape) * 4
    return jnp.dtype(dtype).itemsize


def split_axes(strategy: Strategy) -> tuple[str, ...]:
    """The axes that a layout divides leaves by: the optimizer state's, `shard` for strategies that split none."""
    return strategy.opt.axes or (SHARD,)


def layout(
    params: Any,
    jaxpr: Jaxpr,
    pieces: int,
    *,
    whole_budget: float = 0.01,
    trainable: Callable[[str], bool] | Any = None,
) -> Any:
    """A pytree of `Leaf` for a pytree of ShapeDtypeStructs.

    jaxpr: of the loss, whose first inputs are the leaves. pieces: into how many a leaf may be split. The dim split is
    the first one that divides and that the loss does not slice layer by layer. whole_budget: the smallest leaves stay
    whole while their bytes stay within this fraction of all parameters' bytes / pieces. trainable: a predicate on the
    path, or a mask tree; None trains every float and complex leaf.

    Raises ValueError for a negative budget, or a mask of another structure.
    """
    if not whole_budget >= 0:
        raise ValueError(f"whole_budget={whole_budget}: a fraction, 0 or more (0 splits all that can be split).")
    named, structure = jax.tree_util.tree_flatten_with_path(params)
    learns = _trainable(trainable, params)
    sliced = sliced_dims(jaxpr, len(named), pieces)
    once = [read_once(jaxpr, var) for var in jaxpr.invars[: len(named)]]
    leaves = [
        replace(_leaf(path_of(path), x, taken, pieces, learn), read_once=reads)
        for (path, x), taken, learn, reads in zip(named, sliced, learns, once, strict=True)
    ]
    budget = whole_budget * sum(leaf.bytes for leaf in leaves) / pieces
    small = set()
    for i in sorted((i for i, leaf in enumerate(leaves) if leaf.dim is not None), key=lambda i: leaves[i].bytes):
        budget -= leaves[i].bytes
        if budget < 0:
            break
        small.add(i)
    because = f"one of the smallest leaves, within whole_budget={whole_budget:g}; whole_budget=0 splits it"
    kept = [replace(leaf, dim=None, whole_because=because) if i in small else leaf for i, leaf in enumerate(leaves)]
    return jax.tree.unflatten(structure, kept)


def _leaf(path: str, x: Any, sliced: set[int], pieces: int, trainable: bool) -> Leaf:
    divides = [d for d, size in enumerate(x.shape) if size > 0 and size % pieces == 0]
    allowed = [d for d in divides if d not in sliced]
    because = ""
    if not x.shape:
        because = "a scalar"
    elif _is_key(x.dtype):
        because = "a PRNG key"
    elif math.prod(x.shape) == 0:
        because = "empty"
    elif not divides:
        up = [-(-size // pieces) * pieces for size in x.shape]
        because = f"no dim of {x.shape} divides by {pieces}; e.g. {up[0]} in place of {x.shape[0]} would"
    elif not allowed:
        because = f"the loss slices it along dim {divides[0]}, the only one that divides by {pieces}"
    dim = None if because else allowed[0]
    return Leaf(path=path, shape=tuple(x.shape), dtype=x.dtype, dim=dim, trainable=trainable, whole_because=because)


class WholeLeavesWarning(UserWarning):
    """More of the parameters stays whole on every device than the bound allows."""


def warn_of_whole_leaves(tree_layout: Any, strategy: Strategy, bound: float) -> None:
    """Warns with a `WholeLeavesWarning` that names them if whole leaves are more than `bound` of all bytes.

    A strategy that splits nothing keeps all of them whole, and has nothing to warn of. Raises ValueError for a
    negative bound.
    """
    if not bound >= 0:
        raise ValueError(f"warn_whole={bound}: a fraction of the parameters' bytes, 0 or more (1 never warns).")
    leaves = jax.tree.leaves(tree_layout)
    whole = sorted((leaf for leaf in leaves if leaf.dim is None), key=lambda leaf: -leaf.bytes)
    size, total = sum(leaf.bytes for leaf in whole), sum(leaf.bytes for leaf in leaves)
    if not strategy.opt.axes or size <= bound * total:
        return
    said = [f"  {leaf.path} {leaf.dtype}{list(leaf.shape)}, {leaf.bytes:,} B: {leaf.whole_because}" for leaf in whole]
    more = [f"  and {len(whole) - 8} smaller ones"] if len(whole) > 8 else []
    warnings.warn(
        f"{len(whole)} of {len(leaves)} leaves of params, {size:,} of {total:,} B ({size / total:.1%}), stay whole on "
        f"every device, more than warn_whole={bound:g}:\n"
        + "\n".join([*said[:8], *more])
        + "\nChange those sizes, or the number of devices along shard=, or raise warn_whole.",
        WholeLeavesWarning,
        stacklevel=4,  # the call of parallelize
    )


def _trainable(trainable: Any, params: Any) -> list[bool]:
    named = jax.tree_util.tree_leaves_with_path(params)
    if trainable is None:
        asked = [True] * len(named)
    elif callable(trainable):
        asked = [bool(trainable(path_of(path))) for path, _ in named]
    else:
        if jax.tree.structure(trainable) != jax.tree.structure(params):
            raise ValueError(
                f"trainable is a mask of structure {jax.tree.structure(trainable)}, but params have "
                f"{jax.tree.structure(params)}. Pass one bool per leaf, or a predicate on the path."
            )
        asked = jax.tree.leaves(trainable)
        if not all(isinstance(flag, bool | np.bool_) for flag in asked):
            raise TypeError(f"trainable is a mask of {sorted({type(flag).__name__ for flag in asked})}; pass bools.")
    # Only what can be differentiated can learn.
    learns = [bool(flag) and jnp.issubdtype(x.dtype, jnp.inexact) for flag, (_, x) in zip(asked, named, strict=True)]
    if not any(learns):
        some = ", ".join(path_of(path) for path, _ in named[:8])
        raise ValueError(
            f"trainable chooses no float or complex leaf of params, so nothing would learn. Paths: {some}."
        )
    return learns


def path_of(path: Sequence[Any]) -> str:
    """A leaf's place in its tree, such as ``blocks/mlp/kernel``."""
    return jax.tree_util.keystr(tuple(path), simple=True, separator="/") or "params"


def route(
    leaf: Leaf, strategy: Strategy, mesh: Mesh, precision: Precision, *, to: Placement, deferred: bool = False
) -> Route:
    """How this leaf travels in a step: the difference between the rungs of the ladder.

    to: where its gradient goes. deferred: not at the use, but in one reduction after the last microbatch.
    """
    scatter = () if leaf.dim is None else to.axes
    return Route(
        sizes=axis_sizes(mesh),
        # Gathered at the step's start, it is whole at every use.
        gather=() if leaf.dim is None or strategy.gather == "step" else strategy.params.axes,
        scatter=scatter,
        spread=tuple(axis for axis in BATCH_AXES if axis not in scatter),
        deferred=deferred,
        reduce_dtype=precision.reduce,
    )


def optimizer_layout(opt_state: Any, params_layout: Any, pieces: int) -> Any:
    """A pytree of `Leaf` for an optimizer's state.

    A leaf of its parameter's shape (found by the end of its path) takes its parameter's dim; any other is split along
    the first dim that divides, by its own shape.
    """
    by_path = {
        tuple(map(str, path)): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(params_layout, is_leaf=lambda x: isinstance(x, Leaf))
    }

    def place(path, x):
        keys = tuple(map(str, path))
        owners = (by_path.get(keys[start:]) for start in range(len(keys) + 1))
        owner = next((leaf for leaf in owners if leaf is not None and leaf.shape == tuple(x.shape)), None)
        if owner is None:
            return _leaf(path_of(path), x, set(), pieces, trainable=False)
        return replace(owner, path=path_of(path), dtype=x.dtype, trainable=False, owner=owner.path)

    return jax.tree_util.tree_map_with_path(place, opt_state)


def in_host_memory(tree_layout: Any, placement: Placement) -> frozenset[str]:
    """The paths of the leaves that lie in host memory: the largest, until they are the placement's fraction of all."""
    leaves = [leaf for leaf in jax.tree.leaves(tree_layout) if leaf.shape and leaf.bytes and not _is_key(leaf.dtype)]
    wanted = placement.fraction * sum(leaf.bytes for leaf in leaves) if placement.memory == HOST else 0
    found = set()
    for leaf in sorted(leaves, key=lambda leaf: -leaf.bytes):
        if wanted <= 0:
            break
        found.add(leaf.path)
        wanted -= leaf.bytes
    return frozenset(found)


def shardings(tree_layout: Any, placement: Placement, mesh: Mesh) -> Any:
    """Where the leaves of a layout live under a placement."""
    hosted = in_host_memory(tree_layout, placement)
    return jax.tree.map(
        lambda leaf: sharding(leaf.spec(placement), placement, mesh, HOST if leaf.path in hosted else None), tree_layout
    )


def sharding(spec: P, placement: Placement, mesh: Mesh, memory: str | None = None) -> Sharding:
    """A spec on the devices of a placement. memory: None is their own."""
    first = mesh.devices.flat[0] if placement.devices == "first" else None
    if first is not None and memory is None:
        return SingleDeviceSharding(first)
    if first is not None:  # which memory an array lies in stands in its type only with a mesh
        mesh = Mesh(np.full((1,) * len(mesh.axis_names), first), mesh.axis_names)
    found = NamedSharding(mesh, spec, memory_kind=memory)
    # Devices that are not there have no memories, and JAX drops the word silently; an abstract mesh keeps it.
    known = memory is None or found.memory_kind == memory
    return found if known else NamedSharding(mesh.abstract_mesh, spec, memory_kind=memory)


def shape_at(x: Any, at: Sharding) -> jax.ShapeDtypeStruct:
    """The shape and dtype of an array that lives at a sharding."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at)


def bytes_per_device(leaves: Iterable[Leaf], placement: Placement, mesh: Mesh) -> int:
    """What a device and its host memory hold of these leaves, each as it is split under a placement."""
    pieces = size_over(mesh, placement.axes)
    return sum(leaf.bytes // (pieces if leaf.dim is not None else 1) for leaf in leaves)
