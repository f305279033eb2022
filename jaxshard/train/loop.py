"""A run, from its configuration to its summary."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh
from rich.console import Console

from jaxshard.mesh import axis_sizes, force_cpu_devices, make_mesh
from jaxshard.models import gpt
from jaxshard.train import data
from jaxshard.train.build import training_for
from jaxshard.train.config import Config
from jaxshard.train.metrics import open_run
from jaxshard.train.report import Report, progress, say, summary


class Diverged(RuntimeError):
    """The loss is no longer a number."""


@dataclass(frozen=True, kw_only=True)
class Session:
    """All that a run needs, checked before anything is computed or written."""

    config: Config
    mesh: Mesh
    training: Any
    corpus: data.Corpus
    batches: Callable[[int], data.Batch]
    held_out: list[data.Batch]


def prepare(config: Config) -> Session:
    """Makes the mesh and the training step, and opens the corpus.

    Raises ValueError or RuntimeError, with what to change, when the parts of a configuration do not fit.
    """
    strategy = config.strategy.resolve()
    if config.mesh.devices is not None:
        force_cpu_devices(config.mesh.devices)
    replica = strategy.min_replicas if config.mesh.replica is None else config.mesh.replica
    mesh = make_mesh(replica=replica, shard=config.mesh.shard)
    corpus = data.read(config.data)
    shape = {"context": config.model.context, "vocab": config.model.vocab}
    batches = data.train_batches(corpus, config.data, **shape)
    held_out = data.held_out_batches(corpus, config.data, **shape, batches=config.run.eval_batches)
    training = training_for(config, mesh, strategy)
    return Session(config=config, mesh=mesh, training=training, corpus=corpus, batches=batches, held_out=held_out)


def run(session: Session, console: Console) -> None:
    """Trains, reports and writes metrics; at the end says what each device held and sent.

    Raises ConfigError when the run's folder cannot be written, and `Diverged` when the loss is not finite.
    """
    config, steps = session.config, session.config.run.steps
    file = open_run(config)
    say(console, _opening(session))
    state = session.training.init(partial(gpt.init, config.model), jax.random.key(config.run.seed))
    pace = _Pace(tokens=config.data.batch * config.model.context, steps=steps)
    pending, loss = [], math.nan
    with progress(console, steps) as show:
        for step in range(1, steps + 1):
            state, metrics = session.training.step(state, session.batches(step - 1))
            pending.append(metrics)
            if step % config.run.log_every == 0 or step in (1, steps):
                # Metrics stay on the device until here, because reading one waits for its step.
                values = [{name: float(value) for name, value in row.items()} for row in pending]
                file.write(*({"step": step - len(values) + i} | row for i, row in enumerate(values, start=1)))
                pending, loss = [], values[-1]["loss"]
                show(pace.report(step, loss))
                _check(loss, step, config)
            if config.run.eval_every and step % config.run.eval_every == 0 and step < steps:
                held_out = evaluate(session, state)
                file.write({"step": step, "held_out_loss": held_out})
                say(console, f"step {step}/{steps}  held-out loss {held_out:.5f}")
                pace.resume(step)
    held_out = evaluate(session, state)
    file.write({"step": steps, "held_out_loss": held_out})
    say(console, f"after {steps} steps: training loss {loss:.5f}, held-out loss {held_out:.5f}")
    summary(console, session.training.explain())
    say(console, f"metrics are in {file.path}")


def evaluate(session: Session, state: Any) -> float:
    """The mean loss of a token of the held-out batches."""
    # They are of one size and no token is left out, so that the mean of the means is the mean.
    losses = [session.training.evaluate(state, batch)["loss"] for batch in session.held_out]
    return sum(map(float, losses)) / len(losses)


class _Pace:
    """Tokens per second and time left, without the time that compiling and evaluation take."""

    def __init__(self, *, tokens: int, steps: int):
        self.tokens, self.steps = tokens, steps
        self.since: tuple[int, float] | None = None

    def resume(self, step: int) -> None:
        self.since = (step, time.perf_counter())

    def report(self, step: int, loss: float) -> Report:
        speed = left = None
        if self.since is not None and step > self.since[0]:
            seconds = (time.perf_counter() - self.since[1]) / (step - self.since[0])
            speed, left = self.tokens / seconds, seconds * (self.steps - step)
        self.resume(step)
        return Report(step=step, loss=loss, tokens_per_second=speed, seconds_left=left)


def _opening(session: Session) -> str:
    config, devices = session.config, session.mesh.devices
    params = sum(
        leaf.size for leaf in jax.tree.leaves(jax.eval_shape(partial(gpt.init, config.model), jax.random.key(0)))
    )
    arrangement = " x ".join(f"{axis} {size}" for axis, size in axis_sizes(session.mesh).items())
    train, held_out = session.corpus.sizes
    return (
        f"{config.strategy.name} on {devices.size} {devices.flat[0].platform} devices ({arrangement}): "
        f"{params:,} parameters, {train:,} tokens to train on, {held_out:,} held out"
    )


def _check(loss: float, step: int, config: Config) -> None:
    # float16 overflows now and then, and the loss scale deals with it.
    if not math.isfinite(loss) and not config.precision.scaled:
        raise Diverged(
            f"the loss is {loss} at step {step}: lower optimizer.learning_rate = "
            f"{config.optimizer.learning_rate}, lengthen optimizer.warmup_steps, or lower optimizer.clip. "
            "With JAX_DEBUG_NANS=1 the step that makes a NaN names the line it comes from."
        )
