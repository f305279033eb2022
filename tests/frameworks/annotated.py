"""Models that say how their arrays should be laid out on a mesh of other axes, as models for large machines do.

Here every device holds its part of the batch and, at its use, the whole of a parameter: there is nothing to lay out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import flax.linen as nn
import jax
from flax import nnx
from jax.sharding import AxisType

from frameworks import flax_linen, flax_nnx
from frameworks.case import Case

RULES = (("batch", "data"), ("embed", None), ("mlp", "model"), ("layers", None))
OWN_RULES = (("batch", ("replica", "shard")), ("embed", "shard"), ("mlp", None), ("layers", None))


@dataclass(frozen=True, kw_only=True)
class Annotated:
    """A model with annotations, of which `name` is one. plain: the same without. around: what its script runs in."""

    case: Callable[[], Case]
    plain: Case
    name: str = "mlp"
    around: Callable[[], AbstractContextManager] = nullcontext


@contextmanager
def inside(rules, sizes: dict[str, int]) -> Iterator[None]:
    mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))
    with jax.set_mesh(mesh), nn.logical_axis_rules(rules):
        yield


def linen(wrap, names) -> Case:
    return flax_linen.plain(flax_linen.Stack(remat=True, kernel_init=wrap(nn.initializers.lecun_normal(), names)))


def in_nnx() -> Case:
    kernel_init = nnx.with_partitioning(flax_nnx.KERNEL, ("embed", "mlp"))
    return flax_nnx.split(partial(flax_nnx.Blocks, stacked=False, remat=False, kernel_init=kernel_init))


LINEN, NNX = flax_linen.CASES["scan with remat"], flax_nnx.CASES["list"]
LOGICAL = partial(linen, nn.with_logical_partitioning, ("embed", "mlp"))
ANNOTATED = {
    "linen, axes of a mesh": Annotated(
        case=partial(linen, nn.with_partitioning, ("data", "model")), plain=LINEN, name="model"
    ),
    "linen, rules": Annotated(case=LOGICAL, plain=LINEN, around=partial(inside, RULES, {"data": 4, "model": 2})),
    "linen, rules for our axes": Annotated(
        case=LOGICAL, plain=LINEN, around=partial(inside, OWN_RULES, {"replica": 1, "shard": 8})
    ),
    "nnx, rules": Annotated(case=in_nnx, plain=NNX, around=partial(inside, RULES, {"data": 4, "model": 2})),
}
