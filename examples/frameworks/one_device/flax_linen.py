"""Batch statistics and dropout in flax linen. In `one_device/` the same script without jaxshard."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax


class Model(nn.Module):
    @nn.compact
    def __call__(self, x, train=True):
        for _ in range(2):
            x = nn.BatchNorm(use_running_average=not train)(nn.Dense(64, use_bias=False)(x))
            x = nn.Dropout(0.1, deterministic=not train)(nn.gelu(x))
        return nn.Dense(1)(x)


def init(key):
    variables = Model().init(key, jnp.ones((1, 32)), train=False)
    return variables["params"], variables["batch_stats"]


def loss_fn(params, batch, *, key, extra):
    variables = {"params": params, "batch_stats": extra}
    y, new = Model().apply(variables, batch["x"], rngs={"dropout": key}, mutable=["batch_stats"])
    return jnp.mean((y[:, 0] - batch["y"]) ** 2), new["batch_stats"]


def batches(steps, size=128):
    random = np.random.default_rng(0)
    for x in random.normal(size=(steps, size, 32)).astype(np.float32):
        yield {"x": x, "y": x[:, 0] + x[:, 1]}


optimizer = optax.adam(1e-2)
params, stats = init(jax.random.key(0))
state = (params, stats, optimizer.init(params), jax.random.key(1))


@jax.jit
def step(state, batch):
    params, stats, opt, key = state
    key, now = jax.random.split(key)
    (loss, stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, batch, key=now, extra=stats)
    updates, opt = optimizer.update(grads, opt, params)
    return (optax.apply_updates(params, updates), stats, opt, key), {"loss": loss}


for i, batch in enumerate(batches(31)):
    state, metrics = step(state, batch)
    if i % 10 == 0:
        print(f"step {i:3}  loss {metrics['loss']:.5f}")
