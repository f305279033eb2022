"""Processes of one job on this machine: started together, watched, ended together, and started again.

For several machines, their scheduler does this: `srun`, `mpirun`, a Kubernetes job.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import BinaryIO, TextIO

from jaxshard.train import cluster, processes

KEPT = 20
"""Lines of each process that are kept, for when it fails."""
GRACE = 5.0
"""Seconds in which processes can end by themselves once another has failed: they are told, and say so."""
SETTLE = 0.2
"""Seconds after a death in which others may turn out to have died before it."""
MISTAKE = 2
"""The exit code of a mistake in what was asked; to start again would not help."""
NOISE = re.compile(
    rb"(\[Gloo\] Rank |\d+| is connected to | ?peer ranks\. |Expected number of connected peer ranks is : |\s)+"
)
"""What the CPU collectives print on stdout about each connection; those of several devices run into each other."""

_printing = threading.Lock()


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a process ended. code: as Popen gives it, the negative number of a signal. said: its last lines."""

    index: int
    code: int
    said: Sequence[str]

    def __str__(self) -> str:
        if self.code >= 0:
            return f"process {self.index} ended with code {self.code}"
        memory = " (was there memory enough?)" if self.code == -signal.SIGKILL else ""
        return f"process {self.index} was ended by {signal.Signals(-self.code).name}{memory}"

    @property
    def status(self) -> int:
        """The exit code as a shell has it."""
        return self.code if self.code >= 0 else 128 - self.code


def launch(
    command: Sequence[str],
    *,
    count: int,
    restarts: int = 0,
    fewest: int | None = None,
    environment: Callable[[int], Mapping[str, str]] = lambda place: {},
) -> int:
    """Runs a command in `count` processes that `processes.initialize` joins to one job; returns the job's exit code.

    When a process fails, the others are ended within seconds, and what it said last is printed. Then all start again,
    up to `restarts` times, unless it was a mistake (code 2), or somebody asked for the end. fewest: if less than
    `count`, the process that failed is left out, down to this number. environment: variables for each of the `count`
    places, such as GPUs, of which one is left out with its process.

    SIGTERM and SIGINT are passed on, once to each; a second SIGINT ends all at once. However the launcher ends, the
    processes do not outlive it. Output of the first process is printed as it is, of others with their numbers before
    it. Returns 0, or the exit code of the process that failed first (128 and the number of the signal that ended it).
    """
    events: SimpleQueue[int | Ended] = SimpleQueue()  # signals and deaths; handlers may put into this kind of queue
    places = list(range(count))
    with ExitStack() as stack:
        for one in (signal.SIGTERM, signal.SIGINT):
            stack.callback(signal.signal, one, signal.signal(one, lambda number, frame: events.put(number)))
        read, write = os.pipe()  # the processes see it close when this one ends, however that ends
        stack.callback(os.close, write)
        stack.callback(os.close, read)
        for left in range(restarts, -1, -1):
            job = _Job(command, [environment(place) for place in places], read, events)
            failed = job.outcome()
            if failed is None:
                return 0
            _say(failed, job.asked)
            if not left or job.asked or failed.code == MISTAKE:
                return failed.status
            if fewest is not None and len(places) > fewest:
                del places[failed.index]
            processes.say(
                f"starts again with {len(places)} process{'es' * (len(places) > 1)}, from the last checkpoint: "
                f"restart {restarts - left + 1} of {restarts}"
            )
    raise AssertionError("the last round returns")


class _Job:
    """Processes under way."""

    def __init__(
        self,
        command: Sequence[str],
        environments: Sequence[Mapping[str, str]],
        pipe: int,
        events: SimpleQueue[int | Ended],
    ):
        self.asked = False  # for its end, by a signal
        self._events, self._interrupts = events, 0
        joins = _joining(len(environments))
        self._running = {
            index: _Child(index, command, {**joins(index), **more}, pipe, events)
            for index, more in enumerate(environments)
        }

    def outcome(self) -> Ended | None:
        """Waits until all have ended, which they do soon after one fails. Returns that one, if there is one."""
        failed: list[Ended] = []
        deadline = None
        try:
            while self._running:
                try:
                    event = self._events.get(timeout=None if deadline is None else max(0, deadline - time.monotonic()))
                except Empty:
                    self._kill()
                    deadline = None
                    continue
                if isinstance(event, int):
                    self._pass_on(event)
                    continue
                child = self._running.pop(event.index)
                if event.code and not child.killed:
                    failed.append(event)
                    # One that was ended by a signal could not tell the others, which wait for it.
                    soon = time.monotonic() + (GRACE if event.code > 0 else SETTLE)
                    deadline = soon if deadline is None else min(deadline, soon)
        finally:
            self._kill()
        if self._interrupts > 1:
            return Ended(index=0, code=-signal.SIGINT, said=())
        # JAX aborts a process that has lost another: it is not the one to blame.
        return min(failed, key=lambda one: one.code == -signal.SIGABRT, default=None)

    def _pass_on(self, number: int) -> None:
        self.asked = True
        self._interrupts += number == signal.SIGINT
        if self._interrupts > 1:
            self._kill()
        for child in self._running.values():
            child.send(number)

    def _kill(self) -> None:
        for child in self._running.values():
            child.kill()


class _Child:
    """A process whose output is passed on, and whose end is an event."""

    def __init__(
        self, index: int, command: Sequence[str], more: Mapping[str, str], pipe: int, events: SimpleQueue[int | Ended]
    ):
        self.killed = False
        self._process = subprocess.Popen(
            command,
            env={**os.environ, "PYTHONUNBUFFERED": "1", processes.LAUNCHER: str(pipe), **more},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=[pipe],
            start_new_session=True,  # Ctrl-C in a terminal is the launcher's to pass on
        )
        said: deque[str] = deque(maxlen=KEPT)
        prefix = f"[{index}] " if index else ""
        readers = [
            threading.Thread(target=_pass_on, args=[stream, to, prefix, said], daemon=True)
            for stream, to in ((self._process.stdout, sys.stdout), (self._process.stderr, sys.stderr))
        ]

        def wait() -> None:
            code = self._process.wait()
            for reader in readers:
                reader.join(1)  # its output may be held open by a process of its own
            events.put(Ended(index=index, code=code, said=tuple(said)))

        for thread in (*readers, threading.Thread(target=wait, daemon=True)):
            thread.start()

    def send(self, number: int) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        # What has ended by itself, and is not yet known to have, is not killed.
        if self._process.poll() is None:
            self.killed = True
            self._process.kill()


def _pass_on(stream: BinaryIO, to: TextIO, prefix: str, said: deque[str]) -> None:
    with stream:
        for line in stream:
            if (b"Rank" in line or b"ranks" in line) and NOISE.fullmatch(line):
                continue
            text = line.decode(errors="replace").rstrip("\n")
            said.append(text)
            with _printing, suppress(OSError, ValueError):  # if nobody reads any more, the process must not wait
                to.write(f"{prefix}{text}\n")
                to.flush()


def _joining(count: int) -> Callable[[int], Mapping[str, str]]:
    """What tells each process how to join the others."""
    if count == 1:
        return lambda index: {cluster.COUNT: "1"}
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    # JAX would listen on all interfaces, to anyone.
    common = {cluster.ADDRESS: address, "JAX_COORDINATOR_BIND_ADDRESS": address, cluster.COUNT: str(count)}
    return lambda index: {**common, cluster.INDEX: str(index)}


def _say(failed: Ended, asked: bool) -> None:
    if failed.code == MISTAKE:  # which is said in a line already
        return
    if asked and failed.code in (-signal.SIGTERM, -signal.SIGINT):
        processes.say("stopped")
        return
    lines = "".join(f"\n    {line}" for line in failed.said)
    processes.say(f"{failed}, and the job with it" + (f". Its last lines:{lines}" if lines else "; it printed nothing"))
