"""jax.checkpoint as users write it: their policy decides what is recomputed."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from .program import normals, program, squared_error

policies = jax.checkpoint_policies
BLOCKS = normals(into=(8, 16), up=(3, 16, 32), down=(3, 32, 16), out=(16,))


def block(h, up, down):
    """A residual block with two named activations."""
    hidden = checkpoint_name(jnp.tanh(h @ up), "hidden")
    return h + checkpoint_name(jnp.sin(hidden @ down), "update")


def unrolled(name, notes, **options):
    """Blocks in a Python loop, each under `jax.checkpoint(block, **options)`."""

    def loss(params, batch):
        h = batch["x"] @ params["into"]
        for i in range(3):
            h = jax.checkpoint(block, **options)(h, params["up"][i], params["down"][i])
        return squared_error(h @ params["out"], batch)

    loss.__doc__ = notes
    return program(init=BLOCKS, name=name)(loss)


def scanned(name, notes, **options):
    """The same blocks as a scan."""

    def loss(params, batch):
        body = jax.checkpoint(lambda h, ws: (block(h, *ws), None), **options)
        h, _ = lax.scan(body, batch["x"] @ params["into"], (params["up"], params["down"]))
        return squared_error(h @ params["out"], batch)

    loss.__doc__ = notes
    return program(init=BLOCKS, name=name)(loss)


remat_default = unrolled("remat_default", "Everything is recomputed.")
remat_nothing_saveable = unrolled(
    "remat_nothing_saveable", "The same, said by a policy.", policy=policies.nothing_saveable
)
remat_dots_saveable = unrolled("remat_dots_saveable", "Products are kept.", policy=policies.dots_saveable)
remat_everything_saveable = unrolled(
    "remat_everything_saveable", "Nothing is recomputed.", policy=policies.everything_saveable
)
remat_only_these_names = unrolled(
    "remat_only_these_names", "One named activation is kept.", policy=policies.save_only_these_names("hidden")
)
remat_any_but_these_names = unrolled(
    "remat_any_but_these_names",
    "Any name is kept but one, and products are.",
    policy=policies.save_from_both_policies(policies.save_any_names_but_these("hidden"), policies.dots_saveable),
)
remat_allowing_cse = unrolled("remat_allowing_cse", "No barrier around the block.", prevent_cse=False)
remat_in_scan = scanned("remat_in_scan", "Each step recomputes itself.")
remat_in_scan_allowing_cse = scanned("remat_in_scan_allowing_cse", "As the manual advises.", prevent_cse=False)
remat_in_scan_dots = scanned(
    "remat_in_scan_dots",
    "A policy inside the scan.",
    prevent_cse=False,
    policy=policies.dots_with_no_batch_dims_saveable,
)
remat_in_scan_names = scanned(
    "remat_in_scan_names", "Names inside the scan.", policy=policies.save_only_these_names("update")
)


@program(init=BLOCKS)
def remat_around_scan(params, batch):
    """The scan as a whole is recomputed."""

    @jax.checkpoint
    def blocks(h, ws):
        return lax.scan(lambda h, ws: (block(h, *ws), None), h, ws)[0]

    return squared_error(blocks(batch["x"] @ params["into"], (params["up"], params["down"])) @ params["out"], batch)


@program(init=BLOCKS)
def remat_nested(params, batch):
    """Around the whole, around each scan step, and around a part of each step; the outermost has a policy."""

    @partial(jax.checkpoint, policy=policies.dots_saveable)
    def blocks(params, x):
        @jax.checkpoint
        def body(h, ws):
            up, down = ws
            return h + jnp.sin(jax.checkpoint(lambda h: jnp.tanh(h @ up))(h) @ down), None

        return lax.scan(body, x @ params["into"], (params["up"], params["down"]))[0]

    return squared_error(blocks(params, batch["x"]) @ params["out"], batch)


@program(init=BLOCKS)
def remat_static_arguments(params, batch):
    """Flags and a function among the arguments."""

    @partial(jax.checkpoint, static_argnums=(0, 3))
    def step(activation, h, w, residual):
        return h + activation(h @ w) if residual else activation(h @ w)

    h = batch["x"] @ params["into"]
    for i in range(3):
        h = step(jnp.sin, step(jnp.tanh, h, params["up"][i], False), params["down"][i], False)
    return squared_error(step(jnp.cos, h, params["up"][0] @ params["down"][0], True) @ params["out"], batch)


@program(init=BLOCKS)
def remat_closed_over(params, batch):
    """The weights are closed over, not passed."""
    h = batch["x"] @ params["into"]
    for i in range(3):
        h = jax.checkpoint(lambda h, i=i: block(h, params["up"][i], params["down"][i]))(h)
    return squared_error(h @ params["out"], batch)


@program(init=BLOCKS)
def remat_named_weight(params, batch):
    """The policy saves a name that was given to a weight."""

    @partial(jax.checkpoint, policy=policies.save_only_these_names("weight"))
    def apply(h, w):
        return jnp.tanh(h @ checkpoint_name(2 * w, "weight"))

    h = apply(apply(batch["x"] @ params["into"], params["up"][0]), params["down"][0])
    return squared_error(
        h @ (params["out"] + (params["up"][1:] ** 2).mean((0, 2)) + params["down"].mean((0, 1))), batch
    )


@program(init=BLOCKS)
def remat_in_cond(params, batch):
    """Each example decides whether it goes through a checkpointed block."""

    def one_example(x):
        h = x @ params["into"]
        for i in range(2):
            h = lax.cond(h[i] > 0, jax.checkpoint(block), lambda h, up, down: h, h, params["up"][i], params["down"][i])
        return h

    return squared_error(lax.map(one_example, batch["x"]) @ params["out"], batch)


@program(init=normals(w=(8, 8), out=(8,)))
def remat_twice_on_one_leaf(params, batch):
    """Two checkpointed calls read the same leaf, and the loss reads it once more."""
    step = jax.checkpoint(lambda h, w: jnp.tanh(h @ w))
    h = step(step(batch["x"], params["w"]), params["w"].T)
    return squared_error((h @ params["w"]) @ params["out"], batch)


@jax.custom_vjp
def _doubling_dense(h, w):
    return jnp.tanh(h @ w)


def _doubling_bwd(residuals, g):
    h, w, y = residuals
    g = g * (1 - y * y)
    return g @ w.T, 2 * (h.T @ g)


_doubling_dense.defvjp(lambda h, w: (y := _doubling_dense(h, w), (h, w, y)), _doubling_bwd)


@program(init=BLOCKS)
def remat_of_custom_vjp(params, batch):
    """A rule of the user's own, whose residuals are recomputed in each step of a scan."""

    @jax.checkpoint
    def body(h, ws):
        up, down = ws
        return h + _doubling_dense(_doubling_dense(h, up), down), None

    h, _ = lax.scan(body, batch["x"] @ params["into"], (params["up"], params["down"]))
    return squared_error(h @ params["out"], batch)


@program(init=normals(w=(8, 16), out=(16,)))
def remat_with_gradient_inside(params, batch):
    """A gradient is taken within the region that is recomputed."""

    @jax.checkpoint
    def slope(w, out, x):
        return jax.grad(lambda x: jnp.tanh(x @ w) @ out)(x).sum()

    return squared_error(jax.vmap(slope, (None, None, 0))(params["w"], params["out"], batch["x"]), batch)
