"""Small programs for 8 H100s as a mesh of 2 x 4, whose facts are known by hand. `make.py` compiles them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import compute_on
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

SIZES = {"replica": 2, "shard": 4}


@dataclass(frozen=True, kw_only=True)
class Program:
    """A function of arrays, its arguments (shape, dtype, spec[, memory]), and XLA options to compile it with.

    donated: the arguments in whose place results lie, in their order; all other results lie where they are made.
    """

    fn: Callable[[Mesh], Callable[..., Any]]
    args: tuple[tuple[Any, ...], ...]
    options: dict[str, str] = field(default_factory=dict)
    donated: tuple[int, ...] = ()

    def compiled(self, mesh: Mesh) -> Any:
        shardings = [
            # The mesh of a compile-only device would drop the memory silently; its abstract mesh keeps it.
            NamedSharding(mesh.abstract_mesh, spec, memory_kind=memory[0]) if memory else NamedSharding(mesh, spec)
            for _, _, spec, *memory in self.args
        ]
        shapes = [
            jax.ShapeDtypeStruct(shape, dtype, sharding=at)
            for (shape, dtype, *_), at in zip(self.args, shardings, strict=True)
        ]
        results = tuple(shardings[i] for i in self.donated) or None
        traced = jax.jit(self.fn(mesh), out_shardings=results, donate_argnums=self.donated).trace(*shapes)
        platform = mesh.devices.flat[0].platform
        lowered = traced.lower(lowering_platforms=("cuda" if platform == "gpu" else platform,))
        return lowered.compile(compiler_options=dict(self.options))


def mapped(fn, ins, outs) -> Callable[[Mesh], Callable[..., Any]]:
    return lambda mesh: jax.shard_map(fn, mesh=mesh, in_specs=ins, out_specs=outs, check_vma=False)


def kinds(x, y):
    """Every kind of collective, over one axis, both, and both in the other order."""
    return (
        lax.all_to_all(x, "shard", 0, 1, tiled=True),
        lax.ppermute(y, "replica", [(0, 1), (1, 0)]),
        lax.psum_scatter(x, ("replica", "shard"), scatter_dimension=0, tiled=True),
        lax.pmax(y, "shard"),
        lax.psum((x, y * 2), ("replica", "shard")),
        lax.all_gather(y, ("shard", "replica")),
    )


def nested(x):
    """An all_reduce in a loop of 5 in a loop of 3."""
    inner = lambda c, _: (lax.psum(c, "replica") * 0.5, None)
    outer = lambda c, _: (lax.scan(inner, c, None, length=5)[0], None)
    return lax.scan(outer, x, None, length=3)[0]


def branches(flag, x):
    """One collective in each branch of a conditional, and one in a loop of unknown length."""
    x = lax.cond(flag, lambda x: lax.psum(x, "shard"), lambda x: lax.psum(x * 3, "replica"), x)
    return lax.while_loop(lambda x: jnp.sum(x) < 10, lambda x: lax.pmean(x, "shard") + 1, x)


def layers(weights, x):
    """Nine layers, gathered in a scan, and their gradients, scattered in one; the loops are pipelined and doubled."""

    def layer(x, w):
        return jnp.tanh(x @ lax.all_gather(w, "shard", axis=0, tiled=True)), None

    loss, grads = jax.value_and_grad(lambda w: jnp.sum(lax.scan(layer, x, w)[0]))(weights)
    return lax.psum(loss, ("replica", "shard")), lax.psum(grads, "replica")


def products(a, b, image, kernel):
    """A matrix product, a batched one, and a convolution."""
    convolved = lax.conv_general_dilated(image, kernel, (2, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return a @ b, jnp.einsum("bij,bkj->bik", a.reshape(4, 64, 128), a.reshape(4, 64, 128)), convolved


def from_host(x, weights):
    """Layers whose weights are brought from the host one by one."""

    def layer(x, w):
        return jnp.tanh(x @ jax.device_put(w, jax.memory.Space.Device)), None

    return lax.scan(layer, x, weights)[0]


def streamed(grads, moment):
    """A momentum in host memory, brought to the device layer by layer, updated, and taken back."""

    def layer(i, moment):
        here = jax.device_put(lax.dynamic_slice_in_dim(moment, i, 1, 0), jax.memory.Space.Device)
        there = jax.device_put(0.9 * here + lax.dynamic_slice_in_dim(grads, i, 1, 0), jax.memory.Space.Host)
        return lax.dynamic_update_slice_in_dim(moment, there, i, 0)

    return (lax.fori_loop(0, grads.shape[0], layer, moment),)


def on_host(grads, params, moment):
    """Parameters that the host's processor updates, with a momentum that stays in its memory."""

    def update(grads, params, moment):
        moment = 0.9 * moment + grads
        return params - 0.1 * moment, moment

    space = jax.memory.Space.Host
    compute: Any = getattr(compute_on, "compute_on2", compute_on.compute_on)  # its name before jax 0.12
    update = compute(update, compute_type="device_host", out_memory_spaces=(space, space))
    params, moment = update(jax.device_put(jnp.sin(grads), space), jax.device_put(params, space), moment)
    return jax.device_put(params, jax.memory.Space.Device), moment


ROWS = P("shard")
LAYERS = P(None, "shard")
BOTH = P(("replica", "shard"))
PROGRAMS = {
    "kinds": Program(fn=mapped(kinds, (P(), P()), P()), args=(((64, 32), "float32", P()), ((48,), "bfloat16", P()))),
    "nested": Program(fn=mapped(nested, ROWS, ROWS), args=(((64,), "float32", ROWS),)),
    "branches": Program(fn=mapped(branches, P(), P()), args=(((), "bool", P()), ((16,), "float32", P()))),
    "layers": Program(
        fn=mapped(layers, (P(None, "shard"), BOTH), (P(), P(None, "shard"))),
        args=(((9, 256, 256), "float32", P(None, "shard")), ((64, 256), "float32", BOTH)),
        options={"xla_gpu_enable_while_loop_unrolling": "WHILE_LOOP_UNROLLING_DOUBLE_BUFFER"},
    ),
    "products": Program(
        fn=lambda mesh: products,
        args=(
            ((256, 128), "bfloat16", P()),
            ((128, 512), "bfloat16", P()),
            ((2, 15, 16, 8), "float32", P()),
            ((3, 3, 8, 32), "float32", P()),
        ),
        options={"xla_gpu_enable_triton_gemm": "False"},
    ),
    "from_host": Program(
        fn=lambda mesh: from_host,
        args=(((64, 512), "float32", ROWS), ((4, 512, 512), "float32", P(), "pinned_host")),
    ),
    "streamed": Program(
        fn=mapped(streamed, (LAYERS, LAYERS), (LAYERS,)),
        args=(((4, 512, 512), "float32", LAYERS), ((4, 512, 512), "float32", LAYERS, "pinned_host")),
        donated=(1,),
    ),
    "on_host": Program(
        fn=mapped(on_host, (LAYERS, LAYERS, LAYERS), (LAYERS, LAYERS)),
        args=(
            *(((4, 512, 512), "float32", LAYERS),) * 2,
            ((4, 512, 512), "float32", LAYERS, "pinned_host"),
        ),
        donated=(1, 2),
    ),
}
