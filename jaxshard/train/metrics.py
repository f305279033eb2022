"""What a run leaves in its folder: `config.json` and `metrics.jsonl`. Files of an earlier run are kept."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from jaxshard.train.config import Config, ConfigError


@dataclass(frozen=True)
class MetricsFile:
    """One JSON object a line, each with its `step` (from 1)."""

    path: Path

    def write(self, *records: Mapping[str, float]) -> None:
        """Appends records; a reader sees whole lines at any time, and what was written if the run dies."""
        lines = "".join(json.dumps(dict(record)) + "\n" for record in records)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(lines)


def open_run(config: Config) -> MetricsFile:
    """Makes the run's folder and writes its configuration there.

    What an earlier run left there is kept under the next free number: ``metrics.1.jsonl``, ``config.1.json``.
    Raises ConfigError when the folder cannot be written.
    """
    folder = Path(config.run.dir).expanduser()
    files = [folder / "metrics.jsonl", folder / "config.json"]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        number = 1
        while any(_numbered(path, number).exists() for path in files):
            number += 1
        for path in files:
            if path.exists():
                path.rename(_numbered(path, number))
        files[1].write_text(json.dumps(asdict(config), indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write to run.dir = {config.run.dir}: {error.strerror}.") from None
    return MetricsFile(files[0])


def _numbered(path: Path, number: int) -> Path:
    return path.with_name(f"{path.stem}.{number}{path.suffix}")
