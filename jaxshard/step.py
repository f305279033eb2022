"""`parallelize`: the one step builder. It never asks which strategy it has."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.stages import Lowered, Traced

from jaxshard.checks import check_alive, check_batch, check_places, check_state, noted
from jaxshard.compiler import Built, build, options_for
from jaxshard.contract import Collective, count_collectives, expected_collectives, hold
from jaxshard.dp import DataParallel
from jaxshard.evaluate import Evaluation, whole
from jaxshard.explain import Explanation, explain
from jaxshard.gradients import Gradients, device_gradients, of_mean
from jaxshard.link import check_host_memory
from jaxshard.mesh import automatic, make_mesh, platform_of, settled, unplaced
from jaxshard.nans import blamed_step, debugs_nans, finite_leaves, nonfinite_paths
from jaxshard.precision import Precision
from jaxshard.program import Program
from jaxshard.setup import Setup, setup, shapes_of
from jaxshard.specs import shape_at
from jaxshard.state import TrainState
from jaxshard.strategy import BATCH_AXES, Strategy, named
from jaxshard.update import step_metrics, updated


def parallelize(
    loss_fn: Callable[..., Any],
    optimizer: optax.GradientTransformation,
    *,
    params: Any,
    batch: Any,
    mesh: Mesh | None = None,
    strategy: str | Strategy = "zero3",
    accumulate: int = 1,
    clip: float | None = None,
    skip_nonfinite: bool = False,
    precision: Precision | None = None,
    remat: str | Callable[..., Any] = "none",
    trainable: Any = None,
    whole_budget: float = 0.01,
    warn_whole: float = 0.02,
    axis_name: str | None = None,
    compiler_options: Mapping[str, str] | None = None,
) -> Training | DataParallel:
    """A training step for any loss function, sharded as the strategy says.

    loss_fn: ``(params, batch) -> loss``; ``key=`` (another on every device and microbatch) and ``extra=`` (state that
        is not trained) are passed if its signature names them. The loss is a float scalar, a mean over the examples
        it is given, or a `Loss`; with ``extra``, the pair ``(loss, new_extra)``.
    optimizer: any optax optimizer.
    params: the parameters' shapes: a function of a PRNG key (as given to `Training.init`; it is not run), or a pytree
        of arrays or ShapeDtypeStructs. With ``extra``, ``(params, extra)``.
    batch: the shapes of a global batch: arrays or ShapeDtypeStructs whose first dim is the batch.
    mesh: of `make_mesh`; by default all devices along `shard` (and 2 replicas for a strategy that needs them).
    accumulate: microbatches per step. clip: the global norm that gradients are clipped to.
    skip_nonfinite: whether a step with a loss or a gradient norm that is not finite leaves params, opt, extra and step
        as they were (with float16 it always does); the metrics show it.
    remat: for the bodies of scans over layers: ``"none"``, ``"full"``, ``"dots"``, ``"offload"`` (recomputes as
        ``"full"``, and each layer's input waits in host memory) or one of `jax.checkpoint_policies`, also of those that
        offload.
    trainable: a predicate on the path (``blocks/mlp/kernel``), or a mask tree; by default every float and complex leaf.
    whole_budget: the smallest leaves stay whole while they cost less than this fraction of a device's share.
    warn_whole: a `WholeLeavesWarning` names the leaves that stay whole if they are more than this fraction of all
        parameters' bytes, under a strategy that splits.
    axis_name: a name the model uses for its batch axis, such as BatchNorm's.
    compiler_options: XLA options that win over the strategy's own; None as a value drops one.

    The loss is traced here, once. Raises ValueError or TypeError, naming the argument, for whatever does not fit.
    """
    strategy = named(strategy)
    made = setup(
        loss_fn,
        optimizer,
        params=params,
        batch=batch,
        mesh=make_mesh(replica=strategy.min_replicas) if mesh is None else automatic(mesh),
        strategy=strategy,
        accumulate=accumulate,
        clip=clip,
        skip_nonfinite=skip_nonfinite,
        precision=Precision() if precision is None else precision,
        remat=remat,
        trainable=trainable,
        whole_budget=whole_budget,
        warn_whole=warn_whole,
        axis_name=axis_name,
        compiler_options={} if compiler_options is None else compiler_options,
    )
    # The one strategy that is no single program.
    return DataParallel(made) if strategy.params.devices == "first" else Training(made)


class Training:
    """A training step with its state's layout. Made by `parallelize`."""

    def __init__(self, made: Setup):
        self.setup = made
        self._built: dict[Any, Built] = {}
        self._evaluation = Evaluation(made)

    @property
    def mesh(self) -> Mesh:
        return self.setup.program.mesh

    @property
    def strategy(self) -> Strategy:
        return self.setup.program.strategy

    @property
    def state_shapes(self) -> TrainState:
        """The state as ShapeDtypeStructs that carry their shardings."""
        return self.setup.state_shapes

    def init(self, init_fn: Any, key: jax.Array | None = None) -> TrainState:
        """The state at step 0, born sharded: no leaf is ever whole on a device unless its spec says so.

        init_fn: a function of `key` that returns params (or ``(params, extra)``), run as one global computation whose
        values are the same on every mesh; or a pytree of existing arrays, which are copied. Initialisers that do not
        partition (orthogonal) need up to four copies of their leaf while they run: make stacked layers by
        `init_layers`, one at a time.

        Raises ValueError when shapes differ from those given to `parallelize`.
        """
        check_host_memory(self.setup)
        return self.setup.initial_state(init_fn, key)

    @property
    def rows(self) -> np.ndarray:
        """Which rows of a global batch lie on this process's devices, ascending: all, where it is the only one."""
        return self.setup.rows

    def global_batch(self, part: Any) -> Any:
        """A global batch, for `step`, from its `rows` alone, as numpy arrays.

        Raises ValueError for another number of rows or another dtype: the batch is the one `parallelize` was told of.
        """
        return self.setup.global_batch(part)

    @unplaced()
    def step_fn(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        """One step, pure and unjitted, for your own `jit`: ``(state, batch) -> (state, metrics)``."""
        program = self.setup.program_for(batch)
        params, extra, key, scale = _arguments(state)
        result = _global_gradients(program, params, extra, batch, key, scale)
        new = updated(program, self.setup.optimizer, self.setup.where, state, result, self.setup.clip)
        return new, step_metrics(result, new)

    @unplaced()
    def step(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        """One step. state is donated: use the one returned. batch: a global batch of numpy or JAX arrays. With several
        processes each places its own devices' rows of it; one that has read no others makes it by `global_batch`.

        Returns the new state and metrics, device scalars: ``loss`` and the `Loss.metrics` as means over items,
        ``grad_norm`` before clipping; with float16 ``loss_scale`` and ``skipped`` (steps, so far). A NaN is not an
        error but a metric, because finding one would have every step wait for the device. With ``jax_debug_nans`` (or
        JAX_DEBUG_NANS=1) it is one, a FloatingPointError that names the line of the loss which made the first.

        Raises TypeError or ValueError when the batch does not divide, or the state is another training's, or was given
        to a step before.
        """
        check_alive(state)
        if batch is None:  # what an exhausted loader gives
            check_batch(batch, self.setup.parts)
        batch = self.setup.place(_apart(batch, state))
        built = self.built(batch)
        try:
            with blamed_step(self.setup, batch, lambda: _arguments(state)):
                return settled(self.mesh, built.compiled(state, batch))
        except (TypeError, ValueError):
            check_state(state, self.state_shapes)
            check_places(state, self.setup.where.shardings)
            raise

    @unplaced()
    def evaluate(self, state: TrainState, batch: Any, fn: Callable[..., Any] | None = None) -> dict[str, jax.Array]:
        """Loss and metrics of a batch of any size, without a gradient.

        fn: another function of the same signature as the loss. What divides by the devices is split, the rest runs
        whole on every device; results are weighted by items, those of a plain scalar by examples.
        """
        return self._evaluation(state, batch, fn)

    @unplaced()
    def nonfinite(self, state: TrainState, batch: Any) -> tuple[str, ...]:
        """The leaves of a state, and of the gradients it gives on a batch, with a value that is not finite.

        By their paths: ``("params/w", "grads/w", "grads/b")``. The state stays as it is.
        """
        check_alive(state)
        return nonfinite_paths(self._finite(state, self.setup.place(batch)))

    @cached_property
    def _finite(self) -> Callable[..., Any]:
        def finite(state, batch):
            params, extra, key, scale = _arguments(state)
            program = self.setup.program_for(batch)
            result = _global_gradients(program, params, extra, batch, key, scale)
            return finite_leaves(state, of_mean(program, result.grads, result.factor))

        return jax.jit(finite, compiler_options=self.setup.own_options)

    def whole(self, state: TrainState) -> Any:
        """The parameters as numpy arrays, brought to the host leaf by leaf."""
        return whole(state.params)

    @unplaced()
    def lower(self, batch: Any = None) -> Lowered:
        """The step, lowered for this mesh (of devices that exist, or of a compile-only target), not run."""
        batch = self.setup.batch if batch is None else batch
        # To find a NaN, JAX keeps what is donated, and says so when it traces.
        same = shapes_of(batch) == self.setup.batch and not debugs_nans()
        return (self._traced if same else self._trace(batch)).lower()

    def built(self, batch: Any = None) -> Built:
        """The compiled step for a batch of these shapes. Raises RuntimeError if state is not updated in place."""
        leaves, structure = jax.tree.flatten(self.setup.batch if batch is None else batch)
        # To find a NaN, JAX keeps what is donated.
        seen = structure, tuple((jnp.shape(x), getattr(x, "dtype", type(x))) for x in leaves), debugs_nans()
        if seen not in self._built:
            own = self.setup.compiler_options
            options = options_for(self.strategy, platform_of(self.mesh), own)
            try:
                built = build(self.lower(batch), options, required=own)
            except jax.errors.JaxRuntimeError as error:
                if self.strategy.update != "host":
                    raise
                self._update_by_device(error)
                built = build(self.lower(batch), options, required=own)
            _check_donation(built, self.state_shapes)
            self._built[seen] = built
        return self._built[seen]

    def _update_by_device(self, error: Exception) -> None:
        """What a compiler does not have the host do, the device does."""
        said = str(error).splitlines()[0]
        self.setup = self.setup.by_device(f"this compiler refuses: {said}")
        for kept in ("_traced", "_contract", "_finite"):
            self.__dict__.pop(kept, None)

    @unplaced()
    def explain(self) -> Explanation:
        """A table of leaves (where each lives, why, and what it costs) and every collective of one step."""
        left_out = {name: value for built in self._built.values() for name, value in built.left_out.items()}
        return explain(self.setup, self.contract(), left_out)

    @unplaced()
    def contract(self) -> tuple[Collective, ...]:
        """Every collective of one step, counted in its jaxpr. Raises ContractError for one its strategy has not."""
        return self._contract

    @cached_property
    def _contract(self) -> tuple[Collective, ...]:
        counted = count_collectives(self._traced.jaxpr.jaxpr, self.setup.program.sizes)
        hold(expected_collectives(self.setup), counted)
        return counted

    @cached_property
    def _traced(self) -> Traced:
        return self._trace(self.setup.batch)

    def _trace(self, batch: Any) -> Traced:
        # A leaf that the optimizer writes without reading (Adafactor's placeholders) is updated in place as well.
        jitted = jax.jit(
            lambda state, batch: self.step_fn(state, batch),
            donate_argnums=0,
            keep_unused=True,
            out_shardings=(self.setup.where.shardings, NamedSharding(self.mesh, P())),
        )
        sharding = self.setup.batch_sharding()
        shapes = jax.tree.map(lambda x: shape_at(x, sharding), shapes_of(batch))
        with noted(
            "The step was being traced, where the loss's own derivative rules (custom_vjp, custom_jvp) run first: they "
            f"may use the axes {BATCH_AXES}, but no axis_name= and no sharding constraint."
        ):
            return jitted.trace(self.state_shapes, shapes)


def _arguments(state: TrainState) -> tuple[Any, Any, jax.Array, jax.Array | None]:
    """(params, extra, the key of this step, the loss scale)."""
    key = jax.random.fold_in(state.key, state.step)
    return state.params, state.extra, key, None if state.scale is None else state.scale.scale


def _apart(batch: Any, state: TrainState) -> Any:
    """A batch that shares no memory with the state, which is donated while the batch is read."""
    own = [x for x in jax.tree.leaves(state) if isinstance(x, jax.Array)]

    def apart(x):
        alike = (y for y in own if (y.shape, y.dtype) == (x.shape, x.dtype)) if isinstance(x, jax.Array) else ()
        return jnp.copy(x) if any(x is y or _memory(x) & _memory(y) for y in alike) else x

    return jax.tree.map(apart, batch)


def _memory(x: jax.Array) -> set[int]:
    """Where the buffers of an array begin."""
    return {shard.data.unsafe_buffer_pointer() for shard in x.addressable_shards}


def _global_gradients(program: Program, params: Any, extra: Any, batch: Any, key: Any, scale: Any) -> Gradients:
    """The device's program over global arrays."""
    strategy, layout = program.strategy, program.layout
    specs = jax.tree.map(lambda leaf: leaf.spec(strategy.params), layout)
    grads = program.learning(jax.tree.map(lambda leaf: leaf.spec(strategy.opt), layout))
    whole: Any = P()
    results = Gradients(grads=grads, factor=whole, loss=whole, metrics=whole, norm=whole, extra=whole)
    mapped = jax.shard_map(
        lambda *args: device_gradients(program, *args),
        mesh=program.mesh,
        in_specs=(specs, P(), P(BATCH_AXES), P(), P()),
        out_specs=results,
        check_vma=False,
    )
    return mapped(params, extra, batch, key, scale)


def _check_donation(built: Built, state: TrainState) -> None:
    memory = built.compiled.memory_analysis()
    if memory is None or debugs_nans():
        return
    donated = sum(_local_bytes(x) for x in jax.tree.leaves(state))
    in_place = memory.alias_size_in_bytes + memory.host_alias_size_in_bytes
    if in_place < donated:
        raise RuntimeError(
            f"{donated - in_place} of the state's {donated} bytes per device are not updated in "
            "place, so a step would need them twice. Leaves of the state must keep their shapes and dtypes."
        )


def _local_bytes(x: jax.ShapeDtypeStruct) -> int:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.eval_shape(jax.random.key_data, x)
        return x.size * x.dtype.itemsize
    return math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
