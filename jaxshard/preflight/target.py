"""What a program is compiled for: GPUs that are not there, the machine's own, or forced CPU devices.

XLA's GPU compiler needs no GPU and no driver, only its wheels. It must not look for a GPU, though: set
``JAX_PLATFORMS=cpu`` before JAX is imported, or call through `process.run`, which starts a process that does.
"""

from __future__ import annotations

import contextlib
import importlib.util
import re
import shutil
from collections.abc import Iterator, Sequence
from ctypes.util import find_library
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal

import jax
from jax.experimental import topologies
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh

from jaxshard.mesh import force_cpu_devices, make_mesh
from jaxshard.preflight import device as device_files
from jaxshard.preflight.device import Device

INSTALL = "pip install 'jaxshard[targets]'"
"""What installs the compiler: about 220 MB."""


class TargetError(ValueError):
    """A target that does not exist, or that this process cannot compile for, and what to do."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """Devices to compile for; ``str()`` is how `parse` reads it.

    device: the facts of one, None for CPU devices, which only stand in. source: who provides them: ``"compiler"`` for
    GPUs that are not there, ``"local"`` for the machine's own, ``"cpu"``.
    """

    name: str
    device: Device | None
    nodes: int
    per_node: int
    source: Literal["compiler", "local", "cpu"] = "compiler"

    def __str__(self) -> str:
        if self.source == "local":
            return self.name
        return f"{self.name}:{self.per_node}" if self.nodes == 1 else f"{self.name}:{self.nodes}x{self.per_node}"

    @property
    def size(self) -> int:
        """How many devices there are."""
        return self.nodes * self.per_node

    def devices(self) -> list[Any]:
        """The devices, node by node. Raises TargetError when this process cannot have them."""
        if self.source == "cpu":
            return _cpu_devices(self.size)
        return jax.devices("gpu") if self.source == "local" else _absent_devices(self)

    def mesh(self, *, replica: int = 1, shard: int = -1) -> Mesh:
        """A mesh as `make_mesh` gives: what is lowered for it is compiled for these devices."""
        return make_mesh(replica=replica, shard=shard, devices=self.devices())


def parse(text: str) -> Target:
    """A target from its short form.

    ``h100:8`` is one node; ``h100:16`` and ``h100:2x8`` are two. In place of ``h100``: another of
    `device.KNOWN`, or the path of a TOML file (see `device.load`). ``cpu:8``: forced CPU devices. ``local``: the
    machine's own GPUs; ``FILE.toml:local`` if their kind is not known.

    Raises TargetError or DeviceError.
    """
    name, _, count = text.rpartition(":")
    if text == "local" or (name.endswith(".toml") and count == "local"):
        return _local(jax.devices(), device_files.load(name) if name else None, text)
    counted = re.fullmatch(r"(?:([1-9]\d*)x)?([1-9]\d*)", count)
    if not name or counted is None:
        raise TargetError(
            f"{text!r} is no target; write NAME:N or NAME:NODESxN, such as h100:8, h100:4x8 or cpu:8, or local."
        )
    nodes, size = int(counted[1] or 1), int(counted[2])
    if name == "cpu":
        return Target(name=name, device=None, nodes=nodes, per_node=size, source="cpu")
    valid = (*device_files.KNOWN, "cpu", "local")
    if name not in device_files.KNOWN and not name.endswith(".toml"):
        near = get_close_matches(name, valid, n=1)
        hint = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(valid)}, or a TOML file."
        raise TargetError(f"no target is called {name!r}; {hint}")
    device = device_files.load(name) if name.endswith(".toml") else device_files.known(name)
    if size > device.per_node:
        whole, rest = divmod(size, device.per_node)
        if counted[1] or rest:
            raise TargetError(
                f"{text}: a node has {device.per_node} GPUs. Write NODESx{device.per_node}, or a multiple of "
                f"{device.per_node}, such as {name}:{max(whole, 1) * device.per_node}."
            )
        nodes, size = whole, device.per_node
    return Target(name=name, device=device, nodes=nodes, per_node=size)


def _local(found: Sequence[Any], device: Device | None, name: str = "local") -> Target:
    """The machine's own GPUs as a target. found: the devices that JAX sees."""
    kinds = sorted({one.device_kind for one in found if one.platform in ("gpu", "cuda", "rocm")})
    if len(kinds) != 1:
        seen = ", ".join(kinds) or "no GPU"
        raise TargetError(f"local: JAX sees {seen} here. Name the GPUs to compile for, such as h100:8, or take cpu:8.")
    if device is None:
        names = {_described(one): one for one in map(device_files.known, device_files.KNOWN)}
        if kinds[0] not in names:
            raise TargetError(
                f"local: {kinds[0]} is not among the known devices ({', '.join(names)}). Describe it in a TOML file, "
                "and write FILE.toml:local."
            )
        device = names[kinds[0]]
    nodes = len({one.process_index for one in found})
    return Target(name=name, device=device, nodes=nodes, per_node=len(found) // nodes, source="local")


def _described(device: Device) -> str:
    return device.target_config["device_description_str"]


def compiler_installed() -> bool:
    """Whether the wheels of XLA's GPU compiler are here (or CUDA's own ptxas, in place of theirs)."""
    return _exists("jax_plugins", "xla_cuda12", "xla_cuda13") and (
        _exists("nvidia", "cuda_nvcc", "cu13") or shutil.which("ptxas") is not None
    )


def cudnn_installed() -> bool:
    """Whether programs for absent GPUs may use cuDNN's attention (``pip install 'jax[cuda12]'``).

    It takes JAX's CUDA plugin and cuDNN, next to the compiler, and no other of CUDA's libraries.
    """
    # JAX asks for cuDNN's version when it traces: "cuDNN is not detected" without the plugin, "cuDNN not found" without
    # cuDNN. Where it sees no GPU, it holds heads to what those before Hopper can do. Lowering asks nothing; compiling
    # builds the kernel's graph with cuDNN, and runs nothing. So in jax 0.10 and 0.12.
    plugin = any(importlib.util.find_spec(f"jax_{cuda}_plugin") for cuda in ("cuda12", "cuda13"))
    library = _exists("nvidia", "cudnn") or find_library("cudnn") is not None
    return compiler_installed() and plugin and library


def _exists(package: str, *modules: str) -> bool:
    return importlib.util.find_spec(package) is not None and any(
        importlib.util.find_spec(f"{package}.{module}") for module in modules
    )


def _absent_devices(target: Target) -> list[Any]:
    if not compiler_installed():
        raise TargetError(
            f"compiling for {target} needs XLA's GPU compiler, and no GPU: {INSTALL} (about 220 MB). cuDNN's attention "
            "needs cuDNN as well: pip install 'jax[cuda12]'."
        )
    assert target.device is not None
    try:
        # Nodes first: JAX 0.12 fails on the collectives of 1 x NODES x GPUS.
        topology = topologies.get_topology_desc(
            platform="cuda",
            target_config=target.device.target_config_text,
            topology=f"{target.nodes}x1x{target.per_node}",
        )
    except NotImplementedError:
        raise TargetError(
            f"this process cannot compile for {target}: JAX looked for a GPU when it started, found none, and left the "
            "compiler out. Set JAX_PLATFORMS=cpu before jax is imported, or call through preflight.process.run."
        ) from None
    except jax.errors.JaxRuntimeError as error:
        raise TargetError(
            f"the compiler of jax {jax.__version__} does not take the target_config of {target.name} (it prints which "
            f"field): {error}"
        ) from error
    return topology.devices


def _cpu_devices(count: int) -> list[Any]:
    try:
        force_cpu_devices(count)
    except RuntimeError as error:
        found = jax.devices("cpu")
        if len(found) < count:
            raise TargetError(f"cpu:{count}: {error}") from None
        return found[:count]
    return jax.devices("cpu")


@contextlib.contextmanager
def uncached() -> Iterator[None]:
    """Compiles anew within: JAX's cache cannot give back a program for devices that are not there."""
    folder = jax.config.values["jax_compilation_cache_dir"]
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update("jax_compilation_cache_dir", folder)
        compilation_cache.reset_cache()
