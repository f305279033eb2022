"""Stacks of layers and recurrences: the ways in which a leaf can enter one `lax.scan`."""

import jax
import jax.numpy as jnp
from jax import lax

from .program import examples, layer, normal, normals, program, squared_error

STACK = normals(into=(8, 16), layers=(4, 16, 16), out=(16,))
SERIES = examples(x=(6, 8), y=())


@program(init=STACK)
def scan_xs(params, batch):
    """The usual stack of layers, consumed as xs."""
    h, _ = lax.scan(layer, batch["x"] @ params["into"], params["layers"])
    return squared_error(h @ params["out"], batch)


@program(init=STACK)
def scan_reversed(params, batch):
    h, _ = lax.scan(layer, batch["x"] @ params["into"], params["layers"], reverse=True)
    return squared_error(h @ params["out"], batch)


@program(init=STACK)
def scan_unrolled(params, batch):
    h, _ = lax.scan(layer, batch["x"] @ params["into"], params["layers"], unroll=2)
    return squared_error(h @ params["out"], batch)


@program(
    init=normals(into=(8, 16), up=(4, 16, 24), bias=(4, 24), down=(4, 24, 16), scale=(4, 16), gate=(4,), out=(16,))
)
def scan_several_stacks(params, batch):
    """Matrices, vectors and one scalar per layer in the same scan."""

    def block(h, p):
        hidden = jax.nn.gelu(h * (1 + p["scale"]) @ p["up"] + p["bias"])
        return jnp.tanh(h + (1 + p["gate"]) * (hidden @ p["down"])), None

    stacks = {name: params[name] for name in ("up", "bias", "down", "scale", "gate")}
    h, _ = lax.scan(block, batch["x"] @ params["into"], stacks)
    return squared_error(h @ params["out"], batch)


@program(init=normals(layers=(8, 7, 7), into=(8, 7), out=(7,)))
def scan_only_its_length_divides(params, batch):
    """Splitting along the scanned dim would be the only way to split this stack, and is no way at all."""
    h, _ = lax.scan(layer, batch["x"] @ params["into"], params["layers"])
    return squared_error(h @ params["out"], batch)


@program(init=normals(v=(16,), w=(16, 16), into=(8, 16)))
def scan_initial_carry(params, batch):
    """A vector is the initial carry, and changes."""
    v, _ = lax.scan(lambda v, _: (jnp.tanh(params["w"] @ v), None), params["v"], length=3)
    return squared_error(batch["x"] @ params["into"] @ v, batch)


@program(init=normals(w=(8, 16), out=(16,)))
def scan_carry_unchanged(params, batch):
    """A weight travels in the carry and is never changed."""

    def body(carry, _):
        w, h = carry
        return (w, jnp.tanh(h @ w @ w.T)), None

    (w, h), _ = lax.scan(body, (params["w"], batch["x"]), length=3)
    return squared_error(jnp.tanh(h @ w) @ params["out"], batch)


@program(init=normals(w=(16, 16), into=(8, 16), out=(16,)), batch=SERIES)
def scan_fast_weights(params, batch):
    """The initial carry is a matrix that every time step of an example writes to."""

    def one_example(x):
        def body(w, x_t):
            h = jnp.tanh(x_t @ params["into"] @ w)
            return 0.9 * w + 0.1 * jnp.outer(h, h), None

        return lax.scan(body, params["w"], x)[0]

    return squared_error(jax.vmap(one_example)(batch["x"]).sum(1) @ params["out"], batch)


@program(init=normals(w=(16, 16), u=(8, 16), bias=(16,), out=(16,)), batch=SERIES)
def scan_rnn(params, batch):
    """Weights as consts of a scan over time, whose carry starts at zero."""

    def cell(h, x):
        h = jnp.tanh(x @ params["u"] + h @ params["w"] + params["bias"])
        return h, h

    h0 = jnp.zeros((batch["x"].shape[0], 16))
    _, hs = lax.scan(cell, h0, batch["x"].swapaxes(0, 1))
    return squared_error(hs.mean(0) @ params["out"], batch)


@program(init=normals(w=(24, 64), bias=(64,), h0=(16,), c0=(16,), out=(16,)), batch=SERIES)
def scan_lstm(params, batch):
    """Fused gates, and a learned initial state broadcast to the carry."""

    def cell(state, x):
        h, c = state
        i, f, g, o = jnp.split(jnp.concatenate([x, h], axis=1) @ params["w"] + params["bias"], 4, axis=1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        return (jax.nn.sigmoid(o) * jnp.tanh(c), c), None

    initial = tuple(jnp.broadcast_to(params[name], (batch["x"].shape[0], 16)) for name in ("h0", "c0"))
    (h, _), _ = lax.scan(cell, initial, batch["x"].swapaxes(0, 1))
    return squared_error(h @ params["out"], batch)


@program(init=normals(layers=(6, 8, 8), out=(8,)), batch=SERIES)
def scan_stack_beside_data(params, batch):
    """xs are a stack and a time series: one layer for each step."""

    def body(h, xs):
        w, x = xs
        return jnp.tanh(h + x @ w), None

    h, _ = lax.scan(body, jnp.zeros_like(batch["x"][:, 0]), (params["layers"], batch["x"].swapaxes(0, 1)))
    return squared_error(h @ params["out"], batch)


@program(init=normals(experts=(4, 8, 16), out=(16,)))
def scan_without_carry(params, batch):
    """Nothing is carried: every layer answers for itself."""
    _, hs = lax.scan(lambda _, w: (None, jnp.tanh(batch["x"] @ w)), None, params["experts"])
    return squared_error(hs.sum(0) @ params["out"], batch)


@program(init=normals(experts=(4, 8, 16), out=(16,)))
def scan_as_map(params, batch):
    hs = lax.map(lambda w: jnp.tanh(batch["x"] @ w), params["experts"])
    return squared_error(hs.mean(0) @ params["out"], batch)


@program(init=normals(layers=(0, 16, 16), into=(8, 16), out=(16,)))
def scan_of_length_zero(params, batch):
    """A stack with no layers at all."""
    h, _ = lax.scan(layer, batch["x"] @ params["into"], params["layers"])
    return squared_error(h @ params["out"], batch)


@program(init=STACK)
def scan_returns_weights(params, batch):
    """One scan gives back normalised weights and the weights themselves, and a second consumes both."""

    def normalise(_, w):
        return None, (w / jnp.linalg.norm(w, axis=0), w)

    _, (unit, same) = lax.scan(normalise, None, params["layers"])
    h, _ = lax.scan(lambda h, ws: layer(h, ws[0] + 0.1 * ws[1]), batch["x"] @ params["into"], (unit, same))
    return squared_error(h @ params["out"], batch)


@program(init=normals(into=(8, 16), w=(16, 16), out=(16,)))
def scan_shared_layer(params, batch):
    """The same layer four times: a const, and no xs."""
    h, _ = lax.scan(lambda h, _: layer(h, params["w"]), batch["x"] @ params["into"], length=4)
    return squared_error(h @ params["out"], batch)


@program(init=STACK, low_precision=True)
def scan_cast_stack(params, batch):
    """The whole stack is cast to bfloat16 before the scan."""
    h = (batch["x"] @ params["into"]).astype(jnp.bfloat16)
    h, _ = lax.scan(layer, h, params["layers"].astype(jnp.bfloat16))
    return squared_error(h.astype(jnp.float32) @ params["out"], batch)


@program(init=normals(into=(8, 16), layers=(16, 4, 16), out=(16,)))
def scan_stack_on_inner_dim(params, batch):
    """The layers are the second dim, moved to the front for the scan."""
    h, _ = lax.scan(layer, batch["x"] @ params["into"], jnp.moveaxis(params["layers"], 1, 0))
    return squared_error(h @ params["out"], batch)


@program(init=normals(into=(8, 16), layers=(64, 16), out=(16,)))
def scan_reshaped_stack(params, batch):
    """Four layers lie one below the other in one matrix."""
    h, _ = lax.scan(layer, batch["x"] @ params["into"], params["layers"].reshape(4, 16, 16))
    return squared_error(h @ params["out"], batch)


@program(init=normals(into=(8, 16), first=(2, 16, 16), rest=(3, 16, 16), out=(16,)))
def scan_concatenated_stacks(params, batch):
    layers = jnp.concatenate([params["first"], params["rest"]])
    h, _ = lax.scan(layer, batch["x"] @ params["into"], layers)
    return squared_error(h @ params["out"], batch)


def _list_of_layers(key):
    keys = jax.random.split(key, 4)
    return {"into": normal(keys[0], (8, 16)), "layers": [normal(k, (16, 16)) for k in keys[1:]]}


@program(init=_list_of_layers)
def scan_stacked_list(params, batch):
    """Separate leaves, stacked by the loss itself."""
    h, _ = lax.scan(layer, batch["x"] @ params["into"], jnp.stack(params["layers"]))
    return squared_error(h.sum(1), batch)


@program(init=STACK)
def scan_flipped_stack(params, batch):
    h, _ = lax.scan(layer, batch["x"] @ params["into"], params["layers"][::-1])
    return squared_error(h @ params["out"], batch)


@program(init=STACK)
def stack_indexed_in_python(params, batch):
    h = batch["x"] @ params["into"]
    for i in range(4):
        h = jnp.tanh(h @ params["layers"][i])
    return squared_error(h @ params["out"], batch)


@program(init=STACK)
def stack_iterated_in_python(params, batch):
    """Iterating takes an array apart in a way of its own; the last layer is then read by a negative index."""
    h = batch["x"] @ params["into"]
    for w in params["layers"]:
        h = jnp.tanh(h @ w)
    return squared_error(h @ params["layers"][-1] @ params["out"], batch)


@program(init=STACK)
def stack_in_fori_loop(params, batch):
    def body(i, h):
        return jnp.tanh(h @ params["layers"][i])

    return squared_error(lax.fori_loop(0, 4, body, batch["x"] @ params["into"]) @ params["out"], batch)


@program(init=STACK)
def stack_in_scan_over_indices(params, batch):
    def body(h, i):
        return layer(h, params["layers"][i])

    h, _ = lax.scan(body, batch["x"] @ params["into"], jnp.arange(4))
    return squared_error(h @ params["out"], batch)


@program(init=STACK)
def stack_read_from_both_ends(params, batch):
    """Layer i with layer 3 - i, each a slice at a traced position, one of them keeping its dim."""

    def body(i, h):
        last = lax.dynamic_index_in_dim(params["layers"], 3 - i, keepdims=True)
        return jnp.tanh(h @ params["layers"][i] + jnp.einsum("bd,lde->be", h, last))

    return squared_error(lax.fori_loop(0, 4, body, batch["x"] @ params["into"]) @ params["out"], batch)


@program(init=STACK)
def stack_in_two_halves(params, batch):
    """Two scans, each over its own slice of one stack."""
    h, _ = lax.scan(layer, batch["x"] @ params["into"], params["layers"][:3])
    h, _ = lax.scan(layer, h, params["layers"][3:])
    return squared_error(h @ params["out"], batch)
