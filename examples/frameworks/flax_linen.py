"""Batch statistics and dropout in flax linen. In `one_device/` the same script without jaxshard."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxshard as js

js.force_cpu_devices(8)  # leave this line out on a machine with GPUs


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


training = js.parallelize(loss_fn, optax.adam(1e-2), params=init, batch=next(batches(1)), strategy="zero3")
state = training.init(init, jax.random.key(0))
for i, batch in enumerate(batches(31)):
    state, metrics = training.step(state, batch)
    if i % 10 == 0:
        print(f"step {i:3}  loss {metrics['loss']:.5f}")
