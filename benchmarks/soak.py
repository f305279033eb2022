"""A run that is killed again and again ends where one that is never killed ends, to the bit.

    python benchmarks/soak.py                    200 kills, about 15 minutes
    python benchmarks/soak.py --kills 20         as the tests do it

A small GPT with dropout is trained on forced CPU devices by `jaxshard train`, and its process is killed (SIGKILL) at
random moments, every other time in the middle of a save. The same command then goes on. At the end the metrics file,
every leaf of the state and what else lies in the run's folder must be those of a run that was left alone.
"""

from __future__ import annotations

import os
import random
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax
import tyro

from jaxshard.cli import main as jaxshard
from jaxshard.train.description import describe, is_unfinished
from jaxshard.train.stored import verify

CONFIG = """
[mesh]
devices = {devices}
[strategy]
name = "{strategy}"
[model]
width = 16
layers = 2
heads = 2
context = 32
dropout = 0.1
[data]
batch = 8
[run]
dir = "{folder}"
steps = {steps}
save_every = 3
keep_last = 2
keep_every = 30
log_every = 5
eval_every = 7
eval_batches = 1
watchdog = 0
"""
PATIENCE = 300
"""Seconds that one process may take before something is wrong."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Kills a training run again and again, and compares its end with that of a run left alone."""

    kills: int = 200
    """How often."""
    steps: int | None = None
    """Steps of the run; none: two for each kill."""
    devices: int = 1
    """Forced CPU devices. More take longer: with JAX 0.10 each process then compiles anew, because programs for
    several CPU devices that come back from its cache compute something else now and then."""
    strategy: str = "zero3"
    """The strategy."""
    seed: int = 0
    """Of the moments."""


def train(config: Path) -> int:
    """Starts `jaxshard train` in a process of its own and returns its number.

    A fork of this one, which has imported all there is to import and started nothing: imports are most of the start.
    """
    child = os.fork()
    if child:
        return child
    log = os.open(config.parent / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    code = 1
    try:
        code = jaxshard(["train", str(config)])
    finally:
        sys.stdout.flush()
        os._exit(code)


def ended(child: int) -> int | None:
    """The exit code of a process that has ended (minus the signal that ended it); None while it is there."""
    found, status = os.waitpid(child, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if found else None


def wait_for(what: Callable[[], bool], child: int) -> int | None:
    """Until something is so, or the process has ended: its exit code then."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        code = ended(child)
        if code is not None or what():
            return code
        time.sleep(0.0005)
    os.kill(child, signal.SIGKILL)
    raise RuntimeError(f"process {child} did nothing for {PATIENCE} s")


def kill_one(config: Path, folder: Path, moments: random.Random, *, in_a_save: bool) -> tuple[int | None, bool]:
    """Starts the run and kills it. Returns its exit code if it ended before, and whether a save was cut off."""
    metrics, checkpoints = folder / "metrics.jsonl", folder / "checkpoints"
    left = {entry.name for entry in _entries(checkpoints)}
    size = metrics.stat().st_size if metrics.exists() else 0

    def saving() -> bool:
        return any(is_unfinished(entry.name) and entry.name not in left for entry in _entries(checkpoints))

    def moving() -> bool:
        return metrics.exists() and metrics.stat().st_size != size

    child = train(config)
    code = wait_for(saving if in_a_save else moving, child)
    if code is None and not in_a_save:
        until = time.monotonic() + moments.uniform(0, 0.5)
        code = wait_for(lambda: time.monotonic() > until, child)
    if code is not None:
        return code, False
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None, saving()


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except FileNotFoundError:
        return []


def finish(config: Path) -> None:
    code = wait_for(lambda: False, train(config))
    if code != 0:
        raise RuntimeError(f"the run ended with code {code}:\n{(config.parent / 'log').read_text()[-3000:]}")


def result(folder: Path) -> dict[str, object]:
    """All that a run leaves, in a form that can be compared."""
    steps = sorted(int(entry.name) for entry in (folder / "checkpoints").iterdir())
    for step in steps:
        found = verify(folder, step)
        assert not found.faults, found.faults
    leaves = {f"{step}/{path}": leaf.digest for step in steps for path, leaf in describe(folder, step).leaves.items()}
    return {
        # One killed before its first checkpoint begins anew, and keeps what it had left as `metrics.1.jsonl`.
        "files": sorted(entry.name for entry in folder.iterdir() if not re.search(r"\.\d+", entry.name)),
        "checkpoints": steps,
        "metrics": (folder / "metrics.jsonl").read_bytes(),
        **leaves,
    }


def main(options: Options) -> None:
    began, moments = time.monotonic(), random.Random(options.seed)
    steps = options.steps or 2 * options.kills
    with tempfile.TemporaryDirectory() as scratch:
        # Every process compiles the same programs.
        if options.devices == 1 or jax.__version_info__ >= (0, 11):
            jax.config.update("jax_compilation_cache_dir", str(Path(scratch, "cache")))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
        folders = {}
        for name in ("alone", "killed"):
            folders[name] = Path(scratch, name, "run")
            folders[name].parent.mkdir()
            values = {"devices": options.devices, "strategy": options.strategy, "steps": steps}
            (folders[name].parent / "config.toml").write_text(CONFIG.format(folder=folders[name], **values))
        finish(folders["alone"].parent / "config.toml")
        config = folders["killed"].parent / "config.toml"
        kills = cut = 0
        while kills < options.kills:
            code, in_a_save = kill_one(config, folders["killed"], moments, in_a_save=kills % 2 == 1)
            if code not in (None, 0):
                raise RuntimeError(f"the run ended with code {code}:\n{(config.parent / 'log').read_text()[-3000:]}")
            if code == 0:
                raise RuntimeError(f"the run was over after {kills} kills; --steps {2 * steps} makes it longer")
            kills, cut = kills + 1, cut + in_a_save
        finish(config)
        expected, found = result(folders["alone"]), result(folders["killed"])
        wrong = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
        if wrong:
            raise SystemExit(f"after {kills} kills these differ from the run that was left alone: {', '.join(wrong)}")
        print(
            f"{kills} kills, {cut} of them in the middle of a save, in {steps} steps: metrics, {len(found) - 3} leaves "
            "of all checkpoints are those of the run that was left alone "
            f"({time.monotonic() - began:.0f} s)"
        )


if __name__ == "__main__":
    main(tyro.cli(Options))
