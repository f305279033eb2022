"""Data-parallel training in JAX: a strategy is sharding specs on a device mesh, and every collective is explicit."""

from jaxshard.contract import Collective, ContractError
from jaxshard.dp import DataParallel
from jaxshard.explain import Explanation
from jaxshard.loss import Loss
from jaxshard.mesh import force_cpu_devices, make_mesh
from jaxshard.precision import Precision
from jaxshard.specs import WholeLeavesWarning
from jaxshard.state import TrainState, init_layers
from jaxshard.step import Training, parallelize
from jaxshard.strategy import (
    DDP,
    DP,
    HSDP,
    SHARD_GRAD_OP,
    STRATEGIES,
    ZERO1,
    ZERO2,
    ZERO3,
    Placement,
    Strategy,
    offload,
)

__all__ = [
    "DDP",
    "DP",
    "HSDP",
    "SHARD_GRAD_OP",
    "STRATEGIES",
    "ZERO1",
    "ZERO2",
    "ZERO3",
    "Collective",
    "ContractError",
    "DataParallel",
    "Explanation",
    "Loss",
    "Placement",
    "Precision",
    "Strategy",
    "TrainState",
    "Training",
    "WholeLeavesWarning",
    "force_cpu_devices",
    "init_layers",
    "make_mesh",
    "offload",
    "parallelize",
]
