"""Tokens and the sequences cut from them: a sequence is a function of its number alone, from 0 without end.

So a run that goes on after a stop sees what it would have seen, and each process reads its own rows of a batch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

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

    @cached_property
    def digests(self) -> tuple[str, ...]:
        """Of each file: its number of tokens, and a digest of its first and last `READ` of them."""
        return tuple(_digest(parts) for parts in zip(self.train, self.held_out, strict=True))


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
        check_vocab(tokens, self.vocab)
        return {
            "inputs": tokens[:-1],
            "targets": tokens[1:],
            "weights": np.ones(self.context, np.float32),
        }


READ = 2**20
"""Tokens of each end of a file that are read before a run begins, to know it again and to see that they are tokens."""

FOREIGN = {
    b"\x93NUMPY": "a .npy file: save its array with .tofile",
    b"\x1f\x8b": "compressed by gzip: unpack it",
    b"\x28\xb5\x2f\xfd": "compressed by zstd: unpack it",
    b"PK\x03\x04": "a zip archive: unpack it",
    b"PAR1": "a parquet file: write its tokens, or its text, to a plain file",
    b"\x89HDF": "an HDF5 file: write its tokens to a plain file",
}
"""How files begin that hold neither text nor bare token numbers, and what to do with them."""


def check_vocab(tokens: np.ndarray, vocab: int) -> None:
    """Raises ConfigError for a token that the vocabulary has not."""
    if tokens.size and not 0 <= tokens.min() <= tokens.max() < vocab:
        raise ConfigError(
            f"the corpus has a token {tokens.max()}, and model.vocab = {vocab}; raise it, or correct data.format."
        )


def python_documentation() -> bytes:
    """The reference texts that every CPython ships for its `help`, one after the other: half a megabyte."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name].strip() for name in sorted(topics)).encode()


def read(config: DataConfig) -> Corpus:
    """Opens the files of a run, mapping them to memory. Raises ConfigError for one that cannot be read, or that holds
    neither text nor token numbers."""
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
        tokens = np.memmap(path, dtype, mode="r")
        start = tokens[:READ].tobytes()
        for begins, what in FOREIGN.items():
            if start.startswith(begins):
                raise ConfigError(f"{path} of data.files is {what}.")
        if format == "text" and b"\0" in start:
            raise ConfigError(
                f"{path} has zero bytes, so it is no text; data.format = 'uint16' or 'uint32' reads token numbers."
            )
        return tokens
    except OSError as error:
        raise ConfigError(f"cannot read {path} of data.files: {error.strerror}.") from None


def train_sequences(
    corpus: Corpus, config: DataConfig, *, context: int, vocab: int
) -> Callable[[Iterable[int]], Batch]:
    """The sequences to train on, in an order that is shuffled anew in every pass over the corpus.

    Returns a function of their numbers to arrays of shape numbers x context: int32 `inputs` and `targets`, float32
    `weights`. Raises ConfigError when the corpus is shorter than one sequence, or begins or ends with a token that is
    not below `vocab`; the function, for one that lies between.
    """
    windows = _windows(corpus.train, context, vocab, "train on")
    shuffled = grain.MapDataset.source(windows).shuffle(seed=config.seed).repeat()
    return lambda numbers: _stacked([shuffled[int(number)] for number in numbers])


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
    return [_stacked(group) for group in groups]


def _stacked(rows: list[Any]) -> Batch:
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def _digest(parts: tuple[np.ndarray, ...]) -> str:
    tokens = hashlib.blake2b(repr([len(part) for part in parts]).encode(), digest_size=16)
    for part in parts:
        tokens.update(part[:READ].tobytes())
        tokens.update(part[-READ:].tobytes())
    return tokens.hexdigest()


def _windows(parts: tuple[np.ndarray, ...], context: int, vocab: int, use: str) -> Windows:
    windows = Windows(parts, context, vocab)
    for part in parts:
        check_vocab(part[:READ], vocab)
        check_vocab(part[-READ:], vocab)
    if not len(windows):
        raise ConfigError(
            f"there are {sum(map(len, parts))} tokens to {use}, and no {context + 1} together in one file, "
            f"as model.context = {context} needs; take a longer text, a shorter context, or another held_out."
        )
    return windows
