"""cond, switch, while and fori: whoever decides, no device may wait for another in a branch."""

import jax
import jax.numpy as jnp
from jax import lax

from .program import Below, examples, layer, normal, normals, program, squared_error

BRANCHES = normals(w=(8, 16), v=(8, 16), out=(16,))


@program(init=BRANCHES)
def cond_on_data(params, batch):
    """Each example takes its own branch, each branch has its own weight."""

    def one_example(x):
        return lax.cond(x.sum() > 0, lambda: jnp.tanh(x @ params["w"]), lambda: jnp.sin(x @ params["v"]))

    return squared_error(lax.map(one_example, batch["x"]) @ params["out"], batch)


@program(init=BRANCHES, per_example=False)
def cond_on_part(params, batch):
    """All examples of a part decide together, so devices part ways for the whole forward pass."""
    weights = lax.cond(batch["x"].sum() > 0, lambda p: (p["w"], p["v"]), lambda p: (2 * p["v"], p["w"]), params)
    return squared_error((batch["x"] @ weights[0] + jnp.sin(batch["x"] @ weights[1])) @ params["out"], batch)


@program(init=BRANCHES)
def cond_in_vmap(params, batch):
    """vmap makes this cond a select: both branches run."""

    def one_example(x):
        return lax.cond(x[0] > 0, lambda w: jnp.tanh(x @ w), lambda w: x @ w, params["w"]) @ params["out"]

    return squared_error(jax.vmap(one_example)(batch["x"] + params["v"].mean(1)), batch)


def _with_step(key):
    return {**BRANCHES(key), "step": jnp.array(3, jnp.int32)}


@program(init=_with_step, zero_grads=("v",))
def cond_on_integer_leaf(params, batch):
    """Uniform: a step counter among the parameters decides, alike on every device."""
    w = lax.cond(params["step"] > 2, lambda w, v: w, lambda w, v: v, params["w"], params["v"])
    return squared_error(jnp.tanh(batch["x"] @ w) @ params["out"], batch)


@program(init=normals(experts=(4, 8, 16), out=(16,)), batch=examples(x=(8,), y=(), expert=Below(4)))
def switch_on_data(params, batch):
    """Every example names its branch; one stack feeds them all."""

    def one_example(args):
        x, expert = args
        branches = [lambda x, i=i: jnp.tanh(x @ params["experts"][i] * (i + 1)) for i in range(4)]
        return lax.switch(expert, branches, x)

    return squared_error(lax.map(one_example, (batch["x"], batch["expert"])) @ params["out"], batch)


@program(init=_with_step, zero_grads=("v",))
def switch_on_integer_leaf(params, batch):
    """A uniform switch whose index is clamped from above."""
    branches = [
        lambda p: batch["x"] @ p["v"],
        lambda p: jnp.sin(batch["x"] @ (p["w"] + p["v"])),
        lambda p: jnp.tanh(batch["x"] @ p["w"]),
    ]
    return squared_error(lax.switch(params["step"], branches, params) @ params["out"], batch)


@program(init=normals(w=(8, 16), u=(16,), out=(16,)), zero_grads=("u",))
def while_spectral_norm(params, batch):
    """Power iteration on a weight, not differentiated through, divides that weight."""
    w, u = lax.stop_gradient((params["w"], params["u"]))

    def iterate(state):
        steps, u = state
        v = w @ u
        u = v @ w
        return steps + 1, u / jnp.linalg.norm(u)

    _, u = lax.while_loop(lambda state: state[0] < 5, iterate, (0, u))
    sigma = jnp.linalg.norm(params["w"] @ u)
    return squared_error(batch["x"] @ params["w"] / sigma @ params["out"], batch)


@program(init=normals(w=(8, 8), bias=(8,), out=(8,)), zero_grads=("bias",))
def while_on_data(params, batch):
    """How often an example is transformed before it enters depends on the example and on the weights."""
    w, bias = lax.stop_gradient((params["w"], params["bias"]))

    def settle(x):
        return lax.while_loop(lambda x: jnp.abs(x).max() > 0.7, lambda x: jnp.tanh(0.5 * (x @ w) + 0.1 * bias), x)

    h = jnp.tanh(3 * lax.map(settle, batch["x"]) @ params["w"])
    return squared_error(h @ params["out"] + batch["x"] @ params["out"], batch)


@program(init=normals(layers=(4, 8, 8), out=(8,)))
def while_over_a_stack(params, batch):
    """A loop with traced bounds reads layer after layer; only the last read is differentiated."""
    frozen = lax.stop_gradient(params["layers"])
    depth = jnp.argmax(jnp.array([0, 0, 0, 1]))
    h = lax.fori_loop(0, depth, lambda i, h: jnp.tanh(h @ frozen[i]), batch["x"])
    return squared_error(h @ params["layers"].sum(0) @ params["out"], batch)


@program(init=normals(w=(8, 8), out=(8,)))
def fori_static_bounds(params, batch):
    """Static bounds make a scan of it, so it can be differentiated."""
    h = lax.fori_loop(0, 3, lambda i, h: jnp.tanh(h @ params["w"]) + 0.1 * i, batch["x"])
    return squared_error(h @ params["out"], batch)


@program(init=BRANCHES)
def select_between_leaves(params, batch):
    """Elementwise choices between two leaves, and between a leaf and a literal."""
    w = jnp.where(params["w"] > params["v"], params["w"], 0.5 * params["v"])
    w = w + jnp.maximum(params["w"], params["v"]) + jnp.where(params["v"] > 0, params["v"], 0.1)
    return squared_error(batch["x"] @ jnp.clip(w, -2, 2) @ params["out"], batch)


@program(init=BRANCHES)
def platform_dependent(params, batch):
    """A branch for each kind of device, chosen when the program is compiled."""
    h = lax.platform_dependent(
        batch["x"],
        params["w"],
        params["v"],
        cpu=lambda x, w, v: x @ w + x @ v,
        default=lambda x, w, v: x @ (w + v),
    )
    return squared_error(jnp.tanh(h) @ params["out"], batch)


def _switched_layers(key):
    return {"into": normal(key, (8, 16)), "layers": normal(jax.random.fold_in(key, 1), (3, 16, 16))}


@program(init=_switched_layers)
def cond_returns_scan_and_leaf(params, batch):
    """Both branches give back a pair: an activation, and a slice of a leaf."""
    h = batch["x"] @ params["into"]
    h, w = lax.cond(
        params["layers"].sum() < 100,
        lambda h, ws: (lax.scan(layer, h, ws)[0], ws[0]),
        lambda h, ws: (h, ws[1]),
        h,
        params["layers"],
    )
    return squared_error((h @ w).sum(1), batch)
