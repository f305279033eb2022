"""The state of a training run, born sharded: no leaf is ever whole on a device unless its spec says so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from jaxshard.checks import whole_number
from jaxshard.mesh import put, unplaced
from jaxshard.precision import LossScale, cast_floats, initial_loss_scale
from jaxshard.program import Program
from jaxshard.specs import optimizer_layout, path_of, sharding, shardings


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
) -> Any:
    """The jitted function of a key that makes a state in one global computation.

    Each leaf is born where it will live, with the same value on any mesh.
    """

    def make(key):
        params, extra = init(key)
        return new_state(program, optimizer, params, extra, key)

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

    params = jax.tree.map(place, where.shardings.params, params)
    extra = jax.tree.map(place, where.shardings.extra, extra)
    return jax.jit(
        lambda p, e, k: new_state(program, optimizer, p, e, k),
        out_shardings=where.shardings,
        donate_argnums=(0, 1),
    )(params, extra, key)


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
