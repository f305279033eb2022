"""Every strategy on eight devices, compiled quickly: for tests of what a step computes, not of how fast it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import optax
from oracle import mesh_of

import jaxshard as js
from jaxshard import Strategy

# What such a test tests is the program, not its speed. Compiling is most of its time; this leaves a quarter of it.
QUICK = {
    "xla_backend_optimization_level": "0",
    "xla_llvm_disable_expensive_passes": "True",
    "xla_cpu_parallel_codegen_split_count": "1",
}
if jax.__version_info__ < (0, 11):  # later compilers do not know this
    QUICK |= {"xla_cpu_use_fusion_emitters": "False"}

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
