"""The `jaxshard` command: it trains every small config, and says what was wrong in one line."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxshard.cli import main
from jaxshard.strategy import STRATEGIES
from jaxshard.train import costs

pytestmark = pytest.mark.usefixtures("compiled_once")

CONFIGS = Path(__file__).parent.parent / "configs"
SMALL = [path for path in sorted(CONFIGS.glob("*.toml")) if path.stem in STRATEGIES]
# One small program, so that the strategies' runs are quick and can be compared.
TINY = ["--steps=3", "--model.width=32", "--model.layers=2", "--model.context=16", "--data.batch=8"]
TINY += ["--run.eval_batches=1"]


def records(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses_of(rows: list[dict[str, float]]) -> list[float]:
    """Of each step, and at last of the held-out part."""
    return [row["loss"] if "loss" in row else row["held_out_loss"] for row in rows]


def train(config: Path, folder: Path, *args: str) -> list[dict[str, float]]:
    assert main(["train", str(config), "--run.dir", str(folder), *TINY, *args]) == 0
    return records(folder)


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The oracle of the losses: the same run on one device."""
    folder = tmp_path_factory.mktemp("one")
    command = [sys.executable, "-m", "jaxshard", "train", str(CONFIGS / "ddp.toml"), "--devices", "1"]
    subprocess.run([*command, "--run.dir", str(folder), *TINY], check=True, capture_output=True)
    return records(folder)


@pytest.mark.parametrize(
    "path",
    [pytest.param(p, marks=[pytest.mark.smoke] if p.stem == "zero3" else []) for p in SMALL],
    ids=lambda p: p.stem,
)
def test_small_configs_train_alike(path, tmp_path, expected, capsys):
    rows = train(path, tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2, 3, 3]
    losses = losses_of(rows)
    np.testing.assert_allclose(losses, losses_of(expected), rtol=2e-6)
    assert losses[0] == pytest.approx(np.log(256), rel=0.02), "a new model knows nothing"
    assert losses[-1] < losses[0] - 0.03

    out = capsys.readouterr().out
    assert f"{path.stem} on 8 cpu devices" in out
    assert "step 3/3  loss " in out
    assert "tokens/s" in out
    assert f"after 3 steps: training loss {losses[2]:.5f}, held-out loss {losses[3]:.5f}" in out
    device = "the first device" if path.stem == "dp" else "each device"
    assert f"held by {device}" in out
    assert f"by {device} in a step" in out
    assert {file.name for file in (tmp_path / "run").iterdir()} == {
        ".lock",
        "config.json",
        "metrics.jsonl",
        "checkpoints",
    }


def test_the_strategy_changes_with_one_word(tmp_path, capsys):
    """hsdp needs two replicas, and gets them where the mesh is left to its default."""
    train(CONFIGS / "zero3.toml", tmp_path, "--strategy", "hsdp")
    assert "hsdp on 8 cpu devices (replica 2 x shard 4)" in capsys.readouterr().out


def test_an_earlier_run_is_kept(tmp_path):
    first = train(CONFIGS / "ddp.toml", tmp_path)
    train(CONFIGS / "ddp.toml", tmp_path, "--run.seed", "1", "--fresh")
    assert records(tmp_path) != first
    kept = (tmp_path / "metrics.1.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in kept] == first
    assert json.loads((tmp_path / "config.1.json").read_text())["run"]["seed"] == 0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["train"], "train needs a TOML file"),
        (["trian"], "unknown command trian; did you mean train?"),
        (["train", "absent.toml"], "cannot read absent.toml: No such file or directory."),
        (["train", "@ddp", "--run.dri", "x"], "unknown key run.dri; did you mean run.dir?"),
        (["train", "@ddp", "--stesp", "3"], "unknown key stesp; did you mean steps?"),
        (["train", "@ddp", "--zzz", "3"], "ddp.toml --help lists the keys."),
        (["train", "@ddp", "--steps", "many"], "invalid literal for int() with base 10: 'many'"),
        (["train", "@ddp", "--steps"], "Missing value for argument '--steps/--run.steps'"),
        (["train", "@ddp", "--steps", "0"], "run.steps = 0; it must be 1 or more."),
        (["train", "@ddp", "--model.scan", "maybe"], "'--model.scan'. Expected one of"),
        (["train", "@ddp", "stray"], "stray"),
        (["train", "@ddp", "--strategy", "zero4"], "no strategy is called 'zero4'"),
        (["train", "@ddp", "--mesh.replica", "3"], "there are 8 devices"),
        (["train", "@ddp", "--data.batch", "12"], "12"),
        (["train", "@ddp", "--run.accumulate", "3"], "3"),
        (["train", "@ddp", "--precision.compute", "int8"], "Precision(compute='int8')"),
        (["train", "@ddp", "--model.heads", "3"], "model.width = 128 does not divide into model.heads = 3"),
        (["train", "@ddp", "--model.vocab", "100"], "model.vocab = 100"),
        (["train", "@ddp", "--devices", "4"], "JAX has already started with 8 cpu device(s)"),
        (["train", "@gpt2-124m"], "cannot read data/tokens.bin of data.files"),
        (["strategies", "--devices", "7", "--replica", "2"], "7 devices cannot be 2 equal copies"),
        (["strategies", "--deviecs", "7"], "unknown key deviecs; did you mean devices?"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)  # fmt: skip
def test_mistakes_take_one_line_and_touch_nothing(args, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "ddp"
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("precious\n")
    args = [str(CONFIGS / f"{arg[1:]}.toml") if arg.startswith("@") else arg for arg in args]
    assert main(args) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("jaxshard: ")
    assert captured.err.count("\n") == 1
    assert message in captured.err
    assert [(file.name, file.read_text()) for file in folder.iterdir()] == [("metrics.jsonl", "precious\n")]


def test_a_folder_that_cannot_be_written(tmp_path, capsys):
    (tmp_path / "file").write_text("precious")
    args = ["train", str(CONFIGS / "ddp.toml"), *TINY, "--run.dir", str(tmp_path / "file")]
    assert main(args) == 2
    assert "cannot write to run.dir" in capsys.readouterr().err
    assert (tmp_path / "file").read_text() == "precious"


def test_a_run_that_diverges_fails(tmp_path, capsys):
    args = ["train", str(CONFIGS / "ddp.toml"), *TINY, "--run.dir", str(tmp_path), "--steps", "10"]
    args += ["--optimizer.name", "sgd", "--optimizer.learning_rate", "1e30", "--run.log_every", "1"]
    assert main(args) == 1
    assert "the loss is nan at step" in capsys.readouterr().err
    assert len(records(tmp_path)) > 1


def test_help_lists_every_key_with_the_value_of_the_file(capsys):
    assert main(["train", str(CONFIGS / "hsdp.toml"), "--help"]) == 0
    out = capsys.readouterr().out
    assert "--run.eval-every" in out.replace("_", "-")
    assert "default: hsdp" in out
    assert main(["--help"]) == 0
    assert "jaxshard train CONFIG" in capsys.readouterr().out


@pytest.mark.smoke
def test_strategies_prints_the_ladder(capsys):
    assert main(["strategies", "--devices", "8"]) == 0
    out = capsys.readouterr().out
    for name in STRATEGIES:
        assert name in out
    assert "the first device" in out
    assert main(["--version"]) == 0


def test_costs_are_those_of_the_papers():
    """Oracle: ZeRO's table (arXiv 1910.02054) with 4 bytes everywhere, and rings, worked out by hand."""
    n = 8
    table = {row.names[0]: row.cost for row in costs.rows(n)}
    assert table["ddp"].held == 4
    assert table["zero1"].held == 2 + 2 / n
    assert table["zero2"].held == 1 + 3 / n
    assert table["zero3"].held == table["shard_grad_op"].held == 4 / n
    ring = (n - 1) / n
    assert table["ddp"].sent == table["zero1"].sent == table["zero2"].sent == table["shard_grad_op"].sent == 2 * ring
    assert table["zero3"].sent == 3 * ring
    # Two replicas of four: gather, gather, scatter over 4; all_reduce a quarter over 2.
    assert table["hsdp"].sent == 3 * 3 / 4 + 2 * 1 / 2 / 4
    assert table["hsdp"].held == 4 / 4
    assert (table["dp"].held, table["dp"].sent) == (1 + n + 2, n - 1)
