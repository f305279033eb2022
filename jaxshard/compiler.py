"""The compiler's part of a strategy: XLA options, in one table per JAX version.

Which options exist changes with the release, so each is tried when a program is built; one that this compiler does not
know is left out, and `explain` says so. They matter on GPUs only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.stages import Compiled, Lowered

from jaxshard.strategy import HOST, Strategy

# Gathers and reductions of a loop over layers overlap the neighbouring layers' work only when the loop is pipelined; a
# pipelined loop copies its buffers unless it is double-buffered. JAX 0.12's compiler has new names for the first two.
_PIPELINED: dict[tuple[int, int], dict[str, str]] = {
    (0, 10): {
        "xla_gpu_enable_pipelined_all_gather": "True",
        "xla_gpu_enable_pipelined_all_reduce": "True",
        "xla_gpu_enable_while_loop_unrolling": "WHILE_LOOP_UNROLLING_DOUBLE_BUFFER",
    },
    (0, 12): {
        "xla_gpu_pipeline_all_gather": "COLLECTIVE_PIPELINING_MODE_ON",
        "xla_gpu_pipeline_all_reduce": "COLLECTIVE_PIPELINING_MODE_ON",
        "xla_gpu_enable_while_loop_unrolling": "WHILE_LOOP_UNROLLING_DOUBLE_BUFFER",
    },
}
# JAX 0.12's compiler makes the slices and updates of a loop's stacks asynchronous, and its scheduler takes 5 ms for
# each, so that it believes messages hidden which are not.
_ALWAYS: dict[tuple[int, int], dict[str, str]] = {
    (0, 10): {},
    (0, 12): {"xla_disable_hlo_passes": "dynamic-slice-copy-fusion-async-wrapper"},
}
# What a loop over layers fetches from host memory is on its way beside the layer before.
_FETCHED = {"xla_gpu_enable_pipelined_host_offloading": "True"}
_THRESHOLDS = (
    "xla_gpu_all_gather_combine_threshold_bytes",
    "xla_gpu_all_reduce_combine_threshold_bytes",
    "xla_gpu_reduce_scatter_combine_threshold_bytes",
)


def options_for(strategy: Strategy, platform: str, overrides: Mapping[str, str] | None = None) -> dict[str, str]:
    """XLA options by name. overrides: added last; what they name wins, None as a value drops an option."""
    options: dict[str, str] = {}
    if platform in ("gpu", "cuda", "rocm"):
        options |= _of_this_version(_ALWAYS)
        options |= _of_this_version(_PIPELINED) if strategy.prefer == "speed" else {}
        if strategy.prefer == "speed" and strategy.params.memory == HOST:
            options |= _FETCHED
        if strategy.bucket_mb is not None:
            options |= dict.fromkeys(_THRESHOLDS, str(int(strategy.bucket_mb * 2**20)))
    options |= {name: value for name, value in (overrides or {}).items()}
    return {name: value for name, value in options.items() if value is not None}


def _of_this_version(table: Mapping[tuple[int, int], dict[str, str]]) -> dict[str, str]:
    version = jax.__version_info__[:2]
    return table[max((known for known in table if known <= version), default=min(table))]


@dataclass(frozen=True)
class Built:
    """A compiled program, the options it was compiled with, and those that this compiler does not know."""

    compiled: Compiled
    options: dict[str, str]
    left_out: dict[str, str] = field(default_factory=dict)


def build(lowered: Lowered, options: Mapping[str, str], *, required: Mapping[str, str] | None = None) -> Built:
    """Compiles with the options that the compiler knows. required: a user's own, which are never left out silently."""
    kept: dict[str, Any] = dict(options)
    left_out: dict[str, str] = {}
    while True:
        try:
            return Built(lowered.compile(compiler_options=dict(kept) or None), kept, left_out)
        except Exception as error:
            unknown = [name for name in kept if name in str(error) and name not in (required or {})]
            if not unknown or "No such compile option" not in str(error):
                raise
            left_out |= {name: kept.pop(name) for name in unknown}
