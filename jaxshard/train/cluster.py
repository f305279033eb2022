"""How the processes of a job find each other: from variables that a launcher set, or as JAX detects clusters."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

from jaxshard.train.config import ConfigError

ADDRESS, COUNT, INDEX = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
"""host:port at which process 0 listens, how many processes there are, and which of them this is."""

ALONE = f"set {COUNT}=1 to train in this process alone"
BY_HAND = f"set {ADDRESS}, {COUNT} and {INDEX} for each process"
SLURM_STEP = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """What `jax.distributed.initialize` is to be called with.

    name: who started the processes. arguments: for the call. certain: False where JAX is to see for itself whether
    there are others.
    """

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    certain: bool = True


def found(environment: Mapping[str, str] | None = None) -> Cluster | None:
    """The job that this process belongs to; None if it is alone.

    JAX detects clusters by itself. What is decided here is when it must not: it would wait for others in a Slurm step
    of one task (and leave it one GPU), or in any pod of Kubernetes; and it would overlook Open MPI 5.

    Raises ConfigError for variables that contradict each other, or a package that is missing.
    """
    given = os.environ if environment is None else environment
    if given.get(COUNT) == "1":
        return None
    if COUNT in given or INDEX in given:
        return _by_hand(given)
    step = all(name in given for name in SLURM_STEP)
    tasks = _number(given, "SLURM_NTASKS") if step else 1
    ranks = max(_number(given, "OMPI_COMM_WORLD_SIZE"), _number(given, "PMI_SIZE"))
    if "OMPI_MCA_orte_hnp_uri" in given and ranks > 1:
        return Cluster(name="Open MPI")
    if tasks > 1:
        return Cluster(name="Slurm")
    if ranks > 1:
        _need("mpi4py", "mpi4py", f"MPI started {ranks} processes")
        return Cluster(name="MPI", arguments={"cluster_detection_method": "mpi4py"})
    if step:
        return None
    if "KUBERNETES_SERVICE_HOST" in given:
        if "JOB_COMPLETION_INDEX" not in given:
            return None
        _need("kubernetes", "'jax[k8s]'", "this is a pod of an indexed job")
        return Cluster(name="Kubernetes")
    return Cluster(name="JAX", certain=ADDRESS in given)


def _by_hand(given: Mapping[str, str]) -> Cluster:
    missing = [name for name in (ADDRESS, COUNT, INDEX) if not given.get(name)]
    if missing:
        raise ConfigError(f"{' and '.join(missing)} not set: {BY_HAND}, or none of them; {ALONE}.")
    count, index = _number(given, COUNT), _number(given, INDEX)
    if not 0 <= index < count:
        raise ConfigError(f"{INDEX}={index} with {COUNT}={count}: processes are numbered from 0 to {count - 1}.")
    arguments = {"coordinator_address": given[ADDRESS], "num_processes": count, "process_id": index}
    # Without this JAX would take GPUs' numbers from a cluster around, where a launcher says them otherwise.
    return Cluster(name=given[ADDRESS], arguments=arguments | {"cluster_detection_method": "deactivate"})


def _number(given: Mapping[str, str], name: str) -> int:
    text = given.get(name, "1")
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{name}={text!r} is not a number; {BY_HAND}.") from None


def _need(package: str, wheel: str, why: str) -> None:
    if find_spec(package) is None:
        raise ConfigError(f"{why}, which JAX joins by {package}: pip install {wheel}, or {BY_HAND}; {ALONE}.")
