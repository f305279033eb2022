"""Checkpoints of any state, written in the background: what is kept, what comes back, and what goes wrong.

Oracle: the values on the host before they were saved.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from disk import files_of_at_most
from flax import nnx
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from oracle import assert_same_bits, lenient, mesh_of
from quick import quick

import jaxshard as js
from jaxshard.train.checkpoint import CheckpointError, Checkpoints, describe, restore, verify
from jaxshard.train.description import steps
from jaxshard.train.digest import digests

BATCH = {"x": np.ones((8, 8), np.float32)}


def split(mesh: Any, *spec: Any, memory: str | None = None) -> NamedSharding:
    return NamedSharding(mesh, P(*spec), memory_kind=memory)


def shapes_of(state: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def on_host(x: jax.Array) -> np.ndarray:
    return np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)


def small(seed: int = 0) -> dict[str, jax.Array]:
    x = np.random.default_rng(seed).normal(size=(16, 8)).astype(np.float32)
    return {"w": jax.device_put(x, split(mesh_of(1, 8), "shard"))}


def back(folder: Path, state: Any, **kwargs: Any) -> Any:
    """What is saved of a state and restored to where it was."""
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(1, state, {})
    return restore(folder, shapes_of(state), **kwargs).state


@pytest.mark.smoke
def test_a_loop_of_ones_own(tmp_path):
    def loss(params, batch):
        return jnp.mean((batch["x"] @ params["w"] - 2) ** 2)

    training = quick(loss, {"w": np.eye(8, dtype=np.float32)}, BATCH, optimizer=lenient(optax.adam(0.1)))
    state = training.init({"w": np.eye(8, dtype=np.float32)})
    ends = []
    with Checkpoints(tmp_path / "run") as checkpoints:
        for step in range(1, 7):
            state, _ = training.step(state, BATCH)
            ends.append(np.asarray(state.params["w"]))
            checkpoints.check()
            if step % 2 == 0:
                checkpoints.save(step, state, {"position": 3 * step})
    assert checkpoints.steps() == [4, 6]
    restored = restore(tmp_path / "run", training, 4)
    assert (restored.step, restored.notes, int(restored.state.step)) == (4, {"position": 12}, 4)
    state, _ = training.step(restored.state, BATCH)
    assert_same_bits(state.params["w"], ends[4])
    assert np.abs(ends[4] - ends[3]).max() > 1e-3


def test_every_dtype_placement_and_kind_of_leaf(tmp_path):
    mesh, other = mesh_of(2, 4), mesh_of(1, 8)
    random = np.random.default_rng(0)
    x = random.normal(size=(8, 16)).astype(np.float32)
    bits = np.frombuffer(random.bytes(4 * 64), np.float32).reshape(8, 8)  # NaNs with payloads among them
    state = {
        "f32": jax.device_put(bits, split(mesh, None, ("replica", "shard"))),
        "bf16": jax.device_put(x.astype(jnp.bfloat16), split(mesh, "replica", "shard")),
        "f8": jax.device_put(x.astype(jnp.float8_e4m3fn), split(mesh, "shard")),
        "c64": jax.device_put((x + 1j).astype(np.complex64), split(mesh)),
        "i4": jax.device_put(np.arange(8).astype(jnp.int4), split(mesh, "shard")),
        "bool": jax.device_put(x > 0, split(mesh, "shard")),
        "host": jax.device_put(x, split(mesh, "shard", memory="pinned_host")),
        "whole host": jax.device_put(x + 1, split(mesh, memory="pinned_host")),
        "one": jax.device_put(x, SingleDeviceSharding(jax.devices()[5])),
        "empty": jax.device_put(np.zeros((0, 8), np.int8), split(mesh, None, "shard")),
        "scalar": jnp.float32(-0.0),
        "odd name/with.dots and $%é": [jnp.int32(7)],
        "keys": jax.device_put(jax.random.split(jax.random.key(5), 8), split(mesh, "shard")),
        "rbg": jax.random.key(5, impl="rbg"),
    }
    restored = back(tmp_path, state)
    assert jax.tree.map(lambda x: (x.sharding, x.dtype), restored) == jax.tree.map(
        lambda x: (x.sharding, x.dtype), state
    )
    assert_same_bits(jax.tree.map(on_host, restored), jax.tree.map(on_host, state))
    assert restored["host"].sharding.memory_kind == "pinned_host"

    elsewhere = shapes_of(state)
    for name, spec in (("f32", P()), ("host", P(None, "shard")), ("bf16", P("shard")), ("keys", P())):
        leaf = elsewhere[name]
        elsewhere[name] = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(other, spec))
    moved = restore(tmp_path, elsewhere).state
    assert moved["host"].sharding.memory_kind != "pinned_host"
    assert_same_bits(jax.tree.map(on_host, moved), jax.tree.map(on_host, state))

    assert verify(tmp_path).faults == {}
    leaves = describe(tmp_path).leaves
    assert leaves["f32"].spec == (None, ["replica", "shard"])
    assert (leaves["one"].spec, leaves["host"].memory, str(leaves["keys"])) == (None, "pinned_host", "key<fry>[8]")


def test_what_came_back_shares_no_memory(tmp_path):
    """A step writes its state in place: copies that were one would be written eight times."""
    state = {str(i): jax.device_put(np.zeros((64, i), np.float32), split(mesh_of(1, 8))) for i in range(1, 20)}
    for x in back(tmp_path, state).values():
        assert len({shard.data.unsafe_buffer_pointer() for shard in x.addressable_shards}) == 8


def test_whatever_mesh_is_set(tmp_path):
    state = {**small(), "key": jax.random.key(1)}
    with jax.set_mesh(jax.make_mesh((2, 4), ("a", "b"))):
        restored = back(tmp_path, state)
    assert restored["w"].sharding == state["w"].sharding
    assert_same_bits(jax.tree.map(on_host, restored), jax.tree.map(on_host, state))


def test_models_and_frozen_leaves(tmp_path):
    class Layer(eqx.Module):
        w: jax.Array
        b: jax.Array
        name: str = eqx.field(static=True)

    _, frozen = nnx.split(nnx.Linear(4, 4, rngs=nnx.Rngs(0)))
    state = {"eqx": Layer(jnp.ones((4, 2)), jnp.arange(3.0), "a layer"), "nnx": frozen, "none": None}
    assert len(jax.tree.leaves(state)) == 4
    restored = back(tmp_path, state)
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    assert_same_bits(restored, state)

    def loss(params, batch):
        return jnp.mean((batch["x"] @ params["w"] @ params["frozen"]) ** 2)

    params = {"w": np.eye(8, dtype=np.float32), "frozen": np.eye(8, dtype=np.float32)}
    choices = {"optimizer": lenient(optax.adam(0.1)), "trainable": lambda path: path == "w"}
    for strategy in ("dp", "zero3"):
        training = quick(loss, params, BATCH, strategy, **choices)
        state = training.init(params)
        assert "opt/0/mu/frozen" not in (leaves := _paths(state))
        assert "opt/0/mu/w" in leaves
        with Checkpoints(tmp_path / strategy) as checkpoints:
            checkpoints.save(0, state, {})
        # From each to each: one device alone has the state of dp.
        for folder in {"dp", strategy}:
            restored = restore(tmp_path / folder, training).state
            assert_same_bits(jax.tree.map(on_host, restored), jax.tree.map(on_host, state))
            assert restored.params["w"].sharding == state.params["w"].sharding


def _paths(state: Any) -> set[str]:
    named = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in named}


def test_loss_scale_and_extra(tmp_path):
    def loss(params, batch, *, extra):
        return jnp.mean((batch["x"].astype(params["w"].dtype) @ params["w"]) ** 2), extra

    given = ({"w": np.eye(8, dtype=np.float32)}, {"key": jax.random.key(3), "count": jnp.int32(4)})
    training = quick(loss, given, BATCH, precision=js.Precision(compute="float16"))
    state = training.init(given)
    restored = back(tmp_path, state)
    assert float(restored.scale.scale) == 2.0**16
    assert_same_bits(jax.tree.map(on_host, restored), jax.tree.map(on_host, state))

    plain = quick(loss, given, BATCH)
    with pytest.raises(CheckpointError, match=r"scale/good \(int32\[\]\) is in it and not here.* use the precision"):
        restore(tmp_path, plain)


def test_keep(tmp_path):
    kept = {}
    for name, choices in {"last": {"keep_last": 3}, "every": {"keep_last": 1, "keep_every": 4}}.items():
        with Checkpoints(tmp_path / name, **choices) as checkpoints:
            for step in range(1, 11):
                checkpoints.save(step, small(step), {})
                checkpoints.wait()
                assert step in checkpoints.steps(), "the one just saved stays"
        kept[name] = checkpoints.steps()
        assert sorted(os.listdir(tmp_path / name)) == sorted(map(str, kept[name]))
    assert kept == {"last": [8, 9, 10], "every": [4, 8, 10]}
    assert_same_bits(restore(tmp_path / "every", shapes_of(small()), 4).state, small(4))


def test_links_among_checkpoints(tmp_path):
    """An old one that was moved to another disk: the link goes, what it leads to stays; other names stay as well."""
    with Checkpoints(tmp_path / "run", keep_last=1) as checkpoints:
        checkpoints.save(1, small(), {})
        checkpoints.wait()
        shutil.move(tmp_path / "run" / "1", tmp_path / "elsewhere")
        (tmp_path / "run" / "1").symlink_to(tmp_path / "elsewhere")
        (tmp_path / "run" / "0.deleted-by-me").mkdir()
        checkpoints.save(2, small(), {})
    assert sorted(os.listdir(tmp_path / "run")) == ["0.deleted-by-me", "2"]
    assert describe(tmp_path / "elsewhere").step == 1


def test_the_state_may_be_donated_at_once(tmp_path):
    mesh, size = mesh_of(1, 8), 1 << 20
    overwrite = jax.jit(lambda state: jax.tree.map(lambda x: x - 100, state), donate_argnums=0)
    for name, sharding in {"split": split(mesh, "shard"), "whole": split(mesh)}.items():
        state = {str(i): jax.device_put(np.full(size, i, np.float32), sharding) for i in range(4)}
        jax.block_until_ready(overwrite(jax.tree.map(jnp.copy, state)))
        with Checkpoints(tmp_path / name) as checkpoints:
            checkpoints.save(1, state, {})
            for _ in range(4):
                state = jax.block_until_ready(overwrite(state))
        assert float(state["3"][0]) == -397
        restored = restore(tmp_path / name, shapes_of(state)).state
        assert [set(np.asarray(x)) for x in restored.values()] == [{0}, {1}, {2}, {3}]


def noise(seed: int) -> dict[str, jax.Array]:
    """What does not compress."""
    return {"w": jnp.asarray(np.random.default_rng(seed).normal(size=1 << 16).astype(np.float32))}


@pytest.mark.parametrize("said_by", ["check", "save", "wait", "close"])
def test_a_save_that_fails_in_the_background(tmp_path, said_by, capfd):
    checkpoints = Checkpoints(tmp_path / "run", keep_last=1)
    checkpoints.save(1, noise(1), {})
    checkpoints.wait()
    with files_of_at_most(1 << 17):
        checkpoints.save(2, noise(2), {})
        assert checkpoints._finishing is not None
        checkpoints._finishing.join()
    with pytest.raises(CheckpointError, match=r"^step 2 could not be saved in \S+/run: File too large\.$"):
        checkpoints.save(3, noise(3), {}) if said_by == "save" else getattr(checkpoints, said_by)()
    assert capfd.readouterr() == ("", ""), "the exception says it; nothing else is printed"
    checkpoints.check()  # said once
    assert checkpoints.steps() == [1]
    assert_same_bits(restore(tmp_path / "run", shapes_of(noise(1))).state, noise(1))

    checkpoints.save(3, noise(3), {})
    checkpoints.close()
    assert sorted(os.listdir(tmp_path / "run")) == ["3"], "what the failed save left is cleared"


MANY = """
import sys
import jax.numpy as jnp
import numpy as np
from disk import files_of_at_most
from jaxshard.train.checkpoint import CheckpointError, Checkpoints

noise = np.random.default_rng(0).normal(size=(40, 20_000)).astype(np.float32)
for time in range(3):
    with files_of_at_most(20_000):
        try:
            with Checkpoints(f"{sys.argv[1]}/{time}") as checkpoints:
                checkpoints.save(1, {str(i): jnp.asarray(row) for i, row in enumerate(noise)}, {})
        except CheckpointError as error:
            print(error)
"""


def test_a_save_of_many_leaves_that_fails_is_said_once(tmp_path):
    """In a process of its own, whose end is when the writes that nobody waited for would be told of."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, "-c", MANY, str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert run.returncode == 0
    assert [line.endswith("File too large.") for line in run.stdout.splitlines()] == [True] * 3
    assert "Traceback" not in run.stderr
    assert "orbax" not in run.stderr


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("mine")
    checkpoints = Checkpoints(tmp_path / "file" / "run")
    with pytest.raises(CheckpointError, match=r"step 1 could not be saved in .*: Not a directory"):
        checkpoints.save(1, small(), {})
    assert (tmp_path / "file").read_text() == "mine"
    checkpoints.close()


KILLED = """
import os, signal, sys, threading
import jax
jax.config.update("jax_num_cpu_devices", 2)
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jaxshard.train.checkpoint import Checkpoints

checkpoints = Checkpoints(sys.argv[1])
checkpoints.save(1, {"w": jnp.arange(64.0)}, {})
checkpoints.wait()
kill = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
# This is called when all is written and only the name is missing.
late = sys.argv[2] == "late"
ocp.CompositeCheckpointHandler.finalize = kill if late else lambda *_: threading.Event().wait()
checkpoints.save(2, {"w": -jnp.arange(64.0)}, {})
if late:
    checkpoints.wait()
kill()
"""


@pytest.mark.parametrize("moment", ["early", "late"])
def test_killed_in_the_middle_of_a_save(tmp_path, moment):
    process = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), moment], capture_output=True, timeout=120)
    assert process.returncode == -signal.SIGKILL, process.stderr.decode()
    assert sorted(os.listdir(tmp_path)) == ["1", "2.orbax-checkpoint-tmp"]
    for step in (0, 1):  # and what was killed while it deleted
        (tmp_path / f"{step}.deleted").mkdir()
        (tmp_path / f"{step}.deleted" / "file").touch()
    with Checkpoints(tmp_path, keep_last=1) as checkpoints:
        assert checkpoints.steps() == [1]
        state = {"w": jnp.arange(64.0)}
        assert_same_bits(restore(tmp_path, shapes_of(state)).state, state)
        assert verify(tmp_path).faults == {}
        assert len(os.listdir(tmp_path)) == 4, "looking deletes nothing"
        checkpoints.save(2, {"w": state["w"] + 2}, {})
        checkpoints.wait()
    assert os.listdir(tmp_path) == ["2"]
    assert_same_bits(restore(tmp_path, shapes_of(state)).state, {"w": state["w"] + 2})


ENDED = """
import sys, threading
from concurrent.futures import thread
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jaxshard.train.checkpoint import Checkpoints

def at_the_end(*args):
    threading.main_thread().join()
    while not thread._shutdown:  # until Python starts no more work
        pass
    return save(*args)

save, ocp.JsonCheckpointHandler.finalize = ocp.JsonCheckpointHandler.finalize, at_the_end
checkpoints = Checkpoints(sys.argv[1])
checkpoints.save(1, {"w": jnp.arange(64.0)}, {})
"""


def test_a_program_that_ends_during_a_save_says_so(tmp_path):
    run = subprocess.run([sys.executable, "-c", ENDED, str(tmp_path)], capture_output=True, text=True, timeout=120)
    end = "the program ended before it was written; call close, or use Checkpoints in a `with`."
    assert f"jaxshard: step 1 could not be saved in {tmp_path}: {end}" in run.stderr
    assert steps(tmp_path) == []


def test_making_and_looking_write_nothing(tmp_path):
    checkpoints = Checkpoints(tmp_path / "run")
    assert checkpoints.steps() == steps(tmp_path / "run") == []
    checkpoints.check()
    checkpoints.wait()
    checkpoints.close()
    assert os.listdir(tmp_path) == []


def test_a_step_that_is_not_later(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(5, small(), {})
        for step in (5, 3):
            with pytest.raises(CheckpointError, match=f"has a checkpoint of step 5, so step {step} cannot be saved"):
                checkpoints.save(step, small(), {})
    assert checkpoints.steps() == [5]


def donated() -> dict[str, jax.Array]:
    state = small()
    jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state), donate_argnums=0)(state)
    return state


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (lambda: {"lr": 0.1}, "lr of the state is a float; make it a jax.Array, or put it into the notes"),
        (lambda: {"w": np.ones(3)}, "w of the state is a ndarray"),
        (donated, "w of the state was donated to a step; save the state that the step returned"),
        (lambda: {"a": {"b": jnp.ones(2)}, "a/b": jnp.ones(2)}, "two leaves of the state have the path a/b"),
        (
            lambda: {"w": jnp.ones(4, jnp.uint4)},
            "w of the state is uint4, which zarr does not store; use int8 or uint8",
        ),
        (lambda: {"keys": jax.random.split(jax.random.key(0), 0)}, "keys of the state is an array of no PRNG keys"),
        (lambda: {"none": None, "empty": jnp.zeros((0, 3))}, "the state has no elements"),
    ],
)
def test_a_state_that_cannot_be_stored(tmp_path, state, message):
    with Checkpoints(tmp_path / "run") as checkpoints, pytest.raises(CheckpointError, match=message):
        checkpoints.save(1, state(), {})
    assert os.listdir(tmp_path) == []


def test_choices_are_checked(tmp_path):
    with pytest.raises(ValueError, match="keep_last=0"):
        Checkpoints(tmp_path, keep_last=0)
    for name in ("a[1]", "a*", "a?", "a\\b"):  # orbax would write checkpoints without their arrays
        with pytest.raises(CheckpointError, match=r"in its path, which orbax takes for a pattern"):
            Checkpoints(tmp_path / name / "run")
    with pytest.raises(ValueError, match="keep_every=-1"):
        Checkpoints(tmp_path, keep_every=-1)
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(ValueError, match="step=-1"):
            checkpoints.save(-1, small(), {})
        with pytest.raises(TypeError, match="not JSON serializable"):
            checkpoints.save(1, small(), {"path": tmp_path})
        with pytest.raises(ValueError, match="JSON"):
            checkpoints.save(1, small(), {"loss": float("nan")})
    assert checkpoints.steps() == []


def test_the_description_is_plain_json(tmp_path):
    notes = {"config": {"a": [1, 2.5, None]}, "who": "é"}
    state = {**small(), "key": jax.random.key(1)}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(7, state, notes)
    found = json.loads((tmp_path / "7" / "description" / "metadata").read_text())
    assert (found["format"], found["version"], found["step"], found["notes"]) == ("jaxshard checkpoint", 1, 7, notes)
    assert (found["mesh"], found["processes"], found["jax"]) == ({"replica": 1, "shard": 8}, 1, jax.__version__)
    kinds = {path: (leaf["dtype"], leaf["shape"], leaf["spec"]) for path, leaf in found["leaves"].items()}
    assert kinds == {"key": ("key<fry>", [], None), "w": ("float32", [16, 8], ["shard"])}
    assert [leaf["digest"] for leaf in found["leaves"].values()] == digests([state["key"], state["w"]])


def test_notes_come_back_as_json_has_them(tmp_path):
    """Numbers are sorted in another order than the strings that they come back as, and the checksum must not see it."""
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, small(), {"losses": {1: 0.5, 10: 0.25, 2: (3, 4)}})
    assert describe(tmp_path).notes == {"losses": {"1": 0.5, "10": 0.25, "2": [3, 4]}}


def test_reading_needs_no_device(tmp_path):
    with Checkpoints(tmp_path / "run") as checkpoints:
        checkpoints.save(1, {"params": small(), "key": jax.random.key(0)}, {})
    code = (
        "import sys; from jaxshard.cli import main; run, out = sys.argv[1:]; "
        "commands = ['show', run], ['verify', run], ['export', run, out]; "
        "assert not any(main(['checkpoint', *command]) for command in commands); "
        "from jax._src import xla_bridge; assert not xla_bridge._backends"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "run"), str(tmp_path / "model.safetensors")]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert "whole, 2 leaves" in run.stdout
