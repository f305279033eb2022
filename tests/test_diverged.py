"""A run whose loss or gradients are no longer numbers: it stops and says what went bad, or leaves such steps out."""

import json

import numpy as np
import pytest
from test_resume import CONFIG, rows, train

from jaxshard.step import Training
from jaxshard.train import loop
from jaxshard.train.checkpoint import CheckpointError, Checkpoints
from jaxshard.train.nonfinite import fatal, is_bad

pytestmark = pytest.mark.usefixtures("compiled_once")


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = tmp_path_factory.mktemp("config") / "tiny.toml"
    path.write_text(CONFIG.replace('"zero3"', '"ddp"').replace("log_every = 4", "log_every = 1"))
    return path


@pytest.fixture
def poisoned(monkeypatch):
    """An element of a norm turns infinite before a step, as a fault of memory may make it."""
    whole, steps = Training.step, []

    def poison(at: int, *, once: bool = False):
        def step(self, state, batch):
            new, metrics = whole(self, state, batch)
            if int(new.step) + 1 == at and not (once and steps):
                steps.append(at)
                new.params["norm"]["scale"] = new.params["norm"]["scale"].at[0].set(np.inf)
            return new, metrics

        monkeypatch.setattr(Training, "step", step)

    return poison


def test_it_stops_with_the_step_the_checkpoint_and_the_leaves(config, tmp_path, poisoned, capsys):
    poisoned(5)
    folder = tmp_path / "run"
    assert train(config, folder) == 1
    captured = capsys.readouterr()
    assert "jaxshard: the loss is nan at step 5. The last good checkpoint is" in captured.err
    assert (
        f"{folder}/checkpoints/3; after it, step 5 is the first with leaves that are not finite: params/norm/scale, "
        "grads/"
    ) in captured.err
    assert captured.err.count("\n") == 1
    assert "step 5: the loss is nan; looking for what went bad first" in captured.out
    assert [row["step"] for row in rows(folder) if "loss" in row] == [1, 2, 3, 4, 5]
    assert is_bad(rows(folder)[-1])
    assert not any(is_bad(row) for row in rows(folder)[:-1] if "loss" in row)
    assert Checkpoints(folder / "checkpoints").steps() == [3], "what is bad is not saved"


def test_before_the_first_checkpoint(config, tmp_path, capsys):
    huge = ["--optimizer.name", "sgd", "--optimizer.learning_rate", "1e30", "--optimizer.clip", "1e30"]
    assert train(config, tmp_path / "run", *huge) == 1
    err = capsys.readouterr().err
    assert (
        "There is no checkpoint, but the initial state; after it, step 2 is the first with leaves that are not finite"
        in err
    )
    assert "grads/" in err


def test_the_last_checkpoint_is_damaged(config, tmp_path, poisoned, monkeypatch, capsys):
    """That it diverged is said all the same."""
    poisoned(5)

    def restore(folder, *_):
        raise CheckpointError(f"checkpoint {folder}/3 is damaged.")

    monkeypatch.setattr(loop, "restore", restore)
    assert train(config, tmp_path / "run") == 1
    err = capsys.readouterr().err
    assert "the loss is nan at step 5. What went bad first is not known: checkpoint" in err
    assert err.count("\n") == 1


def test_the_machine_at_fault(config, tmp_path, poisoned, capsys):
    """What is bad once and not again when it is made again was not the program's doing."""
    poisoned(5, once=True)
    assert train(config, tmp_path / "run") == 1
    assert "made again, all steps are finite, so that it was the machine's fault" in capsys.readouterr().err


def test_some_may_be_left_out(config, tmp_path, capsys, monkeypatch):
    """Oracle: the steps that are left out leave the parameters as they were, so a run without them ends alike."""
    from jaxshard.train import session

    whole = session.Session.batch

    def batch(self, first):
        """Of the steps 4 and 6 (sequences 24 and 40 on) the weights are infinite, and so is the loss."""
        found = whole(self, first)
        return found | {"weights": found["weights"] * np.inf} if first in (24, 40) else found

    monkeypatch.setattr(session.Session, "batch", batch)
    assert train(config, tmp_path / "run", "--run.skip_nonfinite", "2") == 0
    out = capsys.readouterr().out
    assert "step 4 left out: the loss is nan; 1 more may be." in out
    assert "step 6 left out: the loss is nan; 0 more may be." in out
    found = rows(tmp_path / "run")
    assert [row["step"] for row in found if "loss" in row and is_bad(row)] == [4, 6]
    assert np.isfinite(found[-1]["held_out_loss"])

    assert train(config, tmp_path / "one", "--run.skip_nonfinite", "1") == 1
    captured = capsys.readouterr()
    assert "step 4 left out" in captured.out
    assert "the loss is nan at step 6. The last good checkpoint is" in captured.err
    assert "raise run.skip_nonfinite, whose 1 are used up" in captured.err

    # Again from the last checkpoint, to the same end.
    assert train(config, tmp_path / "one", "--run.skip_nonfinite", "1") == 1
    captured = capsys.readouterr()
    assert "goes on after step 3 of 9" in captured.out
    assert "at step 6" in captured.err
    assert json.loads((tmp_path / "one" / "config.json").read_text())["run"]["skip_nonfinite"] == 1


def test_when_a_bad_step_is_fatal():
    good, bad = {"loss": 1.0, "grad_norm": 1.0}, {"loss": 1.0, "grad_norm": np.inf}
    assert not is_bad(good)
    assert is_bad(bad)
    assert fatal(bad, skipped=0, allowed=0)
    assert not fatal(bad, skipped=1, allowed=2)
    assert fatal(bad, skipped=2, allowed=2)
    # float16's loss scale deals with an overflow until it can shrink no further.
    assert not fatal(bad | {"loss_scale": 2.0}, skipped=0, allowed=0)
    assert fatal(bad | {"loss_scale": 1.0}, skipped=9, allowed=99)
