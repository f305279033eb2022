"""Leaves that are read more than once, products of leaves, and leaves that hardly take part."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .program import Below, cross_entropy, examples, layer, normals, program, squared_error, unit

TOKENS = examples(tokens=Below(32, (6,)))
CONSTANT = unit((8, 16))


def next_token_loss(logits, batch):
    return cross_entropy(logits[:, :-1], batch["tokens"][:, 1:])


@program(init=normals(table=(32, 16), w=(16, 16)), batch=TOKENS)
def tied_embedding(params, batch):
    """One leaf is the embedding and, transposed, the head."""
    h = jnp.tanh(params["table"][batch["tokens"]] @ params["w"])
    return next_token_loss(h @ params["table"].T, batch)


@program(init=normals(table=(32, 16), layers=(3, 16, 16)), batch=TOKENS, low_precision=True)
def tied_embedding_cast_once(params, batch):
    """The cast leaf is the one that is shared."""
    table = params["table"].astype(jnp.bfloat16)
    h, _ = lax.scan(layer, table[batch["tokens"]], params["layers"].astype(jnp.bfloat16))
    return next_token_loss((h @ table.T).astype(jnp.float32), batch)


@program(init=normals(into=(8, 16), layers=(3, 16, 16), out=(16,)))
def stack_in_two_scans(params, batch):
    """Up the layers, then down the same layers transposed."""
    h, _ = lax.scan(layer, batch["x"] @ params["into"], params["layers"])
    h, _ = lax.scan(lambda h, w: layer(h, w.T), h, params["layers"], reverse=True)
    return squared_error(h @ params["out"], batch)


@program(init=normals(into=(8, 16), layers=(3, 16, 16), out=(16,)))
def stack_also_read_whole(params, batch):
    """xs of a scan, and once more as a sum over layers."""
    h, _ = lax.scan(layer, batch["x"] @ params["into"], params["layers"])
    return squared_error((h + h @ params["layers"].sum(0)) @ params["out"], batch)


@program(init=normals(into=(8, 16), layers=(3, 16, 16), out=(16,)))
def penalty_on_stack(params, batch):
    """L2 on a stack: the part of the loss that no example takes part in."""
    h, _ = lax.scan(layer, batch["x"] @ params["into"], params["layers"])
    return squared_error(h @ params["out"], batch) + 0.01 * jnp.sum(params["layers"] ** 2)


@program(init=normals(w=(8, 16), bias=(16,), out=(16,), scale=()))
def penalty_on_all_leaves(params, batch):
    """L2 through `tree.leaves`, and an L1 on one of them."""
    penalty = sum(jnp.vdot(leaf, leaf) for leaf in jax.tree.leaves(params)) + jnp.abs(params["w"]).sum()
    h = jnp.tanh(batch["x"] @ params["w"] * (1 + params["scale"]) + params["bias"])
    return squared_error(h @ params["out"], batch) + 0.01 * penalty


@program(init=normals(v=(8, 16), g=(16,), out=(16,)))
def weight_norm(params, batch):
    """Direction and length of each column are separate leaves."""
    w = params["g"] * params["v"] / jnp.linalg.norm(params["v"], axis=0, keepdims=True)
    return squared_error(jnp.tanh(batch["x"] @ w) @ params["out"], batch)


@program(init=normals(into=(8, 16), v=(3, 16, 16), g=(3, 16), out=(16,)))
def weight_norm_of_stack(params, batch):
    """Normalised before the scan that consumes it."""
    layers = params["g"][:, None] * params["v"] / jnp.linalg.norm(params["v"], axis=1, keepdims=True)
    h, _ = lax.scan(lambda h, w: layer(h, 2 * w), batch["x"] @ params["into"], layers)
    return squared_error(h @ params["out"], batch)


@program(init=normals(w=(16, 24), a=(16, 2), b=(2, 24), into=(8, 16), out=(24,)), zero_grads=("w",))
def lora_product(params, batch):
    """A frozen weight plus the product of two thin ones."""
    w = lax.stop_gradient(params["w"]) + 0.5 * (params["a"] @ params["b"])
    return squared_error(jnp.tanh(batch["x"] @ params["into"] @ w) @ params["out"], batch)


@program(init=normals(into=(8, 16), w=(3, 16, 16), a=(3, 16, 4), b=(3, 4, 16), out=(16,)))
def lora_of_stack(params, batch):
    """Merged before the scan, for all layers at once."""
    h, _ = lax.scan(layer, batch["x"] @ params["into"], params["w"] + 0.5 * params["a"] @ params["b"])
    return squared_error(h @ params["out"], batch)


@program(init=normals(into=(8, 16), w=(3, 16, 16), a=(3, 16, 2), b=(3, 2, 16), out=(16,)))
def lora_in_scan(params, batch):
    """Never merged: the thin product meets the activation."""

    def body(h, p):
        w, a, b = p
        return jnp.tanh(h @ w + h @ a @ b), None

    h, _ = lax.scan(body, batch["x"] @ params["into"], (params["w"], params["a"], params["b"]))
    return squared_error(h @ params["out"], batch)


@program(init=normals(w=(8, 8), out=(8,)))
def leaf_twice_in_one_operation(params, batch):
    """w @ w, w * w, and w @ w.T: both operands are the same leaf."""
    w = params["w"]
    return squared_error(jnp.tanh(batch["x"] @ (w @ w + w * w + 0.5 * (w @ w.T))) @ params["out"], batch)


@program(init=normals(w=(8, 16), out=(16,)))
def closed_over_arrays(params, batch):
    """A numpy constant, and a JAX array made before the loss is traced to its end."""
    with jax.ensure_compile_time_eval():
        table = jnp.arange(16, dtype=jnp.float32) / 16
    return squared_error(jnp.tanh(batch["x"] @ (params["w"] + CONSTANT) + table) @ params["out"], batch)


@program(init=normals(into=(8, 16), layers=(4, 16, 16), out=(16,)))
def closed_over_in_scan(params, batch):
    """A constant stack is scanned next to a leaf, and a constant vector is a const of the scan."""
    masks = np.tril(np.ones((4, 16, 16), np.float32))
    h, _ = lax.scan(
        lambda h, ws: layer(h + CONSTANT[0], ws[0] * ws[1]),
        batch["x"] @ params["into"],
        (params["layers"], masks),
    )
    return squared_error(h @ params["out"], batch)


@program(init=normals(w=(8, 16), out=(16,)))
def nested_jit(params, batch):
    """jit in jit in jit; the inner ones read leaves, one of them twice."""

    @jax.jit
    def dense(x, w):
        return jnp.tanh(x @ w)

    @jax.jit
    def network(params, x):
        return dense(dense(x, params["w"]), params["w"].T) @ params["w"] @ params["out"]

    return squared_error(network(params, batch["x"]), batch)


@program(init=normals(into=(8, 16), layers=(3, 16, 16), out=(16,)))
def jit_in_scan(params, batch):
    step = jax.jit(lambda h, w, residual: h + jnp.sin(h @ w) if residual else jnp.tanh(h @ w), static_argnums=2)
    h, _ = lax.scan(
        lambda h, w: (step(step(h, w, True), w, False), None), batch["x"] @ params["into"], params["layers"]
    )
    return squared_error(h @ params["out"], batch)


@program(init=normals(w=(8, 16), bias=(16,), out=(16,)))
def jit_returns_its_inputs(params, batch):
    """A jit hands parameters back, one of them unchanged, one twice, one cut."""

    @jax.jit
    def shuffle(params):
        return params["w"], params["bias"][:8], params["w"], params["out"] * 2

    w, bias, again, out = shuffle(params)
    return squared_error(jnp.tanh((batch["x"] + bias) @ (w + jnp.sin(again))) @ (out + params["bias"]), batch)


@program(init=normals(w=(8, 16), out=(16,)))
def duplicated_outputs(params, batch):
    """A scan and a jit give the same value back more than once."""
    doubled = jax.jit(lambda w: (w, w, 2 * w))
    a, b, c = doubled(params["w"])
    _, (d, e) = lax.scan(lambda _, w: (None, (w, w)), None, params["w"])
    return squared_error(jnp.sin(batch["x"] @ (a + b * c + d * e)) @ params["out"], batch)


@program(init=normals(w=(8, 16), out=(16,), spare=(16, 16), spare_bias=(3,)), zero_grads=("spare", "spare_bias"))
def unused_leaves(params, batch):
    """Two leaves that the loss never looks at."""
    return squared_error(jnp.tanh(batch["x"] @ params["w"]) @ params["out"], batch)


@program(init=normals(w=(8, 16), out=(16,), spare=(16, 16)), zero_grads=("spare",))
def dead_computation(params, batch):
    """A leaf is read, and what comes of it goes nowhere, or is multiplied by zero."""
    _ = jnp.sin(params["spare"]).sum()
    h = jnp.tanh(batch["x"] @ params["w"]) + 0.0 * params["spare"][0]
    return squared_error(h @ params["out"], batch)


@program(init=normals(code=(8,), hyper=(8, 128), out=(16,)))
def hypernetwork(params, batch):
    """The weights are the output of another network."""
    w = jnp.tanh(params["code"] @ params["hyper"]).reshape(8, 16)
    return squared_error(jnp.tanh(batch["x"] @ w) @ params["out"], batch)


@program(init=normals(experts=(4, 8, 16), mixture=(4,), out=(16,)))
def soup_of_stack(params, batch):
    """A learned average of the slices of a stack."""
    w = jnp.tensordot(jax.nn.softmax(params["mixture"]), params["experts"], axes=1)
    return squared_error(jnp.tanh(2 * batch["x"] @ w) @ params["out"], batch)
