"""How a program is trained: meshes, strategies and choices drawn at random."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from hypothesis import strategies as st

import jaxshard as js
from jaxshard.strategy import STRATEGIES

MESHES = ((1, 8), (2, 4), (4, 2), (8, 1), (1, 1), (1, 4), (2, 2))
"""Replicas and shards."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """trains: "all", or every second leaf besides the head, "odd" or "even". seed: of parameters and data."""

    strategy: str | js.Strategy = "zero3"
    mesh: tuple[int, int] = (1, 8)
    accumulate: int = 1
    remat: str = "none"
    whole_budget: float = 0
    trains: str = "all"
    seed: int = 0

    @property
    def parts(self) -> int:
        """Into how many parts a batch is cut."""
        return self.mesh[0] * self.mesh[1] * self.accumulate

    def learns(self, leaf: int) -> bool:
        """Whether this leaf has a gradient; leaf 0 is the head."""
        return leaf == 0 or self.trains == "all" or leaf % 2 == (self.trains == "odd")

    def choices(self, params: Any) -> dict[str, Any]:
        """The arguments of `parallelize`."""
        leaves, structure = jax.tree.flatten(params)
        replica, shard = self.mesh
        mask = jax.tree.unflatten(structure, [self.learns(i) for i in range(len(leaves))])
        return {
            "strategy": self.strategy,
            "mesh": js.make_mesh(replica=replica, shard=shard, devices=jax.devices()[: replica * shard]),
            "accumulate": self.accumulate,
            "remat": self.remat if self.remat in ("none", "full", "dots") else POLICIES[self.remat],
            "whole_budget": self.whole_budget,
            "trainable": None if self.trains == "all" else mask,
        }


POLICIES: dict[str, Callable[..., Any]] = {
    "everything_saveable": jax.checkpoint_policies.everything_saveable,
    "nothing_saveable": jax.checkpoint_policies.nothing_saveable,
}
AXES = ((), ("shard",), ("replica",), ("shard", "replica"), ("replica", "shard"))


@st.composite
def strategies(draw: Any) -> js.Strategy:
    """Any legal strategy of one's own."""
    axes = draw(st.sampled_from(AXES[1:]))
    params, grads, opt = (
        js.Placement(axes=axes[:cut]) for cut in sorted(draw(st.integers(0, len(axes))) for _ in range(3))
    )
    return js.Strategy(
        params=params,
        grads=grads,
        opt=opt,
        gather=draw(st.sampled_from(("use", "step"))),
        regather=draw(st.booleans()),
        reduce=draw(st.sampled_from(("microbatch", "step"))),
        prefer=draw(st.sampled_from(("speed", "memory"))),
    )


BUILT_IN = [name for name, strategy in STRATEGIES.items() if strategy.params.devices == "all"]


@st.composite
def settings(draw: Any) -> Setting:
    strategy = draw(st.one_of(st.sampled_from(["zero3", *BUILT_IN]), strategies()))
    least = STRATEGIES[strategy].min_replicas if isinstance(strategy, str) else 1
    return Setting(
        strategy=strategy,
        mesh=draw(st.sampled_from([mesh for mesh in MESHES if mesh[0] >= least])),
        accumulate=draw(st.sampled_from((1, 1, 2, 3))),
        remat=draw(st.sampled_from(("none", "none", "full", "dots", *POLICIES))),
        whole_budget=draw(st.sampled_from((0, 0, 0.01, 0.5))),
        trains=draw(st.sampled_from(("all", "all", "odd", "even"))),
        seed=draw(st.integers(0, 99)),
    )
