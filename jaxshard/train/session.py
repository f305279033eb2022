"""All that a run needs, checked before anything is computed or written."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from jaxshard.loss import Loss
from jaxshard.mesh import axis_sizes, force_cpu_devices, make_mesh
from jaxshard.models import gpt
from jaxshard.train import data, weights
from jaxshard.train.build import held_out_loss, model_for, training_for
from jaxshard.train.config import Config, ConfigError
from jaxshard.train.folder import RunFolder
from jaxshard.train.processes import agree, is_first
from jaxshard.train.resume import Resume

SLOWEST = 300.0
"""Seconds that processes wait for the slowest of them, which may still be compiling."""


@dataclass(frozen=True, kw_only=True)
class Session:
    """A run that can begin. sequences: those to train on, by their numbers."""

    config: Config
    resume: Resume
    folder: RunFolder
    mesh: Mesh
    training: Any
    corpus: data.Corpus
    sequences: Callable[[Iterable[int]], data.Batch]
    held_out: list[data.Batch]
    held_out_loss: Callable[..., Loss] | None  # None: the one that is trained

    def batch(self, first: int) -> Any:
        """The batch that begins at sequence `first`, of which each process reads its own rows."""
        return self.training.global_batch(self.sequences(first + self.training.rows))

    def first_state(self) -> Any:
        """The state at step 0."""
        config, key = self.config, jax.random.key(self.config.run.seed)
        if config.run.weights is None:
            return self.training.init(partial(gpt.init, config.model), key)
        cast = [pattern.removeprefix("params/") for pattern in self.resume.cast]
        path = Path(config.run.weights).expanduser()
        return self.training.init(weights.load(path, self.training.state_shapes.params, cast=cast), key)


def prepare(config: Config, resume: Resume | None = None) -> Session:
    """Makes the mesh and the training step, and opens the corpus.

    Raises ValueError or RuntimeError, with what to change, when the parts of a configuration do not fit, or when
    processes were started with different ones.
    """
    resume = Resume() if resume is None else resume
    strategy = config.strategy.resolve()
    corpus = data.read(config.data)
    versions = {name: version(name) for name in ("jax", "jaxlib", "jaxshard")}
    agree(
        "configuration",
        {**asdict(config), "corpus": corpus.digests, "resume": asdict(resume), "versions": versions},
        seconds=SLOWEST,
    )
    if config.mesh.devices is not None:
        force_cpu_devices(config.mesh.devices)
    _check_devices()
    replica = strategy.min_replicas if config.mesh.replica is None else config.mesh.replica
    mesh = make_mesh(replica=replica, shard=config.mesh.shard)
    shape = {"context": config.model.context, "vocab": config.model.vocab}
    return Session(
        config=config,
        resume=resume,
        folder=RunFolder(Path(config.run.dir).expanduser(), writes=is_first()),
        mesh=mesh,
        corpus=corpus,
        sequences=data.train_sequences(corpus, config.data, **shape),
        held_out=data.held_out_batches(corpus, config.data, **shape, batches=config.run.eval_batches),
        held_out_loss=held_out_loss(model_for(config, mesh)) if config.model.dropout else None,
        training=training_for(config, mesh, strategy),
    )


def _check_devices() -> None:
    """Starts JAX. Raises ConfigError where it has no device of the platform that was asked for."""
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:  # it asserts where the platform's wheels are missing
        asked, said = os.environ.get("JAX_PLATFORMS", ""), " ".join(str(error).split())
        raise ConfigError(
            f"JAX finds no device here, with JAX_PLATFORMS={asked!r}. {said} GPUs need their driver and pip install "
            "'jax[cuda12]' or 'jax[cuda13]'; --devices N forces N CPU devices."
        ) from error


def evaluate(session: Session, state: Any) -> float:
    """The mean loss of a token of the held-out batches."""
    # They are of one size and no token is left out, so that the mean of the means is the mean.
    losses = [session.training.evaluate(state, batch, session.held_out_loss)["loss"] for batch in session.held_out]
    return sum(map(float, losses)) / len(losses)


def program_facts(session: Session) -> dict[str, Any]:
    """What processes compare of the program that they are about to run together."""
    if jax.process_count() == 1:
        return {}
    text = session.training.lower().as_text()
    places = [f"{device.process_index}.{device.id}" for device in session.mesh.devices.flat]
    return {
        "mesh": {**axis_sizes(session.mesh), "devices": " ".join(places)},
        "program": hashlib.blake2b(text.encode(), digest_size=16).hexdigest(),
    }


def opening(session: Session) -> str:
    config, devices = session.config, session.mesh.devices
    params = sum(leaf.size for leaf in jax.tree.leaves(session.training.state_shapes.params))
    arrangement = " x ".join(f"{axis} {size}" for axis, size in axis_sizes(session.mesh).items())
    processes = f" of {jax.process_count()} processes" if jax.process_count() > 1 else ""
    train, held_out = session.corpus.sizes
    return (
        f"{config.strategy.name} on {devices.size} {devices.flat[0].platform} devices{processes} ({arrangement}): "
        f"{params:,} parameters, {train:,} tokens to train on, {held_out:,} held out"
    )
