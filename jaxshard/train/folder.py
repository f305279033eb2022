"""What a run leaves in its folder: `config.json`, `metrics.jsonl` and `checkpoints/`. Earlier runs' are kept."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from jaxshard.train.config import Config, ConfigError


@dataclass(frozen=True)
class RunFolder:
    """The folder of a run. Of several processes the first alone writes there, but for the checkpoints."""

    path: Path
    writes: bool

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def metrics(self) -> Path:
        """One JSON object a line, each with its `step` (from 1)."""
        return self.path / "metrics.jsonl"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Inside, no other run may write here. Raises ConfigError if one does, or if the folder cannot be made."""
        if not self.writes:
            yield
            return
        with self._told():
            self.path.mkdir(parents=True, exist_ok=True)
            lock = (self.path / ".lock").open("a")
        with lock:  # the system unlocks what a process had locked, however that ends
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(f"another run is at work in run.dir = {self.path}; name another.") from None
            except OSError:
                pass  # a file system without locks
            yield

    def begin(self, config: Config) -> None:
        """A new run: what an earlier one left is kept under the next free number, as ``metrics.1.jsonl``.

        Raises ConfigError when the folder cannot be written.
        """
        if self.writes:
            with self._told():
                self.path.mkdir(parents=True, exist_ok=True)
                with _replaced(self.path / "config.json", _pretty(config)):
                    self._put_aside()

    def go_on(self, config: Config, step: int) -> tuple[int, ...]:
        """A run that goes on after `step`: what its metrics say of later steps is dropped, because it comes again.

        Returns the steps up to there that they do not have. Raises ConfigError when the folder cannot be written.
        """
        rows = [row for row in self.rows() if row["step"] <= step]
        if self.writes:
            metrics = "".join(map(_line, rows))
            with self._told(), _replaced(self.path / "config.json", _pretty(config)), _replaced(self.metrics, metrics):
                pass  # neither is replaced before there was room for both
        return tuple(sorted({*range(1, step + 1)} - {row["step"] for row in rows if "loss" in row}))

    def rows(self) -> list[dict[str, float]]:
        """What the metrics say; the end of a line that was being written when the run died is left out.

        Raises ConfigError when they cannot be read, or are not what a run wrote.
        """
        try:
            *lines, _ = self.metrics.read_bytes().split(b"\n")
            rows = [json.loads(line) for line in lines]
            if not all(isinstance(row, dict) and isinstance(row.get("step"), int) for row in rows):
                raise ValueError
        except FileNotFoundError:
            return []
        except OSError as error:
            raise ConfigError(f"cannot read {self.metrics}: {error.strerror}.") from None
        except ValueError:
            raise ConfigError(f"{self.metrics} is not what a run wrote; move it away, or add --fresh.") from None
        return rows

    def evaluated(self, step: int) -> bool:
        """Whether the metrics say what the held-out loss after a step was."""
        return any(row["step"] == step and "held_out_loss" in row for row in self.rows())

    def check_shared(self) -> None:
        """Raises ConfigError where a process does not see the folder that the first has made."""
        if not (self.path / "config.json").exists():
            raise ConfigError(f"run.dir = {self.path}: this process sees no such folder; all must share one disk.")

    def write(self, *records: Mapping[str, float]) -> None:
        """Appends records to the metrics; a reader sees whole lines at any time."""
        if self.writes and records:
            with self._told(), self.metrics.open("a", encoding="utf-8") as file:
                file.write("".join(map(_line, records)))

    def settle(self) -> None:
        """Waits until the metrics are on the disk, so that no checkpoint is there before them."""
        if self.writes:
            with self._told(), self.metrics.open("a") as file:
                os.fsync(file.fileno())

    def _put_aside(self) -> None:
        # The checkpoints first: without them the next start comes here again, and gives what is left the same number.
        files = [path for path in (self.checkpoints, self.metrics, self.path / "config.json") if path.exists()]
        number = 1
        while any(_numbered(path, number).exists() for path in files):
            number += 1
        for path in files:
            path.rename(_numbered(path, number))

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ConfigError(f"cannot write to run.dir = {self.path}: {error.strerror}.") from None


@contextmanager
def _replaced(path: Path, text: str) -> Iterator[None]:
    """A file gets another text at the end, which is on the disk before; an error leaves the file as it is."""
    scratch = path.with_name(f"{path.name}.new")
    try:
        with scratch.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        yield
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


def _pretty(config: Config) -> str:
    return json.dumps(asdict(config), indent=2) + "\n"


def _line(record: Mapping[str, float]) -> str:
    return json.dumps(dict(record)) + "\n"


def _numbered(path: Path, number: int) -> Path:
    return path.with_name(f"{path.stem}.{number}{path.suffix}")
