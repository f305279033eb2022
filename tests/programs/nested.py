"""Scans in scans, scans in branches, branches in scans."""

import jax
import jax.numpy as jnp
from jax import lax

from .program import examples, layer, normals, program, squared_error

SERIES = examples(x=(6, 8), y=())


@program(init=normals(into=(8, 16), layers=(2, 3, 16, 16), out=(16,)))
def nested_stack_of_stacks(params, batch):
    def group(h, layers):
        return lax.scan(layer, h, layers)

    h, _ = lax.scan(group, batch["x"] @ params["into"], params["layers"])
    return squared_error(h @ params["out"], batch)


@program(init=normals(into=(8, 16), layers=(6, 16, 16), out=(16,)))
def nested_reshaped_stack(params, batch):
    """A flat stack, in groups of three for the sake of an outer scan."""
    groups = params["layers"].reshape(2, 3, 16, 16)
    h, _ = lax.scan(lambda h, ws: lax.scan(layer, h, ws, reverse=True), batch["x"] @ params["into"], groups)
    return squared_error(h @ params["out"], batch)


@program(init=normals(into=(8, 16), w=(3, 16, 16), u=(3, 16, 16), out=(16,)), batch=SERIES)
def nested_rnn_layers(params, batch):
    """A scan over layers; each layer is a scan over time for which its slices are consts."""

    def recurrent(hs, p):
        w, u = p

        def cell(h, x):
            h = jnp.tanh(h @ w + x @ u)
            return h, h

        return lax.scan(cell, jnp.zeros_like(hs[0]), hs)[1], None

    hs, _ = lax.scan(recurrent, batch["x"].swapaxes(0, 1) @ params["into"], (params["w"], params["u"]))
    return squared_error(hs[-1] @ params["out"], batch)


@program(init=normals(into=(8, 16), layers=(3, 16, 16), shared=(16, 16), out=(16,)))
def nested_outer_const(params, batch):
    """The inner scan reads a leaf that is a const of both scans."""

    def outer(h, w):
        h, _ = lax.scan(lambda h, _: layer(h, params["shared"]), h, length=2)
        return layer(h, w)

    h, _ = lax.scan(outer, batch["x"] @ params["into"], params["layers"])
    return squared_error(h @ params["out"], batch)


@program(init=normals(into=(8, 16), layers=(2, 3, 16, 16), out=(16,)))
def nested_indices(params, batch):
    """Two loops over indices of a stack of stacks."""

    def outer(i, h):
        return lax.fori_loop(0, 3, lambda j, h: jnp.tanh(h @ params["layers"][i, j]), h)

    return squared_error(lax.fori_loop(0, 2, outer, batch["x"] @ params["into"]) @ params["out"], batch)


@program(init=normals(into=(8, 16), layers=(3, 16, 16), out=(16,)))
def scan_over_slices_of_layers(params, batch):
    """Each layer is applied to its input in four column groups by an inner scan over the layer itself."""

    def outer(h, w):
        _, columns = lax.scan(lambda _, c: (None, jnp.tanh(h @ c)), None, w.reshape(16, 4, 4).swapaxes(0, 1))
        return columns.swapaxes(0, 1).reshape(h.shape), None

    h, _ = lax.scan(outer, batch["x"] @ params["into"], params["layers"])
    return squared_error(h @ params["out"], batch)


@program(init=normals(into=(8, 16), layers=(3, 16, 16), out=(16,)))
def scan_in_cond_on_data(params, batch):
    """Only some examples go through the layers, each deciding for itself."""

    def one_example(x):
        h = x @ params["into"]
        return lax.cond(x[0] > 0, lambda h: lax.scan(layer, h, params["layers"])[0], jnp.sin, h)

    return squared_error(lax.map(one_example, batch["x"]) @ params["out"], batch)


@program(
    init=normals(into=(8, 16), deep=(3, 16, 16), wide=(1, 16, 16), gate=(), out=(16,)),
    zero_grads=("deep", "gate"),
)
def scan_in_cond_on_a_leaf(params, batch):
    """A parameter decides: every device takes the same branch. The other branch's stack gets no gradient."""

    def run(stack):
        return lambda h: lax.scan(layer, h, stack)[0]

    wide_first = params["gate"] ** 2 + 1 > 0
    h = lax.cond(wide_first, run(params["wide"]), run(params["deep"]), batch["x"] @ params["into"])
    return squared_error(h @ params["out"], batch)


@program(init=normals(into=(8, 16), layers=(4, 16, 16), out=(16,)))
def cond_in_scan(params, batch):
    """Every other layer has another activation: the branch follows from the scan's own index."""

    def body(h, xs):
        i, w = xs
        return lax.cond(i % 2 == 0, lambda: jnp.tanh(h @ w), lambda: h + 0.3 * jnp.sin(h @ w)), None

    h, _ = lax.scan(body, batch["x"] @ params["into"], (jnp.arange(4), params["layers"]))
    return squared_error(h @ params["out"], batch)


@program(init=normals(into=(8, 16), layers=(3, 16, 16), out=(16,)))
def cond_on_data_in_scan(params, batch):
    """Layer dropping per example: a scan over layers in a map over examples."""

    def one_example(x):
        def body(h, w):
            return lax.cond(h.sum() > -1, lambda: jnp.tanh(h @ w), lambda: h), None

        return lax.scan(body, x @ params["into"], params["layers"])[0]

    return squared_error(lax.map(one_example, batch["x"]) @ params["out"], batch)


@program(init=normals(into=(8, 16), dense=(2, 16, 16), sparse=(2, 16, 16), out=(16,)))
def switch_in_scan(params, batch):
    """Two kinds of layer in one scan; the body picks its weights from one of two stacks."""

    def body(h, i):
        kinds = [lambda k: jnp.tanh(h @ params["dense"][k]), lambda k: h + jnp.sin(h @ params["sparse"][k])]
        return lax.switch(i % 2, kinds, i // 2), None

    h, _ = lax.scan(body, batch["x"] @ params["into"], jnp.arange(4))
    return squared_error(h @ params["out"], batch)


@program(init=normals(into=(4, 8, 16), layers=(4, 3, 16, 16), out=(4, 16)))
def scan_in_vmap(params, batch):
    """An ensemble of four: vmap over all parameters, a scan inside."""

    def member(p, x):
        return lax.scan(layer, x @ p["into"], p["layers"])[0] @ p["out"]

    return squared_error(jax.vmap(member, in_axes=(0, None))(params, batch["x"]).mean(0), batch)
