"""One step of training, compared with plain `jax.value_and_grad` of the whole batch on one device."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxshard as js

from .program import EXAMPLES, Program
from .setting import Setting

RATE = 64.0
"""Of SGD: so large that the rounding of a parameter hides nothing of its gradient."""


@dataclass(frozen=True)
class Oracle:
    """The loss, and the gradient of each leaf: zeros for those that have none."""

    loss: float
    gradients: list[np.ndarray]

    @property
    def scale(self) -> float:
        return max(float(np.abs(g).max(initial=0)) for g in self.gradients)


def one_device(program: Program, setting: Setting, options: dict[str, str]) -> Oracle:
    params, batch = program.init(setting.seed), program.batch(setting.seed)
    gradient = jax.jit(jax.value_and_grad(program.reference(setting.parts), allow_int=True))
    loss, grads = gradient.lower(params, batch).compile(compiler_options=dict(options))(params, batch)

    def flat(i: int, g: Any) -> np.ndarray:
        return np.asarray(g) if g.dtype != jax.dtypes.float0 and setting.learns(i) else np.zeros(g.shape, np.float32)

    return Oracle(float(loss), [flat(i, g) for i, g in enumerate(jax.tree.leaves(grads))])


def placed(training: Any, params: Any) -> Any:
    """The state at step 0, by hand: `Training.init` compiles a program for it, and has tests of its own."""
    shapes = training.state_shapes
    assert not jax.tree.leaves(shapes.opt), "SGD has no state"
    state = replace(shapes, step=np.zeros((), np.int32), params=params, key=jax.random.key(0))
    return jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), state, shapes)


def check(program: Program, setting: Setting, options: dict[str, str]) -> Oracle:
    """Trains one step. Raises AssertionError, or what the library raises, unless it is the step of one device."""
    oracle = one_device(program, setting, options)
    params, batch = program.init(setting.seed), program.batch(setting.seed)
    assert len(np.unique(batch["y"])) == EXAMPLES, "devices must see different data"
    training = js.parallelize(
        program.loss,
        optax.sgd(RATE),
        params=params,
        batch=batch,
        compiler_options=options,
        **setting.choices(params),
    )
    state, metrics = training.step(placed(training, params), batch)
    training.contract()
    close = 2e-2 if program.low_precision else 2e-5
    np.testing.assert_allclose(metrics["loss"], oracle.loss, rtol=close, err_msg="loss")
    assert oracle.scale > 1e-3, "a program without any gradient would prove nothing"
    before, after = jax.tree.leaves(program.init(setting.seed)), jax.tree.leaves(training.whole(state))
    for leaf, old, new, gradient in zip(program.leaves, before, after, oracle.gradients, strict=True):
        assert (new.shape, new.dtype) == (old.shape, old.dtype), f"{leaf} became {new.dtype}{new.shape}"
        if not jnp.issubdtype(old.dtype, jnp.inexact):
            np.testing.assert_array_equal(new, old, err_msg=repr(leaf))
            continue
        wide = np.result_type(old.dtype, np.float32)
        have = (old.astype(wide) - new.astype(wide)) / RATE
        rounding = float(jnp.finfo(old.dtype).eps) * np.abs(new.astype(wide)).max(initial=0) / RATE
        close_enough = close * oracle.scale + rounding
        np.testing.assert_allclose(have, gradient.astype(wide), rtol=0, atol=close_enough, err_msg=repr(leaf))
    return oracle
