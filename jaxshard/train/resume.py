"""Where a run begins: at its newest checkpoint, or at step 0."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from jaxshard.train.config import Config, ConfigError, parse
from jaxshard.train.description import CheckpointError, leftovers, some, steps


@dataclass(frozen=True, kw_only=True)
class Resume:
    """How `jaxshard train` deals with what is in the run's folder. By itself it goes on from the newest checkpoint."""

    fresh: bool = False
    """Begin anew; what an earlier run left is kept under another name."""
    changed: bool = False
    """Go on although the configuration, or the corpus, is another than the checkpoint's."""
    cast: tuple[str, ...] = ()
    """Leaves of the state whose dtype may differ from the checkpoint's, such as params/head/* (they are cast)."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a run is. step: steps made. sequences: read from the corpus. skipped: steps left out, as not finite."""

    step: int = 0
    sequences: int = 0
    skipped: int = 0

    def after(self, batch: int) -> Progress:
        return replace(self, step=self.step + 1, sequences=self.sequences + batch)


def notes(config: Config, corpus: Sequence[str], progress: Progress) -> dict[str, Any]:
    """What a checkpoint holds besides the state. corpus: the digests of its files."""
    return {"config": asdict(config), "corpus": list(corpus), "progress": asdict(progress)}


def check_notes(
    found: Mapping[str, Any], config: Config, corpus: Sequence[str], where: str, resume: Resume
) -> tuple[Progress, tuple[str, ...]]:
    """How far the run of a checkpoint was, and what has changed since. Raises ConfigError if a change is not allowed:
    this configuration would not have led there."""
    try:
        saved, progress = parse(Config, dict(found["config"])), Progress(**found["progress"])
        digests = list(found["corpus"])
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{where} was not written by this version of jaxshard train ({' '.join(str(error).split())}); name another "
            "run.dir, or add --fresh."
        ) from None
    now = _deciding(config)
    changes = [
        f"{key} = {before!r}, now {now[key]!r}" for key, before in _deciding(saved).items() if before != now[key]
    ]
    if digests != list(corpus):
        changes.append("another corpus: its files had other tokens or sizes")
    if changes and not resume.changed:
        raise ConfigError(
            f"{where} was trained with {'; '.join(changes)}. Add --changed to go on all the same, or --fresh to begin "
            "anew; or name another run.dir."
        )
    return progress, tuple(changes)


def newest(checkpoints: Path) -> int | None:
    """The step of the newest checkpoint; None where there is none, or one alone that was never finished.

    Raises CheckpointError for what lies there besides: it may be a later checkpoint that is damaged.
    """
    whole = steps(checkpoints)
    if not checkpoints.exists():
        return None
    if not checkpoints.is_dir():
        raise CheckpointError(f"{checkpoints} is a file, and checkpoints go into a folder; move it away.")
    others = leftovers(checkpoints)
    if others:
        then = f"after step {whole[-1]}, the newest that is" if whole else "from step 0"
        raise CheckpointError(
            f"{checkpoints} holds {some(others)}, which is no whole checkpoint; move it away to go on {then}, or add "
            "--fresh to begin anew."
        )
    return whole[-1] if whole else None


FREE = ("mesh", "strategy", "model.remat", "model.attention", "model.loss_chunk", "data.files")
"""Sections and keys that do not decide what a run computes but for rounding: any checkpoint fits any mesh. Files may be
elsewhere, because they are known by their digests."""
DECIDING = ("steps", "accumulate", "seed", "weights", "skip_nonfinite")
"""Keys of the section `run` that do."""


def _deciding(config: Config) -> dict[str, Any]:
    """The keys that decide what a run computes, by their dotted names, as JSON gives them back."""
    sections = json.loads(json.dumps(asdict(config)))
    run = {key: sections["run"][key] for key in DECIDING}
    kept = {name: table for name, table in sections.items() if name not in FREE} | {"run": run}
    keys = {f"{name}.{key}": value for name, table in kept.items() for key, value in table.items()}
    return {key: value for key, value in keys.items() if key not in FREE}
