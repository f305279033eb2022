"""A run, from where it is to its summary."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from jaxshard.train.checkpoint import Checkpoints, describe, restore
from jaxshard.train.config import ConfigError
from jaxshard.train.description import CheckpointError, DamagedError, steps
from jaxshard.train.nonfinite import Diverged, advice, described, fatal, first_bad, is_bad, named
from jaxshard.train.processes import agree, is_first
from jaxshard.train.report import Pace, progress_bar, say, summary
from jaxshard.train.resume import Progress, check_notes, newest, notes
from jaxshard.train.session import SLOWEST, Session, evaluate, opening, program_facts
from jaxshard.train.stop import Stop
from jaxshard.train.watchdog import Watchdog


def run(session: Session, console: Console) -> None:
    """Trains from where the run is, reports, and writes metrics and checkpoints; says what each device held and sent.

    Asked to stop by a signal, it finishes the step, saves and returns. Raises ConfigError when the run's
    folder cannot be written or its checkpoints cannot be read, and `Diverged` at a step that is not finite.
    """
    if not is_first():
        console = Console(quiet=True)
    settings = session.config.run
    with ExitStack() as stack:
        stop = stack.enter_context(Stop())
        watchdog = stack.enter_context(Watchdog(times=settings.watchdog))
        watchdog.at("the start")
        kept = {"keep_last": settings.keep_last, "keep_every": settings.keep_every}
        checkpoints = Checkpoints(session.folder.checkpoints, **kept)
        begun = _begin(session, console, stack)
        if begun is None:
            return
        stack.callback(checkpoints.close)
        _Run(session, console, checkpoints, watchdog, *begun).go(stop)


def _begin(session: Session, console: Console, stack: ExitStack) -> tuple[Any, Progress] | None:
    """The state to go on from, and how far it is; None when the run is complete. stack: for the folder's lock."""
    config, folder, resume = session.config, session.folder, session.resume
    step = None if resume.fresh else newest(folder.checkpoints)
    if step is None:
        if resume.cast and config.run.weights is None:
            raise ConfigError(f"--cast {resume.cast[0]}: there is no checkpoint and no run.weights to cast from.")
        agree("program and checkpoint", {"checkpoint": None, **program_facts(session)}, seconds=SLOWEST)
        say(console, opening(session))
        state, progress = session.first_state(), Progress()
        _lock(session, stack, step)
        folder.begin(config)
    else:
        where = str(folder.checkpoints / str(step))
        with _pointing_at_earlier(folder.checkpoints, step):
            found = describe(folder.checkpoints, step)
        progress, changes = check_notes(found.notes, config, session.corpus.digests, where, resume)
        left = config.run.steps - progress.step
        if left < 0 or (left == 0 and folder.evaluated(progress.step)):
            say(console, f"{folder.path} is complete, with {progress.step} steps; --fresh begins anew.")
            return None
        agree("program and checkpoint", {"checkpoint": progress.step, **program_facts(session)}, seconds=SLOWEST)
        say(console, opening(session))
        with _pointing_at_earlier(folder.checkpoints, step):
            restored = restore(folder.checkpoints, session.training, step, cast=resume.cast)
        state = restored.state
        _lock(session, stack, step)
        missing = folder.go_on(config, progress.step)
        say(
            console,
            f"goes on after step {progress.step} of {config.run.steps}, from {where} (of "
            f"{found.notes['config']['strategy']['name']} on {math.prod((found.mesh or {}).values())} devices)",
        )
        if changes:
            say(console, f"it was trained with {'; '.join(changes)}")
        if restored.cast:
            say(console, f"cast from another dtype: {', '.join(restored.cast)}")
        if missing:
            say(console, f"{folder.metrics} lacks {len(missing)} of the steps up to there, from {missing[0]} on")
    # The others wait here until the first has made the folder ready.
    agree("folder", {"dir": str(folder.path)}, seconds=SLOWEST)
    folder.check_shared()
    return state, progress


@contextmanager
def _pointing_at_earlier(checkpoints: Path, step: int) -> Iterator[None]:
    """Says of a damaged checkpoint which one is before it."""
    try:
        yield
    except DamagedError as error:
        earlier = [one for one in steps(checkpoints) if one < step]
        if not earlier:
            raise
        raise DamagedError(f"{error} To go on after step {earlier[-1]}, move that folder away.") from error


def _lock(session: Session, stack: ExitStack, step: int | None) -> None:
    """Locks the folder. step: of the checkpoint that was found before, which must still be the newest."""
    folder = session.folder
    stack.enter_context(folder.locked())
    if not session.resume.fresh and newest(folder.checkpoints) != step:
        raise ConfigError(f"another run was at work in run.dir = {folder.path} just now; give the command again.")


class _Run:
    """The steps of a run: the state after `progress`, and the metrics that are still on the devices."""

    def __init__(
        self,
        session: Session,
        console: Console,
        checkpoints: Checkpoints,
        watchdog: Watchdog,
        state: Any,
        progress: Progress,
    ):
        self.session, self.config, self.settings = session, session.config, session.config.run
        self.console, self.checkpoints, self.watchdog = console, checkpoints, watchdog
        self.state, self.progress = state, progress
        self.pending: list[dict[str, jax.Array]] = []
        self.pace = Pace(tokens=self.config.data.batch * self.config.model.context, steps=self.settings.steps)

    def go(self, stop: Stop) -> None:
        """All steps that are left, or those until it is asked to stop."""
        steps, first = self.settings.steps, self.progress.step + 1
        if first > 1 and not self.session.folder.evaluated(first - 1):
            self.evaluate_if_due()
        with progress_bar(self.console, steps) as show:
            for step in range(first, steps + 1):
                self.step()
                stopping = stop.asked(step) and step < steps
                saves = stopping or step == steps or _divides(self.settings.save_every, step)
                # Not when it stops: its terminal may be gone, and nothing must come before the save.
                reports = not stopping and (step in (first, steps) or _divides(self.settings.log_every, step))
                if saves or reports or self.evaluation_due():
                    loss = self.collect()
                    if reports:
                        show(self.pace.report(step, loss))
                if saves:
                    self.save()
                if stopping:
                    self.checkpoints.wait()
                    say(self.console, f"stopped after step {step} of {steps} and saved it; the same command goes on.")
                    return
                self.evaluate_if_due()
        self.watchdog.at("the last save")
        self.checkpoints.wait()
        self.close()

    def step(self) -> None:
        self.watchdog.at(f"step {self.progress.step + 1}")
        self.checkpoints.check()
        batch = self.session.batch(self.progress.sequences)
        self.state, metrics = self.session.training.step(self.state, batch)
        self.progress = self.progress.after(self.config.data.batch)
        self.pending.append(metrics)

    def collect(self) -> float:
        """Writes the metrics of the latest steps, which wait for them. Returns the last loss.

        Until here they stay on the devices, because reading one waits for its step. Raises `Diverged`.
        """
        rows = [{name: float(value) for name, value in row.items()} for row in self.pending]
        rows = [{"step": step} | row for step, row in enumerate(rows, start=self.progress.step - len(rows) + 1)]
        self.pending = []
        for i, row in enumerate(rows):
            if is_bad(row) and fatal(row, skipped=self.progress.skipped, allowed=self.settings.skip_nonfinite):
                self.session.folder.write(*rows[: i + 1])
                raise Diverged(self.diagnosis(row))
            if is_bad(row) and "loss_scale" not in row:
                self.progress = replace(self.progress, skipped=self.progress.skipped + 1)
                left = self.settings.skip_nonfinite - self.progress.skipped
                say(self.console, f"step {row['step']} left out: {described(row)}; {left} more may be.")
        self.session.folder.write(*rows)
        return rows[-1]["loss"]

    def save(self) -> None:
        step = self.progress.step
        self.watchdog.at(f"saving step {step}")
        self.session.folder.settle()
        self.checkpoints.save(step, self.state, notes(self.config, self.session.corpus.digests, self.progress))
        self.pace.resume(step)

    def evaluation_due(self) -> bool:
        return self.progress.step == self.settings.steps or _divides(self.settings.eval_every, self.progress.step)

    def evaluate_if_due(self) -> None:
        step = self.progress.step
        if self.evaluation_due():
            self.watchdog.at(f"the evaluation after step {step}")
            held_out = evaluate(self.session, self.state)
            self.session.folder.write({"step": step, "held_out_loss": held_out})
            say(self.console, f"step {step}/{self.settings.steps}  held-out loss {held_out:.5f}")
            self.pace.resume(step)

    def diagnosis(self, row: Mapping[str, float]) -> str:
        """What went bad first: the steps since the last checkpoint are made again, and looked at one by one."""
        session, bad, batch = self.session, int(row["step"]), self.config.data.batch
        self.watchdog.at(f"looking for what went bad up to step {bad}")
        say(self.console, f"step {bad}: {described(row)}; looking for what went bad first")
        self.state = None  # There may be room for one state alone.
        self.checkpoints.wait()
        steps, progress = self.checkpoints.steps(), Progress()
        if steps:
            try:
                found = restore(session.folder.checkpoints, session.training, steps[-1])
            except CheckpointError as error:
                return f"{described(row)} at step {bad}. What went bad first is not known: {error}"
            state, progress = found.state, Progress(**found.notes["progress"])
            good = f"The last good checkpoint is {session.folder.checkpoints / str(steps[-1])}"
        else:
            state, good = session.first_state(), "There is no checkpoint, but the initial state"
        start = progress.sequences - progress.step * batch
        step, paths = first_bad(
            session.training, state, progress.step, bad, lambda step: session.batch(start + (step - 1) * batch)
        )
        return f"{described(row)} at step {bad}. {good}; after it, {named(paths, step)}. {advice(self.config)}"

    def close(self) -> None:
        """The last lines."""
        if is_first():
            last = {name: value for row in self.session.folder.rows() for name, value in row.items()}
            names = {"training loss": "loss", "held-out loss": "held_out_loss"}
            # The metrics may have been lost, and with them the training loss.
            losses = [f"{what} {last[name]:.5f}" for what, name in names.items() if name in last]
            say(self.console, f"after {self.settings.steps} steps: {', '.join(losses)}")
        summary(self.console, self.session.training.explain())
        folder = self.session.folder
        say(self.console, f"metrics are in {folder.metrics}, checkpoints in {folder.checkpoints}")


def _divides(every: int, step: int) -> bool:
    return every > 0 and step % every == 0
