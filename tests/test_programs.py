"""Any loss function: two hundred small programs, each trained one step with every leaf split that can be.

Oracle: the gradient of the same program on one device, by SGD, so that no optimizer divides a wrong scale away.
"""

from contextlib import nullcontext
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from programs import PROGRAMS, SMOKE
from quick import QUICK

import jaxshard as js
from jaxshard.preflight.target import uncached

RATE = 0.1
# What the compiler of jax 0.10 for CPUs makes of it crashes the process when it comes back from JAX's cache.
NOT_CACHED = ("remat_around_scan",)


def reference(program, replica: int, shard: int):
    params, batch = jax.jit(program.init)(jax.random.key(0)), program.batch()
    gradient = jax.jit(jax.value_and_grad(program.reference(replica, shard), allow_int=True))
    loss, grads = gradient.lower(params, batch).compile(compiler_options=dict(QUICK))(params, batch)
    return params, batch, loss, grads


def check(program, strategy, replica: int = 1, shard: int = 8):
    params, batch, loss, grads = reference(program, replica, shard)
    training = js.parallelize(
        program.loss,
        optax.sgd(RATE),
        params=params,
        batch=batch,
        mesh=js.make_mesh(replica=replica, shard=shard),
        strategy=strategy,
        whole_budget=0,
        compiler_options=QUICK,
    )
    state, metrics = training.step(training.init(params), batch)
    training.contract()
    close = 5e-3 if program.low_precision else 1e-5
    np.testing.assert_allclose(metrics["loss"], loss, rtol=close)
    named = jax.tree_util.tree_leaves_with_path(params)
    differentiable = [g for g in jax.tree.leaves(grads) if g.dtype != jax.dtypes.float0 and g.size]
    scale = max((float(jnp.abs(g).max()) for g in differentiable), default=0.0)
    assert scale > 0, "a program without any gradient would prove nothing"
    for (path, before), after, grad in zip(
        named, jax.tree.leaves(training.whole(state)), jax.tree.leaves(grads), strict=True
    ):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        assert after.shape == before.shape, name
        assert after.dtype == before.dtype, name
        if grad.dtype == jax.dtypes.float0 or not before.size:
            assert jnp.array_equal(jnp.asarray(after), before), f"{name} has no gradient and changed"
            continue
        moved = np.asarray(before, np.result_type(before.dtype, np.float32)) - np.asarray(after)
        np.testing.assert_allclose(moved, RATE * np.asarray(grad), rtol=0, atol=close * scale, err_msg=name)
        assert (name in program.zero_grads) == (not np.any(np.asarray(grad))), (
            f"{name}: is its gradient zero by intent?"
        )


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.smoke] * (n in SMOKE)) for n in PROGRAMS])
def test_zero3_equals_one_device(name):
    with uncached() if name in NOT_CACHED else nullcontext():
        check(PROGRAMS[name], js.ZERO3)


@pytest.mark.parametrize("name", SMOKE[::2])
def test_split_gradients_of_whole_leaves_on_two_replicas(name):
    check(PROGRAMS[name], js.ZERO2, replica=2, shard=4)


@pytest.mark.parametrize("name", SMOKE[::3])
def test_gathers_tied_to_their_use(name):
    check(PROGRAMS[name], replace(js.ZERO3, prefer="memory"))
