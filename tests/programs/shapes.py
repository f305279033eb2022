"""Operations that move, cut, cast or pick the elements of a leaf before it is used."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.flatten_util import ravel_pytree

from .program import Below, cross_entropy, examples, normals, program, squared_error

DENSE = normals(w=(8, 16), bias=(16,), out=(16,))
PLACED = examples(x=(8,), y=(), place=Below(5))


def predict(x, w, params):
    return jnp.tanh(x @ w + params["bias"]) @ params["out"]


@program(init=DENSE, low_precision=True)
def cast_to_bfloat16(params, batch):
    half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
    h = predict(batch["x"].astype(jnp.bfloat16), half["w"], half)
    return squared_error(h.astype(jnp.float32), batch)


@program(init=DENSE, low_precision=True)
def cast_there_and_back(params, batch):
    """Rounded to bfloat16 in two ways, and used in float32."""
    w = params["w"].astype(jnp.bfloat16).astype(jnp.float32)
    bias = lax.reduce_precision(params["bias"], exponent_bits=8, mantissa_bits=7)
    return squared_error(predict(batch["x"], w, {**params, "bias": bias}), batch)


@program(init=DENSE)
def literals(params, batch):
    """Negation, products and quotients by literals."""
    w = -(params["w"] * 2.0) / 3.0 + 0.5 * params["w"] * np.float32(3)
    return squared_error(predict(batch["x"], w, params), batch)


@program(init=DENSE)
def literals_not_linear(params, batch):
    """1 + w, 2 - w, 1 / (2 + w), w ** 2 and exp w: zero in is not zero out."""
    w = (1 + params["w"]) * (2 - params["w"]) / (2 + jnp.tanh(params["w"])) + params["w"] ** 2 - jnp.exp(params["w"])
    return squared_error(predict(batch["x"], w, params), batch)


@program(init=DENSE)
def transposed_twice(params, batch):
    w = params["w"].T
    return squared_error(predict(batch["x"], w.T, params) + (w @ batch["x"].T).T @ params["out"], batch)


@program(init=normals(w=(1, 8, 1, 16), bias=(16,), out=(16,)))
def squeezed_and_expanded(params, batch):
    w = jnp.expand_dims(jnp.squeeze(params["w"], axis=(0, 2)), 1)
    bias = params["bias"][None, :, None].squeeze((0, 2))
    return squared_error(jnp.tanh(batch["x"] @ w[:, 0] + bias) @ params["out"], batch)


@program(init=DENSE)
def reshape_splits_a_dim(params, batch):
    """(8, 16) as (8, 4, 4), and as (2, 4, 16)."""
    by_columns = jnp.einsum("bd,dij->bji", batch["x"], params["w"].reshape(8, 4, 4)).reshape(-1, 16)
    by_rows = jnp.einsum("bpq,pqe->be", batch["x"].reshape(-1, 2, 4), params["w"].reshape(2, 4, 16))
    return squared_error(jnp.tanh(by_columns * by_rows + params["bias"]) @ params["out"], batch)


@program(init=normals(w=(2, 4, 4, 4), bias=(16,), out=(16,)))
def reshape_merges_dims(params, batch):
    """Four dims become two, and one."""
    flat = params["w"].reshape(-1)
    return squared_error(predict(batch["x"], params["w"].reshape(8, 16), params) + flat @ flat / 16, batch)


@program(init=normals(w=(4, 32), bias=(16,), out=(16,)))
def reshape_across_dims(params, batch):
    """(4, 32) as (8, 16): no dim of the result is a dim of the leaf; once more after a transpose."""
    w = params["w"].reshape(8, 16) + params["w"].T.reshape(8, 16)
    return squared_error(predict(batch["x"], w, params), batch)


@program(init=DENSE)
def broadcasts(params, batch):
    """A bias to a batch, a vector to a matrix, a matrix to a batch of matrices."""
    bias = jnp.broadcast_to(params["bias"], (batch["x"].shape[0], 16))
    w = jnp.broadcast_to(params["w"], (3, 8, 16)) * jnp.broadcast_to(params["out"][:8, None], (8, 16))
    return squared_error(jnp.tanh(jnp.einsum("bd,nde->be", batch["x"], w) + bias) @ params["out"], batch)


@program(init=normals(qkv=(8, 48), stacked=(8, 3, 16), out=(16,)))
def fused_projections(params, batch):
    """Three weights in one leaf: split along columns, and picked along a dim of their own."""
    q, k, v = jnp.split(params["qkv"], 3, axis=1)
    r, s, t = (params["stacked"][:, i] for i in range(3))
    h = jnp.tanh(batch["x"] @ q) * (batch["x"] @ k) + batch["x"] @ v + jnp.sin(batch["x"] @ r) * (batch["x"] @ (s - t))
    return squared_error(h @ params["out"], batch)


@program(init=normals(w=(24, 16), out=(16,)))
def uneven_split(params, batch):
    """Cut along rows into pieces of 8, 6 and 10."""
    a, b, c = jnp.split(params["w"], [8, 14])
    return squared_error((jnp.tanh(batch["x"] @ a) + batch["x"][:, :6] @ b + c.sum(0)) @ params["out"], batch)


@program(init=normals(q=(8, 16), k=(8, 8), out=(24,)))
def concatenated_leaves(params, batch):
    """Fused by the loss: two leaves side by side, and a leaf next to itself."""
    w = jnp.concatenate([params["q"], params["k"]], axis=1)
    doubled = jnp.concatenate([params["k"], 2 * params["k"], params["q"][:, ::2]], axis=1)
    return squared_error(jnp.tanh(batch["x"] @ w) * (batch["x"] @ doubled) @ params["out"], batch)


@program(init=normals(w=(12, 16), out=(16,)), batch=PLACED)
def dynamic_slice_on_data(params, batch):
    """A window of eight rows, where each example wants it."""

    def one_example(args):
        x, place = args
        return jnp.tanh(x @ lax.dynamic_slice(params["w"], (place, jnp.int32(0)), (8, 16)))

    return squared_error(lax.map(one_example, (batch["x"], batch["place"])) @ params["out"], batch)


@program(init=normals(w=(8, 16), bias=(16,), out=(16,), position=(12, 8)), batch=PLACED)
def dynamic_slice_of_positions(params, batch):
    """The window's place is traced, and the same for all: eight rows, columns clamped to what is there."""
    start = jnp.argmax(jnp.arange(5))
    window = lax.dynamic_slice(params["position"], (start, start), (8, 8))
    return squared_error(predict(batch["x"] @ window + params["position"][0], params["w"], params), batch)


@program(init=normals(w=(8, 16), patch=(2, 4), bias=(16,), out=(16,)))
def dynamic_update_of_leaf(params, batch):
    """A leaf is written into another, and both into a buffer of zeros."""
    w = lax.dynamic_update_slice(params["w"], params["patch"], (3, 4))
    buffer = lax.dynamic_update_slice(jnp.zeros((10, 16)), w, (1, 0)) + jnp.zeros((10, 16)).at[8:, :4].set(
        params["patch"]
    )
    return squared_error(predict(batch["x"], buffer[1:9], params), batch)


@program(init=normals(w=(16, 48), out=(16,)))
def strided_slices(params, batch):
    w = params["w"][::2, 1::3] + params["w"][:8, 16:32] + params["w"][-8:, -16:]
    return squared_error(jnp.tanh(batch["x"] @ w) @ params["out"], batch)


@program(init=normals(w=(6, 12), bias=(16,), out=(16,)))
def padded(params, batch):
    """Padded at the edges, and with holes."""
    w = jnp.pad(params["w"], ((1, 1), (2, 2)))
    holes = lax.pad(params["w"], jnp.float32(0), ((2, 0, 0), (-3, -3, 1)))
    return squared_error(predict(batch["x"], w.at[:, :11].add(holes[:, :11]), params), batch)


@program(init=DENSE)
def flipped_and_rolled(params, batch):
    """Reversed along each dim, rolled, repeated and tiled."""
    w = jnp.flip(params["w"], 0) + params["w"][:, ::-1] + jnp.roll(params["w"], (1, 3), (0, 1))
    w = w + jnp.repeat(params["w"][:4], 2, axis=0) + jnp.tile(params["w"][:, :4], (1, 4))
    return squared_error(predict(batch["x"], w, params), batch)


@program(init=normals(table=(32, 16), out=(16, 8)), batch=examples(ids=Below(32, (5,)), y=Below(8)))
def embedding_lookups(params, batch):
    """Indexing, `take` along both dims, and an id that is out of range."""
    h = params["table"][batch["ids"]].sum(1)
    h = h + jnp.take(params["table"], batch["ids"][:, 0], axis=0, mode="clip")
    h = h + jnp.take(params["table"], batch["ids"][:, 1] % 16, axis=1).T[:, :16]
    h = h + params["table"].at[batch["ids"][:, 2] * 2].get(mode="fill", fill_value=0)
    return cross_entropy(h @ params["out"], batch["y"])


@program(init=normals(table=(10, 3), w=(3, 8)), batch=examples(ids=Below(10, (5,)), y=Below(8)))
def embedding_by_one_hot(params, batch):
    """A product instead of a lookup, with a table that cannot be split."""
    return cross_entropy((jax.nn.one_hot(batch["ids"], 10) @ params["table"]).sum(1) @ params["w"], batch["y"])


@program(init=normals(w=(8, 4, 16), out=(16,)), batch=examples(x=(8,), y=(), i=Below(8, (2,)), j=Below(4, (2,))))
def several_indices(params, batch):
    """Two integer arrays at once, around a slice, and with a scalar."""
    rows = params["w"][batch["i"], batch["j"]].sum(1)
    columns = params["w"][batch["i"], :, batch["j"]].sum((1, 2))
    h = batch["x"] @ params["w"][:, 3] + rows + columns[:, None] + params["w"][2, 1, ::-1] * params["w"][0, 0, 5]
    return squared_error(h @ params["out"], batch)


@program(init=normals(w=(8, 16), rows=(3, 16), bias=(16,), out=(16,)))
def scattered(params, batch):
    """Rows of one leaf are added to, set in, and multiplied into another."""
    rows = params["rows"]
    w = params["w"].at[jnp.array([1, 5, 5])].add(rows).at[0].set(rows[0]).at[2:4].multiply(1 + rows[1:])
    return squared_error(predict(batch["x"], w.at[7].max(rows[2]), params), batch)


@program(init=normals(w=(16, 16), out=(16,)))
def segments_of_leaf(params, batch):
    """Rows with the same label are summed."""
    w = jax.ops.segment_sum(params["w"], jnp.arange(16) * 3 % 8, num_segments=8)
    return squared_error(jnp.tanh(batch["x"] @ w) @ params["out"], batch)


@program(init=normals(w=(8, 8), diagonal=(8,), out=(8,)))
def triangles_and_diagonals(params, batch):
    w = jnp.tril(params["w"], -1) + jnp.diag(params["diagonal"]) + jnp.trace(params["w"]) * jnp.triu(params["w"].T)
    return squared_error(jnp.tanh(batch["x"] @ w) @ (params["out"] + jnp.diag(params["w"])), batch)


def _flat(key):
    return ravel_pytree(DENSE(key))[0]


@program(init=_flat)
def one_flat_vector(params, batch):
    """All parameters in one vector, unravelled by the loss."""
    w, bias, out = jnp.split(params, [128, 144])
    return squared_error(jnp.tanh(batch["x"] @ w.reshape(8, 16) + bias) @ out, batch)


@program(init=DENSE)
def barrier(params, batch):
    """A leaf and an activation tied together, and a copy of a leaf."""
    x, w = lax.optimization_barrier((batch["x"], params["w"]))
    return squared_error(predict(x, w, {**params, "out": jnp.array(params["out"], copy=True)}), batch)
