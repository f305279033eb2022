"""`jaxshard launch` trains as one process does, also when a process is killed on the way, and refuses what differs.

Oracle: the same run by one process of eight devices. Gloo adds in another order than the collectives within a process,
so that losses agree to rounding; what is saved and restored, and runs of the same processes, to the bit.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
from quick import QUICK
from several import Process, environment, processes

from jaxshard.train.checkpoint import describe

CONFIG = """
[strategy]
name = "zero3"
[model]
width = 16
layers = 1
heads = 2
context = 16
[data]
batch = 8
[optimizer]
warmup_steps = 2
[run]
steps = 10
save_every = 2
keep_last = 9
log_every = 1
eval_every = 0
eval_batches = 1
watchdog = 0
"""
STEPS = 10
LAUNCH = [sys.executable, "-m", "jaxshard", "launch", "--processes", "2", "--devices", "4"]
TRAIN = [sys.executable, "-m", "jaxshard", "train"]


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = tmp_path_factory.mktemp("config") / "tiny.toml"
    path.write_text(CONFIG)
    return path


# What is tested is not how fast programs run, and compiling them is most of the time.
ENVIRONMENT = environment(1, XLA_FLAGS=" ".join(f"--{name}={value}" for name, value in QUICK.items()))


def finished(*command: object) -> Process:
    """A run that has ended well. In a process of its own: programs out of JAX's cache on CPUs are not always right."""
    job = Process(list(map(str, command)), ENVIRONMENT)
    assert job.wait() == 0, job.out
    return job


@pytest.fixture(scope="module")
def alone(config, tmp_path_factory):
    """The run of one process, left alone."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    finished(*TRAIN, config, "--devices", 8, "--run.dir", folder)
    return folder


@pytest.fixture(scope="module")
def together(config, tmp_path_factory):
    """The run of two processes, left alone."""
    folder = tmp_path_factory.mktemp("together") / "run"
    assert "on 8 cpu devices of 2 processes" in finished(*LAUNCH, config, "--run.dir", folder).out
    return folder


def rows(folder: Path) -> list[dict[str, float]]:
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in found] == [*range(1, STEPS + 1), STEPS], "each step once, and the evaluation"
    return found


def digests(folder: Path, step: int = STEPS) -> dict[str, str]:
    return {path: leaf.digest for path, leaf in describe(folder / "checkpoints", step).leaves.items()}


def close(folder: Path, to: Path) -> None:
    for found, expected in zip(rows(folder), rows(to), strict=True):
        assert found.keys() == expected.keys()
        np.testing.assert_allclose(list(found.values()), list(expected.values()), rtol=1e-4, err_msg=str(found))
    assert rows(to)[-1]["held_out_loss"] < rows(to)[0]["loss"] - 0.2, "it learns"


def cut(folder: Path, to: Path, step: int) -> Path:
    """A copy of the run as it would be, had it died after this step."""
    shutil.copytree(folder, to)
    for one in (to / "checkpoints").iterdir():
        if one.name.isdigit() and int(one.name) > step:
            shutil.rmtree(one)
    return to


def children(pid: int) -> list[int]:
    return sorted(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def killed(config: Path, folder: Path, *options: str) -> Process:
    """A job of which the second process is killed after some steps."""
    job = Process([*LAUNCH, *options, config, "--run.dir", folder], ENVIRONMENT)
    job.expect("step 5/10")  # the save after step 4 has begun, so that the one after step 2 is whole
    os.kill(children(job.pid)[1], signal.SIGKILL)
    assert job.wait() == 0, job.out
    assert "jaxshard: process 1 was ended by SIGKILL" in job.out
    assert "goes on after step" in job.out
    return job


def test_two_processes_train_as_one(alone, together):
    close(together, alone)
    assert digests(together) != digests(alone), "which is why they are only close"


def test_one_that_is_killed_changes_nothing(config, together, tmp_path):
    """To the bit: the metrics file, and all that is saved at the end."""
    job = killed(config, tmp_path / "run", "--restarts", "1")
    assert "starts again with 2 processes, from the last checkpoint: restart 1 of 1" in job.out
    assert rows(tmp_path / "run") == rows(together)
    assert digests(tmp_path / "run") == digests(together)


def test_the_rest_go_on_without_it(config, alone, tmp_path):
    """Saved by two and restored by one, with four devices in the place of eight."""
    job = killed(config, tmp_path / "run", "--restarts", "1", "--min-processes", "1")
    assert "starts again with 1 process, from the last checkpoint" in job.out
    assert "on 4 cpu devices (" in job.out
    close(tmp_path / "run", alone)


def test_saved_by_one_and_restored_by_two(config, alone, tmp_path):
    two = cut(alone, tmp_path / "two", 4)
    assert "goes on after step 4 of 10" in finished(*LAUNCH, config, "--run.dir", two).out
    close(two, alone)
    assert rows(two)[:4] == rows(alone)[:4]
    assert rows(two)[4:] != rows(alone)[4:], "they were made by others"


def test_processes_that_were_started_differently(config, tmp_path):
    """Other numbers, and files of other lengths: an error in one line in each, before there is a folder."""
    text = b"some text of a corpus, long enough for a few sequences and some that are held out. " * 20
    for i in range(2):
        (tmp_path / str(i)).mkdir()
        (tmp_path / str(i) / "corpus.txt").write_bytes(text[: len(text) - 100 * i])
    differ = {
        "optimizer.learning_rate": (["--optimizer.learning_rate", "0.1"], ["--optimizer.learning_rate", "0.2"]),
        "corpus": (["--data.files", "corpus.txt"], ["--data.files", "corpus.txt"]),
        "no such file": (["--data.files", "corpus.txt"], ["--data.files", "absent.txt"]),
    }
    run = ["--run.dir", str(tmp_path / "run"), "--devices", "4"]
    for name, args in differ.items():
        commands = [[*TRAIN, str(config), *run, *args[i]] for i in range(2)]
        with processes(commands, folders=[tmp_path / "0", tmp_path / "1"]) as job:
            assert [one.wait() for one in job] == [2, 2], job[0].out
        # JAX's own threads may log that a connection has ended.
        first, second = ([line for line in one.lines if line.startswith("jaxshard: ")] for one in job)
        assert len(first) == len(second) == 1
        if name == "no such file":
            assert second[0].startswith("jaxshard: cannot read absent.txt")
            assert first[0] == f"jaxshard: process 1 stopped: {second[0].removeprefix('jaxshard: ')}"
        else:
            assert first == second
            assert first[0].startswith(f"jaxshard: process 1 has {name}")
            assert "All processes must be started with the same configuration." in first[0]
    assert not (tmp_path / "run").exists()
