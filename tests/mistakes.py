"""A linear model to make mistakes with, and how an error is expected."""

from __future__ import annotations

import re
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from oracle import mesh_of

import jaxshard as js

PARAMS = {"b": np.zeros(8, np.float32), "w": np.random.default_rng(1).normal(size=(8, 8)).astype(np.float32)}
BATCH = {name: np.random.default_rng(i).normal(size=(16, 8)).astype(np.float32) for i, name in enumerate("xy")}


def square(params, batch):
    return jnp.mean((batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2)


def training_for(loss: Any = square, optimizer: Any = None, *, mesh: Any = (1, 8), **choices: Any) -> Any:
    """`parallelize` with a part of its arguments replaced by a mistake."""
    choices = {"params": PARAMS, "batch": BATCH, "mesh": mesh_of(*mesh) if isinstance(mesh, tuple) else mesh} | choices
    return js.parallelize(loss, optax.sgd(0.1) if optimizer is None else optimizer, **choices)


def error(kind: type[Exception], *parts: str):
    """Expects an error whose message and notes have all these parts (patterns), in this order."""
    return pytest.raises(kind, match="(?s)" + ".*".join(parts))


def literal(*parts: str) -> tuple[str, ...]:
    """These parts as patterns."""
    return tuple(map(re.escape, parts))
