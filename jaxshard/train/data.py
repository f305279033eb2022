"""Tokens and their batches: the batch of a step is a function of the step's number alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import grain
import numpy as np

from jaxshard.train.config import ConfigError, DataConfig

Batch = dict[str, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """The tokens of a run, one array for each file, and where each one's held-out end begins."""

    train: tuple[np.ndarray, ...]
    held_out: tuple[np.ndarray, ...]

    @property
    def sizes(self) -> tuple[int, int]:
        """Tokens to train on, and tokens held out."""
        return sum(map(len, self.train)), sum(map(len, self.held_out))


@dataclass(frozen=True)
class Windows(grain.sources.RandomAccessDataSource[Batch]):
    """Adjacent sequences of `context` tokens, each with the token that follows as its last target."""

    parts: tuple[np.ndarray, ...]
    context: int
    vocab: int

    def __len__(self) -> int:
        return int(self._ends[-1])

    @cached_property
    def _ends(self) -> np.ndarray:
        return np.cumsum([max(len(part) - 1, 0) // self.context for part in self.parts])

    def __getitem__(self, index: int) -> Batch:
        """Window `index`: int32 `inputs` and `targets` and float32 `weights`, each of `context` tokens."""
        part = int(np.searchsorted(self._ends, index, side="right"))
        start = (index - (int(self._ends[part - 1]) if part else 0)) * self.context
        tokens = np.asarray(self.parts[part][start : start + self.context + 1], np.int32)
        if not 0 <= tokens.min() <= tokens.max() < self.vocab:
            raise ValueError(
                f"the corpus has a token {tokens.max()}, and model.vocab = {self.vocab}; raise it, "
                "or correct data.format."
            )
        return {
            "inputs": tokens[:-1],
            "targets": tokens[1:],
            "weights": np.ones(self.context, np.float32),
        }


def python_documentation() -> bytes:
    """The reference texts that every CPython ships for its `help`, one after the other: half a megabyte."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name].strip() for name in sorted(topics)).encode()


def read(config: DataConfig) -> Corpus:
    """Opens the files of a run, mapping them to memory. Raises ConfigError for one that cannot be read."""
    if not config.files:
        if config.format != "text":
            raise ConfigError(f"data.format = {config.format!r} needs data.files: the default corpus is text.")
        parts = (np.frombuffer(python_documentation(), np.uint8),)
    else:
        parts = tuple(_open(Path(name).expanduser(), config.format) for name in config.files)
    cuts = [round(len(part) * (1 - config.held_out)) for part in parts]
    return Corpus(
        train=tuple(part[:cut] for part, cut in zip(parts, cuts, strict=True)),
        held_out=tuple(part[cut:] for part, cut in zip(parts, cuts, strict=True)),
    )


def _open(path: Path, format: str) -> np.ndarray:
    dtype = np.dtype(np.uint8 if format == "text" else format).newbyteorder("<")
    try:
        size = path.stat().st_size
        if size % dtype.itemsize or not size:
            raise ConfigError(f"{path} has {size} bytes, which is no number of {format} tokens above 0.")
        return np.memmap(path, dtype, mode="r")
    except OSError as error:
        raise ConfigError(f"cannot read {path} of data.files: {error.strerror}.") from None


def train_batches(corpus: Corpus, config: DataConfig, *, context: int, vocab: int) -> Callable[[int], Batch]:
    """The batch of each step: windows in an order that is shuffled anew in every pass over the corpus.

    Returns a function of the step (from 0) to arrays of shape batch x context: int32 `inputs` and `targets`,
    float32 `weights`. Raises ConfigError when the corpus is shorter than one window.
    """
    windows = _windows(corpus.train, context, vocab, "train on")
    shuffled = grain.MapDataset.source(windows).shuffle(seed=config.seed).repeat()
    batches = shuffled.batch(config.batch)

    def at(step: int) -> Batch:
        batch = batches[step]
        assert batch is not None  # grain filters nothing here
        return batch

    return at


def held_out_batches(corpus: Corpus, config: DataConfig, *, context: int, vocab: int, batches: int) -> list[Batch]:
    """At most `batches` batches, of windows spread evenly over the held-out part: always the same ones.

    All are of one size, so that they share one compiled program.
    """
    windows = _windows(corpus.held_out, context, vocab, "hold out")
    count = min(len(windows), batches * config.batch)
    if count > config.batch:
        count -= count % config.batch
    spread = np.linspace(0, len(windows) - 1, count).round().astype(int)
    rows = [windows[int(index)] for index in spread]
    groups = [rows[start : start + config.batch] for start in range(0, count, config.batch)]
    return [{name: np.stack([row[name] for row in group]) for name in group[0]} for group in groups]


def _windows(parts: tuple[np.ndarray, ...], context: int, vocab: int, use: str) -> Windows:
    windows = Windows(parts, context, vocab)
    if not len(windows):
        raise ConfigError(
            f"there are {sum(map(len, parts))} tokens to {use}, and no {context + 1} together in one file, "
            f"as model.context = {context} needs; take a longer text, a shorter context, or another held_out."
        )
    return windows
