"""Scripts run by real processes that are one JAX job, on forced CPU devices."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from queue import Empty, Queue

PATIENCE = 120
"""Seconds after which a test gives up. Nothing here is expected to take long; nothing is asserted about time."""

NOISE = ("cudart", "cuda_plugin", "absl::InitializeLog")
"""Of lines that JAX's libraries print about themselves."""
GLOO = re.compile(
    r"\[Gloo\] Rank \d*| ?is connected to |peer ranks\. |Expected number of connected peer ranks is : ?\d*"
)
"""What the collectives print about each connection, in pieces that can stand between the program's own."""


def environment(devices: int, **more: str) -> dict[str, str]:
    """For a process of its own on forced CPU devices, which finds the tests and the project."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "SLURM_", "OMPI_"))}
    places = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
    return inherited | {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(devices),
        "PYTHONPATH": os.pathsep.join(places),
        "PYTHONUNBUFFERED": "1",
        "PYTHONWARNINGS": "error",
        **more,
    }


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Process:
    """A process whose lines of output can be waited for."""

    def __init__(self, command: Sequence[str | Path], environment: Mapping[str, str], folder: Path | None = None):
        self.lines: list[str] = []
        self._queue: Queue[str | None] = Queue()
        self._ended = False
        self._process = subprocess.Popen(
            list(map(str, command)),
            env=environment,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self.pid = self._process.pid
        threading.Thread(target=self._collect, daemon=True).start()

    def _collect(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                kept = GLOO.sub("", line).rstrip("\n")
                # What is left of it, or a piece of it: a number alone.
                piece = kept.strip().isdigit() or (kept != line.rstrip("\n") and not kept.strip(" 0123456789"))
                if kept.strip() and not piece and not any(noise in line for noise in NOISE):
                    self._queue.put(kept)
        self._queue.put(None)

    def expect(self, text: str) -> str:
        """Waits for a line that contains this, after those expected before. Fails when the process ends without."""
        while (line := self._next()) is not None:
            if text in line:
                return line
        raise AssertionError(f"{text!r} was not printed, but:\n{self.out}")

    def _next(self) -> str | None:
        if self._ended:
            return None
        try:
            line = self._queue.get(timeout=PATIENCE)
        except Empty:
            raise AssertionError(f"nothing printed for {PATIENCE} s after:\n{self.out}") from None
        if line is None:
            self._ended = True
        else:
            self.lines.append(line)
        return line

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def wait(self) -> int:
        """The exit code, once all output is read."""
        while self._next() is not None:
            pass
        return self._process.wait(PATIENCE)

    @property
    def out(self) -> str:
        return "\n".join(self.lines)

    def end(self) -> None:
        self._process.kill()
        self.wait()


@contextmanager
def processes(
    command: Sequence[str | Path] | Sequence[Sequence[str]],
    *,
    count: int = 2,
    devices: int = 4,
    folders: Sequence[Path] | None = None,
    variables: Mapping[str, str] | None = None,
) -> Iterator[list[Process]]:
    """`count` processes of one job with `devices` CPU devices each, under way; at the end those left are ended.

    command: one for all, or one for each. folders: where each runs. variables: of their environment.
    """
    common = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}", "JAX_NUM_PROCESSES": str(count)}
    job = []
    for i in range(count):
        own = command if isinstance(command[0], str | Path) else command[i]
        given = environment(devices, **common, JAX_PROCESS_ID=str(i), **(variables or {}))
        job.append(Process(own, given, folders[i] if folders else None))  # pyright: ignore[reportArgumentType]
    try:
        yield job
    finally:
        for one in job:
            one.end()


def script(text: str, *args: str) -> list[str]:
    """The command that runs this Python text."""
    return [sys.executable, "-c", text, *args]


def run(text: str, *args: str, count: int = 2, devices: int = 4, **more: str) -> list[tuple[int, str]]:
    """Runs a Python text in `count` processes, to its end; (exit code, output) of each."""
    with processes(script(text, *args), count=count, devices=devices, variables=more) as job:
        return [(one.wait(), one.out) for one in job]
