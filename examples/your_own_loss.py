"""Your own loss function under any strategy. Run it: `python examples/your_own_loss.py zero3`."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxshard as js

js.force_cpu_devices(8)  # leave this line out on a machine with GPUs


def init(key):
    hidden, out = jax.random.split(key)
    return {"hidden": jax.random.normal(hidden, (16, 256)) / 4, "out": jax.random.normal(out, (256, 1)) / 16}


def loss(params, batch):
    predicted = jnp.tanh(batch["x"] @ params["hidden"]) @ params["out"]
    return jnp.mean((predicted[:, 0] - batch["y"]) ** 2)


def batches(steps, size=512):
    rng = np.random.default_rng(0)
    for _ in range(steps):
        x = rng.normal(size=(size, 16)).astype(np.float32)
        yield {"x": x, "y": np.sin(x[:, 0] + x[:, 1])}


example = next(batches(1))
strategy = sys.argv[1] if len(sys.argv) > 1 else "zero3"
training = js.parallelize(loss, optax.adam(1e-2), params=init, batch=example, strategy=strategy, clip=1.0)
state = training.init(init, jax.random.key(0))
for step, batch in enumerate(batches(100)):
    state, metrics = training.step(state, batch)
    if step % 20 == 0:
        print(f"step {step:3}  loss {metrics['loss']:.5f}  gradient norm {metrics['grad_norm']:.3f}")
print(training.explain())
