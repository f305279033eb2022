"""A module with functions among its leaves, in equinox. In `one_device/` the same script without jaxshard."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax


def make(key):
    return eqx.nn.MLP(32, "scalar", width_size=64, depth=2, activation=jax.nn.gelu, key=key)


_, static = eqx.partition(make(jax.random.key(0)), eqx.is_inexact_array)


def init(key):
    return eqx.filter(make(key), eqx.is_inexact_array)


def loss_fn(params, batch):
    model = eqx.combine(params, static)
    return jnp.mean((jax.vmap(model)(batch["x"]) - batch["y"]) ** 2)


def batches(steps, size=128):
    random = np.random.default_rng(0)
    for x in random.normal(size=(steps, size, 32)).astype(np.float32):
        yield {"x": x, "y": x[:, 0] + x[:, 1]}


optimizer = optax.adam(1e-2)
params = init(jax.random.key(0))
state = (params, optimizer.init(params))


@jax.jit
def step(state, batch):
    params, opt = state
    loss, grads = jax.value_and_grad(loss_fn)(params, batch)
    updates, opt = optimizer.update(grads, opt, params)
    return (optax.apply_updates(params, updates), opt), {"loss": loss}


for i, batch in enumerate(batches(31)):
    state, metrics = step(state, batch)
    if i % 10 == 0:
        print(f"step {i:3}  loss {metrics['loss']:.5f}")
