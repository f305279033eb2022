"""The optimizer of a run: AdamW or SGD, warm-up and cosine, and decay of matrices alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxshard.train.config import OptimizerConfig

MATRICES = ("kernel", "embedding")
"""The last names of the leaves that are matrices. Their number of dims does not tell: in a stack of scanned
blocks a bias has two dims as well."""


def decayed(params: Any) -> Any:
    """Which leaves decay: a tree of bools. Biases and the scales of norms do not, stacked or not."""
    return jax.tree.map_with_path(lambda path, _: getattr(path[-1], "key", None) in MATRICES, params)


def schedule(config: OptimizerConfig, *, batch: int, steps: int) -> Callable[[Any], jax.Array]:
    """The learning rate at each step: linear up to its peak, half a cosine down to `final` times the peak.

    batch: sequences in a global batch. steps: length of the run. With ``lr_scaling="linear"`` the peak is
    ``learning_rate * batch / base_batch`` (Goyal et al. 2017, arXiv 1706.02677). Returns a function of the
    number of updates made (int scalar) to a float32 scalar.
    """
    peak = config.learning_rate * (batch / config.base_batch if config.lr_scaling == "linear" else 1.0)
    warmup, decay = config.warmup_steps, max(steps - config.warmup_steps, 1)

    def rate(count):
        step = jnp.asarray(count, jnp.float32)
        # From one part of the peak and not from 0, with which the first step would be lost.
        up = (step + 1) / (warmup + 1)
        cosine = (1 + jnp.cos(jnp.pi * jnp.clip((step - warmup) / decay, 0, 1))) / 2
        return peak * jnp.where(step < warmup, up, config.final + (1 - config.final) * cosine)

    return rate


def make(config: OptimizerConfig, *, batch: int, steps: int) -> optax.GradientTransformation:
    """The optimizer. Clipping is not in it: the training step reports the norm before it clips."""
    decay = optax.add_decayed_weights(config.weight_decay, mask=decayed)
    rate = optax.scale_by_learning_rate(schedule(config, batch=batch, steps=steps))
    if config.name == "sgd":
        return optax.chain(optax.trace(config.beta1), decay, rate)
    return optax.chain(optax.scale_by_adam(config.beta1, config.beta2), decay, rate)
