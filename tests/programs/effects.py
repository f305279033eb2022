"""Randomness, callbacks to the host, and prints."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .program import Below, examples, layer, normals, program, squared_error

DENSE = normals(w=(8, 16), out=(16,))
NUMBERED = examples(x=(8,), y=(), id=Below(1000))


@program(init=DENSE)
def dropout_of_features(params, batch):
    """A fixed key: the same hidden units are dropped for every example."""
    keep = jax.random.bernoulli(jax.random.key(1), 0.7, (16,))
    return squared_error(jnp.where(keep, jnp.tanh(batch["x"] @ params["w"]) / 0.7, 0) @ params["out"], batch)


@program(init=normals(into=(8, 16), layers=(3, 16, 16), out=(16,)), batch=NUMBERED)
def dropout_by_example(params, batch):
    """Each example's mask follows from its id, wherever the example is; the keys are split in a scan."""
    keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(jax.random.key(1), batch["id"])

    def body(state, w):
        h, keys = state
        keys, now = jnp.moveaxis(jax.vmap(jax.random.split)(keys), 1, 0)
        keep = jax.vmap(lambda key: jax.random.bernoulli(key, 0.8, (16,)))(now)
        return (jnp.where(keep, layer(h, w)[0] / 0.8, 0), keys), None

    (h, _), _ = lax.scan(body, (batch["x"] @ params["into"], keys), params["layers"])
    return squared_error(h @ params["out"], batch)


@program(init=normals(mean=(8, 16), log_scale=(8, 16), out=(16,)))
def noisy_weights(params, batch):
    """A variational layer: weights are drawn around one leaf, as far as another says."""
    noise = jax.random.normal(jax.random.key(2), (8, 16))
    w = params["mean"] + jnp.exp(params["log_scale"] - 2) * noise
    prior = 0.5 * jnp.mean(params["mean"] ** 2) - jnp.mean(params["log_scale"])
    return squared_error(jnp.tanh(batch["x"] @ w) @ params["out"], batch) + 0.1 * prior


def _on_host(function, x):
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jax.pure_callback(lambda x: function(np.asarray(x)), like, x, vmap_method="expand_dims")


@program(init=DENSE)
def pure_callback_stopped(params, batch):
    """A weight's signs come from the host, with no gradient."""
    signs = _on_host(np.sign, lax.stop_gradient(params["w"]))
    return squared_error(jnp.tanh(batch["x"] @ (params["w"] + 0.1 * signs)) @ params["out"], batch)


@jax.custom_jvp
def _host_sin(x):
    return _on_host(np.sin, x)


_host_sin.defjvps(lambda t, y, x: t * _on_host(np.cos, x))


@program(init=DENSE)
def pure_callback_with_rule(params, batch):
    """The host computes a function of a leaf, and its derivative."""
    return squared_error(batch["x"] @ _host_sin(params["w"]) @ params["out"], batch)


@program(init=normals(into=(8, 16), layers=(2, 16, 16), out=(16,)))
def pure_callback_in_scan(params, batch):
    """The host is called for each layer."""
    h, _ = lax.scan(lambda h, w: (_host_sin(h @ w), None), batch["x"] @ params["into"], params["layers"])
    return squared_error(h @ params["out"], batch)


@program(init=DENSE)
def debug_print(params, batch):
    """Prints of a leaf's norm and of an activation."""
    h = jnp.tanh(batch["x"] @ params["w"])
    jax.debug.print("norm {}, first {}", jnp.linalg.norm(params["w"]), h[0, 0])
    return squared_error(h @ params["out"], batch)


@program(init=normals(into=(8, 16), layers=(2, 16, 16), out=(16,)))
def debug_callback_in_checkpointed_scan(params, batch):
    """A callback looks at every layer's weight, in a region that is recomputed."""

    @jax.checkpoint
    def body(h, w):
        jax.debug.callback(lambda w: None, w)
        return layer(h, w)

    h, _ = lax.scan(body, batch["x"] @ params["into"], params["layers"])
    return squared_error(h @ params["out"], batch)
