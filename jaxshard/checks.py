"""Mistakes found before anything runs: each error names the argument, shows its numbers, and says what to do.

An error inside a function of the user's stays as it is, so that it points at the user's line; a note below it says what
the function was called for.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from numbers import Real
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax


@contextmanager
def noted(note: str) -> Iterator[None]:
    """Adds a note to whatever error passes; its traceback still ends where it was raised."""
    try:
        yield
    except Exception as error:
        error.add_note(note)
        raise


def kind_of(value: Any) -> str:
    """What kind of thing a value is, for a message."""
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        return f"an array of shape {np.shape(value)} and dtype {value.dtype}"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def whole_number(name: str, value: Any, meaning: str) -> int:
    """An int of 1 or more, from an int of any kind. Raises TypeError for what is none, ValueError below 1."""
    try:
        if isinstance(value, bool | np.bool_):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}={value!r} is {kind_of(value)}: {meaning}, an int of 1 or more.") from None
    if number < 1:
        raise ValueError(f"{name}={number}: {meaning}, an int of 1 or more.")
    return number


def real_number(name: str, value: Any, meaning: str) -> float:
    """A float, from a real number of any kind. Raises TypeError for what is none."""
    scalar = hasattr(value, "dtype") and is_array(value) and value.shape == ()
    kinds = (jnp.integer, jnp.floating)
    real = isinstance(value, Real) or (scalar and any(jnp.issubdtype(value.dtype, kind) for kind in kinds))
    if isinstance(value, bool) or not real:
        raise TypeError(f"{name}={value!r} is {kind_of(value)}: {meaning}.")
    return float(value)


def leaves_by_path(tree: Any) -> dict[str, Any]:
    """Every leaf of a tree by its place in it, such as ``blocks/mlp/kernel``."""
    named = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in named}


def is_array(x: Any) -> bool:
    """Whether a leaf is an array that JAX can hold (or its shape), or a Python number."""
    if not hasattr(x, "dtype"):
        return isinstance(x, bool | int | float | complex)
    try:
        return hasattr(x, "shape") and any(
            jnp.issubdtype(x.dtype, kind) for kind in (np.number, np.bool_, jax.dtypes.extended)
        )
    except TypeError:  # another library's dtype
        return False


def check_arrays(tree: Any, what: str, instead: str) -> None:
    """Raises TypeError, naming the leaves, unless all are arrays. instead: what to do with those that are not."""
    wrong = {path: x for path, x in leaves_by_path(tree).items() if not is_array(x)}
    if wrong:
        said = ", ".join(f"{path or what} is {kind_of(x)}" for path, x in list(wrong.items())[:4])
        more = f" (and {len(wrong) - 4} more)" if len(wrong) > 4 else ""
        raise TypeError(f"{what}: {said}{more}; every leaf must be a NumPy or JAX array of numbers. {instead}")


def check_params(params: Any, what: str = "params") -> None:
    """Raises TypeError, naming the leaves, for parameters (or `extra`) that are no arrays."""
    instead = "Keep the rest out of them: equinox.partition(model, equinox.is_inexact_array), flax.nnx.split(model)."
    check_arrays(params, what, instead)


def batch_size(batch: Any) -> int:
    """The first dim that all leaves of a batch have. Raises TypeError or ValueError when there is none."""
    if isinstance(batch, Iterator):
        raise TypeError(f"batch is {kind_of(batch)}; pass one batch, such as next({type(batch).__name__}).")
    check_arrays(batch, "batch", "Convert it (numpy.asarray), or leave it out of the batch.")
    shapes = {path: np.shape(x) for path, x in leaves_by_path(batch).items()}
    if not shapes:
        raise ValueError("batch has no arrays; pass a pytree of arrays whose first dim is the global batch.")
    scalars = [path or "batch" for path, shape in shapes.items() if not shape]
    if scalars:
        some = ", ".join(scalars[:4]) + (f" and {len(scalars) - 4} more" if len(scalars) > 4 else "")
        raise ValueError(
            f"batch: {some} have no dims, and the first dim of every leaf is the global batch. "
            "Make lists arrays (numpy.asarray), and let loss_fn close over constants."
        )
    sizes = {path: shape[0] for path, shape in shapes.items()}
    if len(set(sizes.values())) > 1:
        raise ValueError(f"the leaves of batch disagree in their first dim, which is the global batch: {sizes}.")
    return next(iter(sizes.values()))


def check_batch(batch: Any, parts: Mapping[str, int]) -> None:
    """Raises ValueError unless all leaves have one leading size, divisible by all `parts` (named factors)."""
    size, divisor = batch_size(batch), math.prod(parts.values())
    if size and size % divisor == 0:
        return
    said = " x ".join(f"{name}={count}" for name, count in parts.items())
    below, above = size // divisor * divisor, (size // divisor + 1) * divisor
    near = f"{below} or {above}" if below else f"{above}"
    # With fewer or more microbatches this batch may do as it is.
    accumulate = parts.get("accumulate", 1)
    rows, rest = divmod(size * accumulate, divisor)
    fits = [k for k in range(1, rows + 1) if rows % k == 0] if accumulate > 1 and not rest else []
    nearest = sorted(sorted(fits, key=lambda k: abs(k - accumulate))[:2])
    or_so = f" Or keep it, with accumulate={' or '.join(map(str, nearest))}." if fits else ""
    raise ValueError(
        f"a batch of {size} does not divide by {said} = {divisor}; the nearest sizes that do: {near}.{or_so}"
    )


def check_optimizer(optimizer: Any, params: Any) -> None:
    """Traces an optimizer on the parameters that learn (ShapeDtypeStructs) once, to see that it fits them.

    Raises TypeError for what is no optimizer, and for one whose update gives other shapes than it was given. An error
    of the optimizer's own is raised as it is, with a note.
    """
    if isinstance(optimizer, type) or not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        raise TypeError(f"optimizer is {kind_of(optimizer)}; pass an optax optimizer, such as optax.adamw(3e-4).")

    def update(grads, state, params, loss):
        return optax.with_extra_args_support(optimizer).update(grads, state, params, value=loss)

    # optax mixes integer counts with floats, which a user's strict promotion would forbid.
    with jax.numpy_dtype_promotion("standard"):
        with noted(
            f"optimizer=: its init failed on these params: {described(params)}. A mask, or labels, must be a tree "
            "like the params, or a function of them."
        ):
            state = jax.eval_shape(lambda p: optimizer.init(p), params)
        with noted(
            "optimizer=: its update failed. It is called once a step, as update(grads, state, params, value=loss); an "
            "optimizer that evaluates the loss again (value_fn, grad_fn), as a line search does, cannot be used here. "
            "One that takes no value= can be wrapped: GradientTransformation(o.init, lambda *args: o.update(*args))."
        ):
            loss = jax.ShapeDtypeStruct((), jnp.float32)
            updates, new_state = jax.eval_shape(update, params, state, params, loss)
    _check_kept("updates", updates, params)
    _check_kept("state", new_state, state)


def _check_kept(what: str, new: Any, old: Any) -> None:
    """Raises TypeError unless an update kept structure, shapes and dtypes. (Floats are cast back to the old width.)"""
    if jax.tree.structure(new) != jax.tree.structure(old):
        raise TypeError(
            f"optimizer=: its update returned {what} of the structure {jax.tree.structure(new)}, not of "
            f"{jax.tree.structure(old)}, which it was given."
        )
    for (path, x), y in zip(leaves_by_path(new).items(), jax.tree.leaves(old), strict=True):
        floats = all(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in (x, y))
        if x.shape != y.shape or not (floats or x.dtype == y.dtype):
            raise TypeError(
                f"optimizer=: its update returned {path or 'a leaf'} of the {what} as {_shape(x)}, not as "
                f"{_shape(y)}, which it was given."
            )


_OF_ANOTHER = (
    "A state belongs to the training that made it; to go on from its parameters, call init(other.whole(state))."
)


def check_alive(state: Any) -> None:
    """Raises ValueError for a state whose memory a step has reused."""
    if any(isinstance(x, jax.Array) and x.is_deleted() for x in jax.tree.leaves(state)):
        raise ValueError(
            "this state was given to an earlier step, which reused its memory. Go on with the state that it returned: "
            "state, metrics = training.step(state, batch)."
        )


def check_state(state: Any, shapes: Any, parts: Sequence[str] = ()) -> None:
    """Raises TypeError or ValueError, naming the leaf, for a state of another training.

    shapes: this training's state as ShapeDtypeStructs. parts: the fields that matter, all by default.
    """
    if not isinstance(state, type(shapes)):
        raise TypeError(f"state is {kind_of(state)}; pass what training.init, or a step, returned.")
    for part in parts or [field.name for field in fields(shapes)]:
        given, wanted = getattr(state, part), getattr(shapes, part)
        if jax.tree.structure(given) != jax.tree.structure(wanted):
            raise ValueError(
                f"state.{part} has the structure {jax.tree.structure(given)}, and this training's has "
                f"{jax.tree.structure(wanted)}. {_OF_ANOTHER}"
            )
        for i, (x, y) in enumerate(zip(jax.tree.leaves(given), jax.tree.leaves(wanted), strict=True)):
            if (np.shape(x), x.dtype) != (y.shape, y.dtype):
                name = "/".join(filter(None, (f"state.{part}", list(leaves_by_path(given))[i])))
                raise ValueError(f"{name} is {_shape(x)}, and this training's is {_shape(y)}. {_OF_ANOTHER}")


def check_places(state: Any, shardings: Any) -> None:
    """Raises ValueError, naming the leaf, for arrays of a state that live elsewhere than this training's."""
    for (path, x), wanted in zip(leaves_by_path(state).items(), jax.tree.leaves(shardings), strict=True):
        if isinstance(x, jax.Array) and not x.sharding.is_equivalent_to(wanted, x.ndim):
            raise ValueError(f"state.{path} lives in {x.sharding}, and this training's in {wanted}. {_OF_ANOTHER}")


def differences(given: Any, example: Any) -> str:
    """How the shapes of a batch differ from those of the example, for a note."""
    if jax.tree.structure(given) != jax.tree.structure(example):
        return f"its structure is {jax.tree.structure(given)}, not {jax.tree.structure(example)}"
    pairs = zip(leaves_by_path(given).items(), jax.tree.leaves(example), strict=True)
    return ", ".join(f"{path or 'it'} is {_shape(x)}, not {_shape(y)}" for (path, x), y in pairs if x != y)


def _shape(x: Any) -> str:
    return f"{x.dtype}{list(np.shape(x))}"


def described(tree: Any, most: int = 6) -> str:
    """The leaves of a tree with their shapes, in one line."""
    named = leaves_by_path(tree)
    said = ", ".join(f"{path or 'it'} {_shape(x)}" for path, x in list(named.items())[:most])
    return said + (f" and {len(named) - most} more" if len(named) > most else "")
