"""A small model in two forms of one function, and what it is compared with: one device, plain `jax.grad` and optax."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxshard as js

# 8 and 4 divide WIDTH and VOCAB; 7 and 4 divide HIDDEN: on every mesh some leaves are split and, on most, some are not.
LAYERS, WIDTH, HIDDEN, VOCAB, LENGTH = 3, 16, 28, 32, 4


@dataclass(frozen=True, kw_only=True)
class Model:
    """A residual network over tokens.

    form: blocks stacked for a `lax.scan`, or a list. tied: the head is the embedding.
    """

    form: Literal["scan", "list"]
    tied: bool = False

    def __str__(self) -> str:
        return self.form + (", tied" if self.tied else "")

    def init(self, key: jax.Array) -> Any:
        """Parameters; both forms hold the same values."""
        names = iter(jax.random.split(key, 6))

        def normal(*shape):
            return jax.random.normal(next(names), shape) / jnp.sqrt(shape[-2])

        blocks = {
            "norm": 1 + normal(LAYERS, WIDTH) / 4,
            "up": normal(LAYERS, WIDTH, HIDDEN),
            "bias": normal(LAYERS, HIDDEN) / 4,
            "down": normal(LAYERS, HIDDEN, WIDTH),
        }
        if self.form == "list":
            blocks = [jax.tree.map(lambda x, i=i: x[i], blocks) for i in range(LAYERS)]
        params = {"embed": normal(VOCAB, WIDTH) * 2, "blocks": blocks}
        return params if self.tied else {**params, "head": normal(WIDTH, VOCAB)}

    def logits(self, params: Any, tokens_BxT: jax.Array) -> jax.Array:
        x = params["embed"][tokens_BxT]
        if self.form == "scan":
            x, _ = jax.lax.scan(lambda x, block: (_block(x, block), None), x, params["blocks"])
        else:
            for block in params["blocks"]:
                x = _block(x, block)
        return x @ (params["embed"].T if self.tied else params["head"])

    def losses(self, params: Any, batch: Any) -> jax.Array:
        """The cross-entropy of every token, (B, T)."""
        logits = self.logits(params, batch["tokens"]).astype(jnp.float32)
        at = jnp.take_along_axis(logits, batch["targets"][..., None], axis=-1)[..., 0]
        return jax.nn.logsumexp(logits, axis=-1) - at

    def loss(self, params: Any, batch: Any) -> jax.Array:
        return jnp.mean(self.losses(params, batch))


def _block(x, p):
    return x + jnp.tanh((x * p["norm"]) @ p["up"] + p["bias"]) @ p["down"]


FORMS = [Model(form="scan"), Model(form="list")]


def batches(steps: int, size: int) -> list[dict[str, np.ndarray]]:
    """Global batches of random tokens, another for each step and every example of its own."""
    random = np.random.default_rng(7)
    shape = (steps, size, LENGTH)
    tokens, targets = (random.integers(0, VOCAB, shape, dtype=np.int32) for _ in range(2))
    return [{"tokens": a, "targets": b} for a, b in zip(tokens, targets, strict=True)]


def lenient(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """The same optimizer where promotion is strict: optax combines its integer counts with floats."""

    def update(*args, **kwargs):
        with jax.numpy_dtype_promotion("standard"):
            return optimizer.update(*args, **kwargs)

    return optax.GradientTransformation(optimizer.init, update)


def mesh_of(replica: int, shard: int) -> jax.sharding.Mesh:
    return js.make_mesh(replica=replica, shard=shard, devices=jax.devices()[: replica * shard])


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Run:
    """What training gave: the parameters at the start and at the end (on the host), and each step's loss and norm."""

    start: Any
    end: Any
    loss: np.ndarray
    norm: np.ndarray


@functools.cache
def initial(init: Callable[..., Any], seed: int = 0) -> Any:
    """What an init function gives on one device, compiled once."""
    return jax.jit(init)(jax.random.key(seed))


def run(training: Any, init: Any, data: Sequence[Any], seed: int = 0) -> Run:
    """Trains over all batches."""
    state = training.init(initial(init, seed), jax.random.key(seed))
    start, metrics = training.whole(state), []
    for batch in data:
        state, now = training.step(state, batch)
        metrics.append((now["loss"], now["grad_norm"]))
    loss, norm = np.array(metrics, np.float32).T
    return Run(start, training.whole(state), loss, norm)


def one_device(
    loss: Callable[..., Any], init: Any, optimizer: optax.GradientTransformation, data: Sequence[Any]
) -> Run:
    """The oracle: the same loss over whole batches, on one device, with nothing of this library."""
    params = initial(init)
    start = jax.tree.map(np.asarray, params)
    opt, metrics = optimizer.init(params), []

    @jax.jit
    def step(params, opt, batch):
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, opt = optimizer.update(grads, opt, params)
        return optax.apply_updates(params, updates), opt, (value, optax.tree.norm(grads))

    for batch in data:
        params, opt, now = step(params, opt, batch)
        metrics.append(now)
    losses, norms = np.array(metrics, np.float32).T
    return Run(start, jax.tree.map(np.asarray, params), losses, norms)


@functools.cache
def oracle(model: Model, optimizer: optax.GradientTransformation, steps: int, size: int) -> Run:
    return one_device(model.loss, model.init, optimizer, batches(steps, size))


def assert_close(ours: Run, theirs: Run, *, ulps: int = 2) -> None:
    """Parameters agree within `ulps` per step, at each leaf's largest value.

    The floor is the same for the largest change of any leaf: what a gradient that is zero in theory cannot be below.
    Every leaf must have moved by a thousand times as much, or the comparison would say little.
    """
    steps = len(theirs.loss)
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), theirs.start, theirs.end)
    floor = np.spacing(max(jax.tree.leaves(moved)))
    named = jax.tree_util.tree_leaves_with_path(theirs.end)
    for (path, want), have, far in zip(named, jax.tree.leaves(ours.end), jax.tree.leaves(moved), strict=True):
        allowed = ulps * steps * max(np.spacing(np.abs(want).max()), floor)
        assert far > 1000 * allowed, f"{path} hardly moved"
        off = np.abs(have - want).max()
        assert off <= allowed, f"{jax.tree_util.keystr(path)}: off by {off}, allowed {allowed}, moved {far}"
    np.testing.assert_allclose(ours.loss, theirs.loss, rtol=1e-5)
    np.testing.assert_allclose(ours.norm, theirs.norm, rtol=1e-5)


def assert_same_bits(ours: Any, theirs: Any) -> None:
    """Two trees of arrays are equal bit for bit."""
    named = jax.tree_util.tree_leaves_with_path(theirs)
    for (path, want), have in zip(named, jax.tree.leaves(ours), strict=True):
        have, want = np.asarray(have), np.asarray(want)
        assert have.dtype == want.dtype, path
        assert have.tobytes() == want.tobytes(), f"{path}: off by up to {np.abs(have - want).max()}"
