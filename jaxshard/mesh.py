"""Device meshes: the two batch axes, and CPU devices that stand in for GPUs."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, Sharding, SingleDeviceSharding

from jaxshard.strategy import BATCH_AXES, REPLICA, SHARD


def make_mesh(*, replica: int = 1, shard: int = -1, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh of ``replica x shard`` devices.

    replica: how many copies of the states there are. shard: over how many devices each copy may be split.
    One of the two may be -1: what is left of the devices. devices: all of `jax.devices()` by default.

    Both axes split the batch. Raises ValueError when the factors do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else list(devices)
    if not devices:
        raise ValueError("make_mesh(devices=[]): a mesh needs at least one device.")
    factors = {REPLICA: replica, SHARD: shard}
    said = " x ".join(f"{axis}={size}" for axis, size in factors.items())
    bad = [axis for axis, size in factors.items() if size != -1 and size < 1]
    if bad or list(factors.values()).count(-1) > 1:
        raise ValueError(f"make_mesh({said}): sizes are 1 or more, and at most one may be -1 (what is left).")
    known = math.prod(size for size in factors.values() if size != -1)
    sizes = [len(devices) // known if size == -1 else size for size in factors.values()]
    if math.prod(sizes) != len(devices):
        raise ValueError(
            f"make_mesh({said}): there are {len(devices)} devices, and {' x '.join(map(str, sizes))} = "
            f"{math.prod(sizes)}. Choose factors whose product is {len(devices)}, or pass devices=."
        )
    return jax.make_mesh(tuple(sizes), BATCH_AXES, axis_types=(AxisType.Auto,) * 2, devices=devices)


def axis_sizes(mesh: Mesh) -> dict[str, int]:
    """Size by axis name. Raises ValueError when a batch axis is missing, or another axis is larger than 1."""
    sizes = dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))
    missing = [axis for axis in BATCH_AXES if axis not in sizes]
    if missing:
        raise ValueError(
            f"the mesh has the axes {mesh.axis_names}; {missing} missing. Make it with make_mesh(replica=, shard=)."
        )
    others = {axis: size for axis, size in sizes.items() if axis not in BATCH_AXES and size > 1}
    if others:
        raise ValueError(
            f"the mesh has the axes {sizes}; {', '.join(others)} would split neither the batch nor a state. "
            f"Use an axis of {BATCH_AXES} for those devices: make_mesh(replica=, shard=)."
        )
    return sizes


def automatic(mesh: Mesh) -> Mesh:
    """The same mesh with `Auto` axes, which sharding constraints need. Raises TypeError for what is no mesh."""
    if not isinstance(mesh, Mesh):
        raise TypeError(f"mesh is a {type(mesh).__name__}; pass a jax.sharding.Mesh, such as make_mesh() gives.")
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))


def size_over(mesh: Mesh, axes: Sequence[str]) -> int:
    """The number of pieces that a split over these axes makes."""
    sizes = axis_sizes(mesh)
    return math.prod(sizes[axis] for axis in axes)


def platform_of(mesh: Mesh) -> str:
    """The platform of a mesh's devices: cpu, gpu or cuda, tpu."""
    return mesh.devices.flat[0].platform


@contextmanager
def unplaced() -> Iterator[None]:
    """Inside, no mesh is set, whatever the caller has set; sharding constraints may still name its axes."""
    try:
        around = jax.sharding.get_mesh()
    except ValueError:  # in a `jit` of the caller, where a mesh can be covered but not put aside
        with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
            yield
        return
    with ExitStack() as stack:
        stack.enter_context(jax.set_mesh(None))
        if not around.empty:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # JAX has no other way to name axes alone
                stack.enter_context(automatic(around))
        yield


def put(tree: Any, to: Sharding) -> Any:
    """Arrays on the devices of a sharding. With several processes each fills its own devices, from its own memory."""
    if to.is_fully_addressable:
        return jax.device_put(tree, to)

    def place(x: Any) -> jax.Array:
        if isinstance(x, jax.Array) and (jnp.issubdtype(x.dtype, jax.dtypes.prng_key) or not x.is_fully_addressable):
            return jax.device_put(x, to)
        # `device_put` would first compare the whole array with every other process's.
        x = np.asarray(x)
        x = x.astype(jax.dtypes.canonicalize_dtype(x.dtype), copy=False)
        return jax.make_array_from_callback(x.shape, to, lambda index: x[index])

    return jax.tree.map(place, tree)


def assembled(
    shape: tuple[int, ...],
    dtype: Any,
    sharding: Sharding,
    begin: Callable[[tuple[slice, ...]], Callable[[], np.ndarray]],
) -> jax.Array:
    """An array of which each device of this process gets its own part, in the sharding's memory.

    begin: begins to make the part at an index, and returns a function that waits for it.
    """
    places = {d: tuple(index or ()) for d, index in sharding.addressable_devices_indices_map(shape).items()}
    begun = {_key(index): begin(index) for index in {_key(index): index for index in places.values()}.values()}
    results = {key: wait() for key, wait in begun.items()}
    parts = []
    for device, index in places.items():
        # CPU devices take the host's memory as it is: those that hold the same part get memory of their own each,
        # because a step writes in place.
        part = results[_key(index)].copy() if device.platform == "cpu" else results[_key(index)]
        parts.append(jax.device_put(part, SingleDeviceSharding(device, memory_kind=sharding.memory_kind)))
    return jax.make_array_from_single_device_arrays(shape, sharding, parts, dtype=dtype)


def _key(index: tuple[slice, ...]) -> tuple[Any, ...]:
    return tuple((part.start, part.stop) for part in index)


def settled(mesh: Mesh, result: Any) -> Any:
    """A result, waited for where devices are forced CPU ones.

    They share one pool of threads: programs that are on their way at once can each hold threads that the other's
    collectives wait for, and the process is aborted after a minute. GPUs have queues of their own, and run ahead.
    """
    return jax.block_until_ready(result) if platform_of(mesh) == "cpu" else result


def force_cpu_devices(count: int) -> None:
    """Makes this process see `count` CPU devices of its own and no others: a mesh to test on.

    Must run before JAX is first used. Raises RuntimeError when that is too late.

    Sets two environment variables unless they are set: PJRT_NPROC, so that XLA's pool has more threads than devices
    (with fewer, batched LAPACK calls of all devices at once wait for each other for ever), and OPENBLAS_NUM_THREADS=1
    (calls of eight devices, each with threads of its own, are fifty times slower, and can hang).
    """
    os.environ.setdefault("PJRT_NPROC", str(max(2 * count, os.cpu_count() or 1)))
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        pass  # JAX has started; below we see whether it has what was asked for.
    found = jax.local_devices()
    if len(found) != count or found[0].platform != "cpu":
        raise RuntimeError(
            f"JAX has already started with {len(found)} {found[0].platform} device(s), so it cannot get {count} CPU "
            "devices now. Call force_cpu_devices before anything that computes, or set JAX_NUM_CPU_DEVICES."
        )
