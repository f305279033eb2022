"""Custom rules, and derivatives taken inside the loss.

Where a custom rule is given, it is on purpose not the derivative of what it belongs to: a program that
loses the rule on the way gets other gradients.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from .program import Below, cross_entropy, examples, layer, normals, program, squared_error

NETWORK = normals(w=(8, 16), bias=(16,), out=(16,))


def network(params, x):
    """One hidden layer; x (..., 8) to (...)."""
    return jnp.tanh(x @ params["w"] + params["bias"]) @ params["out"]


@jax.custom_jvp
def _dense_jvp(x, w):
    return jnp.tanh(x @ w)


@_dense_jvp.defjvp
def _(primals, tangents):
    (x, w), (dx, dw) = primals, tangents
    h = _dense_jvp(x, w)
    return h, (1 - h * h) * (dx @ w + 2 * (x @ dw))


@program(init=NETWORK)
def custom_jvp_of_weight(params, batch):
    return squared_error(_dense_jvp(batch["x"] + 0.1, params["w"]) @ params["out"] + params["bias"].sum(), batch)


@jax.custom_vjp
def _dense_vjp(x, w):
    return jnp.tanh(x @ w)


def _dense_fwd(x, w):
    h = _dense_vjp(x, w)
    return h, (x, w, h)


def _dense_bwd(residuals, g):
    x, w, h = residuals
    g = g * (1 - h * h)
    return g @ w.T, 2 * (x.T @ g)


_dense_vjp.defvjp(_dense_fwd, _dense_bwd)


@program(init=NETWORK)
def custom_vjp_of_weight(params, batch):
    """The weight is an argument and a residual."""
    return squared_error(_dense_vjp(batch["x"], params["w"]) @ params["out"] + params["bias"].sum(), batch)


@program(init=normals(into=(8, 16), layers=(3, 16, 16), out=(16,)))
def custom_vjp_in_scan(params, batch):
    h, _ = lax.scan(lambda h, w: (_dense_vjp(h, w), None), batch["x"] @ params["into"], params["layers"])
    return squared_error(h @ params["out"], batch)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _scale_gradients(activation, scale, tree):
    return jax.tree.map(activation, tree)


def _scale_fwd(activation, scale, tree):
    return jax.tree.map(activation, tree), None


def _scale_bwd(activation, scale, _, g):
    return (jax.tree.map(lambda g: scale * g, g),)


_scale_gradients.defvjp(_scale_fwd, _scale_bwd)


@program(init=NETWORK)
def custom_vjp_of_whole_tree(params, batch):
    """All parameters go through one custom rule that has static arguments."""
    return squared_error(network(_scale_gradients(jnp.sin, 0.5, params), batch["x"]), batch)


@jax.custom_vjp
def _lookup(table, ids):
    return table[ids]


def _lookup_bwd(residuals, g):
    table, ids = residuals
    return 2 * jnp.zeros_like(table).at[ids].add(g), None


_lookup.defvjp(lambda table, ids: (table[ids], (table, ids)), _lookup_bwd)


@program(init=normals(table=(32, 16), out=(16, 8)), batch=examples(ids=Below(32, (5,)), y=Below(8)))
def custom_vjp_with_integers(params, batch):
    """An embedding whose rule has an integer argument, and so no cotangent for it."""
    return cross_entropy(_lookup(params["table"], batch["ids"]).sum(1) @ params["out"], batch["y"])


@jax.custom_vjp
def _reversible(layers, h):
    return lax.scan(layer, h, layers)[0]


def _reversible_fwd(layers, h):
    last, hs = lax.scan(lambda h, w: (jnp.tanh(h @ w), h), h, layers)
    return last, (layers, hs)


def _reversible_bwd(residuals, g):
    def body(g, xs):
        w, h = xs
        g = g * (1 - jnp.tanh(h @ w) ** 2)
        return g @ w.T, 2 * (h.T @ g)

    g, layers_g = lax.scan(body, g, residuals, reverse=True)
    return layers_g, g


_reversible.defvjp(_reversible_fwd, _reversible_bwd)


@program(init=normals(into=(8, 16), layers=(3, 16, 16), out=(16,)))
def custom_vjp_over_scan(params, batch):
    """The rule is itself a scan over the stack, backwards."""
    return squared_error(_reversible(params["layers"], batch["x"] @ params["into"]) @ params["out"], batch)


@jax.custom_vjp
def _fixed_point(w, x):
    return lax.while_loop(
        lambda state: state[0] < 30, lambda state: (state[0] + 1, jnp.tanh(state[1] @ w * 0.3 + x)), (0, x)
    )[1]


def _fixed_point_fwd(w, x):
    z = _fixed_point(w, x)
    return z, (w, x, z)


def _fixed_point_bwd(residuals, g):
    w, x, z = residuals
    _, vjp = jax.vjp(lambda w, x, z: jnp.tanh(z @ w * 0.3 + x), w, x, z)
    _, u = lax.while_loop(lambda state: state[0] < 30, lambda state: (state[0] + 1, g + vjp(state[1])[2]), (0, g))
    return vjp(u)[:2]


_fixed_point.defvjp(_fixed_point_fwd, _fixed_point_bwd)


@program(init=normals(into=(8, 16), w=(16, 16), out=(16,)))
def custom_vjp_deep_equilibrium(params, batch):
    """while_loop forwards, while_loop backwards, a weight in both."""
    return squared_error(_fixed_point(params["w"], batch["x"] @ params["into"]) @ params["out"], batch)


@jax.custom_gradient
def _straight_through(w):
    return jnp.round(w * 4) / 4, lambda g: g


@program(init=NETWORK)
def custom_gradient_quantised(params, batch):
    """Rounded weights; the rounding passes gradients straight through."""
    return squared_error(network({**params, "w": _straight_through(params["w"])}, batch["x"]), batch)


@program(init=NETWORK)
def quantised_by_stop_gradient(params, batch):
    """The same by hand, which reads the leaf three times."""
    w = params["w"]
    w = w + lax.stop_gradient(jnp.round(w * 4) / 4 - w)
    return squared_error(network({**params, "w": w}, batch["x"]), batch)


@program(init=normals(w=(8, 8), into=(8, 8), out=(8,)))
def custom_root(params, batch):
    """Implicit differentiation by JAX's own `custom_root`, the weight closed over."""

    def one_example(x):
        def solve(f, z):
            return lax.fori_loop(0, 30, lambda _, z: z - f(z), z)

        def tangent_solve(g, y):
            return jnp.linalg.solve(jax.jacobian(g)(y), y)

        u = x @ params["into"]
        return lax.custom_root(lambda z: z - jnp.tanh(0.3 * (z @ params["w"]) + u), u, solve, tangent_solve)

    return squared_error(jax.vmap(one_example)(batch["x"]) @ params["out"], batch)


@program(init=NETWORK)
def gradient_penalty(params, batch):
    """The size of the gradient with respect to the input, differentiated again."""
    slopes = jax.vmap(jax.grad(network, argnums=1), in_axes=(None, 0))(params, batch["x"])
    return squared_error(network(params, batch["x"]), batch) + jnp.mean((jnp.linalg.norm(slopes, axis=1) - 1) ** 2)


@program(init=normals(into=(8, 16), layers=(2, 16, 16), out=(16,)))
def gradient_penalty_through_scan(params, batch):
    def deep(x):
        return lax.scan(layer, x @ params["into"], params["layers"])[0] @ params["out"]

    slopes = jax.vmap(jax.grad(deep))(batch["x"])
    return squared_error(jax.vmap(deep)(batch["x"]), batch) + jnp.mean(slopes**2)


@program(init=NETWORK)
def jvp_along_weights(params, batch):
    """How the output changes when the weights move along their own signs."""
    direction = jax.tree.map(lambda w: lax.stop_gradient(jnp.sign(w)), params)
    y, dy = jax.jvp(lambda p: network(p, batch["x"]), (params,), (direction,))
    return squared_error(y + 0.1 * dy, batch)


@program(init=NETWORK)
def hessian_vector_product(params, batch):
    """Forward over reverse, for the input."""

    def curvature(x):
        return jax.jvp(jax.grad(lambda x: network(params, x)), (x,), (jnp.ones_like(x),))[1]

    return squared_error(network(params, batch["x"]), batch) + jnp.mean(jax.vmap(curvature)(batch["x"]) ** 2)


@program(init=NETWORK)
def jacobian_penalty(params, batch):
    """A contractive network: the Jacobian of the hidden layer, forward mode."""
    hidden = jax.jacfwd(lambda x: jnp.tanh(x @ params["w"] + params["bias"]))
    jacobians = jax.vmap(hidden)(batch["x"])
    return squared_error(network(params, batch["x"]), batch) + jnp.mean(jacobians**2)


@program(init=NETWORK)
def inner_gradient_step(params, batch):
    """Meta-learning: every example is a task that takes a gradient step before it answers."""

    def task(x, y):
        step = jax.grad(lambda p: (network(p, 0.5 * x) - y) ** 2)(params)
        adapted = jax.tree.map(lambda p, g: p - 0.1 * g, params, step)
        return network(adapted, x)

    return squared_error(jax.vmap(task)(batch["x"], batch["y"]), batch)


@program(init=NETWORK)
def vjp_inside(params, batch):
    """Pulls a vector of ones back through the network and through a linearised copy of it."""
    y, pull = jax.vjp(lambda x: network(params, x), batch["x"])
    _, push = jax.linearize(lambda x: network(params, x), batch["x"])
    return squared_error(y + pull(jnp.ones_like(y))[0].sum(1) + push(jnp.ones_like(batch["x"])), batch)


@program(init=normals(w=(8, 16), target=(8, 16), out=(16,)), zero_grads=("target",))
def stopped_gradient(params, batch):
    """One leaf is only ever read under stop_gradient, another both ways."""
    goal = jnp.tanh(batch["x"] @ lax.stop_gradient(params["target"] + params["w"]))
    return jnp.mean((jnp.tanh(batch["x"] @ params["w"]) - goal) ** 2) + squared_error(
        batch["x"] @ params["w"] @ params["out"], batch
    )


@program(init=normals(w=(4, 8, 16), bias=(4, 16), out=(4, 16)))
def vmap_over_params(params, batch):
    """An ensemble along the leading dims."""
    return squared_error(jax.vmap(network, in_axes=(0, None))(params, batch["x"]).mean(0), batch)


@program(init=normals(w=(8, 4, 16), bias=(16,), out=(16, 4)))
def vmap_on_other_dims(params, batch):
    """An ensemble along dims that are not the first; one leaf is shared by all members."""
    axes = {"w": 1, "bias": None, "out": 1}
    return squared_error(jax.vmap(network, in_axes=(axes, None), out_axes=1)(params, batch["x"]).mean(1), batch)
