"""Leaves of every dtype, size and container."""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .program import Below, cross_entropy, examples, normal, normals, program, squared_error

BASE = normals(w=(8, 16), out=(16,))


def with_leaf(**leaves):
    """`BASE` and further leaves, each a function of a key."""
    return lambda key: {
        **BASE(key),
        **{name: make(jax.random.fold_in(key, 9)) for name, make in leaves.items()},
    }


@program(init=with_leaf(key=lambda key: jax.random.clone(key)))
def leaf_key(params, batch):
    """Fixed random features, drawn from a key among the parameters."""
    features = jax.random.normal(params["key"], (8, 16))
    return squared_error(jnp.sin(batch["x"] @ features + batch["x"] @ params["w"]) @ params["out"], batch)


@program(init=with_leaf(keys=lambda key: jax.random.split(key, 8), layers=lambda key: normal(key, (8, 16, 16))))
def leaf_keys_scanned(params, batch):
    """A stack of keys is xs next to a stack of weights: noise of each layer's own."""

    def body(h, xs):
        key, w = xs
        return jnp.tanh(h @ w + 0.1 * jax.random.normal(key, (16,))), None

    h, _ = lax.scan(body, batch["x"] @ params["w"], (params["keys"], params["layers"]))
    return squared_error(h @ params["out"], batch)


@program(init=with_leaf(permutation=lambda key: jax.random.permutation(key, 8)))
def leaf_integers(params, batch):
    """int32: a fixed permutation of the features."""
    return squared_error(jnp.tanh(batch["x"][:, params["permutation"]] @ params["w"]) @ params["out"], batch)


@program(init=with_leaf(steps=lambda key: jnp.array(7, jnp.int32)))
def leaf_counter(params, batch):
    """int32 and 0-d: a step count that sets a temperature."""
    temperature = 1 + params["steps"].astype(jnp.float32) / 10
    return squared_error(jnp.tanh(batch["x"] @ params["w"] / temperature) @ params["out"], batch)


@program(init=with_leaf(mask=lambda key: jax.random.bernoulli(key, 0.6, (8, 16))))
def leaf_mask(params, batch):
    """bool: pruned weights."""
    w = jnp.where(params["mask"], params["w"], 0.0)
    return squared_error(jnp.tanh(batch["x"] @ w) @ params["out"], batch)


@program(init=with_leaf(quantised=lambda key: jax.random.randint(key, (8, 16), -127, 127, jnp.int8)))
def leaf_quantised(params, batch):
    """int8 weights, frozen by their dtype, under a trained correction."""
    w = params["quantised"].astype(jnp.float32) / 127 + params["w"]
    return squared_error(jnp.tanh(batch["x"] @ w) @ params["out"], batch)


@program(init=with_leaf(half=lambda key: normal(key, (16, 16)).astype(jnp.bfloat16)), low_precision=True)
def leaf_bfloat16(params, batch):
    """One leaf is bfloat16 at rest."""
    h = jnp.tanh(batch["x"] @ params["w"])
    h = h + (h.astype(jnp.bfloat16) @ params["half"]).astype(jnp.float32)
    return squared_error(h @ params["out"], batch)


@program(init=with_leaf(scale=lambda key: jnp.float32(1.5), shift=lambda key: jnp.float32(0.5)))
def leaf_scalars(params, batch):
    """0-d float leaves."""
    h = jnp.tanh(params["scale"] * (batch["x"] @ params["w"])) + params["shift"]
    return squared_error(h @ params["out"] / params["scale"] ** 2, batch)


@program(init=with_leaf(empty=lambda key: jnp.zeros((0, 4)), empty_columns=lambda key: jnp.zeros((8, 0))))
def leaf_empty(params, batch):
    """Leaves without elements take part in a concatenation, a sum and a product."""
    h = jnp.concatenate([batch["x"] @ params["w"], batch["x"] @ params["empty_columns"]], axis=1)
    inner = params["empty_columns"] @ params["empty"]
    return squared_error(h @ params["out"] + inner.sum() + params["empty"].sum(), batch)


@program(init=normals(a=(8, 10), b=(10, 3), c=(3, 7), bias=(7,), out=(7, 1)))
def leaf_odd_shapes(params, batch):
    """No dim of most leaves divides by 4 or 8."""
    h = jnp.tanh(jnp.sin(batch["x"] @ params["a"]) @ params["b"] @ params["c"] + params["bias"])
    return squared_error((h @ params["out"])[:, 0], batch)


@program(
    init=with_leaf(filters=lambda key: lax.complex(normal(key, (9, 16)), normal(jax.random.split(key)[0], (9, 16))))
)
def leaf_complex(params, batch):
    """complex64: a filter in the frequencies, as in a Fourier neural operator."""
    h = jnp.tanh(batch["x"] @ params["w"])
    spectrum = jnp.einsum("bf,fg->bg", jnp.fft.rfft(h), params["filters"])
    return squared_error(jnp.fft.irfft(spectrum, 16) @ params["out"] + spectrum.real.mean(1), batch)


@program(init=with_leaf(phases=lambda key: normal(key, (4, 2, 1, 8, 2)), unit=lambda key: normal(key, (1, 16))))
def leaf_many_dims(params, batch):
    """Five dims, and dims of size one."""
    w = params["phases"].mean((0, 1, 2))
    h = jnp.tanh(batch["x"] @ params["w"] * (1 + params["unit"]))
    return squared_error(h @ params["out"] + (batch["x"] @ w).sum(1), batch)


def _lone_array(key):
    return normal(key, (8, 16))


@program(init=_lone_array)
def tree_of_one_array(w, batch):
    """The parameters are a single array."""
    return squared_error(jnp.tanh(batch["x"] @ w).sum(1), batch)


class Dense(NamedTuple):
    w: Any
    bias: Any


def _named_tuples(key):
    w1, w2 = (normal(k, s) for k, s in zip(jax.random.split(key), [(8, 16), (16, 4)], strict=True))
    return (Dense(w1, jnp.full(16, 0.1)), [Dense(w=w2, bias=None), {3: jnp.full(4, 0.5)}])


@program(init=_named_tuples)
def tree_of_named_tuples(params, batch):
    """NamedTuples in a tuple and a list, a None, and a dict with integer keys."""
    first, (second, scales) = params
    h = jnp.tanh(batch["x"] @ first.w + first.bias)
    return squared_error(h @ second.w @ scales[3], batch)


@partial(jax.tree_util.register_dataclass, data_fields=("w", "bias"), meta_fields=("activation",))
@dataclass(frozen=True)
class Block:
    w: Any
    bias: Any
    activation: str


def _dataclasses(key):
    blocks = zip(jax.random.split(key), ("tanh", "sin"), strict=True)
    return {"blocks": [Block(w=normal(k, (8, 8)), bias=normal(k, (8,)), activation=name) for k, name in blocks]}


@program(init=_dataclasses)
def tree_of_dataclasses(params, batch):
    """Registered dataclasses, with a static field that picks the activation."""
    h = batch["x"]
    for block in params["blocks"]:
        h = getattr(jnp, block.activation)(h @ block.w + block.bias)
    return squared_error(h.sum(1), batch)


@program(
    init=normals(table=(48, 16), out=(16, 8)),
    batch=lambda: (examples(ids=Below(48, (3,)))(), [examples(y=Below(8))()["y"]]),
)
def tree_of_batches(params, batch):
    """The batch is a pytree of its own: a dict and a list in a tuple."""
    inputs, (labels,) = batch
    return cross_entropy(params["table"][inputs["ids"]].mean(1) @ params["out"], labels)
