"""Parameters as safetensors. Oracle: the format's own reader, and the values before they were written."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from disk import files_of_at_most
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from oracle import assert_same_bits, mesh_of
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import jaxshard.train.weights as module
from jaxshard.cli import main
from jaxshard.train.checkpoint import CheckpointError, Checkpoints
from jaxshard.train.weights import export, load


def make() -> dict[str, Any]:
    random = np.random.default_rng(2)
    split = NamedSharding(mesh_of(2, 4), P("shard"))
    blocks = [{"kernel": jax.device_put(random.normal(size=(8, 6)).astype(np.float32), split)} for _ in range(2)]
    return {
        "blocks": blocks,
        "bias": jax.device_put(random.normal(size=(8, 4)).astype(jnp.bfloat16), split),
        "scale": jnp.float32(1.5),
        "table": jnp.arange(6, dtype=jnp.int32),
        "mask": jnp.array([True, False]),
        "empty": jnp.zeros((0, 4)),
        "wave": jnp.array([1 + 2j], jnp.complex64),
    }


def shapes(params: Any = None, spec: P | None = None, mesh: tuple[int, int] = (2, 4)) -> Any:
    at = NamedSharding(mesh_of(*mesh), P() if spec is None else spec)

    def shape(x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at if x.ndim else NamedSharding(at.mesh, P()))

    return jax.tree.map(shape, make() if params is None else params)


NAMES = {"blocks.0.kernel", "blocks.1.kernel", "bias", "scale", "table", "mask", "empty", "wave"}


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("weights") / "run"
    with Checkpoints(folder / "checkpoints") as checkpoints:
        checkpoints.save(3, {"params": make(), "opt": {"mu": jnp.ones(3)}, "step": jnp.int32(3)}, {})
    return folder


@pytest.mark.parametrize("source", ["live", "checkpoint"])
def test_what_the_formats_own_reader_finds(run, tmp_path, source):
    path = tmp_path / "model.safetensors"
    assert export(make() if source == "live" else run, path) == [path]
    found = load_file(path)
    assert found.keys() == NAMES
    params = make()
    want = params | {f"blocks.{i}.kernel": block["kernel"] for i, block in enumerate(params["blocks"])}
    for name, x in found.items():
        assert_same_bits(x, want[name])
        assert x.shape == want[name].shape
    with safe_open(path, framework="numpy") as file:
        assert file.metadata() == {"format": "pt"}
    assert os.listdir(tmp_path) == ["model.safetensors"]
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    for name, entry in json.loads(data[8:start]).items():
        if name != "__metadata__":
            assert (start + entry["data_offsets"][0]) % found[name].itemsize == 0, f"{name} is not aligned"


def test_live_and_stored_are_the_same_file(run, tmp_path):
    files = [export(source, tmp_path / f"{i}.safetensors")[0] for i, source in enumerate((make(), run))]
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.parametrize("most", [1, 200, 400, 10_000])
def test_several_files_and_an_index(run, tmp_path, most):
    files = export(run, tmp_path / "model.safetensors", max_bytes=most)
    count = {1: 8, 200: 4, 400: 2, 10_000: 1}[most]
    assert len(files) == count
    if count > 1:
        assert files[0].name == f"model-00001-of-0000{count}.safetensors"
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
        places = {name: path.name for path in files for name in load_file(path)}
        assert index["weight_map"] == places
        assert places.keys() == NAMES
        assert index["metadata"]["total_size"] == sum(x.nbytes for path in files for x in load_file(path).values())
        assert all(sum(x.nbytes for x in load_file(path).values()) <= max(most, 192) for path in files)
    assert len(os.listdir(tmp_path)) == count + (count > 1)
    assert_same_bits(load(tmp_path / "model.safetensors", shapes()), make())
    assert_same_bits(load(tmp_path / "model.safetensors.index.json", shapes()), make()) if count > 1 else None


def test_dtype(run, tmp_path):
    for i, source in enumerate((make(), run)):
        (path,) = export(source, tmp_path / f"{i}.safetensors", dtype="bfloat16")
        found = load_file(path)
        kinds = {name: x.dtype.name for name, x in found.items()}
        assert kinds.pop("table") == "int32"
        assert kinds.pop("mask") == "bool"
        assert kinds.pop("wave") == "complex64"
        assert set(kinds.values()) == {"bfloat16"}
        want = np.asarray(make()["blocks"][1]["kernel"]).astype(jnp.bfloat16)
        assert_same_bits(found["blocks.1.kernel"], want)


@pytest.mark.parametrize("mesh", [(2, 4), (1, 8), (1, 2)], ids=str)
@pytest.mark.parametrize("spec", [P(), P("shard"), P(("shard", "replica"))], ids=str)
def test_straight_to_any_shardings(run, tmp_path, mesh, spec, monkeypatch):
    (path,) = export(run, tmp_path / "model.safetensors")
    params = make()["blocks"]
    wanted = {"blocks": shapes(params, spec, mesh)}
    (tmp_path / "part").mkdir()
    (path,) = export({"blocks": params}, tmp_path / "part" / "model.safetensors")
    largest = []
    assembled = module.assembled

    def watched(shape, dtype, sharding, begin):
        def watch(index):
            read = begin(index)
            return lambda: (largest.append(read().shape), read())[1]

        return assembled(shape, dtype, sharding, watch)

    monkeypatch.setattr(module, "assembled", watched)
    loaded = load(path, wanted)
    assert jax.tree.map(lambda x: x.sharding, loaded) == jax.tree.map(lambda x: x.sharding, wanted)
    assert_same_bits(loaded, {"blocks": params})
    pieces = jax.tree.leaves(loaded)[0].sharding.shard_shape((8, 6))
    assert set(largest) == {pieces}, "more than a device's part was read"


def test_cast(run, tmp_path):
    (path,) = export(run, tmp_path / "model.safetensors", dtype="bfloat16")
    with pytest.raises(
        CheckpointError, match=r"model.safetensors does not fit: 4 leaves differ: blocks/0/kernel is bf"
    ):
        load(path, shapes())
    with pytest.raises(CheckpointError, match=r"2 leaves differ: empty is bfloat16.*; scale is bfloat16"):
        load(path, shapes(), cast=["blocks/*"])
    loaded = load(path, shapes(), cast=["*"])
    want = np.asarray(make()["blocks"][0]["kernel"]).astype(jnp.bfloat16).astype(np.float32)
    assert_same_bits(loaded["blocks"][0]["kernel"], want)
    assert loaded["bias"].dtype == jnp.bfloat16


def test_no_more_than_one_leaf_is_whole(run, tmp_path, monkeypatch):
    """Each is written before the next is fetched."""
    written, fetch = [], module.read_whole

    def watched(description, path):
        written.append((tmp_path / ".model.safetensors.unfinished").stat().st_size)
        return fetch(description, path)

    opened = Path.open
    monkeypatch.setattr(module, "read_whole", watched)
    monkeypatch.setattr(Path, "open", lambda path, mode: opened(path, mode, buffering=0))
    (path,) = export(run, tmp_path / "model.safetensors")
    sizes = [x.nbytes for x in load_file(path).values()]
    assert len(written) == len(sizes) == 8
    header = path.stat().st_size - sum(sizes)
    assert written[0] == header
    assert path.stat().st_size - written[-1] < max(sizes), "the last was fetched when the others had been written"


def test_existing_files_stay(run, tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"mine")
    with pytest.raises(CheckpointError, match=r"model.safetensors is there already; delete it, or choose another name"):
        export(run, path, max_bytes=1)
    assert path.read_bytes() == b"mine"
    with pytest.raises(CheckpointError, match=r"cannot write .*/absent/model.safetensors: No such file or directory"):
        export(run, tmp_path / "absent" / "model.safetensors")
    with files_of_at_most(300), pytest.raises(CheckpointError, match=r"cannot write .*: File too large"):
        export(run, tmp_path / "other.safetensors")
    assert os.listdir(tmp_path) == ["model.safetensors"]


@pytest.mark.parametrize(
    ("params", "choices", "message"),
    [
        ({"a": {"b": jnp.ones(2)}, "a.b": jnp.ones(2)}, {}, r"two leaves have the name a\.b when dots stand"),
        ({"a": jnp.ones(2, jnp.float8_e5m2)}, {}, r"a is float8_e5m2, which .* dtype='bfloat16' .* casts floats"),
        ({"a": jnp.ones(2, jnp.int4)}, {}, r"a is int4"),
        ({"key": jax.random.key(0)}, {}, r"key is key<fry>.*keep PRNG keys out of params"),
        ({"a": jnp.ones(2)}, {"dtype": "int8"}, r"dtype int8: choose one of float16, bfloat16, float32, float64"),
        ({"a": jnp.ones(2)}, {"dtype": "half"}, r"dtype half: choose one of float16"),
    ],
)
def test_what_cannot_be_exported(tmp_path, params, choices, message):
    with pytest.raises(CheckpointError, match=message):
        export(params, tmp_path / "model.safetensors", **choices)
    assert os.listdir(tmp_path) == []


def test_wrong_arguments(run, tmp_path):
    with pytest.raises(CheckpointError, match=r"the name of an export ends in \.safetensors"):
        export(run, tmp_path / "model.bin")
    with pytest.raises(ValueError, match="max_bytes=0"):
        export(run, tmp_path / "model.safetensors", max_bytes=0)
    with pytest.raises(TypeError, match="w is a ndarray; pass a checkpoint's folder or a tree of JAX arrays"):
        export({"w": np.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(TypeError, match="bias has no sharding"):
        load(tmp_path / "model.safetensors", jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), make()))
    with pytest.raises(CheckpointError, match="holds no whole checkpoint"):
        export(tmp_path, tmp_path / "model.safetensors")
    with Checkpoints(tmp_path / "other") as checkpoints:
        checkpoints.save(1, {"w": jnp.ones(2)}, {})
    with pytest.raises(CheckpointError, match="has no params; export is for those of a TrainState"):
        export(tmp_path / "other", tmp_path / "model.safetensors")


def test_a_damaged_checkpoint_is_not_exported(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    step = tmp_path / "run" / "checkpoints" / "3"
    with Checkpoints(tmp_path / "other") as checkpoints:
        other = make() | {"table": jnp.arange(6, dtype=jnp.int32) + 1}
        checkpoints.save(3, {"params": other, "opt": {"mu": jnp.ones(3)}, "step": jnp.int32(3)}, {})
    shutil.rmtree(step / "state")
    shutil.copytree(tmp_path / "other" / "3" / "state", step / "state")
    with pytest.raises(CheckpointError, match="is damaged: params/table holds other bits than were saved"):
        export(tmp_path / "run", tmp_path / "model.safetensors")
    assert not [name for name in os.listdir(tmp_path) if "safetensors" in name]


BAD = [
    (lambda path: path.unlink(), r"cannot read \S+/model\.safetensors: it does not exist\."),
    (lambda path: path.write_bytes(b""), r"model\.safetensors is no whole safetensors file: "),
    (lambda path: path.write_bytes(path.read_bytes()[:-1]), r"model\.safetensors is no whole safetensors file: "),
    (lambda path: path.write_bytes(b"some other bytes, long enough"), r"is no whole safetensors file: "),
    (lambda path: (path.unlink(), path.mkdir()), r"cannot read \S+/model\.safetensors: it is no file\."),
    (
        lambda path: save_file({"bias": np.ones(3)}, path),
        r"8 leaves differ: bias is float64\[3\] in it and bfloat16\[8,4\] here; blocks",
    ),
]


@pytest.mark.parametrize(("damage", "match"), BAD)
def test_bad_files(run, tmp_path, damage, match):
    export(run, tmp_path / "model.safetensors")
    damage(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=match) as caught:
        load(tmp_path / "model.safetensors", shapes())
    assert "\n" not in str(caught.value)


def test_leaves_too_many_and_of_other_shapes(run, tmp_path):
    export(run, tmp_path / "model.safetensors")
    wanted = shapes()
    del wanted["mask"]
    with pytest.raises(
        CheckpointError, match=r"mask \(bool\[2\]\) is in it and not here\. Load it into the model that"
    ):
        load(tmp_path / "model.safetensors", wanted)
    wanted = shapes() | {"mask": jax.ShapeDtypeStruct((3,), bool, sharding=shapes()["mask"].sharding)}
    with pytest.raises(CheckpointError, match=r"a leaf differs: mask is bool\[2\] in it and bool\[3\] here"):
        load(tmp_path / "model.safetensors", wanted)


def test_bad_indices(run, tmp_path):
    export(run, tmp_path / "model.safetensors", max_bytes=1)
    index = tmp_path / "model.safetensors.index.json"
    good = json.loads(index.read_text())
    places = good["weight_map"]
    for text, match in {
        "no JSON": "is no index of safetensors files: it has no weight_map",
        "[]": "is no index of safetensors files",
        json.dumps({"weight_map": ["a"]}): "is no index of safetensors files",
        json.dumps({"weight_map": places | {"mask": "../x.safetensors"}}): "is no index of safetensors files",
        json.dumps({"weight_map": places | {"mask": ""}}): "is no index of safetensors files",
        json.dumps({"weight_map": places | {"mask": ".."}}): r"cannot read .*\.\.: it is no file",
        json.dumps(
            {"weight_map": places | {"mask": "gone.safetensors"}}
        ): "cannot read .*gone.safetensors: it does not exist",
        json.dumps({"weight_map": places | {"mask": places["bias"]}}): "says that mask is in model-.*, and it is not",
    }.items():
        index.write_text(text)
        with pytest.raises(CheckpointError, match=match):
            load(tmp_path / "model.safetensors", shapes())


def test_the_command(run, tmp_path, capsys):
    out = str(tmp_path / "model.safetensors")
    assert main(["checkpoint", "export", str(run), out, "--dtype", "bfloat16", "--step", "3"]) == 0
    assert capsys.readouterr().out == f"{out}: {os.path.getsize(out)} B\n"
    assert load_file(out)["scale"] == np.asarray(1.5, jnp.bfloat16)
    for args, match in {
        (str(run), out): "is there already",
        (str(tmp_path / "nope"), out): "nope is no folder. Give the folder of a run",
        (str(run), f"{out}.bin"): "ends in .safetensors",
        (str(run),): "takes DIR and NAME.safetensors, and then options",
        (str(run), str(tmp_path / "b.safetensors"), "--max-gb", "0"): "max_gb = 0.0: a size above 0",
        (str(run), str(tmp_path / "b.safetensors"), "--max-gb", "inf"): "max_gb = inf: a size above 0",
        (str(run), str(tmp_path / "b.safetensors"), "--dtyp", "x"): "unknown key dtyp; did you mean dtype?",
    }.items():
        assert main(["checkpoint", "export", *args]) == 2
        err = capsys.readouterr().err
        assert match in err
        assert err.count("\n") == 1
