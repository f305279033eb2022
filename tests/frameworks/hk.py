"""haiku: functions that are transformed. Oracle: `jax.value_and_grad` of the transformed function's apply."""

from __future__ import annotations

from functools import partial

import haiku as hk
import jax
import jax.numpy as jnp
import optax

from frameworks.case import SGD, WIDTH, Case, history, mean_square

LAYERS, LENGTH = 2, 4


def stacked(x):
    """Layers by `layer_stack`, and an LSTM over a sequence of pieces of them."""

    def block(x):
        return x + jnp.tanh(hk.Linear(WIDTH)(x))

    x = jnp.asarray(hk.layer_stack(LAYERS)(block)(x))
    pieces_TxBxD = x.reshape(len(x), LENGTH, -1).swapaxes(0, 1)
    core = hk.LSTM(WIDTH)
    out_TxBxD, _ = hk.dynamic_unroll(core, pieces_TxBxD, core.initial_state(len(x)))
    return hk.Linear(WIDTH)(out_TxBxD[-1])


def normed(x, axis_name=None):
    x = hk.Linear(WIDTH, with_bias=False)(x)
    x = hk.BatchNorm(True, True, decay_rate=0.9, cross_replica_axis=axis_name)(x, is_training=True)
    return hk.Linear(WIDTH)(jnp.tanh(x))


def plain_training(fn, data):
    net = hk.transform_with_state(fn)
    params, state = jax.jit(net.init)(jax.random.key(0), data[0]["x"])
    opt, start, metrics = SGD.init(params), params, []

    @jax.jit
    def step(params, state, opt, batch):
        def loss(params):
            y, new = net.apply(params, state, None, batch["x"])
            return mean_square(y, batch), new

        (value, new), grads = jax.value_and_grad(loss, has_aux=True)(params)
        updates, opt = SGD.update(grads, opt)
        return optax.apply_updates(params, updates), new, opt, (value, grads)

    for batch in data:
        params, state, opt, now = step(params, state, opt, batch)
        metrics.append(now)
    return history(start, params, metrics), state


def transformed(fn, axis_name=None) -> Case:
    """Made by the function as it is on one device, where no axis has a name; applied as it is on all."""
    net = hk.transform_with_state(partial(fn, axis_name=axis_name) if axis_name else fn)

    def init(key):
        return hk.transform_with_state(fn).init(key, jnp.ones((1, WIDTH)))

    def loss(params, batch, *, extra):
        y, new = net.apply(params, extra, None, batch["x"])
        return mean_square(y, batch), new

    return Case(init=init, loss=loss, train=partial(plain_training, fn), axis_name=axis_name)


CASES = {
    "layer_stack and dynamic_unroll": transformed(stacked),
    "statistics of the batch": transformed(normed, axis_name="batch"),
}


def drop(x, key):
    return hk.transform(lambda x: hk.dropout(hk.next_rng_key(), 0.5, x)).apply({}, key, x)


DROPOUT = {"next_rng_key": drop}
