"""What a training step is made of, checked and traced before anything runs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxshard.checks import (
    check_batch,
    check_optimizer,
    check_params,
    differences,
    kind_of,
    noted,
    real_number,
    whole_number,
)
from jaxshard.gather import Choices
from jaxshard.loss import LossFunction, loss_function
from jaxshard.mesh import axis_sizes, platform_of, put, settled, size_over
from jaxshard.precision import Precision, cast_floats
from jaxshard.program import Program, TracedLoss, trace_loss
from jaxshard.remat import body_remat
from jaxshard.specs import layout, shape_at, split_axes, warn_of_whole_leaves
from jaxshard.state import StateLayout, TrainState, check_shapes, initialiser, placed, state_layout
from jaxshard.strategy import BATCH_AXES, Strategy, name_of
from jaxshard.update_place import update_place


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A step before it is built.

    batch: the shapes of a global batch. params, extra: shapes, as they are stored. offloaded: where states in host
    memory are updated, and why there; ``""`` if there are none.
    """

    loss: LossFunction
    optimizer: optax.GradientTransformation
    params: Any
    extra: Any
    batch: Any
    program: Program
    where: StateLayout
    clip: float | None
    axis_name: str | None
    compiler_options: Mapping[str, str]
    offloaded: str = ""

    @property
    def parts(self) -> dict[str, int]:
        """What a batch size must divide by, by name."""
        sizes = axis_sizes(self.program.mesh)
        return {axis: sizes[axis] for axis in BATCH_AXES} | {"accumulate": self.program.accumulate}

    @property
    def own_options(self) -> dict[str, str]:
        """The caller's XLA options alone, without the strategy's and without those that it only drops."""
        return {name: value for name, value in self.compiler_options.items() if value is not None}

    def by_device(self, why: str) -> Setup:
        """The same with states in host memory updated on the device, because the host cannot."""
        strategy = replace(self.program.strategy, update="device")
        program = replace(self.program, strategy=strategy)
        place = update_place(program, self.optimizer, self.where)
        said = "" if place is None else f"{place.because}\n  (not by the host, because {why})"
        return replace(self, program=program, offloaded=said)

    @property
    def state_shapes(self) -> TrainState:
        """The state as ShapeDtypeStructs that carry their shardings."""
        return jax.tree.map(shape_at, self.where.shapes, self.where.shardings)

    def program_for(self, batch: Any) -> Program:
        """The program for a global batch: traced already for the example's shapes, anew for others."""
        check_batch(batch, self.parts)
        shapes = shapes_of(batch)
        if shapes == self.batch:
            return self.program
        with noted(f"This batch is another than parallelize was given: {differences(shapes, self.batch)}."):
            traced = self.trace(self.loss, shapes, self.program.mesh.size * self.program.accumulate)
        return replace(self.program, loss=traced)

    def trace(self, loss: LossFunction, batch: Any, parts: int) -> TracedLoss:
        """Traces a loss on one of `parts` equal parts of a batch."""
        mesh, precision = self.program.mesh, self.program.precision
        return traced(loss, mesh, self.axis_name, precision, self.params, self.extra, batch, parts)

    def batch_sharding(self) -> NamedSharding:
        return NamedSharding(self.program.mesh, P(BATCH_AXES))

    def place(self, batch: Any) -> Any:
        """A global batch, split over the batch axes. Raises TypeError or ValueError for what cannot be."""
        try:
            return put(batch, self.batch_sharding())
        except (TypeError, ValueError):
            check_batch(batch, self.parts)
            raise

    @property
    def rows(self) -> np.ndarray:
        """See `Training.rows`."""
        size = jax.tree.leaves(self.batch)[0].shape[0]
        held = self.batch_sharding().addressable_devices_indices_map((size,)).values()
        return np.unique(np.concatenate([np.arange(size)[index] for index in held]))

    def global_batch(self, part: Any) -> Any:
        """See `Training.global_batch`."""
        check_batch(part, {})
        sharding, rows, given = self.batch_sharding(), len(self.rows), shapes_of(part)
        wanted = jax.tree.map(lambda x: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype), self.batch)
        if given != wanted:
            raise ValueError(
                f"global_batch: of this process's {rows} rows of a batch, {differences(given, wanted)}. Pass the rows "
                "that training.rows lists, of the dtypes that parallelize was given."
            )
        return jax.tree.map(
            lambda x, whole: jax.make_array_from_process_local_data(
                sharding, np.asarray(x).astype(whole.dtype, copy=False), whole.shape
            ),
            part,
            self.batch,
        )

    def initial_state(self, init: Any, key: jax.Array | None) -> TrainState:
        """The state at step 0, from a function of a key or from existing arrays. See `Training.init`."""
        mesh = self.program.mesh
        key = None if key is None else _of_no_device(key)
        if _is_function(init):
            if key is None:
                raise ValueError("init(init_fn, key): a function needs the key it is called with.")

            def make(key):
                return split_extra(_arrays(init(key)), self.loss)

            self._check_given(jax.eval_shape(make, key))
            return settled(mesh, initialiser(self.program, self.optimizer, self.where, make)(key))
        given = split_extra(_arrays(init), self.loss)
        self._check_given(given)
        key = jax.random.key(0) if key is None else key
        return settled(mesh, placed(self.program, self.optimizer, self.where, *given, key))

    def _check_given(self, given: tuple[Any, Any]) -> None:
        casts = self.program.precision.params is not None
        check_shapes(given[0], self.params, "the parameters given to init", any_float=casts)
        check_shapes(given[1], self.extra, "the extra given to init")


def _of_no_device(key: jax.Array) -> jax.Array:
    """A key from wherever it lives, bound to no device and no mesh. Raises TypeError unless it is one key."""
    is_new = isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    is_old = isinstance(key, jax.Array) and key.dtype == jnp.uint32 and key.ndim == 1
    if not (is_new and key.shape == ()) and not is_old:
        raise TypeError(f"init(..., key): the key is {kind_of(key)}; pass one, jax.random.key(0) or the like.")
    if is_old:
        return jnp.asarray(np.asarray(key))
    return jax.random.wrap_key_data(jnp.asarray(np.asarray(jax.random.key_data(key))), impl=jax.random.key_impl(key))


def _arrays(tree: Any) -> Any:
    """Python scalars as arrays of the dtype they have in shapes."""
    check_params(tree, "the parameters given to init")
    return jax.tree.map(lambda x: x if hasattr(x, "dtype") else jnp.asarray(x, jnp.result_type(x)), tree)


def setup(
    loss_fn: Callable[..., Any],
    optimizer: optax.GradientTransformation,
    *,
    params: Any,
    batch: Any,
    mesh: Mesh,
    strategy: Strategy,
    accumulate: int,
    clip: float | None,
    skip_nonfinite: bool,
    precision: Precision,
    remat: Any,
    trainable: Any,
    whole_budget: float,
    warn_whole: float,
    axis_name: str | None,
    compiler_options: Mapping[str, str],
) -> Setup:
    """Checks every choice and traces the loss. The arguments are those of `parallelize`, all given."""
    sizes = axis_sizes(mesh)
    _check(strategy, sizes, compiler_options)
    accumulate = whole_number("accumulate", accumulate, "the number of microbatches per step")
    clip = None if clip is None else _norm(clip)
    whole_budget = real_number("whole_budget", whole_budget, "a fraction, 0 or more")
    warn_whole = real_number("warn_whole", warn_whole, "a fraction of the parameters' bytes, 0 or more")
    if not isinstance(precision, Precision):
        raise TypeError(f"precision={precision!r}: pass jaxshard.Precision(compute='bfloat16'), or the like.")
    if not isinstance(skip_nonfinite, bool):
        raise TypeError(f"skip_nonfinite={skip_nonfinite!r} is {kind_of(skip_nonfinite)}: pass True or False.")
    if axis_name is not None and (not isinstance(axis_name, str) or axis_name in mesh.axis_names):
        raise ValueError(
            f"axis_name={axis_name!r}: one more name, for all batch axes together; the mesh's own axes "
            f"{mesh.axis_names} can be used in the loss as they are."
        )
    check_batch(batch, {axis: sizes[axis] for axis in BATCH_AXES} | {"accumulate": accumulate})
    loss = loss_function(loss_fn)
    shapes, extra = split_extra(_param_shapes(params), loss)
    stored = jax.eval_shape(lambda p: cast_floats(p, precision.params), shapes)
    extra = shapes_of(extra)
    first = traced(loss, mesh, axis_name, precision, stored, extra, batch, mesh.size * accumulate)
    program = Program(
        loss=first,
        layout=layout(
            stored,
            first.closed.jaxpr,
            size_over(mesh, split_axes(strategy)),
            whole_budget=whole_budget,
            trainable=trainable,
        ),
        strategy=strategy,
        mesh=mesh,
        precision=precision,
        accumulate=accumulate,
        choices=Choices(
            regather=strategy.regather,
            tie=strategy.prefer == "memory",
            remat=body_remat(remat, tie=strategy.prefer == "memory"),
            product_order=isinstance(mesh, Mesh) and platform_of(mesh) == "cpu",  # a plan's mesh has no devices
        ),
        deferred=strategy.defers(accumulate),
        skips=skip_nonfinite or precision.scaled,
    )
    check_optimizer(optimizer, program.learning(stored))
    where = state_layout(program, optimizer, stored, extra)
    place = update_place(program, optimizer, where)
    if place is not None:
        resolved = replace(strategy, update="host" if place.by_host else "device")
        program = replace(program, strategy=resolved)
    if program.pieces > 1:
        warn_of_whole_leaves(program.layout, strategy, warn_whole)
    return Setup(
        loss=loss,
        optimizer=optimizer,
        params=stored,
        extra=extra,
        batch=shapes_of(batch),
        program=program,
        where=where,
        clip=clip,
        axis_name=axis_name,
        compiler_options=dict(compiler_options),
        offloaded="" if place is None else place.because,
    )


def traced(
    loss: LossFunction,
    mesh: Mesh,
    axis_name: str | None,
    precision: Precision,
    params: Any,
    extra: Any,
    batch: Any,
    parts: int,
) -> TracedLoss:
    """A loss traced on one of `parts` equal parts of a global batch, with parameters whole and in the compute dtype."""
    part = jax.tree.map(lambda x: jax.ShapeDtypeStruct((x.shape[0] // parts, *x.shape[1:]), x.dtype), shapes_of(batch))
    whole = jax.eval_shape(lambda p: cast_floats(p, precision.compute), params)
    key = jax.eval_shape(lambda: jax.random.key(0))
    return trace_loss(loss, mesh, axis_name, whole, part, key, extra)


def shapes_of(tree: Any) -> Any:
    """The ShapeDtypeStructs of a pytree of arrays, in the dtypes JAX would give them."""

    def shape(x):
        dtype = x.dtype if hasattr(x, "dtype") else jnp.result_type(x)
        dtype = dtype if jnp.issubdtype(dtype, jax.dtypes.extended) else jax.dtypes.canonicalize_dtype(dtype)
        return jax.ShapeDtypeStruct(jnp.shape(x), dtype)

    return jax.tree.map(shape, tree)


def split_extra(given: Any, loss: LossFunction) -> tuple[Any, Any]:
    """(params, extra); without `extra` in the loss's signature all of it is params."""
    if not loss.takes_extra:
        return given, None
    if not (isinstance(given, tuple) and len(given) == 2):
        raise TypeError(
            f"{loss.name} takes `extra`, so params (or what init_fn returns) must be the pair (params, extra); "
            f"it is {kind_of(given)}."
        )
    return given


def _is_function(x: Any) -> bool:
    """Whether this is a function of a key. A module whose leaves are arrays may be callable as well, and is none."""
    return callable(x) and (isinstance(x, functools.partial) or jax.tree_util.all_leaves([x]))


def _param_shapes(params: Any) -> Any:
    if not _is_function(params):
        check_params(params)
        return shapes_of(params)

    # A fresh function: JAX caches traces by the function's identity.
    def made(key):
        with noted("params= is a function, so it is called with one PRNG key, as init_fn(key)."):
            result = params(key)
        check_params(result, "params=, called with a key")
        return result

    return jax.eval_shape(made, jax.eval_shape(lambda: jax.random.key(0)))


def _check(strategy: Strategy, sizes: Mapping[str, int], compiler_options: Any) -> None:
    if not isinstance(compiler_options, Mapping):
        raise TypeError(
            f"compiler_options is {kind_of(compiler_options)}; pass a dict of XLA options, such as "
            "{'xla_gpu_enable_latency_hiding_scheduler': 'True'}."
        )
    if sizes["replica"] < strategy.min_replicas:
        raise ValueError(
            f"{name_of(strategy)} wants at least {strategy.min_replicas} replicas, and the mesh has "
            f"{' x '.join(f'{axis}={size}' for axis, size in sizes.items())}. "
            f"Use make_mesh(replica={strategy.min_replicas}), or zero3 for a mesh with one replica."
        )


def _norm(clip: Any) -> float:
    meaning = "the largest global norm of the gradients, above 0, or None"
    norm = real_number("clip", clip, meaning)
    if not norm > 0:
        raise ValueError(f"clip={clip}: {meaning}.")
    return norm
