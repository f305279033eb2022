"""An LSTM in haiku. In `one_device/` the same script without jaxshard."""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxshard as js

js.force_cpu_devices(8)  # leave this line out on a machine with GPUs


@hk.transform
def model(x_BxT):
    core = hk.LSTM(32)
    states_TxBxD, _ = hk.dynamic_unroll(core, x_BxT.T[:, :, None], core.initial_state(len(x_BxT)))
    return hk.Linear(1)(states_TxBxD[-1])[:, 0]


def init(key):
    return model.init(key, jnp.ones((1, 8)))


def loss_fn(params, batch):
    return jnp.mean((model.apply(params, None, batch["x"]) - batch["y"]) ** 2)


def batches(steps, size=128):
    random = np.random.default_rng(0)
    for x in random.normal(size=(steps, size, 8)).astype(np.float32):
        yield {"x": x, "y": x[:, -1] + x[:, -2]}


training = js.parallelize(loss_fn, optax.adam(1e-2), params=init, batch=next(batches(1)), strategy="zero3")
state = training.init(init, jax.random.key(0))
for i, batch in enumerate(batches(31)):
    state, metrics = training.step(state, batch)
    if i % 10 == 0:
        print(f"step {i:3}  loss {metrics['loss']:.5f}")
