"""Evaluation on batches of any size, and parameters brought whole to the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxshard import collectives
from jaxshard.checks import batch_size, check_alive, check_state, noted
from jaxshard.gradients import device_index
from jaxshard.loss import Loss, loss_function
from jaxshard.mesh import put, settled
from jaxshard.nans import blamed
from jaxshard.program import gathered_for_step, held_params
from jaxshard.setup import Setup, shapes_of
from jaxshard.state import TrainState
from jaxshard.strategy import BATCH_AXES


class Evaluation:
    """Loss and metrics of a batch without a gradient; compiled once per function and shapes."""

    def __init__(self, made: Setup):
        self.setup = made
        self._compiled: dict[Any, Callable[..., Loss]] = {}

    def __call__(self, state: TrainState, batch: Any, fn: Callable[..., Any] | None) -> dict[str, jax.Array]:
        # JAX would only say so once it runs, and may end the process.
        check_alive(state)
        check_state(state, self.setup.where.shapes, ("params", "extra"))
        self._check_devices(state)
        size = batch_size(batch)
        if not size:
            raise ValueError("batch has the first dim 0; evaluate needs an example at least.")
        devices = self.setup.program.mesh.size
        split = size // devices * devices
        if 0 < split < size:  # to axes of our own mesh: an array over `Explicit` ones cannot be sliced freely
            batch = put(batch, NamedSharding(self.setup.program.mesh, P()))
        sums = []
        if split:
            sums.append(self._run(state, jax.tree.map(lambda x: x[:split], batch), fn, parts=devices))
        if split < size:
            sums.append(self._run(state, jax.tree.map(lambda x: x[split:], batch), fn, parts=1))
        both = jax.tree.map(lambda *x: sum(x), *sums)
        share = jnp.where(both.weight > 0, 1 / both.weight, 0)
        return {"loss": both.total * share, **{name: value * share for name, value in both.metrics.items()}}

    def _check_devices(self, state: TrainState) -> None:
        mesh = self.setup.program.mesh
        for x in jax.tree.leaves((state.step, state.params)):
            if isinstance(x, jax.Array) and x.sharding.device_set != set(mesh.devices.flat):
                raise ValueError(
                    f"state lives in {x.sharding}, which is not on the devices of this training's mesh, {mesh}. "
                    "Bring its parameters over with init(other.whole(state))."
                )

    def _run(self, state: TrainState, batch: Any, fn: Callable[..., Any] | None, *, parts: int) -> Loss:
        shapes = shapes_of(batch)
        cached = fn, parts, tuple(jax.tree.leaves(shapes)), jax.tree.structure(shapes)
        if cached not in self._compiled:
            rest = "what is left of a batch that does not divide by the devices" if parts == 1 else "one device's part"
            with noted(f"evaluate was running the function on {rest}."):
                self._compiled[cached] = self._compile(shapes, fn, parts)
        spec = P(BATCH_AXES) if parts > 1 else P()
        batch = put(batch, NamedSharding(self.setup.program.mesh, spec))
        key = jax.random.fold_in(state.key, state.step)
        return self._compiled[cached](state.params, state.extra, batch, key)

    def _compile(self, shapes: Any, fn: Callable[..., Any] | None, parts: int) -> Callable[..., Loss]:
        program = self.setup.program
        loss = replace(self.setup.loss if fn is None else loss_function(fn), by_examples=True)
        traced = self.setup.trace(loss, shapes, parts)

        def device_sums(params, extra, batch, key):
            held = held_params(program, gathered_for_step(program, params), None)
            # Where all compute the same examples they draw alike, by a number that no device has.
            key = jax.random.fold_in(key, device_index(program) if parts > 1 else program.mesh.size)
            sums, _ = traced(program.choices, held, batch, key, extra)
            sums = Loss(sums.total.astype(jnp.float32), sums.weight, dict(sums.metrics))
            # What is not split, every device has computed in full.
            return collectives.total(sums, BATCH_AXES, program.sizes, "items") if parts > 1 else sums

        specs = jax.tree.map(lambda leaf: leaf.spec(program.strategy.params), program.layout)
        in_specs = specs, P(), P(BATCH_AXES) if parts > 1 else P(), P()
        mapped = jax.shard_map(device_sums, mesh=program.mesh, in_specs=in_specs, out_specs=P(), check_vma=False)
        compiled = jax.jit(mapped)

        def run(*args):
            with blamed(program.mesh, lambda: (device_sums, in_specs, args)):
                return settled(program.mesh, compiled(*args))

        return run


def whole(params: Any) -> Any:
    """A tree of sharded arrays as numpy arrays, brought to the host leaf by leaf. PRNG keys stay JAX arrays.

    With several processes all of them call it, and every one gets the whole tree.
    """
    check_alive(params)

    def fetch(x):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return x
        if isinstance(x, jax.Array) and not (x.is_fully_addressable or x.is_fully_replicated):
            return multihost_utils.process_allgather(x, tiled=True)
        return np.asarray(x)

    return jax.tree.map(fetch, params)
