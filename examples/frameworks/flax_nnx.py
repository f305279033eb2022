"""Stacked residual blocks in flax nnx. In `one_device/` the same script without jaxshard."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxshard as js

js.force_cpu_devices(8)  # leave this line out on a machine with GPUs


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(32, rngs=rngs)
        self.linear = nnx.Linear(32, 32, rngs=rngs)

    def __call__(self, x):
        return x + nnx.gelu(self.linear(self.norm(x)))


class Model(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.vmap(Block, in_axes=0, out_axes=0)(rngs.split(2))
        self.head = nnx.Linear(32, 1, rngs=rngs)

    def __call__(self, x):
        apply = nnx.remat(lambda x, block: block(x))
        return self.head(nnx.scan(apply, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.blocks))


def init(key):
    return Model(nnx.Rngs(key))


def loss_fn(model, batch):
    return jnp.mean((model(batch["x"])[:, 0] - batch["y"]) ** 2)


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
