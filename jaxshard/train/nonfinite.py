"""Steps that are not finite: how many may be left out, and what went bad first where the run stops."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from jaxshard.train.config import Config


class Diverged(RuntimeError):
    """The loss or a gradient is no longer a number."""


def is_bad(row: Mapping[str, float]) -> bool:
    """Whether a step's metrics show a loss or a gradient that is not finite."""
    return not (math.isfinite(row["loss"]) and math.isfinite(row["grad_norm"]))


def fatal(row: Mapping[str, float], *, skipped: int, allowed: int) -> bool:
    """Whether a bad step ends a run that has left out `skipped` before it, of `allowed`.

    float16 overflows now and then and the loss scale deals with that, until it can shrink no further.
    """
    return row["loss_scale"] <= 1 if "loss_scale" in row else skipped >= allowed


def first_bad(
    training: Any, state: Any, step: int, last: int, batch_at: Callable[[int], Any]
) -> tuple[int, tuple[str, ...]]:
    """The first step, after `step` and up to `last`, in which leaves go bad, and those leaves by their paths.

    Makes the steps again from `state`, which is good and is used up. batch_at: the batch of a step (from 1). A state
    that is bad already is told from a batch that makes a good one bad by the paths: ``params/w`` or ``grads/w``.
    """
    for made in range(step + 1, last + 1):
        batch = batch_at(made)
        found = training.nonfinite(state, batch)
        if found:
            return made, found
        state, _ = training.step(state, batch)
    return last, ()


def described(row: Mapping[str, float]) -> str:
    """What is wrong with a bad step."""
    if not math.isfinite(row["loss"]):
        return f"the loss is {row['loss']}"
    return f"the loss is {row['loss']}, and the norm of its gradient {row['grad_norm']}"


def named(paths: tuple[str, ...], step: int) -> str:
    """The leaves that went bad, for a message."""
    if not paths:
        return "made again, all steps are finite, so that it was the machine's fault"
    more = f" and {len(paths) - 3} others" if len(paths) > 3 else ""
    return f"step {step} is the first with leaves that are not finite: {', '.join(paths[:3])}{more}"


def advice(config: Config) -> str:
    """What to try when a run has ended at such a step."""
    optimizer, allowed = config.optimizer, config.run.skip_nonfinite
    ways = [
        f"lower optimizer.learning_rate = {optimizer.learning_rate}",
        "set optimizer.clip" if optimizer.clip is None else f"lower optimizer.clip = {optimizer.clip}",
        "lengthen optimizer.warmup_steps",
        f"raise run.skip_nonfinite, whose {allowed} are used up"
        if allowed
        else "let run.skip_nonfinite leave some out",
    ]
    return f"What may help: {', '.join(ways)}. JAX_DEBUG_NANS=1 names the line that makes the first NaN."
