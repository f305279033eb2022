"""Checkpoints of two real processes with four devices each, and of one process with eight: from each to the other.

Oracle: the values on the host of one process.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from oracle import assert_same_bits, mesh_of
from safetensors.numpy import load_file
from several import run

from jaxshard.train.checkpoint import Checkpoints, describe, restore, verify

SPECS = {"rows": P("shard"), "both": P(("replica", "shard")), "cols": P(None, "shard"), "whole": P(), "key": P()}

TWO = """
import sys
from pathlib import Path
from jaxshard.train.processes import initialize
initialize()
import jax, numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
import jaxshard as js
from jaxshard.train.checkpoint import CheckpointError, Checkpoints, restore, verify
from jaxshard.train.weights import export, load
from test_checkpoint_processes import SPECS, make, shapes

folder = Path(sys.argv[1])
assert (jax.process_count(), len(jax.devices()), len(jax.local_devices())) == (2, 8, 4)
mesh = js.make_mesh(replica=2, shard=4)
restored = restore(folder / "one", shapes(mesh))
assert restored.notes == {"saved": "by one"}
for name, x in restored.state.items():
    assert x.sharding == NamedSharding(mesh, SPECS[name]) and len(x.addressable_shards) == 4
with Checkpoints(folder / "two", keep_last=1) as checkpoints:
    for step in (5, 6):
        checkpoints.save(step, restored.state, {"process": jax.process_index()})
        checkpoints.check()
    try:
        checkpoints.save(7, {"w": jax.numpy.ones(3)}, {})
    except CheckpointError as error:
        print(error)
assert checkpoints.steps() == [6]
params = {name: x for name, x in restored.state.items() if name != "key"}
export(params, folder / "live.safetensors")
multihost_utils.sync_global_devices("exported")
wanted = {name: shape for name, shape in shapes(mesh).items() if name != "key"}
for name, x in load(folder / "live.safetensors", wanted).items():
    for a, b in zip(x.addressable_shards, params[name].addressable_shards):
        assert np.array_equal(a.data, b.data), name
print("done", jax.process_index())
"""


def make() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {name: random.normal(size=(16, 8)).astype(np.float32) for name in SPECS if name != "key"}


def shapes(mesh: jax.sharding.Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    at = {name: NamedSharding(mesh, spec) for name, spec in SPECS.items()}
    found = {name: jax.ShapeDtypeStruct((16, 8), jnp.float32, sharding=at[name]) for name in SPECS if name != "key"}
    return found | {"key": jax.ShapeDtypeStruct((), jax.random.key(0).dtype, sharding=at["key"])}


@pytest.mark.smoke
def test_two_processes_and_one(tmp_path):
    here = mesh_of(1, 8)
    state = {name: jax.device_put(x, NamedSharding(here, SPECS[name])) for name, x in make().items()}
    state["key"] = jax.device_put(jax.random.key(8), NamedSharding(here, P()))
    with Checkpoints(tmp_path / "one") as checkpoints:
        checkpoints.save(2, state, {"saved": "by one"})

    for i, (code, out) in enumerate(run(TWO, str(tmp_path))):
        assert code == 0, out
        assert "w of the state lies in one process alone; make it an array over the mesh." in out
        assert f"done {i}" in out

    two = describe(tmp_path / "two")
    assert (two.step, two.processes, two.mesh, two.notes) == (6, 2, {"replica": 2, "shard": 4}, {"process": 0})
    assert {path: leaf.digest for path, leaf in two.leaves.items()} == {
        path: leaf.digest for path, leaf in describe(tmp_path / "one").leaves.items()
    }
    assert verify(tmp_path / "two").faults == {}
    restored = restore(tmp_path / "two", shapes(here)).state
    assert jax.random.key_data(restored.pop("key")).tolist() == jax.random.key_data(jax.random.key(8)).tolist()
    assert_same_bits(restored, make())
    assert_same_bits(load_file(tmp_path / "live.safetensors"), make())
