"""Which line of the user's program makes the first NaN.

JAX looks at the results of a compiled program alone. With `jax_debug_nans`, when JAX finds a NaN there, the program is
run again with a check after every operation (`jax.experimental.checkify`), backward pass included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import checkify
from jax.extend.source_info_util import SourceInfo, new_name_stack, summarize
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxshard.checks import leaves_by_path
from jaxshard.collectives import is_hosted, to_device
from jaxshard.gradients import local_sums
from jaxshard.setup import Setup
from jaxshard.state import TrainState
from jaxshard.strategy import BATCH_AXES

LOSS = str(Path(__file__).parent / "loss.py")


def debugs_nans() -> bool:
    return jax.config.values["jax_debug_nans"]


@contextmanager
def blamed(mesh: Mesh, again: Callable[[], tuple[Callable[..., Any], Any, Any]]) -> Iterator[None]:
    """Turns JAX's report of a NaN into a FloatingPointError with the line that made the first one.

    again: gives what each device of `mesh` computes, the specs of its arguments and the arguments, as for
    `jax.shard_map`; called when there is a NaN.
    """
    try:
        yield
    except Exception as error:
        if "FloatingPointError" not in type(error).__name__:  # JAX has two, one of them its own
            raise
        raise FloatingPointError(_first_nan(mesh, *again())) from None


def blamed_step(made: Setup, batch: Any, arguments: Callable[[], tuple[Any, Any, Any, Any]]):
    """`blamed` for the forward and backward passes of a step. arguments: gives (params, extra, key, loss scale)."""

    def again():
        program, (params, extra, key, scale) = made.program_for(batch), arguments()
        specs = jax.tree.map(lambda leaf: leaf.spec(program.strategy.params), program.layout)
        in_specs = specs, P(), P(BATCH_AXES), P(), P()
        return lambda *args: local_sums(program, *args), in_specs, (params, extra, batch, key, scale)

    return blamed(made.program.mesh, again)


def finite_leaves(state: TrainState, grads: Any) -> dict[str, Any]:
    """Whether each leaf of the parameters, the optimizer's and the extra state, and gradients is finite; traceable."""

    def finite(x):
        x = to_device(x, "state") if is_hosted(x) else x
        return jnp.isfinite(x).all() if jnp.issubdtype(x.dtype, jnp.inexact) else jnp.bool(True)

    trees = {"params": state.params, "opt": state.opt, "extra": state.extra, "grads": grads}
    return {name: jax.tree.map(finite, tree) for name, tree in trees.items()}


def nonfinite_paths(finite: dict[str, Any]) -> tuple[str, ...]:
    """The paths of the leaves that are not finite, of what `finite_leaves` found: the state's before the gradients'."""
    return tuple(
        f"{name}/{path}"
        for name in ("params", "opt", "extra", "grads")
        for path, good in leaves_by_path(finite[name]).items()
        if not good
    )


def _first_nan(mesh: Mesh, device: Callable[..., Any], specs: Any, arguments: Any) -> str:
    def checked(*args):
        error, _ = checkify.checkify(device, errors=checkify.nan_checks)(*args)
        return jax.tree.map(lambda x: jnp.asarray(x)[None], error)

    mapped = jax.shard_map(checked, mesh=mesh, in_specs=specs, out_specs=P(mesh.axis_names), check_vma=False)
    with jax.debug_nans(False):
        errors = jax.device_get(jax.jit(mapped)(*arguments))
    for i in range(mesh.size):
        found = jax.tree.map(lambda x, i=i: x[i], errors).get_exception()
        if found is not None:
            return f"{str(found).rstrip('.')}, first on device {i}, at\n{_lines(found)}"
    return "a NaN, but none in the loss or its gradients: it comes from the optimizer's update."


def _lines(found: Any) -> str:
    """The user's lines that led to an operation, innermost last."""
    lines = summarize(SourceInfo(getattr(found, "traceback_info", None), new_name_stack()), num_frames=20).splitlines()
    ours = [i for i, line in enumerate(lines) if line.startswith(LOSS)]
    return "\n".join(f"  {line}" for line in lines[ours[-1] + 1 if ours else 0 :])
