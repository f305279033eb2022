"""A run that was stopped, or died, goes on as if it never had been: to the bit, and with each step once in its metrics.

Oracle: the same run left alone. Its steps are such that saves, reports and evaluations fall together and apart.
"""

import json
import shutil
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
from disk import files_of_at_most
from several import Process, environment

from jaxshard.cli import main
from jaxshard.train import loop
from jaxshard.train.checkpoint import Checkpoints, describe
from jaxshard.train.config import Config, ConfigError
from jaxshard.train.data import python_documentation
from jaxshard.train.description import steps
from jaxshard.train.folder import RunFolder
from jaxshard.train.session import Session
from jaxshard.train.stop import Stop

pytestmark = pytest.mark.usefixtures("compiled_once")

CONFIG = """
[mesh]
devices = 8
[strategy]
name = "zero3"
[model]
width = 16
layers = 2
heads = 2
context = 16
dropout = 0.1
[data]
batch = 8
[optimizer]
warmup_steps = 2
[run]
steps = 9
save_every = 3
keep_last = 9
log_every = 4
eval_every = 2
eval_batches = 1
watchdog = 0
"""
STEPS = 9


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = tmp_path_factory.mktemp("config") / "tiny.toml"
    path.write_text(CONFIG)
    return path


@pytest.fixture(scope="module")
def alone(config, tmp_path_factory):
    """The run that was left alone."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    assert train(config, folder) == 0
    return folder


def train(config: Path, folder: Path, *args: str) -> int:
    return main(["train", str(config), "--run.dir", str(folder), *args])


def rows(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def left(folder: Path) -> dict[str, object]:
    """What a run leaves, but for its configuration's name of its own folder."""
    found = Checkpoints(folder / "checkpoints").steps()
    leaves = {step: {path: leaf.digest for path, leaf in describe(folder, step).leaves.items()} for step in found}
    return {"metrics": (folder / "metrics.jsonl").read_bytes(), "leaves": leaves, "files": sorted(files(folder))}


def files(folder: Path) -> list[str]:
    return [entry.name for entry in folder.iterdir() if entry.name != ".lock"]


class Died(BaseException):
    """The end of the process, as far as a program can have it in a test."""


def dies_at(monkeypatch, name: str, count: int, *, after: bool = False) -> None:
    """The `count`-th call of a method of the run ends it, before or after what it does."""
    whole, calls = getattr(loop._Run, name), []

    def method(self, *args):
        calls.append(name)
        if len(calls) == count and not after:
            raise Died
        result = whole(self, *args)
        if len(calls) == count:
            raise Died
        return result

    monkeypatch.setattr(loop._Run, name, method)


def test_the_run_left_alone_has_each_step_once(alone):
    found = rows(alone)
    assert [row["step"] for row in found if "loss" in row] == list(range(1, STEPS + 1))
    assert [row["step"] for row in found if "held_out_loss" in row] == [2, 4, 6, 8, 9]
    assert Checkpoints(alone / "checkpoints").steps() == [3, 6, 9]
    assert sorted(files(alone)) == ["checkpoints", "config.json", "metrics.jsonl"]


@pytest.mark.parametrize("step", [1, 3, pytest.param(5, marks=pytest.mark.smoke), 8])
def test_stopped_and_gone_on(config, alone, tmp_path, monkeypatch, capsys, step):
    with monkeypatch.context() as patch:
        patch.setattr(Stop, "asked", lambda self, made: made == step)
        assert train(config, tmp_path / "run") == 0
    assert f"stopped after step {step} of {STEPS} and saved it" in capsys.readouterr().out
    assert Checkpoints(tmp_path / "run" / "checkpoints").steps()[-1] == step
    assert train(config, tmp_path / "run") == 0
    assert f"goes on after step {step} of {STEPS}" in capsys.readouterr().out
    found, expected = left(tmp_path / "run"), left(alone)
    extra = found["leaves"].keys() - expected["leaves"].keys()  # type: ignore[union-attr]
    assert extra <= {step}
    for one in extra:
        del found["leaves"][one]  # type: ignore[attr-defined]
    assert found == expected


@pytest.mark.parametrize(
    ("name", "count", "after"),
    [
        ("step", 2, True),  # before anything is saved
        ("step", 5, True),  # with metrics that are not written yet
        ("save", 2, False),  # with metrics that are ahead of the checkpoint
        ("save", 2, True),  # with an evaluation that is owed
        ("evaluate_if_due", 9, False),  # after the last step
        ("evaluate_if_due", 8, True),
    ],
)
def test_dead_and_gone_on(config, alone, tmp_path, monkeypatch, name, count, after):
    with monkeypatch.context() as patch:
        dies_at(patch, name, count, after=after)
        with pytest.raises(Died):
            train(config, tmp_path / "run")
    assert left(tmp_path / "run") != left(alone)
    assert train(config, tmp_path / "run") == 0
    found = left(tmp_path / "run")
    # One that died before its first checkpoint began anew, and what it had left is kept.
    found["files"] = [name for name in found["files"] if ".1" not in name]  # type: ignore[attr-defined]
    assert found == left(alone)


def test_a_line_that_was_being_written_is_dropped(config, alone, tmp_path):
    """A machine that dies can leave half a line; steps up to the checkpoint that are missing are said."""
    folder = tmp_path / "run"
    shutil.copytree(alone, folder)
    shutil.rmtree(folder / "checkpoints" / "9")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "lo')
    assert train(config, folder) == 0
    assert left(folder) == left(alone)


def test_metrics_that_lack_steps_are_told_of(config, alone, tmp_path, capsys):
    folder = tmp_path / "run"
    shutil.copytree(alone, folder)
    shutil.rmtree(folder / "checkpoints" / "9")
    (folder / "metrics.jsonl").unlink()
    assert train(config, folder) == 0
    assert "lacks 6 of the steps up to there, from 1 on" in capsys.readouterr().out
    assert [row["step"] for row in rows(folder) if "loss" in row] == [7, 8, 9]


def test_metrics_that_are_lost_after_the_last_step(config, alone, tmp_path, capsys):
    folder = tmp_path / "run"
    shutil.copytree(alone, folder)
    (folder / "metrics.jsonl").unlink()
    assert train(config, folder) == 0
    assert rows(folder) == rows(alone)[-1:], "the last look at the held-out part is made again"
    assert f"after 9 steps: held-out loss {rows(alone)[-1]['held_out_loss']:.5f}" in capsys.readouterr().out


def test_fewer_steps_than_were_made(config, alone, tmp_path, capsys):
    folder = tmp_path / "run"
    shutil.copytree(alone, folder)
    for step in ("6", "9"):
        shutil.rmtree(folder / "checkpoints" / step)
    assert train(config, folder, "--changed", "--run.steps", "2") == 0
    assert f"{folder} is complete, with 3 steps" in capsys.readouterr().out


def test_what_lies_hidden_among_checkpoints_is_no_matter(config, alone, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(alone, folder)
    (folder / "checkpoints" / ".nfs0001").write_text("")
    assert train(config, folder) == 0


def test_a_complete_run_is_left_as_it_is(config, alone, tmp_path, capsys):
    folder = tmp_path / "run"
    shutil.copytree(alone, folder)
    assert train(config, folder) == 0
    assert f"{folder} is complete, with 9 steps; --fresh begins anew." in capsys.readouterr().out
    assert left(folder) == left(alone)


def test_fresh_begins_anew_and_keeps_what_was_there(config, alone, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(alone, folder)
    assert train(config, folder, "--fresh", "--run.seed", "1") == 0
    assert (folder / "metrics.1.jsonl").read_bytes() == (alone / "metrics.jsonl").read_bytes()
    assert (folder / "metrics.jsonl").read_bytes() != (alone / "metrics.jsonl").read_bytes()
    assert Checkpoints(folder / "checkpoints.1").steps() == [3, 6, 9]
    assert json.loads((folder / "config.1.json").read_text())["run"]["seed"] == 0


@pytest.mark.parametrize("renamed", [0, 1, 2, 3])
def test_dead_while_it_keeps_what_was_there(tmp_path, monkeypatch, renamed):
    """Whatever the moment, the next start ends it: all that a run left has one number."""
    for name in ("metrics.1.jsonl", "config.1.json"):  # of a run that died before its first checkpoint
        (tmp_path / name).write_text("older")
    for name in ("metrics.jsonl", "config.json"):
        (tmp_path / name).write_text("old")
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "old").write_text("")
    whole, calls = Path.rename, []

    def rename(self, target):
        calls.append(self)
        if len(calls) > renamed:
            raise Died
        return whole(self, target)

    folder = RunFolder(tmp_path, writes=True)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", rename)
        patch.setattr(Path, "replace", rename)
        with pytest.raises(Died):
            folder.begin(Config())
    assert steps(folder.checkpoints) == []
    folder.begin(Config())
    assert files(tmp_path / "checkpoints.2") == ["old"]
    assert [(tmp_path / name).read_text() for name in ("metrics.2.jsonl", "config.2.json")] == ["old", "old"]
    assert (tmp_path / "metrics.1.jsonl").read_text() == "older"
    assert len(files(tmp_path)) == 6


def test_a_full_disk_keeps_what_was_there(alone, tmp_path):
    folder = RunFolder(Path(shutil.copytree(alone, tmp_path / "run")), writes=True)
    for change in (lambda: folder.begin(Config()), lambda: folder.go_on(Config(), 3)):
        with files_of_at_most(10), pytest.raises(ConfigError, match=r"cannot write to run\.dir = .*: File too large"):
            change()
        assert left(folder.path) == left(alone)


def test_a_run_that_ended_while_this_one_began(config, alone, tmp_path, monkeypatch, capsys):
    folder, whole = tmp_path / "run", Session.first_state

    def first_state(self):
        shutil.copytree(alone, folder)
        return whole(self)

    monkeypatch.setattr(Session, "first_state", first_state)
    assert train(config, folder) == 2
    assert f"another run was at work in run.dir = {folder} just now; give the command again" in capsys.readouterr().err
    assert left(folder) == left(alone)


def test_another_configuration_is_refused_until_it_is_allowed(config, alone, tmp_path, capsys):
    folder = tmp_path / "run"
    shutil.copytree(alone, folder)
    before = left(folder)
    longer = ["--run.steps", "10", "--optimizer.learning_rate", "1e-3"]
    assert train(config, folder, *longer) == 2
    err = capsys.readouterr().err
    assert "was trained with optimizer.learning_rate = 0.003, now 0.001; run.steps = 9, now 10. Add --changed" in err
    assert err.count("\n") == 1
    assert left(folder) == before
    assert train(config, folder, *longer, "--changed") == 0
    out = capsys.readouterr().out
    assert "goes on after step 9 of 10" in out
    assert "it was trained with optimizer.learning_rate = 0.003, now 0.001; run.steps = 9, now 10" in out
    assert [row["step"] for row in rows(folder) if "loss" in row] == list(range(1, 11))


def test_another_corpus_is_refused(config, tmp_path, capsys):
    text = tmp_path / "text"
    text.write_bytes(python_documentation()[:20_000])
    args = ["--data.files", str(text), "--run.steps", "2"]
    assert train(config, tmp_path / "run", *args) == 0
    text.write_bytes(python_documentation()[1:20_001])
    assert train(config, tmp_path / "run", *args) == 2
    assert "was trained with another corpus: its files had other tokens or sizes" in capsys.readouterr().err


def test_the_corpus_may_be_elsewhere(config, tmp_path, capsys):
    for name in ("text", "moved"):
        (tmp_path / name).write_bytes(python_documentation()[:20_000])
        assert train(config, tmp_path / "run", "--data.files", str(tmp_path / name), "--run.steps", "2") == 0
    assert "is complete" in capsys.readouterr().out


@pytest.fixture(scope="module")
def without_dropout(config, tmp_path_factory):
    """(a run left alone, one stopped after step 6), without dropout, which draws on each device by its place."""
    folder = tmp_path_factory.mktemp("without")
    assert train(config, folder / "alone", "--model.dropout", "0") == 0
    shutil.copytree(folder / "alone", folder / "stopped")
    shutil.rmtree(folder / "stopped" / "checkpoints" / "9")
    return folder / "alone", folder / "stopped"


@pytest.mark.parametrize("strategy", ["ddp", "hsdp", "dp"])
def test_any_strategy_goes_on(config, without_dropout, tmp_path, capsys, strategy):
    alone, stopped = without_dropout
    folder = tmp_path / "run"
    shutil.copytree(stopped, folder)
    assert train(config, folder, "--model.dropout", "0", "--strategy", strategy) == 0
    out = capsys.readouterr().out
    assert f"{strategy} on 8 cpu devices" in out
    assert "goes on after step 6 of 9" in out
    expected, found = ([row["loss"] for row in rows(one) if "loss" in row] for one in (alone, folder))
    assert found[:6] == expected[:6]
    np.testing.assert_allclose(found, expected, rtol=2e-6)


def test_float16_goes_on_with_its_loss_scale(config, tmp_path, monkeypatch):
    args = ["--precision.compute", "float16", "--precision.growth_interval", "2", "--run.steps", "6"]
    assert train(config, tmp_path / "alone", *args) == 0
    with monkeypatch.context() as patch:
        patch.setattr(Stop, "asked", lambda self, made: made == 3)
        assert train(config, tmp_path / "run", *args) == 0
    assert train(config, tmp_path / "run", *args) == 0
    assert rows(tmp_path / "run") == rows(tmp_path / "alone")
    scales = [row["loss_scale"] for row in rows(tmp_path / "run") if "loss" in row]
    assert scales[-1] > scales[2] > scales[0], "a scale that begins anew would be seen"


def test_an_error_in_the_metrics_touches_nothing(config, alone, tmp_path, capsys):
    folder = tmp_path / "run"
    shutil.copytree(alone, folder)
    shutil.rmtree(folder / "checkpoints" / "9")
    (folder / "metrics.jsonl").write_text("precious\n")
    assert train(config, folder) == 2
    assert "metrics.jsonl is not what a run wrote" in capsys.readouterr().err
    assert (folder / "metrics.jsonl").read_text() == "precious\n"


def test_a_signal(config, tmp_path):
    """In a process of its own: asked to stop, as by a scheduler, it saves and says so in one line."""
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "jaxshard", "train", config, "--run.dir", folder, "--run.steps", "100000"]
    process = Process([*command, "--run.log_every", "1", "--run.eval_every", "0"], environment(8))
    try:
        process.expect("step 3/")
        process.signal(signal.SIGTERM)
        assert process.wait() == 0
    finally:
        process.end()
    (saved,) = Checkpoints(folder / "checkpoints").steps()[-1:]
    assert process.lines[-1] == f"stopped after step {saved} of 100000 and saved it; the same command goes on."
    assert rows(folder)[-1]["step"] == describe(folder, saved).notes["progress"]["step"] == saved
