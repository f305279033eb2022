"""Every strategy on eight devices, compiled quickly: for tests of what a step computes, not of how fast it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optax
from oracle import mesh_of
from test_programs import QUICK

import jaxshard as js
from jaxshard import Strategy

EVERY = [(name, (1, 8)) for name in ("dp", "ddp", "zero1", "zero2", "shard_grad_op", "zero3")] + [("hsdp", (2, 4))]
"""(strategy, replica x shard)."""


def quick(
    loss: Callable[..., Any],
    params: Any,
    batch: Any,
    strategy: str | Strategy = "zero3",
    mesh: tuple[int, int] = (1, 8),
    *,
    optimizer: optax.GradientTransformation | None = None,
    **choices: Any,
) -> Any:
    """A training that splits every leaf it can. Plain descent at rate 1 by default: a step moves by the gradient."""
    return js.parallelize(
        loss,
        optax.sgd(1.0) if optimizer is None else optimizer,
        params=params,
        batch=batch,
        mesh=mesh_of(*mesh),
        strategy=strategy,
        whole_budget=0,
        compiler_options=QUICK,
        **choices,
    )
