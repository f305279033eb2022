"""Several processes find each other, agree on what they run, and end together, whatever happens to one of them."""

from __future__ import annotations

import signal
import sys

import pytest
from several import Process, environment, free_port, processes, run, script

from jaxshard.train import cluster
from jaxshard.train.config import ConfigError
from jaxshard.train.processes import agree, count, difference, index, initialize, is_first, told_to_others

START = """
import os, signal, sys
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from jaxshard.train.config import ConfigError
from jaxshard.train.processes import (
    Disagreement, agree, count, index, initialize, is_first, publish, published, told_to_others
)

def total():
    "A sum over all devices of all processes, of the numbers from 0."
    mesh = jax.make_mesh((jax.device_count(),), ("d",))
    numbers = np.arange(jax.device_count(), dtype="float32")
    x = jax.make_array_from_callback(numbers.shape, NamedSharding(mesh, P("d")), lambda part: numbers[part])
    return float(jax.jit(lambda x: x.sum(), out_shardings=NamedSharding(mesh, P()))(x))
"""


def test_processes_find_each_other_and_compare_facts():
    """Equal facts pass; different ones are the same error in every process, after which they can still speak."""
    text = """
initialize()
initialize()
assert (is_first(), count()) == (index() == 0, 2)
agree("configuration", {"optimizer": {"name": "sgd", "rate": 0.1}, "files": ["a", "b"], "none": {}})
print("sum", total(), jax.local_device_count())
mine = [
    {"optimizer": {"learning_rate": 0.003 - 0.001 * index(), "beta": 0.9}},
    {"data": {"files": ["a", "b"][: 2 - index()]}, "seed": index()},
    {"a": 1} if is_first() else {"a": 1, "b": {"c": True}},
    {"program": "x" * 1000 + str(index())},
]
for facts in mine:
    try:
        agree("configuration", facts)
    except Disagreement as error:
        print(error)
agree("program", {"text": "the same"})
print("end")
"""
    ended = run(START + text)
    for code, out in ended:
        assert code == 0, out
        assert "sum 28.0 4" in out
        lines = out.splitlines()
        assert lines[-1] == "end"
        same = "All processes must be started with the same configuration."
        assert lines[1:4] == [
            f"process 1 has optimizer.learning_rate = 0.002, and process 0 has 0.003. {same}",
            f'process 1 has data.files = ["a"], and process 0 has ["a", "b"] (1 more differ: seed). {same}',
            f"process 1 has b.c = true, and process 0 has none. {same}",
        ]
        assert lines[4].startswith('process 1 has program = "xxx')
        assert len(lines[4]) < 300
    assert ended[0][1] == ended[1][1]


@pytest.mark.parametrize("first", [0, 1])
def test_one_that_fails_before_it_agrees_is_named(first):
    """`agree` raises at once in the others, which end with the same code."""
    text = """
initialize()
try:
    with told_to_others():
        if index() == int(sys.argv[1]):
            raise ConfigError("cannot read data/tokens.bin.")
        agree("configuration", {}, seconds=1000)
except ConfigError as error:
    print(error)
    sys.exit(2)
"""
    ended = run(START + text, str(first))
    assert ended[first] == (2, "cannot read data/tokens.bin.")
    assert ended[1 - first] == (2, f"process {first} stopped: cannot read data/tokens.bin.")


@pytest.mark.parametrize("first", [0, 1])
def test_one_that_fails_while_the_other_waits_in_a_collective(first):
    """No exception can reach a thread that waits there: the process is ended, and says why."""
    text = """
initialize()
print(total(), flush=True)
with told_to_others():
    if index() == int(sys.argv[1]):
        raise ValueError("what went\\nwrong")
    total()
"""
    ended = run(START + text, str(first))
    assert ended[first][0] == 1
    assert "ValueError: what went\nwrong" in ended[first][1]
    code, out = ended[1 - first]
    assert (code, out) == (1, f"28.0\njaxshard: process {first} stopped: ValueError: what went wrong")


def test_one_that_does_not_come_is_named():
    """And is ended when it comes after all, though its facts are the same."""
    text = """
initialize()
try:
    with told_to_others():
        while not is_first() and 0 not in published("gone"):
            pass
        agree("data", {}, seconds=0.2)
        print("agreed")
except Disagreement as error:
    print(error)
    sys.exit(2)
"""
    first, second = run(START + text)
    said = "process 1 did not come within 0.2 s to compare the data; the others wait. Look at what it printed last."
    assert first == (2, said)
    assert second == (2, f"process 0 stopped: {said}")


def test_one_that_is_killed_ends_the_others():
    """Without a launcher too: JAX's heartbeats miss it."""
    text = """
initialize(heartbeat_seconds=1)
print("sum", total(), flush=True)
if not is_first():
    signal.pause()
total()
"""
    with processes(script(START + text)) as (first, second):
        first.expect("sum 28.0")
        second.expect("sum 28.0")
        second.signal(signal.SIGKILL)
        assert second.wait() == -signal.SIGKILL
        assert first.wait() == -signal.SIGABRT
        assert "stopped sending heartbeats" in first.out


def test_jax_detects_the_cluster():
    """Oracle: the variables that Slurm sets in a step of two tasks, and Open MPI 4 for two ranks."""
    text = "initialize()\nagree('data', {})\nprint(index(), count(), len(jax.devices()))"
    step = {"SLURM_JOB_ID": "3", "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2"}
    slurm = [step | {"SLURM_PROCID": str(i), "SLURM_LOCALID": str(i)} for i in range(2)]
    mpi = {"OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://127.0.0.1:34911", "OMPI_COMM_WORLD_SIZE": "2"}
    ompi = [mpi | {"OMPI_COMM_WORLD_RANK": str(i), "OMPI_COMM_WORLD_LOCAL_RANK": str(i)} for i in range(2)]
    for variables in (slurm, ompi):
        port = {"JAX_COORDINATOR_PORT": str(free_port())}
        job = [Process(script(START + text), environment(2, **each, **port)) for each in variables]
        assert [(one.wait(), one.out) for one in job] == [(0, "0 2 4"), (0, "1 2 4")]


JOB = {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "3"}
STEP = {name: "1" for name in cluster.SLURM_STEP}


@pytest.mark.parametrize(
    ("variables", "name"),
    [
        (JOB, "a:1"),
        (JOB | STEP | {"SLURM_NTASKS": "8"}, "a:1"),
        (STEP | {"SLURM_NTASKS": "8"}, "Slurm"),
        (STEP, None),
        (STEP | {"SLURM_NTASKS": "8", "JAX_NUM_PROCESSES": "1"}, None),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_MCA_orte_hnp_uri": "x"}, "Open MPI"),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, None),
    ],
)
def test_who_is_asked_for_the_other_processes(variables, name):
    """A step of one task and a plain pod are left alone; what is said by hand comes before what is detected."""
    found = cluster.found(variables)
    assert (found and found.name) == name


def test_jax_is_not_asked_for_gpus_where_the_job_is_said_by_hand():
    found = cluster.found(JOB | STEP)
    assert found is not None
    assert found.arguments == {
        "coordinator_address": "a:1",
        "num_processes": 4,
        "process_id": 3,
        "cluster_detection_method": "deactivate",
    }


def test_elsewhere_jax_looks_for_itself():
    found = cluster.found({})
    assert found is not None
    assert not found.certain


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"JAX_NUM_PROCESSES": "2"}, "JAX_COORDINATOR_ADDRESS and JAX_PROCESS_ID not set"),
        (
            JOB | {"JAX_PROCESS_ID": "4"},
            "JAX_PROCESS_ID=4 .* processes are numbered from 0 to 3",
        ),
        (JOB | {"JAX_PROCESS_ID": "one"}, "JAX_PROCESS_ID='one' is not a number"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "MPI started 2 processes, which JAX joins by mpi4py: pip install mpi4py"),
        ({"PMI_SIZE": "2"}, "set JAX_NUM_PROCESSES=1 to train in this process alone"),
        (
            {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "0"},
            r"a pod of an indexed job, which JAX joins by kubernetes: pip install 'jax\[k8s\]'",
        ),
    ],
)
def test_jobs_that_cannot_be_joined(variables, message, monkeypatch):
    monkeypatch.setattr(cluster, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=message):
        cluster.found(variables)


def test_mpi_without_a_place_to_look_is_asked_through_its_own_package(monkeypatch):
    monkeypatch.setattr(cluster, "find_spec", lambda name: object())
    found = cluster.found({"PMI_SIZE": "2"})
    assert found is not None
    assert found.arguments == {"cluster_detection_method": "mpi4py"}


def test_joining_too_late_is_an_error():
    text = "import jax; jax.devices()\nfrom jaxshard.train.processes import initialize\ninitialize()"
    one = Process([sys.executable, "-c", text], environment(1, **JOB))
    assert one.wait() == 1
    assert "ConfigError: cannot join the job (a:1)" in one.out
    assert "must be called before" in one.out


@pytest.mark.smoke
def test_one_process_alone(monkeypatch):
    """Nothing is joined, compared or told; and JAX has started here."""
    for name in JOB:
        monkeypatch.delenv(name, raising=False)
    initialize()
    assert (index(), count(), is_first()) == (0, 1, True)
    agree("configuration", {"any": object()})
    with pytest.raises(KeyError), told_to_others():
        raise KeyError


def test_more_than_two_processes_in_one_line():
    assert difference([1, 2, 3], {"a": {"b": 1}, "c": 2}, {"a": {"b": 2}, "d": 1}) == (
        "processes 1, 2 and 3 differ from process 0: process 1 has a.b = 1, and process 0 has 2 (2 more differ: c, d)."
    )
    assert difference([4], {}, {"a": 1.5}) == "process 4 has no a, and process 0 has 1.5."
