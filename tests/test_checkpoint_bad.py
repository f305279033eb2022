"""Bad checkpoints: one clear line, and nothing on disk changed.

Oracle: the message, the digest of every file in the folder before and after, and the exact state where a fault is in a
byte that nothing reads.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from oracle import assert_same_bits, mesh_of

from jaxshard.cli import main
from jaxshard.train.checkpoint import CheckpointError, Checkpoints, describe, restore, verify
from jaxshard.train.description import _checksum

DESCRIPTION = "description/metadata"


def make() -> dict[str, Any]:
    random = np.random.default_rng(1)
    at = NamedSharding(mesh_of(1, 8), P("shard"))
    return {
        "params": {
            "w": jax.device_put(random.normal(size=(256, 128)).astype(np.float32), at),
            "b": jax.device_put(random.normal(size=8).astype(np.float32), at),
        },
        "count": jnp.int32(3),
        "key": jax.random.key(3),
    }


def shapes(state: Any = None) -> dict[str, Any]:
    state = make() if state is None else state
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    """The folder of a run with checkpoints of steps 10 and 20."""
    folder = tmp_path_factory.mktemp("good") / "run"
    with Checkpoints(folder / "checkpoints") as checkpoints:
        for step in (10, 20):
            checkpoints.save(step, make(), {"step": step})
    return folder


@pytest.fixture
def run(good, tmp_path) -> Path:
    """A copy to be damaged."""
    return Path(shutil.copytree(good, tmp_path / "run"))


def contents(folder: Path) -> dict[str, str]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def fails(folder: Path, match: str, call: Callable[[], Any]) -> None:
    before = contents(folder)
    with pytest.raises(CheckpointError, match=match) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 500
    assert "tensorstore" not in message
    assert contents(folder) == before


def rewrite(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def empty(run: Path) -> None:
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").mkdir()


def foreign(run: Path) -> None:
    empty(run)
    (run / "checkpoints" / "model.bin").write_bytes(b"weights")


def unfinished(run: Path) -> None:
    empty(run)
    (run / "checkpoints" / "30.orbax-checkpoint-tmp" / "state").mkdir(parents=True)


def orbax_alone(run: Path) -> None:
    for step in (10, 20):
        shutil.rmtree(run / "checkpoints" / str(step) / "description")


def garbled(run: Path) -> None:
    (run / "checkpoints" / "20" / DESCRIPTION).write_bytes(b"\xff\x00 no JSON")


def cut(run: Path) -> None:
    path = run / "checkpoints" / "20" / DESCRIPTION
    path.write_bytes(path.read_bytes()[:-20])


def blank(run: Path) -> None:
    (run / "checkpoints" / "20" / DESCRIPTION).write_bytes(b"")


def renamed(run: Path) -> None:
    shutil.move(run / "checkpoints" / "20", run / "checkpoints" / "21")


PLACES = [
    (shutil.rmtree, r"run holds no whole checkpoint: it does not exist\. Give the folder of a run"),
    (empty, r"run holds no whole checkpoint: it is empty"),
    (foreign, r"no whole checkpoint: it has model\.bin"),
    (unfinished, r"no whole checkpoint: 30\.orbax-checkpoint-tmp was never finished"),
    (orbax_alone, r"no whole checkpoint: it has 10, 20"),
    (garbled, r"checkpoints/20 is damaged: its description is no JSON\. Use another step"),
    (cut, r"checkpoints/20 is damaged: its description is no JSON"),
    (blank, r"checkpoints/20 is damaged: its description is no JSON"),
    (renamed, r"checkpoints/21 was saved as step 20; give its folder that name back"),
]


@pytest.mark.parametrize(("damage", "match"), PLACES, ids=lambda x: getattr(x, "__name__", ""))
def test_what_is_no_checkpoint(run, damage, match):
    damage(run)
    for call in (lambda: restore(run, shapes()), lambda: describe(run), lambda: verify(run)):
        fails(run.parent, match, call)


DESCRIPTIONS = [
    ({"format": "another"}, "is no checkpoint of jaxshard: another program wrote its description"),
    ({"version": 2, "jaxshard": "9.0"}, r"has format 2, written by jaxshard 9\.0; this jaxshard reads format 1"),
    ({"notes": {"step": 21}}, "is damaged: its description has another checksum"),
    ({"leaves": {}}, "is damaged: its description has another checksum"),
    ({"checksum": None}, "is damaged: its description has another checksum"),
]


@pytest.mark.parametrize(("changes", "match"), DESCRIPTIONS, ids=str)
def test_a_description_that_was_changed(run, changes, match):
    rewrite(run / "checkpoints" / "20" / DESCRIPTION, **changes)
    fails(run, match, lambda: restore(run, shapes()))
    assert restore(run, shapes(), 10).notes == {"step": 10}


def a_leaf(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda body: body["leaves"]["count"].update(changes)


@pytest.mark.parametrize(
    "change",
    [
        a_leaf(shape=[-1]),
        a_leaf(shape=["2"]),
        a_leaf(shape=3),
        a_leaf(dtype="float33"),
        a_leaf(colour="red"),
        lambda body: body["leaves"].update(count=None),
        lambda body: body.update(leaves=[]),
        lambda body: body.pop("step"),
        lambda body: body["leaves"]["count"].pop("spec"),
    ],
)
def test_a_description_of_another_form(run, change):
    """Its checksum is right: a program wrote it so."""
    path = run / "checkpoints" / "20" / DESCRIPTION
    body = json.loads(path.read_text())
    del body["checksum"]
    change(body)
    path.write_text(json.dumps(body | {"checksum": _checksum(body)}))
    fails(run, r"checkpoints/20 is damaged: its description is incomplete\. Use another step", lambda: describe(run))


@pytest.mark.parametrize("text", ['{"format": NaN}', "[" * 100_000, '{"a": -Infinity}'])
def test_a_description_that_python_alone_would_read(run, text):
    (run / "checkpoints" / "20" / DESCRIPTION).write_text(text)
    fails(run, "is damaged: its description is no JSON", lambda: describe(run))


def test_a_description_that_is_no_table(run):
    for text in ("[]", "null", "3"):
        (run / "checkpoints" / "20" / DESCRIPTION).write_text(text)
        fails(run, "is no checkpoint of jaxshard", lambda: restore(run, shapes()))


def test_steps_and_folders(run, monkeypatch):
    folder = run / "checkpoints"
    fails(run, r"checkpoints has no checkpoint of step 15; it has 10, 20\.", lambda: restore(run, shapes(), 15))
    fails(run, r"20 is the checkpoint of step 20, and step 10 was asked for", lambda: describe(folder / "20", 10))
    fails(run, r"holds no whole checkpoint: it is a file", lambda: describe(folder / "20" / DESCRIPTION))
    for place in (run, folder, folder / "20"):
        assert restore(place, shapes()).step == describe(place).step == 20
    assert describe(folder, 10).step == describe(folder / "10", 10).step == 10
    monkeypatch.chdir(folder / "10")
    assert describe(".").step == describe("..", 10).step == 10
    shutil.copytree(folder / "10", run / "best")
    assert describe(run / "best").step == restore(run / "best", shapes(), 10).step == 10
    fails(run, r"best is the checkpoint of step 10, and step 20 was asked for", lambda: describe(run / "best", 20))
    for name in ("20.orbax-checkpoint-tmp", "20.deleted"):
        shutil.copytree(folder / "20", folder / name)
        fails(run, f"{name} was never finished, or its deletion was not", lambda name=name: describe(folder / name))


def at(path: str, leaf: Any) -> dict[str, Any]:
    """The shapes of the state with another leaf at a path, or none."""
    found = shapes()
    *outer, last = path.split("/")
    table = found
    for name in outer:
        table = table[name]
    if leaf is None:
        del table[last]
    else:
        table[last] = jax.ShapeDtypeStruct(*leaf, sharding=found["count"].sharding)
    return found


OTHERS = [
    ("params/w", ((64, 16), jnp.float32), r"does not fit: a leaf differs: params/w is float32\[256,128\] in it and "),
    (
        "params/w",
        ((256, 128, 1), jnp.float32),
        r"float32\[256,128,1\] here\. Restore it with the model and the optimizer",
    ),
    (
        "params/w",
        ((256, 128), jnp.bfloat16),
        r"bfloat16\[256,128\] here\. Where only the dtype differs, cast=\['PATH'\]",
    ),
    ("params/w", ((64, 16), jnp.bfloat16), r"bfloat16\[64,16\] here\. Restore it with the model"),
    ("count", ((), jnp.uint32), r"count is int32\[\] in it and uint32\[\] here\. Restore it with the model"),
    ("count", ((), jnp.float32), r"count is int32\[\] in it and float32\[\] here\. Restore it with the model"),
    ("params/b", None, r"a leaf differs: params/b \(float32\[8\]\) is in it and not here"),
    ("params/c", ((8,), jnp.float32), r"a leaf differs: params/c \(float32\[8\]\) is not in it"),
    ("scale", ((8,), jnp.float32), r"scale \(float32\[8\]\) is not in it"),
    ("key", ((2,), jnp.uint32), r"key is key<fry>\[\] in it and uint32\[2\] here\. Restore"),
    ("params/b", ((8,), jax.random.key(0).dtype), r"params/b is float32\[8\] in it and key<fry>\[8\] here\. Restore"),
    (
        "key",
        ((), jax.random.key(0, impl="rbg").dtype),
        r"key<fry>\[\] in it and key<rbg>\[\] here\. Keys of another kind",
    ),
]


@pytest.mark.parametrize(("path", "leaf", "match"), OTHERS)
def test_another_training(good, path, leaf, match):
    fails(good, match, lambda: restore(good, at(path, leaf)))


def test_many_leaves_that_differ(good):
    wanted = {str(i): shapes()["count"] for i in range(9)}
    fails(good, r"13 leaves differ: 0 \(int32\[\]\) is not in it; 1 .*; and 9 more\. ", lambda: restore(good, wanted))


def test_cast(good):
    wanted = shapes()
    for path in ("w", "b"):
        x = wanted["params"][path]
        wanted["params"][path] = jax.ShapeDtypeStruct(x.shape, jnp.bfloat16, sharding=x.sharding)
    fails(good, "2 leaves differ", lambda: restore(good, wanted))
    fails(good, r"a leaf differs: params/b is float32\[8\]", lambda: restore(good, wanted, cast=["*/w"]))
    fails(good, r"cast 'parms/\*' matches no leaf", lambda: restore(good, wanted, cast=["params/*", "parms/*"]))
    fails(good, "count is int32", lambda: restore(good, at("count", ((), jnp.float32)), cast=["*"]))
    restored = restore(good, wanted, cast=["params/*"])
    assert restored.cast == ("params/b", "params/w")
    want = jax.tree.map(lambda x: np.asarray(x).astype(jnp.bfloat16), make()["params"])
    assert_same_bits(restored.state["params"], want)
    assert restored.state["params"]["w"].sharding == wanted["params"]["w"].sharding
    assert restore(good, shapes(), cast=["*"]).cast == ()


def test_cast_from_what_jax_holds_with_x64_alone(tmp_path):
    values = np.arange(8) + 0.1
    with jax.enable_x64(True), Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"w": jnp.asarray(values), "key": jax.random.key(3)}, {})
    at = shapes()["params"]["b"].sharding
    wanted = {"w": jax.ShapeDtypeStruct((8,), jnp.float32, sharding=at), "key": shapes()["key"]}
    restored = restore(tmp_path, wanted, cast="w").state
    assert_same_bits({"w": restored["w"]}, {"w": values.astype(np.float32)})
    assert restored["w"].sharding == at


def test_shapes_without_shardings(good):
    with pytest.raises(TypeError, match=r"count has no sharding; pass a training"):
        restore(good, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), make()))


def data_files(step: Path) -> list[Path]:
    """The files that hold arrays, and those that say where in them."""
    return sorted(path for path in (step / "state").rglob("*") if path.parent.name == "d" or path.suffix == ".ocdbt")


def as_good(found: Any) -> bool:
    try:
        assert_same_bits(
            jax.tree.map(lambda x: jax.random.key_data(x) if x.dtype == found["key"].dtype else x, found),
            jax.tree.map(lambda x: jax.random.key_data(x) if x.dtype == found["key"].dtype else x, make()),
        )
    except AssertionError:
        return False
    return True


@pytest.mark.parametrize("damage", ["delete", "truncate", "empty", "flip"])
def test_damaged_data(run, damage):
    """Of every file in turn: an error, or the exact state because nothing reads what was damaged. Never other bits."""
    step = run / "checkpoints" / "20"
    random = np.random.default_rng(0)
    outcomes = []
    for path in data_files(step):
        whole = path.read_bytes()
        flipped = bytearray(whole)
        flipped[random.integers(len(whole))] ^= 1 << random.integers(8)
        changed = {"truncate": whole[: len(whole) // 2], "empty": b"", "flip": bytes(flipped)}
        path.unlink() if damage == "delete" else path.write_bytes(changed[damage])
        before = contents(run)
        try:
            outcomes.append(as_good(restore(run, shapes()).state))
            assert outcomes[-1], f"{path} was damaged, and other values came back"
            faults = verify(run).faults
            assert not faults
        except CheckpointError as error:
            outcomes.append(False)
            message = str(error)
            assert message.startswith(f"checkpoint {step} is damaged: "), message
            assert "\n" not in message
            assert len(message) < 400
            assert verify(run).faults, "restore has found what verify does not"
        assert contents(run) == before
        path.write_bytes(whole)
        assert restore(run, shapes(), 10).step == 10
    assert outcomes.count(False) >= 2
    assert as_good(restore(run, shapes()).state), "all damage was undone"


def test_flipped_bits_of_an_array_name_its_leaf(run, capsys):
    """In the file of the largest array, incompressible: most of its bytes are that array's."""
    step = run / "checkpoints" / "20"
    path = max(data_files(step), key=lambda path: path.stat().st_size)
    whole = path.read_bytes()
    assert len(whole) > 256 * 128 * 3, "the array's data is in another file"
    reasons = []
    for place in np.linspace(100, len(whole) // 2, 8, dtype=int):
        changed = bytearray(whole)
        changed[place] ^= 16
        path.write_bytes(changed)
        faults = verify(run).faults
        assert set(faults) == {"params/w"}
        reasons += faults.values()
        fails(run, r"20 is damaged: .*params/w", lambda: restore(run, shapes()))
    assert "holds other bits than were saved" in reasons, "the format alone found all of them"
    assert main(["checkpoint", "verify", str(run)]) == 1
    out = capsys.readouterr().out.splitlines()
    assert out[0] == f"{run}/checkpoints/10: whole, 4 leaves, 128 KiB"
    assert out[1].startswith(f"{run}/checkpoints/20: not whole: ")


def test_a_state_that_was_taken_away(run):
    shutil.rmtree(run / "checkpoints" / "20" / "state")
    fails(run, r"20 is damaged: count is missing, wholly or in part\. Use another step", lambda: restore(run, shapes()))
    assert verify(run).faults.keys() == describe(run).leaves.keys()


def test_arrays_of_another_checkpoint(run):
    """Whole in themselves, and not what the description says."""
    with Checkpoints(run / "other") as checkpoints:
        checkpoints.save(20, make() | {"count": jnp.int32(4), "key": jax.random.key(4)}, {})
    shutil.rmtree(run / "checkpoints" / "20" / "state")
    shutil.copytree(run / "other" / "20" / "state", run / "checkpoints" / "20" / "state")
    fails(run, "20 is damaged: other bits than were saved in count; key", lambda: restore(run, shapes()))
    assert verify(run).faults == dict.fromkeys(("count", "key"), "holds other bits than were saved")


@pytest.mark.parametrize("command", ["show", "verify"])
def test_the_command_says_it_in_one_line(run, command, capsys):
    garbled(run)
    assert main(["checkpoint", command, str(run)]) == (1 if command == "verify" else 2)
    out, err = capsys.readouterr()
    said = out.splitlines()[-1] if command == "verify" else err
    assert f"{run}/checkpoints/20 is damaged: its description is no JSON" in said
    assert "Traceback" not in out + err
