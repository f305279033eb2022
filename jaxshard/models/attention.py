"""Causal attention: JAX's own forms, and one in blocks, in plain JAX, whose memory grows with the length alone.

The blocks follow FlashAttention-2 (Dao 2023, arXiv 2307.08691): softmax is computed online, block after block of keys,
and the backward pass computes each block of scores again from the log-sum-exp of its rows. It runs wherever XLA does.

Shapes are named by B examples, T tokens, H heads, K key/value heads and C channels of a head. Of N blocks, each has S
keys, and R rows: its queries for each of the H / K heads that share a key, head by head.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Form = Literal["auto", "xla", "blockwise", "cudnn"]

BLOCK = 512
"""Tokens in a block: the scores of 32 heads are then 32 MiB, and the products large enough for a GPU's matrix units."""

CUDNN_CHANNELS = 128
"""The widest head that cuDNN takes on every GPU (256 from Hopper on); the width is a multiple of 8."""


def causal_attention(
    q_BxTxHxC: jax.Array, k_BxTxKxC: jax.Array, v_BxTxKxC: jax.Array, *, form: Form = "auto"
) -> jax.Array:
    """softmax(q k' / sqrt(C)) v over the keys that are no later than the query, B x T x H x C in the dtype of `q`.

    Each key/value head serves H / K query heads. `form` changes rounding alone: `xla` holds all B x H x T x T scores,
    `cudnn` is a kernel for GPUs and 16-bit floats, `auto` is `without_cudnn`.
    """
    if form == "auto":
        form = without_cudnn(q_BxTxHxC.shape[1])
    if form == "blockwise":
        return blockwise_attention(q_BxTxHxC, k_BxTxKxC, v_BxTxKxC)
    return jax.nn.dot_product_attention(q_BxTxHxC, k_BxTxKxC, v_BxTxKxC, is_causal=True, implementation=form)


def without_cudnn(length: int) -> Literal["xla", "blockwise"]:
    """The better form for sequences of so many tokens, on any device: in blocks if there is more than one."""
    return "blockwise" if length > BLOCK else "xla"


def best_form(
    form: Form, *, length: int, channels: int, platform: str, cudnn: bool, compute: str
) -> Literal["xla", "blockwise", "cudnn"]:
    """`form`, with `auto` decided: cuDNN's where it can be, else `without_cudnn`.

    length: tokens of a sequence. channels: of a head. platform: of the devices, as JAX names it. cudnn: whether JAX
    can use cuDNN. compute: the dtype of queries, keys and values.

    Raises ValueError for a form that is asked for where it cannot be.
    """
    # XLA has no such product for CPUs.
    half_on_cpu = platform == "cpu" and compute == "float16"
    if form == "xla" and half_on_cpu:
        raise ValueError("model.attention = 'xla' cannot compute in float16 on CPUs; take 'blockwise' or 'auto'.")
    obstacle = None
    if platform not in ("gpu", "cuda"):
        obstacle = f"an NVIDIA GPU, and these devices are {platform}"
    elif not cudnn:
        obstacle = "cuDNN, and JAX does not find it: pip install 'jax[cuda12]'"
    elif compute not in ("bfloat16", "float16"):
        obstacle = f"floats of 16 bits, and compute is in {compute}: set precision.compute = 'bfloat16'"
    elif channels % 8 or channels > CUDNN_CHANNELS:
        obstacle = f"heads of 8, 16, ... {CUDNN_CHANNELS} channels, and these have {channels}"
    if form == "cudnn" and obstacle is not None:
        raise ValueError(f"model.attention = 'cudnn' needs {obstacle}; or leave the choice to 'auto'.")
    if form == "auto":
        return "cudnn" if obstacle is None else "blockwise" if half_on_cpu else without_cudnn(length)
    return form


def cudnn_found() -> bool:
    """Whether JAX finds cuDNN on this machine. Starts JAX's backends."""
    # Tracing asks for cuDNN's version: "cuDNN is not detected" without JAX's CUDA plugin, "not found" without cuDNN.
    x = jax.ShapeDtypeStruct((1, 8, 1, 8), jnp.bfloat16)
    try:
        jax.eval_shape(partial(jax.nn.dot_product_attention, implementation="cudnn"), x, x, x)
    except RuntimeError:
        return False
    return True


def blockwise_attention(
    q_BxTxHxC: jax.Array, k_BxTxKxC: jax.Array, v_BxTxKxC: jax.Array, *, block: int = BLOCK
) -> jax.Array:
    """`causal_attention` in blocks of so many tokens: those above the diagonal are not computed, and none is stored.

    Softmax and sums of products are in float32. Differentiable in reverse mode alone, once.
    """
    batch, length, heads, channels = q_BxTxHxC.shape
    groups = k_BxTxKxC.shape[2]
    block = min(block, length)

    def blocks(x_BxTxKxC: jax.Array) -> jax.Array:
        # Keys past the end are later than every query, so that no weight falls on them.
        x = jnp.pad(x_BxTxKxC, [(0, 0), (0, -length % block), (0, 0), (0, 0)])
        x_BxNxSxKxGxC = x.reshape(batch, -1, block, groups, x.shape[2] // groups, channels)
        return jnp.einsum("bnskgc->nbkgsc", x_BxNxSxKxGxC).reshape(x_BxNxSxKxGxC.shape[1], batch, groups, -1, channels)

    out_NxBxKxRxC = _attention(blocks(q_BxTxHxC), blocks(k_BxTxKxC), blocks(v_BxTxKxC))
    out_NxBxKxGxSxC = out_NxBxKxRxC.reshape(-1, batch, groups, heads // groups, block, channels)
    return jnp.einsum("nbkgsc->bnskgc", out_NxBxKxGxSxC).reshape(batch, -1, heads, channels)[:, :length]


@jax.custom_vjp
def _attention(q_NxBxKxRxC: jax.Array, k_NxBxKxSxC: jax.Array, v_NxBxKxSxC: jax.Array) -> jax.Array:
    return _forward(q_NxBxKxRxC, k_NxBxKxSxC, v_NxBxKxSxC)[0]


def _forward(q_NxBxKxRxC: jax.Array, k_NxBxKxSxC: jax.Array, v_NxBxKxSxC: jax.Array):
    def step(carry, at):
        (i, j), (out_NxBxKxRxC, lse_NxBxKxR, *row) = at, carry
        sum_BxKxRxC, mass_BxKxR, top_BxKxR = (jnp.where(j == 0, x, y) for x, y in zip(new_row, row, strict=True))
        scores_BxKxRxS = _scores(_get(q_NxBxKxRxC, i), _get(k_NxBxKxSxC, j), i, j)
        # Weights are relative to the largest score so far, and what was summed before is rescaled to it.
        before, top_BxKxR = top_BxKxR, jnp.maximum(top_BxKxR, scores_BxKxRxS.max(-1))
        rescale_BxKxR = jnp.exp(before - top_BxKxR)
        weights_BxKxRxS = jnp.exp(scores_BxKxRxS - top_BxKxR[..., None])
        mass_BxKxR = mass_BxKxR * rescale_BxKxR + weights_BxKxRxS.sum(-1)
        sum_BxKxRxC = sum_BxKxRxC * rescale_BxKxR[..., None]
        sum_BxKxRxC += _product("bkrs,bksc->bkrc", weights_BxKxRxS, _get(v_NxBxKxSxC, j))
        # Written after each block of keys; what stays is written after the last, on the diagonal.
        out_NxBxKxRxC = _put(out_NxBxKxRxC, sum_BxKxRxC / mass_BxKxR[..., None], i)
        lse_NxBxKxR = _put(lse_NxBxKxR, top_BxKxR + jnp.log(mass_BxKxR), i)
        return (out_NxBxKxRxC, lse_NxBxKxR, sum_BxKxRxC, mass_BxKxR, top_BxKxR), None

    rows = jnp.zeros(q_NxBxKxRxC.shape[:-1], jnp.float32)
    new_row = jnp.zeros(q_NxBxKxRxC.shape[1:], jnp.float32), rows[0], rows[0] - jnp.inf
    (out, lse, *_), _ = lax.scan(step, (jnp.zeros_like(q_NxBxKxRxC), rows, *new_row), _up_to_the_diagonal(len(rows)))
    return out, (q_NxBxKxRxC, k_NxBxKxSxC, v_NxBxKxSxC, out, lse)


def _backward(residuals, dout_NxBxKxRxC: jax.Array):
    q_NxBxKxRxC, k_NxBxKxSxC, v_NxBxKxSxC, out_NxBxKxRxC, lse_NxBxKxR = residuals
    # What softmax subtracts from the gradient of a row's weights: their mean, weighted by themselves.
    mean_NxBxKxR = _product("nbkrc,nbkrc->nbkr", out_NxBxKxRxC, dout_NxBxKxRxC)

    def step(carry, at):
        (i, j), (dq_NxBxKxRxC, dk_NxBxKxSxC, dv_NxBxKxSxC, sum_BxKxRxC) = at, carry
        q, dout, k, v = _get(q_NxBxKxRxC, i), _get(dout_NxBxKxRxC, i), _get(k_NxBxKxSxC, j), _get(v_NxBxKxSxC, j)
        weights_BxKxRxS = jnp.exp(_scores(q, k, i, j) - _get(lse_NxBxKxR, i)[..., None])
        dweights_BxKxRxS = _product("bkrc,bksc->bkrs", dout, v)
        dscores_BxKxRxS = weights_BxKxRxS * (dweights_BxKxRxS - _get(mean_NxBxKxR, i)[..., None]) * _scale(q)
        sum_BxKxRxC = jnp.where(j == 0, 0, sum_BxKxRxC) + _product("bkrs,bksc->bkrc", dscores_BxKxRxS, k)
        dk = _get(dk_NxBxKxSxC, j) + _product("bkrs,bkrc->bksc", dscores_BxKxRxS, q)
        dv = _get(dv_NxBxKxSxC, j) + _product("bkrs,bkrc->bksc", weights_BxKxRxS, dout)
        dq_NxBxKxRxC = _put(dq_NxBxKxRxC, sum_BxKxRxC, i)
        return (dq_NxBxKxRxC, _put(dk_NxBxKxSxC, dk, j), _put(dv_NxBxKxSxC, dv, j), sum_BxKxRxC), None

    # Keys get gradients from every later row, so theirs are summed in float32; a row's are complete when it ends.
    keys, row = jnp.zeros(k_NxBxKxSxC.shape, jnp.float32), jnp.zeros(q_NxBxKxRxC.shape[1:], jnp.float32)
    carry = jnp.zeros_like(q_NxBxKxRxC), keys, keys, row
    (dq, dk, dv, _), _ = lax.scan(step, carry, _up_to_the_diagonal(len(q_NxBxKxRxC)))
    return dq, dk.astype(k_NxBxKxSxC.dtype), dv.astype(v_NxBxKxSxC.dtype)


_attention.defvjp(_forward, _backward)


def _up_to_the_diagonal(blocks: int) -> tuple[np.ndarray, np.ndarray]:
    """Every (block of queries, block of keys that it sees), row by row: one loop, of a length that XLA knows."""
    i, j = np.tril_indices(blocks)
    return i.astype(np.int32), j.astype(np.int32)


def _scale(q: jax.Array) -> float:
    return 1 / math.sqrt(q.shape[-1])


def _scores(q_BxKxRxC: jax.Array, k_BxKxSxC: jax.Array, i: jax.Array, j: jax.Array) -> jax.Array:
    """Of the queries of block `i` for the keys of block `j`, float32 B x K x R x S; -inf for keys that come later."""
    scores_BxKxRxS = _product("bkrc,bksc->bkrs", q_BxKxRxC, k_BxKxSxC) * _scale(q_BxKxRxC)
    rows, block = scores_BxKxRxS.shape[-2:]
    token = np.arange(block, dtype=np.int32)
    seen_RxS = i * block + np.tile(token, rows // block)[:, None] >= j * block + token
    return jnp.where(seen_RxS, scores_BxKxRxS, -jnp.inf)


def _product(form: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """An einsum in the dtype of `b`, summed in float32."""
    return jnp.einsum(form, a.astype(b.dtype), b, preferred_element_type=jnp.float32)


def _get(x: jax.Array, i: jax.Array) -> jax.Array:
    return lax.dynamic_index_in_dim(x, i, keepdims=False)


def _put(x: jax.Array, part: jax.Array, i: jax.Array) -> jax.Array:
    return lax.dynamic_update_index_in_dim(x, part.astype(x.dtype), i, 0)
