"""Targets: their names, the facts of their devices, and devices of one's own.

Oracle: the figures as they are published, written out here.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxshard as js
from jaxshard.preflight import device, target
from jaxshard.preflight.device import DeviceError, Link, known, load
from jaxshard.preflight.facts import facts
from jaxshard.preflight.target import TargetError, parse

compiles = [
    pytest.mark.target,
    pytest.mark.skipif(not target.compiler_installed(), reason=f"needs the GPU compiler: {target.INSTALL}"),
]

# bf16 peak and reached, float32; memory GB and TB/s; NVLink, PCIe and the node's network in GB/s, one way.
PUBLISHED = {
    "a100-80": (312, 271, 19.5, 80, 2.0, 300, 31, 200),
    "h100": (989, 794, 67, 80, 3.35, 450, 55, 400),
    "h200": (989, 794, 67, 141, 4.8, 450, 55, 400),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_published_figures(name):
    one = known(name)
    bf16, reached, float32, memory, bandwidth, nvlink, pcie, network = PUBLISHED[name]
    assert (one.flops["bfloat16"], one.reached["bfloat16"], one.flops["float32"]) == (
        bf16 * 1e12,
        reached * 1e12,
        float32 * 1e12,
    )
    assert one.memory == pytest.approx(memory * 1e9, rel=0.08)  # nominal; what the driver reports is more
    assert one.memory_bandwidth == pytest.approx(bandwidth * 1e12, rel=0.02)
    assert (one.inside.bandwidth, one.between.bandwidth) == (nvlink * 1e9, network * 1e9)
    assert (one.host_bandwidth, one.per_node) == (pcie * 1e9, 8)
    info = one.target_config["gpu_device_info"]
    assert info["device_memory_size"] == one.memory
    assert info["memory_bandwidth"] == pytest.approx(one.memory_bandwidth, rel=1e-3)
    assert set(PUBLISHED) == set(device.KNOWN)


@pytest.mark.smoke
def test_a_link_between_measured_sizes():
    """8 H200: 40 GB/s at 1 MiB and 65 at 2 MiB, 482 at 16 GiB, a flat 40 us below 512 KiB; other kinds 361 at most."""
    link = known("h200").inside
    assert link.bus_bandwidth("all_reduce", 2**20) == 40e9
    assert 40e9 < link.bus_bandwidth("all_reduce", 2**20 * 3 // 2) < 65e9
    assert link.bus_bandwidth("all_reduce", 2**36) == 482e9
    assert link.bus_bandwidth("all_gather", 2**36) == 361e9
    assert link.bus_bandwidth("all_gather", 2**20) == 40e9
    for size in (2**10, 2**19):
        assert 2 * 7 / 8 * size / link.bus_bandwidth("all_reduce", size) == pytest.approx(40e-6, rel=0.01)
    assert Link(bandwidth=5.0).bus_bandwidth("all_reduce", 1) == 5.0


@pytest.mark.parametrize("name", PUBLISHED)
def test_no_curve_exceeds_what_its_link_can_do(name):
    for link in (known(name).inside, known(name).between):
        rates = [rate for _, rate in link.all_reduce]
        assert rates == sorted(rates)
        # Switches that add up let an all-reduce pass its ring's bound of the peak.
        assert max(rates) <= 1.1 * link.bandwidth
        assert (link.ring or 0) < link.bandwidth


FORMS = {
    "h100:8": (1, 8),
    "h100:2": (1, 2),
    "h100:16": (2, 8),
    "a100-80:4x8": (4, 8),
    "h200:2x4": (2, 4),
    "cpu:6": (1, 6),
}


@pytest.mark.parametrize("text", FORMS)
def test_names_of_targets(text):
    one = parse(text)
    assert (one.nodes, one.per_node) == FORMS[text]
    assert one.size == FORMS[text][0] * FORMS[text][1]
    assert parse(str(one)) == one
    assert one.source == ("cpu" if text.startswith("cpu") else "compiler")
    assert (one.device is None) == text.startswith("cpu")


WRONG = {
    "h100": "NAME:N or NAME:NODESxN",
    "h100:0": "NAME:N or NAME:NODESxN",
    ":8": "NAME:N or NAME:NODESxN",
    "h10:8": "did you mean h100",
    "b200:8": "did you mean h200",
    "zzz:8": "choose one of a100-80, h100, h200, cpu, local, or a TOML file",
    "h100:12": "a node has 8 GPUs.*such as h100:8",
    "h100:2x16": "a node has 8 GPUs",
    "local": "JAX sees no GPU here",
}


@pytest.mark.parametrize("text", WRONG)
def test_wrong_names(text):
    with pytest.raises(TargetError, match=WRONG[text]):
        parse(text)


def test_cpu_devices_are_a_target():
    mesh = parse("cpu:4").mesh(replica=2)
    assert dict(mesh.shape) == {"replica": 2, "shard": 2}
    assert list(mesh.devices.flat) == jax.devices()[:4]
    with pytest.raises(TargetError, match=r"cpu:64.*already started with 8 cpu"):
        parse("cpu:64").devices()


def seen(*kinds, platform="gpu"):
    return [SimpleNamespace(device_kind=kind, platform=platform, process_index=i // 2) for i, kind in enumerate(kinds)]


def test_the_machines_own_gpus():
    one = target._local(seen(*["NVIDIA H200"] * 4), None)
    assert (one.device, one.nodes, one.per_node, str(one)) == (known("h200"), 2, 2, "local")
    with pytest.raises(TargetError, match=r"NVIDIA L4 is not among .*NVIDIA H200.*FILE\.toml:local"):
        target._local(seen("NVIDIA L4"), None)
    assert target._local(seen("NVIDIA L4"), known("h100")).device == known("h100")
    with pytest.raises(TargetError, match="JAX sees NVIDIA H200, NVIDIA L4"):
        target._local(seen("NVIDIA H200", "NVIDIA L4"), None)


# Devices of one's own

OWN = """
like = "h100"
name = "h100-pcie"
memory_bandwidth = 2e12
flops.bfloat16 = 756e12
inside.bandwidth = 64e9
"""


def written(tmp_path, text):
    path = tmp_path / "own.toml"
    path.write_text(text)
    return path


def test_a_device_of_ones_own(tmp_path):
    own, base = load(written(tmp_path, OWN)), known("h100")
    assert (own.name, own.memory_bandwidth, own.inside.bandwidth) == ("h100-pcie", 2e12, 64e9)
    assert own.flops == {**base.flops, "bfloat16": 756e12}
    assert (own.memory, own.between, own.target_config) == (base.memory, base.between, base.target_config)
    found = parse(f"{tmp_path / 'own.toml'}:2x8")
    assert (found.device, found.nodes) == (own, 2)


def test_a_device_without_a_base(tmp_path):
    text = (device._FOLDER / "h200.toml").read_text()
    assert load(written(tmp_path, text)) == known("h200")
    with pytest.raises(DeviceError, match=r"own\.toml: per_node, memory missing; .*like ="):
        load(written(tmp_path, text.replace("per_node =", "# ").replace("\nmemory =", "\n#")))


MISTAKES = {
    "like = 'h1000'": "no device is called 'h1000'; did you mean h100?",
    "like = 'h100'\nmemry = 1": "unknown key memry; did you mean memory?",
    "like = 'h100'\n[inside]\nbandwith = 1": r"unknown key bandwith; did you mean bandwidth\?",
    "like = 'h100'\nmemory = 1.5": "memory = 1.5; it must be a whole number above 0",
    "like = 'h100'\nmemory = true": "it must be a whole number",
    "like = 'h100'\nmemory_bandwidth = -1": "it must be a number above 0",
    "like = 'h100'\nname = 8": "it must be a text",
    "like = 'h100'\nflops = 1e12": "it must be a section of FLOP/s by dtype",
    "like = 'h100'\ninside = 1": r"inside = 1; it must be a section, \[inside\]",
    "like = 'h100'\ntarget_config = 1": "it must be a section of XLA's fields",
    "like = 'h100'\n[flops]\nfloat99 = 1": "'float99' is no dtype; write bfloat16",
    "like = 'h100'\n[inside]\nall_reduce = [[2, 1.0], [1, 2.0]]": "ascending order",
    "like = 'h100'\n[inside]\nall_reduce = [[2]]": r"points \[bytes, bytes/s\]",
    "like =": "is no TOML",
}


@pytest.mark.parametrize("text", MISTAKES)
def test_mistakes_in_a_device(tmp_path, text):
    with pytest.raises(DeviceError, match=MISTAKES[text]):
        load(written(tmp_path, text))


def test_an_absent_file(tmp_path):
    with pytest.raises(DeviceError, match=r"cannot read .*none\.toml"):
        parse(f"{tmp_path}/none.toml:8")


def test_the_text_that_xla_reads():
    fields = {
        "name": 'a "b"',
        "on": True,
        "info": {"major": 9, "feature_extension": "NONE"},
        "rate": [{"k": 1}, {"k": 2}],
    }
    assert replace(known("h100"), target_config=fields).target_config_text == (
        'name: "a \\"b\\"" on: true info { major: 9 feature_extension: NONE } rate { k: 1 } rate { k: 2 }'
    )


def test_without_the_compiler_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(target, "compiler_installed", lambda: False)
    with pytest.raises(TargetError, match=r"h100:8 needs XLA's GPU compiler.*jaxshard\[targets\].*jax\[cuda12\]"):
        parse("h100:8").devices()


# With the compiler


class TestCompiled:
    pytestmark = compiles

    @pytest.fixture(autouse=True)
    def _compiled_anew(self):
        with target.uncached():
            yield

    @pytest.mark.parametrize("name", PUBLISHED)
    def test_compiles_for(self, name):
        one = parse(f"{name}:2x8")
        mesh = one.mesh(replica=2)
        assert dict(mesh.shape) == {"replica": 2, "shard": 8}
        assert [device.process_index for device in mesh.devices[:, 0]] == [0, 1]
        assert one.device is not None
        assert mesh.devices.flat[0].device_kind == one.device.target_config["device_description_str"]
        w = jax.ShapeDtypeStruct((128, 256), jnp.bfloat16, sharding=NamedSharding(mesh, P("shard")))
        found = facts(jax.jit(lambda w: jnp.sum(w @ w.T)).lower(w).compile(), mesh)
        assert found.memory.arguments == 128 * 256 * 2 // 8
        assert sum(found.flops.values()) == 2 * 128 * 128 * 256 // 8

    def test_a_field_that_the_compiler_does_not_know(self):
        wrong = replace(known("h100"), target_config={**known("h100").target_config, "nonsense": 1})
        with pytest.raises(TargetError, match="does not take the target_config of h100"):
            replace(parse("h100:8"), device=wrong).devices()

    def test_a_training_step_is_lowered_for_a_target(self):
        training = js.parallelize(
            lambda params, batch: jnp.mean((batch @ params["w"]) ** 2),
            optax.sgd(0.1),
            params={"w": jnp.zeros((64, 64))},
            batch=jnp.zeros((16, 64)),
            mesh=parse("h100:8").mesh(),
            whole_budget=0,
        )
        assert isinstance(training, js.Training)
        found = facts(training.lower().compile(), training.mesh)
        sent = [(one.kind, one.axes, one.bytes) for one in found.collectives if one.bytes > 64]
        assert sorted(sent) == [("all_gather", ("shard",), 64 * 64 * 4), ("reduce_scatter", ("shard",), 64 * 64 * 4)]
