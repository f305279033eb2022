"""torch's DataParallel, honestly: the baseline to beat.

Parameters and optimizer state live on the first device alone. Each step broadcasts the parameters, computes gradients
everywhere, gathers them to the first device, and updates there. That cannot be one program, so it is several calls, for
one process only, and the first device holds and sends what the others do not.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from jaxshard import collectives
from jaxshard.checks import check_alive, check_places, check_state
from jaxshard.contract import Collective
from jaxshard.evaluate import Evaluation, whole
from jaxshard.explain import Explanation, explain
from jaxshard.gradients import Gradients, item_share, local_sums
from jaxshard.link import check_host_memory
from jaxshard.loss import Loss
from jaxshard.mesh import settled, unplaced
from jaxshard.nans import blamed_step, finite_leaves, nonfinite_paths
from jaxshard.setup import Setup
from jaxshard.specs import Leaf
from jaxshard.state import TrainState
from jaxshard.strategy import BATCH_AXES, Strategy
from jaxshard.update import step_metrics, updated


class DataParallel:
    """The same face as `Training`, without `step_fn` and `lower`: there is no one program to give."""

    def __init__(self, made: Setup):
        if jax.process_count() > 1:
            raise ValueError("dp runs in one process only, because one device updates for all; use ddp.")
        self.setup = made
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
        """The state at step 0, on the first device. See `Training.init`."""
        check_host_memory(self.setup)
        return self.setup.initial_state(init_fn, key)

    @property
    def rows(self) -> np.ndarray:
        """Which rows of a global batch lie on this process's devices: all. See `Training.rows`."""
        return self.setup.rows

    def global_batch(self, part: Any) -> Any:
        """A global batch, for `step`, from what this process has read: all of it. See `Training.global_batch`."""
        return self.setup.global_batch(part)

    @unplaced()
    def step(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        """One step; the state is donated. See `Training.step`."""
        check_alive(state)
        check_state(state, self.state_shapes)
        check_places(state, self.setup.where.shardings)
        return self._update(state, *self._stacked(state, self.setup.place(batch)))

    def _stacked(self, state: TrainState, batch: Any) -> Any:
        """(gradients, one row per device; the sums of the loss; the new extra), on the first device."""
        scale = None if state.scale is None else state.scale.scale
        key = jax.random.fold_in(state.key, state.step)
        copies = self._broadcast((state.params, state.extra, key, scale))
        with blamed_step(self.setup, batch, lambda: copies):
            results = settled(self.mesh, self._gradients(*copies, batch))
        return jax.device_put(results, SingleDeviceSharding(self.mesh.devices.flat[0]))

    @unplaced()
    def nonfinite(self, state: TrainState, batch: Any) -> tuple[str, ...]:
        """The leaves of a state, and of its gradients, that are not finite. See `Training.nonfinite`."""
        check_alive(state)
        return nonfinite_paths(jax.jit(finite_leaves)(state, self._stacked(state, self.setup.place(batch))[0]))

    @unplaced()
    def evaluate(self, state: TrainState, batch: Any, fn: Callable[..., Any] | None = None) -> dict[str, jax.Array]:
        """Loss and metrics of a batch of any size. See `Training.evaluate`."""
        check_alive(state)
        return self._evaluation(self._broadcast(state), batch, fn)

    def whole(self, state: TrainState) -> Any:
        """The parameters as numpy arrays. See `Training.whole`."""
        return whole(state.params)

    def explain(self) -> Explanation:
        """What the first device holds and what passes over its links in a step. See `Training.explain`."""
        return explain(self.setup, self.contract(), {})

    def contract(self) -> tuple[Collective, ...]:
        """The transfers of a step, from its plan: they are the runtime's, and stand in no program."""
        program, devices = self.setup.program, self.mesh.size

        def transfer(kind: str, purpose: str, leaf: Leaf, dtype: Any) -> Collective:
            return Collective(
                kind=kind,
                purpose=purpose,
                leaf=leaf.path,
                axes=BATCH_AXES,
                devices=devices,
                dtype=jnp.dtype(dtype).name,
                bytes=math.prod(leaf.shape) * jnp.dtype(dtype).itemsize,
                count=1,
            )

        leaves = jax.tree.leaves(program.layout) if devices > 1 else []
        down = [transfer("broadcast", "gather", leaf, leaf.dtype) for leaf in leaves]
        up = [transfer("gather", "reduce", leaf, self._wire_dtype(leaf.dtype)) for leaf in leaves if leaf.trainable]
        return (*down, *up)

    def _wire_dtype(self, dtype: Any) -> Any:
        """Floats travel in the reduction's dtype."""
        return self.setup.program.precision.reduce if jnp.issubdtype(dtype, jnp.floating) else dtype

    def _broadcast(self, tree: Any) -> Any:
        return jax.device_put(tree, NamedSharding(self.mesh, P()))

    @cached_property
    def _gradients(self) -> Callable[..., Any]:
        """Gradients stacked along a new first dim, one row per device."""

        def gradients(params, extra, key, scale, batch):
            program = self.setup.program_for(batch)
            mapped = jax.shard_map(
                lambda *args: self._device(program, *args),
                mesh=self.mesh,
                in_specs=(P(), P(), P(), P(), P(BATCH_AXES)),
                out_specs=(P(BATCH_AXES), P(), P()),
                check_vma=False,
            )
            return mapped(params, extra, key, scale, batch)

        return jax.jit(gradients, compiler_options=self.setup.own_options)

    def _device(self, program, params, extra, key, scale, batch) -> tuple[Any, Loss, Any]:
        grads, sums, extra = local_sums(program, params, extra, batch, key, scale)
        sums = collectives.total(sums, BATCH_AXES, program.sizes, "items")
        factor = item_share(sums.weight) * (1 if scale is None else scale)

        def wire(g):
            return (g * factor.astype(g.dtype)).astype(self._wire_dtype(g.dtype))[None]

        return jax.tree.map(wire, grads), sums, extra

    @cached_property
    def _update(self) -> Callable[..., Any]:
        program = self.setup.program

        def update(state, stacked, sums, extra):
            unscale = 1 if state.scale is None else 1 / state.scale.scale

            def add(g):
                dtype = program.precision.accumulate if jnp.issubdtype(g.dtype, jnp.floating) else g.dtype
                return jnp.sum(g.astype(dtype), axis=0) * jnp.asarray(unscale, dtype)

            grads = jax.tree.map(add, stacked)
            square = sum(jnp.sum(jnp.square(jnp.abs(g).astype(jnp.float32))) for g in jax.tree.leaves(grads))
            share = item_share(sums.weight)
            metrics = {name: value * share for name, value in sums.metrics.items()}
            result = Gradients(grads, None, sums.total * share, metrics, jnp.sqrt(square), extra)
            new = updated(program, self.setup.optimizer, self.setup.where, state, result, self.setup.clip)
            return new, step_metrics(result, new)

        return jax.jit(update, donate_argnums=0, compiler_options=self.setup.own_options)
