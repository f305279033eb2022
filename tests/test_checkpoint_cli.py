"""`jaxshard checkpoint show` and `verify`, run as a user runs them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from oracle import mesh_of

from jaxshard.cli import main
from jaxshard.train.checkpoint import Checkpoints


def save(folder: Path, w: Any, step: int = 4) -> Path:
    """A run with checkpoints of two steps."""
    x = np.arange(64, dtype=np.float32).reshape(8, 8)
    with Checkpoints(folder / "checkpoints") as checkpoints:
        for at in (step - 1, step):
            state = {"params": {"w": jax.device_put(x + at, w)}, "step": jnp.int32(at), "key": jax.random.key(at)}
            checkpoints.save(at, state, {"config": {"steps": 9}, "read": 3 * at})
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    sharding = NamedSharding(mesh_of(2, 4), P(None, ("shard", "replica")))
    return save(tmp_path_factory.mktemp("show") / "run", sharding)


def test_show(run, capsys):
    assert main(["checkpoint", "show", str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{run}/checkpoints/4: step 4, 3 leaves, 260 B"
    assert lines[1].startswith("saved from replica=2 x shard=4, by 1 process, with jaxshard ")
    assert lines[1].endswith(f" and jax {jax.__version__}")
    assert lines[2] == "notes: config, read (--json prints them)"
    assert lines[3] == "whole checkpoints there: 3, 4"
    assert lines[5:] == [
        "leaf      array         split over              memory",
        "key       key<fry>[]    one device              device",
        "params/w  float32[8,8]  dim 1: shard x replica  device",
        "step      int32[]       one device              device",
    ]


def test_digests_are_the_same_whatever_the_mesh_and_the_memory(run, tmp_path, capsys):
    places = [
        SingleDeviceSharding(jax.devices()[1]),
        NamedSharding(mesh_of(1, 8), P("shard")),
        NamedSharding(mesh_of(1, 2), P(), memory_kind="pinned_host"),
    ]
    found = set()
    for i, folder in enumerate([run, *(save(tmp_path / str(i), at) for i, at in enumerate(places))]):
        assert main(["checkpoint", "show", str(folder), "--digests"]) == 0
        found.add(capsys.readouterr().out)
        assert len(found) == 1, i
    lines = found.pop().splitlines()
    assert [line.split("  ")[1:] for line in lines] == [
        ["key<fry>[]", "key"],
        ["float32[8,8]", "params/w"],
        ["int32[]", "step"],
    ]
    main(["checkpoint", "show", str(run), "--digests", "--step", "3"])
    other = capsys.readouterr().out.splitlines()
    assert all(a != b for a, b in zip(lines, other, strict=True)), "other values, the same digests"


def test_json_holds_all(run, capsys):
    assert main(["checkpoint", "show", str(run / "checkpoints" / "3"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["notes"] == {"config": {"steps": 9}, "read": 9}
    assert found["leaves"]["params/w"]["spec"] == [None, ["shard", "replica"]]
    assert found["folder"] == f"{run}/checkpoints/3"


def test_verify(run, capsys):
    (run / "checkpoints" / "5.orbax-checkpoint-tmp").mkdir(exist_ok=True)
    assert main(["checkpoint", "verify", str(run)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{run}/checkpoints/3: whole, 3 leaves, 260 B",
        f"{run}/checkpoints/4: whole, 3 leaves, 260 B",
        f"{run}/checkpoints/5.orbax-checkpoint-tmp: unfinished; it is never read, and the next save clears it",
    ]
    for args in ([str(run), "--step", "3"], [str(run / "checkpoints" / "3")]):
        assert main(["checkpoint", "verify", *args]) == 0
        assert capsys.readouterr().out == f"{run}/checkpoints/3: whole, 3 leaves, 260 B\n"


def test_verify_tells_of_what_is_no_checkpoint_any_more(run, tmp_path, capsys):
    folder = Path(shutil.copytree(run, tmp_path / "run")) / "checkpoints"
    shutil.rmtree(folder / "4" / "description")
    assert main(["checkpoint", "verify", str(folder)]) == 1
    out = capsys.readouterr().out
    assert f"{folder}/3: whole" in out
    assert f"{folder}/4: not whole: it has no description, or is no checkpoint" in out


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["show"], "jaxshard checkpoint show takes DIR, and then options"),
        (["verify", "a", "b"], "jaxshard checkpoint verify takes DIR, and then options"),
        (["shwo", "a"], "unknown command checkpoint shwo; did you mean show?"),
        (["show", "RUN", "--step", "7"], "has no checkpoint of step 7; it has 3, 4."),
        (["show", "RUN", "--step", "x"], "step"),
        (["show", "RUN", "--digest"], "unknown key digest; did you mean digests?"),
        (["show", "RUN/nowhere"], "nowhere holds no whole checkpoint: it does not exist."),
        (["verify", "RUN/checkpoints/3/state"], "state holds no whole checkpoint: it has "),
    ],
)
def test_what_was_asked_is_wrong(run, args, said, capsys):
    assert main(["checkpoint", *(arg.replace("RUN", str(run)) for arg in args)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert err.count("\n") == 1


def test_a_reader_that_has_read_enough(run):
    """As `head` does: no traceback."""
    command = [sys.executable, "-m", "jaxshard", "checkpoint", "show", str(run), "--json"]
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb") as out:
        process = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, text=True, timeout=120)
    assert (process.returncode, process.stderr) == (141, "")


def test_help(capsys):
    assert main(["checkpoint"]) == 2
    assert main(["checkpoint", "--help"]) == 0
    assert capsys.readouterr().out.count("usage: jaxshard checkpoint show DIR") == 2
    for command in ("show", "verify", "export"):
        assert main(["checkpoint", command, "--help"]) == 0
        assert f"usage: jaxshard checkpoint {command} DIR" in capsys.readouterr().out
