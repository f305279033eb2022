"""The programs that `benchmarks/compiled.py` compares: one loss, and three ways to train it on many GPUs.

All sides share the model, the loss, the optimizer, the layout of the states and the recomputation of each block. They
differ in how a weight becomes whole where it is used, and in who decides that:

- `plain`: parameters and batch are split, and the compiler works out the rest;
- `careful`: by hand, as well as we can: every block casts its weights and makes them whole itself, keeps activations
  split over the batch, and has each gradient go straight to its shard;
- `ours`: `jaxshard.parallelize` on the same loss, which knows of no layout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.lax import with_sharding_constraint as constrain
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.stages import Compiled

import jaxshard as js
from jaxshard.models.attention import Form, causal_attention

OPTIMIZER = optax.adamw(3e-4)
COMPUTE = jnp.bfloat16
Params = dict[str, Any]
Block = Callable[[jax.Array, Params], jax.Array]
Weights = Callable[[Any], Any]
Side = Literal["plain", "careful", "ours"]


# -- Two models. Shapes: B examples, T tokens, D width, H heads, K key/value heads, C channels of a head


@dataclass(frozen=True, kw_only=True)
class Model:
    """A decoder-only transformer. matrices: shapes of one block's. examples: sequences per GPU."""

    vocab: int
    width: int
    layers: int
    tied: bool
    tokens: int
    examples: int
    matrices: Mapping[str, tuple[int, int]]
    block: Block

    def params(self, scanned: bool) -> Params:
        """Shapes of the parameters, float32: blocks in one stack, or in a list."""

        def array(*shape: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, jnp.float32)

        shapes = {**self.matrices, "attention_norm": (self.width,), "mlp_norm": (self.width,)}
        stack = {name: array(self.layers, *shape) for name, shape in shapes.items()}
        blocks = stack if scanned else [{name: array(*shape) for name, shape in shapes.items()}] * self.layers
        head = {} if self.tied else {"head": array(self.vocab, self.width)}
        return {"embed": array(self.vocab, self.width), "blocks": blocks, "norm": array(self.width), **head}

    def batch(self, gpus: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes of a global batch."""
        tokens = jax.ShapeDtypeStruct((gpus * self.examples, self.tokens), jnp.int32)
        return {"inputs": tokens, "targets": tokens}


def rms_norm(x_BxTxD: jax.Array, scale_D: jax.Array) -> jax.Array:
    wide = x_BxTxD.astype(jnp.float32)
    return (wide * lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)).astype(x_BxTxD.dtype) * scale_D


def gpt(*, vocab: int, width: int, layers: int, heads: int, tokens: int, examples: int) -> Model:
    """GPT-2's shape, with RMS norms and no biases: 12 x width x width parameters in a block, and a tied head."""

    def block(x_BxTxD: jax.Array, w: Params) -> jax.Array:
        projected = rms_norm(x_BxTxD, w["attention_norm"]) @ w["qkv"]
        q_BxTxHxC, k_BxTxHxC, v_BxTxHxC = (
            part.reshape(*part.shape[:2], heads, width // heads) for part in jnp.split(projected, 3, -1)
        )
        scores = jnp.einsum("bthc,bshc->bhts", q_BxTxHxC, k_BxTxHxC) * (width // heads) ** -0.5
        scores = jnp.where(jnp.tril(jnp.ones((tokens, tokens), bool)), scores, jnp.asarray(-1e4, scores.dtype))
        mixed = jnp.einsum("bhts,bshc->bthc", jax.nn.softmax(scores, -1), v_BxTxHxC)
        x_BxTxD += mixed.reshape(x_BxTxD.shape) @ w["out"]
        return x_BxTxD + jax.nn.gelu(rms_norm(x_BxTxD, w["mlp_norm"]) @ w["up"]) @ w["down"]

    matrices = {
        "qkv": (width, 3 * width),
        "out": (width, width),
        "up": (width, 4 * width),
        "down": (4 * width, width),
    }
    return Model(
        vocab=vocab,
        width=width,
        layers=layers,
        tied=True,
        tokens=tokens,
        examples=examples,
        matrices=matrices,
        block=block,
    )


def llama(
    *,
    vocab: int,
    width: int,
    layers: int,
    heads: int,
    kv_heads: int,
    hidden: int,
    tokens: int,
    examples: int,
    attention: Form,
) -> Model:
    """Llama 3's shape: grouped key/value heads, rotary positions, SwiGLU, a head of its own."""
    channels = width // heads

    def rotate(x_BxTxHxC: jax.Array) -> jax.Array:
        pairs = jnp.arange(channels // 2, dtype=jnp.float32)
        angles = jnp.arange(tokens, dtype=jnp.float32)[:, None] * 500_000.0 ** (pairs * (-2 / channels))
        cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
        a, b = jnp.split(x_BxTxHxC.astype(jnp.float32), 2, -1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x_BxTxHxC.dtype)

    def block(x_BxTxD: jax.Array, w: Params) -> jax.Array:
        normed = rms_norm(x_BxTxD, w["attention_norm"])
        q_BxTxHxC, k_BxTxKxC, v_BxTxKxC = (
            (normed @ w[name]).reshape(*normed.shape[:2], -1, channels) for name in ("query", "key", "value")
        )
        mixed = causal_attention(rotate(q_BxTxHxC), rotate(k_BxTxKxC), v_BxTxKxC, form=attention)
        x_BxTxD += mixed.reshape(x_BxTxD.shape) @ w["out"]
        normed = rms_norm(x_BxTxD, w["mlp_norm"])
        return x_BxTxD + (jax.nn.silu(normed @ w["gate"]) * (normed @ w["up"])) @ w["down"]

    matrices = {
        "query": (width, width),
        "key": (width, kv_heads * channels),
        "value": (width, kv_heads * channels),
        "out": (width, width),
        "gate": (width, hidden),
        "up": (width, hidden),
        "down": (hidden, width),
    }
    return Model(
        vocab=vocab,
        width=width,
        layers=layers,
        tied=False,
        tokens=tokens,
        examples=examples,
        matrices=matrices,
        block=block,
    )


def mean_loss(
    model: Model,
    params: Params,
    batch: Mapping[str, jax.Array],
    at_use: Weights = lambda weights: weights,
    between: Callable[[jax.Array], jax.Array] = lambda x: x,
) -> jax.Array:
    """Cross-entropy of the next token, each block recomputed in the backward pass.

    at_use: what is done to weights just before they are used. between: to activations, between blocks.
    """
    embed_VxD = at_use(params["embed"])
    x_BxTxD = between(embed_VxD[batch["inputs"]])
    scanned = isinstance(params["blocks"], dict)

    # A scan keeps its body from being merged with its own recomputation; a list of blocks needs the barrier.
    @partial(jax.checkpoint, prevent_cse=not scanned)
    def block(x_BxTxD, weights):
        return between(model.block(x_BxTxD, at_use(weights)))

    if scanned:
        x_BxTxD, _ = lax.scan(lambda x, weights: (block(x, weights), None), x_BxTxD, params["blocks"])
    else:
        for weights in params["blocks"]:
            x_BxTxD = block(x_BxTxD, weights)
    head_VxD = embed_VxD if model.tied else at_use(params["head"])
    logits = (rms_norm(x_BxTxD, at_use(params["norm"])) @ head_VxD.T).astype(jnp.float32)
    picked = jnp.take_along_axis(logits, batch["targets"][..., None], -1)[..., 0]
    return (jax.nn.logsumexp(logits, -1) - picked).mean()


# -- By hand, with `jit`


def layout(state: Any, scanned: bool, mesh: Mesh) -> Any:
    """Shardings: matrices are split along their rows, vectors and the layers of a stack are not."""

    def sharding(path, x):
        layers = (None,) * (scanned and "blocks" in jax.tree_util.keystr(path))
        return NamedSharding(mesh, P(*layers, "shard") if x.ndim - len(layers) == 2 else P())

    return jax.tree.map_with_path(sharding, state)


def cast(weights: Any) -> Any:
    """`plain`: the cast alone."""
    return jax.tree.map(lambda w: w.astype(COMPUTE), weights)


def gathered(mesh: Mesh) -> Weights:
    """`careful`: cast, then gathered, so that bfloat16 travels; gradients are cast, then scattered."""
    whole, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("shard"))

    def gather(w):
        if w.ndim < 2:
            return w.astype(COMPUTE)

        @jax.custom_vjp
        def make_whole(w):
            return constrain(constrain(w.astype(COMPUTE), split), whole)

        # The transpose of a constraint to `whole` would have the gradient whole on every GPU.
        make_whole.defvjp(lambda w: (make_whole(w), None), lambda _, g: (constrain(g, split).astype(w.dtype),))
        return make_whole(w)

    return lambda weights: jax.tree.map(gather, weights)


def by_hand(model: Model, scanned: bool, mesh: Mesh, careful: bool, options: Mapping[str, str]) -> Compiled:
    """The training step as one `jit`: state and batch split, weights cast at their use, and constraints if careful."""
    over_batch, whole = NamedSharding(mesh, P("shard")), NamedSharding(mesh, P())
    choices = (gathered(mesh), lambda x: constrain(x, over_batch)) if careful else (cast, lambda x: x)

    def step(state, batch):
        params, opt_state = state
        loss, gradients = jax.value_and_grad(lambda params: mean_loss(model, params, batch, *choices))(params)
        updates, opt_state = OPTIMIZER.update(gradients, opt_state, params)
        metrics = {"loss": loss, "grad_norm": optax.global_norm(gradients)}
        return (optax.apply_updates(params, updates), opt_state), metrics

    params = model.params(scanned)
    state = params, jax.eval_shape(OPTIMIZER.init, params)
    where = layout(state, scanned, mesh)
    jitted = jax.jit(step, donate_argnums=0, in_shardings=(where, over_batch), out_shardings=(where, whole))
    return jitted.lower(state, model.batch(mesh.size)).compile(compiler_options=dict(options))


# -- Ours


def training(model: Model, scanned: bool, mesh: Mesh, strategy: js.Strategy) -> js.Training:
    """The same step by `parallelize`."""
    made = js.parallelize(
        lambda params, batch: mean_loss(model, params, batch),
        OPTIMIZER,
        params=model.params(scanned),
        batch=model.batch(mesh.size),
        mesh=mesh,
        strategy=strategy,
        precision=js.Precision(compute="bfloat16", reduce="bfloat16"),
    )
    assert isinstance(made, js.Training)
    return made
