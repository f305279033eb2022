"""What a user can get wrong with `jaxshard train`: one clear line, exit code 2, and nothing on disk changed.

Oracle: the message, and every file below the working folder before and after.
"""

from __future__ import annotations

import fcntl
import gzip
import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from disk import files_of_at_most
from jax.errors import JaxRuntimeError
from test_resume import CONFIG

from jaxshard.cli import main
from jaxshard.step import Training
from jaxshard.train.checkpoint import Checkpoints, describe, verify
from jaxshard.train.weights import export

pytestmark = pytest.mark.usefixtures("compiled_once")

TEXT = b"All that is gold does not glitter, and not all those who wander are lost. " * 200


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A folder with a configuration, a corpus, a run that was stopped after step 6 of 9, and its weights."""
    folder = tmp_path_factory.mktemp("good")
    (folder / "text").write_bytes(TEXT)
    # ddp: the quickest to trace, and what is wrong here is wrong under all.
    text = CONFIG.replace('"zero3"', '"ddp"').replace("batch = 8", 'batch = 8\nfiles = ["text"]')
    (folder / "tiny.toml").write_text(text.replace("dropout = 0.1\n", "") + 'dir = "run"\n')
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(["train", "tiny.toml"]) == 0
    shutil.rmtree(folder / "run" / "checkpoints" / "9")
    export(folder / "run", folder / "good.safetensors")
    return folder


@pytest.fixture
def here(good, tmp_path, monkeypatch):
    """A copy of it, in which a test works."""
    monkeypatch.chdir(shutil.copytree(good, tmp_path / "work"))
    return Path()


def contents(folder: Path) -> dict[str, str]:
    files = [path for path in folder.resolve().rglob("*") if path.is_file()]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def refuses(here: Path, capsys, args: list[str], message: str) -> None:
    capsys.readouterr()
    before = contents(here)
    assert main(["train", "tiny.toml", *args]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("jaxshard: ")
    assert captured.err.count("\n") == 1, captured.err
    assert len(captured.err) < 600
    assert message in captured.err
    assert contents(here) == before


def step_6(here: Path) -> Path:
    return here / "run" / "checkpoints" / "6"


def arrays(here: Path) -> list[Path]:
    """The files that hold arrays. All are damaged, because there may be some that nothing refers to."""
    return [path for path in (step_6(here) / "state").rglob("d/*") if path.is_file()]


def flipped(here: Path) -> None:
    for path in arrays(here):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 16
        path.write_bytes(data)


def truncated(here: Path) -> None:
    for path in arrays(here):
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def emptied(here: Path) -> None:
    for path in arrays(here):
        path.write_bytes(b"")


def lost(here: Path) -> None:
    for path in arrays(here):
        path.unlink()


def without_arrays(here: Path) -> None:
    shutil.rmtree(step_6(here) / "state")


def without_description(here: Path) -> None:
    shutil.rmtree(step_6(here) / "description")


def garbled(here: Path) -> None:
    (step_6(here) / "description" / "metadata").write_bytes(b"\0\1\2")


def of_another_program(here: Path) -> None:
    (step_6(here) / "description" / "metadata").write_text(json.dumps({"format": "another"}))


def of_the_future(here: Path) -> None:
    path = step_6(here) / "description" / "metadata"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"version": 99, "jaxshard": "9.9"}))


def of_a_program_of_ones_own(here: Path) -> None:
    """Saved by a loop that is not `jaxshard train`."""
    import jax.numpy as jnp

    shutil.rmtree(here / "run" / "checkpoints")
    with Checkpoints(here / "run" / "checkpoints") as checkpoints:
        checkpoints.save(6, {"params": jnp.ones(8)}, {"mine": 1})


def renamed(here: Path) -> None:
    step_6(here).rename(step_6(here).with_name("8"))


def foreign(here: Path) -> None:
    (step_6(here).with_name("model.bin")).write_bytes(b"precious")


def a_file(here: Path) -> None:
    shutil.rmtree(here / "run" / "checkpoints")
    (here / "run" / "checkpoints").write_text("precious")


def metrics_of_another(here: Path) -> None:
    (here / "run" / "metrics.jsonl").write_text("precious\n")


def metrics_without_steps(here: Path) -> None:
    (here / "run" / "metrics.jsonl").write_text('{"precious": 1}\n')


def metrics_of_bytes(here: Path) -> None:
    (here / "run" / "metrics.jsonl").write_bytes(b"\xff\xfe\n")


def metrics_in_a_folder(here: Path) -> None:
    (here / "run" / "metrics.jsonl").unlink()
    (here / "run" / "metrics.jsonl").mkdir()


DAMAGED: list[tuple[Callable[[Path], None], str]] = [
    (flipped, "run/checkpoints/6 is damaged: "),
    (truncated, "run/checkpoints/6 is damaged: "),
    (emptied, "run/checkpoints/6 is damaged: "),
    (lost, "run/checkpoints/6 is damaged: "),
    (without_arrays, "run/checkpoints/6 is damaged: "),
    (without_description, "holds 6, which is no whole checkpoint; move it away to go on after step 3"),
    (garbled, "run/checkpoints/6 is damaged: its description is no JSON"),
    (of_another_program, "run/checkpoints/6 is no checkpoint of jaxshard: another program"),
    (of_the_future, "has format 99, written by jaxshard 9.9; this jaxshard reads format 1"),
    (of_a_program_of_ones_own, "run/checkpoints/6 was not written by this version of jaxshard train"),
    (renamed, "run/checkpoints/8 was saved as step 6; give its folder that name back"),
    (foreign, "holds model.bin, which is no whole checkpoint"),
    (a_file, "run/checkpoints is a file, and checkpoints go into a folder"),
    (metrics_of_another, "run/metrics.jsonl is not what a run wrote"),
    (metrics_without_steps, "run/metrics.jsonl is not what a run wrote"),
    (metrics_of_bytes, "run/metrics.jsonl is not what a run wrote"),
    (metrics_in_a_folder, "cannot read run/metrics.jsonl: Is a directory."),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGED, ids=[case[0].__name__ for case in DAMAGED])
def test_damaged_runs(here, capsys, damage, message):
    damage(here)
    refuses(here, capsys, [], message)


CHANGED = ["--changed"]
OTHERS = [
    (["--model.width", "32"], "was trained with model.width = 16, now 32. Add --changed"),
    (["--data.seed", "3"], "was trained with data.seed = 0, now 3"),
    (["--data.batch", "16"], "was trained with data.batch = 8, now 16"),
    (["--precision.compute", "bfloat16"], "was trained with precision.compute = None, now 'bfloat16'"),
    (["--model.width", "32", *CHANGED], "leaves differ: params/blocks/attention/key/bias is float32[2,16] in it and"),
    (["--model.layers", "3", *CHANGED], "float32[2,16] in it and float32[3,16] here"),
    (["--model.vocab", "300", *CHANGED], "params/embed/embedding is float32[256,16] in it and float32[300,16] here"),
    (["--model.mlp", "swiglu", *CHANGED], "params/blocks/mlp/gate/bias (float32[2,64]) is not in it"),
    (["--model.bias", "false", *CHANGED], "is in it and not here"),
    (["--optimizer.name", "sgd", *CHANGED], "does not fit: 58 leaves differ: opt/0/trace/blocks/attention/key/bias"),
    (["--precision.params", "bfloat16", *CHANGED], "bfloat16[2,16] here"),
    (["--precision.compute", "float16", *CHANGED], "scale/scale (float32[]) is not in it"),
    (
        ["--run.weights", "good.safetensors"],
        "was trained with run.weights = None, now 'good.safetensors'. Add --changed",
    ),
    (["--run.dir", "run[1]"], "run[1]/checkpoints has a [ in its path, which orbax takes for a pattern"),
    (["--run.dir", "new", "--cast", "params/*"], "--cast params/*: there is no checkpoint and no run.weights to cast"),
    (["--cast", "params/heads/*"], "cast 'params/heads/*' matches no leaf"),
    (["--fresh", "yes"], "yes"),
    (["--chagned"], "unknown key chagned; did you mean changed?"),
    (["--resume"], "unknown key resume; jaxshard train tiny.toml --help lists the keys."),
    (["--optimizer.lr", "1"], "unknown key optimizer.lr; jaxshard train tiny.toml --help lists the keys."),
    (["--run.keep_last", "0"], "run.keep_last = 0; it must be 1 or more."),
    (["--run.save_every", "-1"], "run.save_every = -1; it must be 0 or more."),
    (["--run.skip_nonfinite", "-1"], "run.skip_nonfinite = -1; it must be 0 or more."),
    (["--run.watchdog", "-1"], "run.watchdog = -1.0; it must be 0 or more."),
    (["--model.dropout", "1.5"], "model.dropout is 1.5, a share"),
]


@pytest.mark.parametrize(("args", "message"), OTHERS, ids=[" ".join(case[0]) for case in OTHERS])
def test_other_configurations(here, capsys, args, message):
    refuses(here, capsys, args, message)


def tokens(*numbers: int, dtype: str = "<u2") -> bytes:
    return np.array(numbers * 500, dtype).tobytes()


FILES = [
    ("empty", b"", [], "empty has 0 bytes"),
    ("short", b"too short", [], "no 17 together in one file, as model.context = 16 needs"),
    ("held", TEXT[:200], ["--data.held_out", "0.01"], "there are 2 tokens to hold out"),
    ("odd", b"12345", ["--data.format", "uint16"], "odd has 5 bytes, which is no number of uint16 tokens"),
    ("beyond", tokens(1, 2, 256), ["--data.format", "uint16"], "the corpus has a token 256, and model.vocab = 256"),
    ("a.txt", TEXT, ["--data.format", "uint16"], "and model.vocab = 256; raise it, or correct data.format"),
    ("wide", tokens(1, dtype="<u4"), ["--data.format", "text"], "wide has zero bytes, so it is no text"),
    ("a.npy", b"\x93NUMPY\1\0" + TEXT, [], "a.npy of data.files is a .npy file"),
    ("a.gz", gzip.compress(TEXT), [], "a.gz of data.files is compressed by gzip"),
    ("a.zip", b"PK\x03\x04" + TEXT, [], "a.zip of data.files is a zip archive"),
    ("a.zst", b"\x28\xb5\x2f\xfd" + TEXT, [], "a.zst of data.files is compressed by zstd"),
    ("a.parquet", b"PAR1" + TEXT, [], "a.parquet of data.files is a parquet file"),
]


@pytest.mark.parametrize(("name", "data", "args", "message"), FILES, ids=[case[0] for case in FILES])
def test_files_that_are_no_corpus(here, capsys, name, data, args, message):
    (here / name).write_bytes(data)
    refuses(here, capsys, ["--data.files", name, *args], message)


def test_the_step_before_a_damaged_one_is_named(here, capsys):
    flipped(here)
    refuses(here, capsys, [], "To go on after step 3, move that folder away.")
    step_6(here).rename(here / "away")
    assert main(["train", "tiny.toml"]) == 0
    assert "goes on after step 3 of 9" in capsys.readouterr().out


def test_a_device_that_is_full(here, capsys, monkeypatch):
    def step(self, state, batch):
        raise JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 249912363712 bytes.\nMore lines.")

    monkeypatch.setattr(Training, "step", step)
    assert main(["train", "tiny.toml"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("jaxshard: RESOURCE_EXHAUSTED: Out of memory allocating 249912363712 bytes. Take a smaller")
    assert err.count("\n") == 1


def test_files_that_are_not_there(here, capsys):
    refuses(here, capsys, ["--data.files", "absent"], "cannot read absent of data.files: No such file or directory.")
    refuses(here, capsys, ["--data.files", "."], "cannot read . of data.files: Is a directory.")


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def no_header(path: Path) -> None:
    path.write_bytes(b"\0" * 100)


def deleted(path: Path) -> None:
    path.unlink()


WEIGHTS = [
    (cut_short, [], "good.safetensors is no whole safetensors file"),
    (no_header, [], "good.safetensors is no whole safetensors file"),
    (deleted, [], "cannot read good.safetensors: it does not exist."),
    (None, ["--model.width", "32"], "float32[2,16] in it and float32[2,32] here"),
    (None, ["--model.mlp", "swiglu"], "is not in it"),
    (None, ["--precision.params", "bfloat16"], "bfloat16"),
]


@pytest.mark.parametrize(("damage", "args", "message"), WEIGHTS)
def test_weights_that_do_not_fit(here, capsys, damage, args, message):
    if damage:
        damage(here / "good.safetensors")
    refuses(here, capsys, ["--run.weights", "good.safetensors", "--run.dir", "new", *args], message)
    assert not (here / "new").exists()


def test_weights_that_fit_are_taken(here):
    """The same parameters at step 0 give the held-out loss of the checkpoint they are from."""
    args = ["--run.weights", "good.safetensors", "--run.dir", "new", "--optimizer.learning_rate", "0"]
    assert main(["train", "tiny.toml", *args, "--run.steps", "2"]) == 0
    found = [json.loads(line) for line in (here / "new" / "metrics.jsonl").read_text().splitlines()]
    there = [json.loads(line) for line in (here / "run" / "metrics.jsonl").read_text().splitlines()]
    held_out = next(row["held_out_loss"] for row in there if row["step"] == 6 and "held_out_loss" in row)
    assert found[-1]["held_out_loss"] == held_out


def test_a_folder_that_cannot_be_made(here, capsys):
    """A file is in its way, or the disk takes no folders (as one mounted read-only; /proc is such a place)."""
    refuses(here, capsys, ["--run.dir", "text/run"], "cannot write to run.dir = text/run: Not a directory.")
    refuses(here, capsys, ["--run.dir", "/proc/run"], "cannot write to run.dir = /proc/run: No such file or directory.")


def test_a_run_that_is_running(here, capsys):
    with (here / "run" / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        refuses(here, capsys, [], "another run is at work in run.dir = run; name another.")
    assert main(["train", "tiny.toml"]) == 0


def test_a_full_disk(here, capsys):
    """The run ends in one line, and what was whole stays whole; with room again it goes on."""
    before = {step: describe(here / "run", step).leaves for step in (3, 6)}
    with files_of_at_most(20_000):
        assert main(["train", "tiny.toml"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("jaxshard: ")
    assert err.count("\n") == 1
    assert "File too large" in err
    assert {step: describe(here / "run", step).leaves for step in (3, 6)} == before
    assert not any(verify(here / "run", step).faults for step in (3, 6))
    assert main(["train", "tiny.toml"]) == 0
    assert Checkpoints(here / "run" / "checkpoints").steps() == [3, 6, 9]


def test_there_are_many_cases():
    assert len(DAMAGED) + len(OTHERS) + len(FILES) + len(WEIGHTS) >= 40
