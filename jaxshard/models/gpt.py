"""A decoder-only transformer in flax nnx: GPT-2 and Llama are two settings of it.

Shapes are named by B examples, T tokens, D width, H heads, K key/value heads, C channels of a head and
V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, partial, reduce
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxshard.models.attention import Form, best_form, causal_attention
from jaxshard.models.loss import cross_entropy

INPUT, MIXED, HIDDEN = "block_input", "attention_mixed", "mlp_hidden"
"""Names of a block's activations, for policies of `jax.checkpoint_policies` that save or offload by name: its input,
and what the last matrices of attention and of the MLP are given."""


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """The shape of a GPT. Raises ValueError when widths and heads do not fit each other."""

    vocab: int = 256
    """Number of tokens; 256 for bytes."""
    width: int = 64
    """Channels of the residual stream."""
    layers: int = 2
    """Number of blocks."""
    heads: int = 4
    """Query heads of each block."""
    kv_heads: int | None = None
    """Key/value heads, each shared by a group of query heads; None: as many as heads."""
    context: int = 128
    """The longest sequence, in tokens."""
    mlp_ratio: float = 4.0
    """Hidden channels of the MLP, as a multiple of width."""
    mlp: Literal["gelu", "swiglu"] = "gelu"
    """The MLP's activation; swiglu has a third matrix, the gate."""
    norm: Literal["layer", "rms"] = "layer"
    """LayerNorm with scale and bias, or RMSNorm with a scale."""
    bias: bool = True
    """Whether the linear layers of the blocks have biases."""
    positions: Literal["rotary", "learned"] = "rotary"
    """Rotary embeddings of queries and keys, or one learned vector for each position."""
    rope_theta: float = 10_000.0
    """The base of the rotary wavelengths."""
    tied: bool = True
    """Whether the head is the transposed embedding."""
    scan: bool = True
    """Blocks as one stack of parameters that is scanned over (quick to compile), or as a list."""
    remat: Literal["none", "full", "dots", "offload"] = "none"
    """What the backward pass recomputes in each block: nothing, all of it, or all but the matrix products; offload: all
    of it, from inputs that wait in the host's memory."""
    attention: Form = "auto"
    """All scores at once, in blocks, or cuDNN's kernel for GPUs and 16-bit floats; auto: see `resolved`."""
    loss_chunk: int | None = None
    """Tokens whose logits are held at once, and computed again in the backward pass; None: all."""
    dropout: float = 0.0
    """The share of the embedding, and of what each branch adds to the stream, that a training step leaves out."""
    init_std: float = 0.02
    """Standard deviation of the initial weights."""
    dtype: str | None = None
    """The dtype of compute; None: that of the parameters it is given."""

    def __post_init__(self):
        for name in ("vocab", "width", "layers", "heads", "context"):
            if getattr(self, name) < 1:
                raise ValueError(f"model.{name} is {getattr(self, name)}; it must be 1 or more.")
        if self.loss_chunk is not None and self.loss_chunk < 1:
            raise ValueError(f"model.loss_chunk is {self.loss_chunk}; it must be 1 or more, or left out.")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"model.dropout is {self.dropout}, a share; it must lie in [0, 1).")
        if self.width % self.heads:
            raise ValueError(f"model.width = {self.width} does not divide into model.heads = {self.heads} heads.")
        if self.heads % self.groups:
            raise ValueError(f"model.heads = {self.heads} does not divide into model.kv_heads = {self.groups} groups.")
        if self.positions == "rotary" and self.head_width % 2:
            raise ValueError(
                f"rotary positions turn channels in pairs, but a head has {self.head_width} "
                f"(model.width = {self.width} / model.heads = {self.heads}); use an even number."
            )

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    @property
    def groups(self) -> int:
        return self.heads if self.kv_heads is None else max(self.kv_heads, 1)

    @property
    def hidden(self) -> int:
        return round(self.width * self.mlp_ratio)


def resolved(config: GPTConfig, *, platform: str, cudnn: bool, compute: str) -> GPTConfig:
    """The config with `attention` decided for its devices: cuDNN's where it can be, else blocks for long sequences.

    platform: of the devices, as JAX names it. cudnn: whether JAX can use cuDNN. compute: the dtype of compute.

    Raises ValueError when cuDNN is asked for where it cannot be. (Left undecided, `auto` is one that runs anywhere.)
    """
    form = best_form(
        config.attention,
        length=config.context,
        channels=config.head_width,
        platform=platform,
        cudnn=cudnn,
        compute=config.dtype or compute,
    )
    return replace(config, attention=form)


def _linear(config: GPTConfig, d_in: int, d_out: int, rngs: nnx.Rngs, *, bias: bool, std: float) -> nnx.Linear:
    return nnx.Linear(
        d_in, d_out, use_bias=bias, dtype=config.dtype, kernel_init=nnx.initializers.normal(std), rngs=rngs
    )


def _norm(config: GPTConfig, rngs: nnx.Rngs) -> nnx.LayerNorm | nnx.RMSNorm:
    if config.norm == "rms":
        return nnx.RMSNorm(config.width, epsilon=1e-5, dtype=config.dtype, rngs=rngs)
    return nnx.LayerNorm(config.width, epsilon=1e-5, dtype=config.dtype, rngs=rngs)


def _residual_std(config: GPTConfig) -> float:
    """Layers that add to the residual stream start smaller, so that its variance does not grow with depth."""
    return config.init_std / math.sqrt(2 * config.layers)


def _dropped(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """Leaves out a share of the elements, and scales up the others (Srivastava et al. 2014); all stay without a key."""
    if key is None or not rate:
        return x
    return jnp.where(jax.random.bernoulli(key, 1 - rate, x.shape), x / (1 - rate), 0).astype(x.dtype)


def rotary_angles(config: GPTConfig, length: int) -> jax.Array:
    """The angle of each position and pair of channels, T x C/2 float32 (Su et al. 2021, arXiv 2104.09864)."""
    pairs_C = jnp.arange(config.head_width // 2, dtype=jnp.float32)
    wavelengths_C = config.rope_theta ** (pairs_C * (-2.0 / config.head_width))
    return jnp.arange(length, dtype=jnp.float32)[:, None] * wavelengths_C


def rotate(x_BxTxHxC: jax.Array, angles_TxC: jax.Array) -> jax.Array:
    """Turns each pair of channels (c, c + C/2) by its angle; in float32, returned in the dtype of `x`."""
    cos_TxC, sin_TxC = jnp.cos(angles_TxC)[:, None], jnp.sin(angles_TxC)[:, None]
    a, b = jnp.split(x_BxTxHxC.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([a * cos_TxC - b * sin_TxC, b * cos_TxC + a * sin_TxC], axis=-1)
    return turned.astype(x_BxTxHxC.dtype)


class Embed(nnx.Module):
    """A table of vectors. (flax's own computes in the dtype it was made with, not its parameters'.)"""

    def __init__(self, config: GPTConfig, rows: int, rngs: nnx.Rngs):
        self.dtype = config.dtype
        normal = nnx.initializers.normal(config.init_std)
        self.embedding = nnx.Param(normal(rngs.params(), (rows, config.width), jnp.float32))

    @property
    def table_RxD(self) -> jax.Array:
        table_RxD = self.embedding[...]
        return table_RxD if self.dtype is None else table_RxD.astype(self.dtype)

    def __call__(self, rows: jax.Array | np.ndarray) -> jax.Array:
        return self.table_RxD[rows]


class Attention(nnx.Module):
    """Causal self-attention with grouped key/value heads."""

    def __init__(self, config: GPTConfig, rngs: nnx.Rngs):
        self.config = config
        narrow, std = config.groups * config.head_width, config.init_std
        self.query = _linear(config, config.width, config.width, rngs, bias=config.bias, std=std)
        self.key = _linear(config, config.width, narrow, rngs, bias=config.bias, std=std)
        self.value = _linear(config, config.width, narrow, rngs, bias=config.bias, std=std)
        self.out = _linear(config, config.width, config.width, rngs, bias=config.bias, std=_residual_std(config))

    def __call__(self, x_BxTxD: jax.Array, angles_TxC: jax.Array | None) -> jax.Array:
        heads = (*x_BxTxD.shape[:2], -1, self.config.head_width)
        q_BxTxHxC, k_BxTxKxC, v_BxTxKxC = (
            project(x_BxTxD).reshape(heads) for project in (self.query, self.key, self.value)
        )
        if angles_TxC is not None:
            q_BxTxHxC, k_BxTxKxC = rotate(q_BxTxHxC, angles_TxC), rotate(k_BxTxKxC, angles_TxC)
        mixed_BxTxHxC = causal_attention(q_BxTxHxC, k_BxTxKxC, v_BxTxKxC, form=self.config.attention)
        return self.out(checkpoint_name(mixed_BxTxHxC.reshape(x_BxTxD.shape), MIXED))


class MLP(nnx.Module):
    """Two matrices with a GELU between them, or SwiGLU's three (Shazeer 2020, arXiv 2002.05202)."""

    def __init__(self, config: GPTConfig, rngs: nnx.Rngs):
        def inward() -> nnx.Linear:
            return _linear(config, config.width, config.hidden, rngs, bias=config.bias, std=config.init_std)

        self.gate = inward() if config.mlp == "swiglu" else None
        self.up = inward()
        self.down = _linear(config, config.hidden, config.width, rngs, bias=config.bias, std=_residual_std(config))

    def __call__(self, x_BxTxD: jax.Array) -> jax.Array:
        up = self.up(x_BxTxD)
        hidden = jax.nn.gelu(up) if self.gate is None else jax.nn.silu(self.gate(x_BxTxD)) * up
        return self.down(checkpoint_name(hidden, HIDDEN))


class Block(nnx.Module):
    """Attention and MLP, each normalised before and added to the residual stream after."""

    def __init__(self, config: GPTConfig, rngs: nnx.Rngs):
        self.dropout = config.dropout
        self.attention_norm = _norm(config, rngs)
        self.attention = Attention(config, rngs)
        self.mlp_norm = _norm(config, rngs)
        self.mlp = MLP(config, rngs)

    def __call__(self, x_BxTxD: jax.Array, angles_TxC: jax.Array | None, key: jax.Array | None = None) -> jax.Array:
        keys = (None, None) if key is None else jax.random.split(key)
        x_BxTxD = checkpoint_name(x_BxTxD, INPUT)
        x_BxTxD += _dropped(self.attention(self.attention_norm(x_BxTxD), angles_TxC), self.dropout, keys[0])
        return x_BxTxD + _dropped(self.mlp(self.mlp_norm(x_BxTxD)), self.dropout, keys[1])


class GPT(nnx.Module):
    """The language model: int tokens B x T to features B x T x D; times `head_DxV`, the logits. A key: for dropout."""

    def __init__(self, config: GPTConfig, rngs: nnx.Rngs):
        self.config = config
        self.embed = Embed(config, config.vocab, rngs)
        self.positions = Embed(config, config.context, rngs) if config.positions == "learned" else None
        keys = jax.random.split(rngs.params(), config.layers)
        if config.scan:
            self.blocks = nnx.vmap(lambda key: Block(config, nnx.Rngs(key)))(keys)
        else:
            self.blocks = nnx.List([Block(config, nnx.Rngs(key)) for key in keys])
        self.norm = _norm(config, rngs)
        head = partial(_linear, config, config.width, config.vocab, rngs, bias=False, std=config.init_std)
        self.head = None if config.tied else head()

    def __call__(self, tokens_BxT: jax.Array | np.ndarray, key: jax.Array | None = None) -> jax.Array:
        length = tokens_BxT.shape[1]
        if length > self.config.context:
            raise ValueError(f"a sequence of {length} tokens is longer than the context of {self.config.context}.")
        x_BxTxD = self.embed(tokens_BxT)
        angles_TxC = None
        if self.positions is None:
            angles_TxC = rotary_angles(self.config, length)
        else:
            x_BxTxD += self.positions(jnp.arange(length))
        here, inside = (None, None) if key is None else jax.random.split(key)
        x_BxTxD = _dropped(x_BxTxD, self.config.dropout, here)
        return self.norm(self._through_blocks(x_BxTxD, angles_TxC, inside))

    @property
    def head_DxV(self) -> jax.Array:
        """The matrix that makes logits of features."""
        if self.head is None:
            return self.embed.table_RxD.T
        kernel_DxV = self.head.kernel[...]
        return kernel_DxV if self.config.dtype is None else kernel_DxV.astype(self.config.dtype)

    def _through_blocks(self, x_BxTxD: jax.Array, angles_TxC: jax.Array | None, key: jax.Array | None) -> jax.Array:
        def through(x, block_and_key):
            block, key = block_and_key
            # Parameters go in as arguments, so that remat recomputes from them and saves no copy.
            graphdef, params = nnx.split(block)
            apply = _remat(lambda x, params, key: nnx.merge(graphdef, params)(x, angles_TxC, key), self.config)
            if self.config.scan:
                return jax.lax.scan(lambda x, layer: (apply(x, *layer), None), x, (params, key))[0]
            return apply(x, params, key)

        keys = None if key is None else jax.random.split(key, self.config.layers)
        blocks: Any = self.blocks
        if self.config.scan:
            return through(x_BxTxD, (blocks, keys))
        return reduce(through, zip(blocks, keys if keys is not None else [None] * len(blocks), strict=True), x_BxTxD)


def _remat(fn, config: GPTConfig):
    if config.remat == "none":
        return fn
    policies = jax.checkpoint_policies
    policy = {
        "full": None,
        "dots": policies.dots_with_no_batch_dims_saveable,
        "offload": policies.save_and_offload_only_these_names(
            names_which_can_be_saved=(),
            names_which_can_be_offloaded=(INPUT,),
            offload_src="device",
            offload_dst="pinned_host",
        ),
    }[config.remat]
    # A scan keeps its body from being merged with its own recomputation; a list of blocks needs the barrier.
    return jax.checkpoint(fn, policy=policy, prevent_cse=not config.scan)


def init(config: GPTConfig, key: jax.Array) -> dict[str, Any]:
    """The initial parameters: a nested dict of float32 arrays. Pure: it can be jitted with shardings."""
    return nnx.to_pure_dict(nnx.state(GPT(config, nnx.Rngs(key)), nnx.Param))


@cache
def _structure(config: GPTConfig) -> nnx.GraphDef[GPT]:
    return nnx.graphdef(nnx.eval_shape(lambda: GPT(config, nnx.Rngs(0))))


def _model(config: GPTConfig, params: dict[str, Any]) -> GPT:
    return nnx.merge(_structure(config), params, copy=True)


def logits(config: GPTConfig, params: dict[str, Any], tokens_BxT: jax.Array | np.ndarray) -> jax.Array:
    """The scores of the next token, B x T x V in the dtype of compute."""
    # JAX's attention and flax's norms mix bfloat16 with float32 inside, which strict promotion would forbid.
    with jax.numpy_dtype_promotion("standard"):
        model = _model(config, params)
        return model(tokens_BxT) @ model.head_DxV


def loss(
    config: GPTConfig, params: dict[str, Any], batch: Mapping[str, Any], key: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Cross-entropy of the next token: its weighted sum over the batch, and the sum of the weights.

    batch: `inputs` and `targets`, int B x T; `weights`, float32 B x T (0 for a token that does not count).
    key: what dropout draws from; None leaves nothing out.
    Returns two float32 scalars; the mean is their quotient, over however many batches both are summed.
    """
    with jax.numpy_dtype_promotion("standard"):
        model, weights_BxT = _model(config, params), batch["weights"]
        x_BxTxD = model(batch["inputs"], key)
        total = cross_entropy(x_BxTxD, model.head_DxV, batch["targets"], weights_BxT, chunk=config.loss_chunk)
        return total, jnp.sum(weights_BxT)
