"""The state of a training run, born sharded: no leaf is ever whole on a device unless its spec says so."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import PartitionSpec as P
from jax.sharding import Sharding

from jaxshard.checks import whole_number
from jaxshard.jaxprs import constant_of, only
from jaxshard.mesh import assembled, put, unplaced
from jaxshard.precision import LossScale, cast_floats, initial_loss_scale
from jaxshard.program import Program
from jaxshard.specs import optimizer_layout, path_of, sharding, shardings
from jaxshard.strategy import HOST


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """step: int32 scalar, the number of updates made. params, opt, extra: pytrees of sharded arrays. key: the PRNG key
    that every step's keys are folded from. scale: the dynamic loss scale, None unless computing in float16."""

    step: jax.Array
    params: Any
    opt: Any
    extra: Any
    key: jax.Array
    scale: LossScale | None


RUN_KEY = 0x6A73  # folded into the key of initialisation, so that steps draw from another stream


def new_state(
    program: Program, optimizer: optax.GradientTransformation, params: Any, extra: Any, key: Any
) -> TrainState:
    """The state at step 0; traceable."""
    params = cast_floats(params, program.precision.params)
    with jax.numpy_dtype_promotion("standard"):
        opt = optimizer.init(program.learning(params))
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        opt=opt,
        extra=extra,
        key=jax.random.fold_in(_run_key(key), RUN_KEY),
        scale=initial_loss_scale(program.precision),
    )


def _run_key(key: jax.Array) -> jax.Array:
    """A new-style key of the default kind, from a key of any style and kind."""
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = jax.random.wrap_key_data(key)
    default = jax.eval_shape(lambda: jax.random.key(0)).dtype
    return key if key.dtype == default else jax.random.key(jax.random.bits(key, (), jnp.uint32))


@dataclass(frozen=True, kw_only=True)
class StateLayout:
    """The shapes, the layout and the shardings of a state."""

    shapes: TrainState
    opt: Any  # a pytree of Leaf, like the optimizer's state
    shardings: TrainState


def state_layout(program: Program, optimizer: optax.GradientTransformation, params: Any, extra: Any) -> StateLayout:
    """Where every leaf of a state lives. params, extra: pytrees of ShapeDtypeStructs."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    shapes = jax.eval_shape(lambda p, e, k: new_state(program, optimizer, p, e, k), params, extra, key)
    opt = optimizer_layout(shapes.opt, program.learning(program.layout), program.pieces)
    mesh, strategy = program.mesh, program.strategy
    everywhere = jax.tree.map(lambda _: sharding(P(), strategy.params, mesh), shapes)
    return StateLayout(
        shapes=shapes,
        opt=opt,
        shardings=replace(
            everywhere,
            params=shardings(program.layout, strategy.params, mesh),
            opt=shardings(opt, strategy.opt, mesh),
        ),
    )


def initialiser(
    program: Program,
    optimizer: optax.GradientTransformation,
    where: StateLayout,
    init: Callable[[jax.Array], tuple[Any, Any]],
) -> Callable[[jax.Array], TrainState]:
    """A function of a key that makes a state, each leaf where it will live, with the same value on any mesh.

    In one global computation, unless some of it goes to host memory: see `_made_in_turn`.
    """

    def make(key):
        params, extra = init(key)
        return new_state(program, optimizer, params, extra, key)

    if _hosted(where):
        return lambda key: _made_in_turn(make, (key,), (None,), where)
    return jax.jit(make, out_shardings=where.shardings)


@unplaced()
def placed(
    program: Program,
    optimizer: optax.GradientTransformation,
    where: StateLayout,
    params: Any,
    extra: Any,
    key: jax.Array,
) -> TrainState:
    """A state from existing parameters, which stay untouched. They come to the devices leaf by leaf."""

    def place(sharding, x):
        # A copy: the state is donated, and the caller's array must outlive it.
        return jnp.copy(put(x, sharding))

    def make(params, extra, key):
        return new_state(program, optimizer, params, extra, key)

    if _hosted(where):
        near = shardings(program.layout, program.strategy.params.on_device, program.mesh)
        return _made_in_turn(make, (params, extra, key), (near, where.shardings.extra, None), where)
    params = jax.tree.map(place, where.shardings.params, params)
    extra = jax.tree.map(place, where.shardings.extra, extra)
    return jax.jit(make, out_shardings=where.shardings, donate_argnums=(0, 1))(params, extra, key)


def _hosted(where: StateLayout) -> bool:
    return any(x.memory_kind == HOST for x in jax.tree.leaves(where.shardings))


AT_ONCE = 2**30
"""Bytes of a state that are made on each device before they leave for host memory; one leaf may have more."""


def _made_in_turn(make: Callable[..., TrainState], args: Any, near: Any, where: StateLayout) -> TrainState:
    """``make(*args)`` where only part of the state is on a device at a time: what is made there leaves for host memory
    before more is made, and a constant (an optimizer's zeros) is not made there at all.

    near: the devices' memory for each of the arguments, which are brought there when they are read; None: as it is.
    """
    flat = jax.tree.leaves(args)
    near = [at for arg, tree in zip(args, near, strict=True) for at in jax.tree.leaves(tree) or [None] * _count(arg)]
    given = jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), x.dtype), args)
    closed, shapes = jax.make_jaxpr(make, return_shape=True)(*given)
    leaves, homes = jax.tree.leaves(shapes), jax.tree.leaves(where.shardings)
    found: dict[int, jax.Array] = {}
    turns: list[list[int]] = [[k for k, home in enumerate(homes) if home.memory_kind != HOST]]
    size = 0
    for k, (x, home) in enumerate(zip(leaves, homes, strict=True)):
        if home.memory_kind != HOST:
            continue
        value = constant_of(closed.jaxpr, closed.jaxpr.outvars[k])
        if value is not None:
            found[k] = _filled(x, home, value)
            continue
        here = math.prod(home.shard_shape(x.shape)) * x.dtype.itemsize
        if len(turns) == 1 or size + here > AT_ONCE:
            turns.append([])
            size = 0
        turns[-1].append(k)
        size += here
    for turn in turns:
        program, read = only(closed, turn)
        inputs = [x if at is None else put(x, at) for x, at, used in zip(flat, near, read, strict=True) if used]
        run = jax.jit(jaxpr_as_fun(program), out_shardings=[homes[k] for k in turn])
        found |= dict(zip(turn, jax.block_until_ready(run(*inputs)), strict=True))
    return jax.tree.unflatten(jax.tree.structure(shapes), [found[k] for k in range(len(leaves))])


def _count(tree: Any) -> int:
    return len(jax.tree.leaves(tree))


def _filled(x: jax.ShapeDtypeStruct, home: Sharding, value: Any) -> jax.Array:
    """An array of one value, made by the host."""

    def begin(index: tuple[slice, ...]) -> Callable[[], np.ndarray]:
        shape = tuple(len(range(*part.indices(size))) for part, size in zip(index, x.shape, strict=True))
        return lambda: np.full(shape, value, x.dtype)

    return assembled(x.shape, x.dtype, home, begin)


def init_layers(init_layer: Callable[[jax.Array], Any], key: jax.Array, layers: int) -> Any:
    """The stacked parameters of `layers` layers, made one after the other, for use in an init function.

    init_layer: a function of a key that returns one layer's parameters, of any shapes. Each leaf of the result has one
    more dim, of size `layers`, in front; for a list of layers, take slices of it. The values are those of
    ``jax.vmap(init_layer)(jax.random.split(key, layers))``, but the temporaries are one layer's: orthogonal
    initialisers do not partition, and need up to four whole copies of what they make.

    Raises TypeError or ValueError unless `layers` is an int of 1 or more.
    """
    layers = whole_number("init_layers: layers", layers, "how many there are")
    return jax.lax.map(init_layer, jax.random.split(key, layers))


def check_shapes(given: Any, expected: Any, what: str, *, any_float: bool = False) -> None:
    """Raises ValueError with the first leaf whose path, shape or dtype is not the expected one.

    any_float: any float dtype will do, because it is cast.
    """
    if jax.tree.structure(given) != jax.tree.structure(expected):
        raise ValueError(
            f"{what} have the structure {jax.tree.structure(given)}, but parallelize was given "
            f"{jax.tree.structure(expected)}. Pass what params= said."
        )
    pairs = zip(jax.tree_util.tree_leaves_with_path(given), jax.tree.leaves(expected), strict=True)
    for (path, x), wanted in pairs:
        floats = jnp.issubdtype(x.dtype, jnp.floating) and jnp.issubdtype(wanted.dtype, jnp.floating)
        dtype = x.dtype
        if not jnp.issubdtype(dtype, jax.dtypes.extended):
            dtype = jax.dtypes.canonicalize_dtype(dtype)
        if tuple(x.shape) != tuple(wanted.shape) or not (dtype == wanted.dtype or (any_float and floats)):
            raise ValueError(
                f"{path_of(path)} of {what} is {x.dtype}{list(x.shape)}, but parallelize was given "
                f"{wanted.dtype}{list(wanted.shape)}. Pass what params= said."
            )
