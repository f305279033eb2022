"""A thread that says what a run waits for, when something takes far longer than usual."""

from __future__ import annotations

import re
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from typing import TextIO

from jaxshard.train import processes

MEMORY = 512
"""How many of the latest intervals count as usual: on GPUs only the few steps whose metrics are read are waited for."""


class Watchdog:
    """Prints the stacks of all threads when nothing was begun for long, once; and says when it goes on.

    Use it in a ``with`` around a run, which calls `at` when it begins something.

    times: long is this many times the longest of the latest intervals; 0: never. least_seconds: and at least this.
    first_seconds: and at least this the first time that something of a kind is begun, because that may compile; it does
    not count as usual. file: None: stderr. clock: seconds.
    """

    def __init__(
        self,
        *,
        times: float = 20.0,
        least_seconds: float = 60.0,
        first_seconds: float = 600.0,
        file: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        for name, value in {"times": times, "least_seconds": least_seconds, "first_seconds": first_seconds}.items():
            if not value >= 0:
                raise ValueError(f"Watchdog({name}={value}): it must be 0 or more.")
        self._times, self._least, self._first, self._file, self._clock = (
            times,
            least_seconds,
            first_seconds,
            file,
            clock,
        )
        self._usual: deque[float] = deque(maxlen=MEMORY)
        self._kinds: set[str] = set()
        self._now: tuple[str, float, bool] | None = None  # what, since when, whether it is the first of its kind
        self._stalled = self._ended = False
        self._moved = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="jaxshard: watchdog", daemon=True)

    def at(self, what: str) -> None:
        """Something begins, such as ``step 41``; what was begun before has ended. Things that differ in their numbers
        alone are of one kind."""
        now, before = self._clock(), self._now
        kind = re.sub(r"\d+", "", what)
        self._now = (what, now, kind not in self._kinds)
        self._kinds.add(kind)
        if before and not before[2]:
            self._usual.append(now - before[1])
        if self._stalled:
            self._moved.set()

    def __enter__(self) -> Watchdog:
        if self._times:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended = True
        self._moved.set()
        if self._times:
            self._thread.join()

    def limit(self, first: bool) -> float:
        """After how many seconds something takes long. first: whether it is the first of its kind."""
        return max(self._least, self._first if first else 0, self._times * max(tuple(self._usual), default=0))

    def _watch(self) -> None:
        while not self._ended:
            now = self._now
            left = self.limit(now[2]) - (self._clock() - now[1]) if now else self._least
            if left > 0:
                self._moved.wait(min(left, self._least or left))  # what begins meanwhile can have a shorter limit
                self._moved.clear()
            elif now:
                self._report(now)

    def _report(self, now: tuple[str, float, bool]) -> None:
        """Says that something takes long; then waits until it is over, and says so."""
        what, since, first = now
        self._stalled = True
        if self._now is now:
            usual = tuple(self._usual)
            longest = f"the longest of the last {len(usual)} took {_seconds(max(usual))}" if usual else ""
            known = longest if longest and not first else "it is the first of its kind"
            self._print(f"{what} has taken {_seconds(self._clock() - since)} so far; {known}. Threads:\n{stacks()}")
            while self._now is now and not self._ended:
                self._moved.wait()
                self._moved.clear()
            self._print(f"{what} went on, after {_seconds(self._clock() - since)}")
        self._stalled = False

    def _print(self, message: str) -> None:
        which = f"process {processes.index()}: " if processes.count() > 1 else ""
        print(f"jaxshard: {which}{message}", file=self._file or sys.stderr, flush=True)


def stacks() -> str:
    """Where every thread but the calling one is, the main thread last."""
    # faulthandler would say the same, without the threads' names, and to real files alone.
    names = {one.ident: one.name for one in threading.enumerate()}
    frames = {key: frame for key, frame in sys._current_frames().items() if key != threading.get_ident()}
    main = threading.main_thread().ident
    return "\n".join(
        f"thread {names.get(key, key)}:\n{''.join(traceback.format_stack(frames[key]))}"
        for key in sorted(frames, key=lambda key: key == main)
    )


def _seconds(value: float) -> str:
    return f"{value:.0f} s" if value >= 10 else f"{value:.2g} s"
