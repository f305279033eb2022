"""The cross-entropy of a language model, whose logits are its largest array.

Shapes are named by B examples, T tokens, D width, V vocabulary; N chunks of S tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax import lax


def cross_entropy(
    scores: Callable[[jax.Array], jax.Array],
    x_BxTxD: jax.Array,
    targets_BxT: jax.Array,
    weights_BxT: jax.Array,
    *,
    chunk: int | None = None,
) -> jax.Array:
    """The weighted sum of the tokens' losses, float32; softmax is in float32.

    scores: from features ... x D to logits ... x V. chunk: the tokens whose logits are held at once; None: all. In
    chunks, tokens go through `scores` a second time in the backward pass.
    """

    def total(x: jax.Array, targets: jax.Array, weights: jax.Array) -> jax.Array:
        losses = optax.softmax_cross_entropy_with_integer_labels(scores(x).astype(jnp.float32), targets)
        return jnp.sum(losses * weights)

    arrays = x_BxTxD, targets_BxT, weights_BxT
    tokens = targets_BxT.size
    if chunk is None or chunk >= tokens:
        return total(*arrays)

    def chunks(leaf: jax.Array) -> jax.Array:
        flat = jnp.reshape(leaf, (tokens, *leaf.shape[2:]))
        # The last chunk is filled up with tokens of weight 0.
        return jnp.pad(flat, [(0, -tokens % chunk), *[(0, 0)] * (flat.ndim - 1)]).reshape(-1, chunk, *flat.shape[1:])

    # A loop keeps its body from being merged with its own recomputation.
    step = jax.checkpoint(lambda sum, part: (sum + total(*part), None), prevent_cse=False)
    return lax.scan(step, jnp.zeros((), jnp.float32), tuple(map(chunks, arrays)))[0]
