"""A run that is asked to stop finishes its step: by SIGTERM, as schedulers do before they take a machine, by Ctrl-C,
or because its terminal was closed."""

from __future__ import annotations

import itertools
import signal
import socket
import threading
from contextlib import suppress
from types import TracebackType
from typing import Any

from jaxshard.train import processes

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
LOOK = 0.5
"""Seconds between two looks at whether another process was asked."""
ANSWER = 0.02
"""Seconds between two looks at how far the others are, once one was asked."""
_END = b"\0"  # no signal has this number

_rounds = itertools.count()


class Stop:
    """Turns signals into a question that is asked after each step. A second SIGINT leaves at once, with code 130.

    Use it in a ``with`` in the main thread; with several processes each of them does. Handlers are put back at the end.
    Raises RuntimeError in another thread, to which Python gives no signals.
    """

    def __init__(self) -> None:
        self._several = processes.count() > 1
        self._folder = f"stop/{next(_rounds)}"
        self._changed = threading.Condition()
        self._step = 0  # the last one that is done
        self._signalled = self._agreeing = False
        self._last: int | None = None  # the step after which all processes stop
        self._interrupts = 0

    def asked(self, step: int) -> bool:
        """Whether to stop after this step. step: its number, which grows by one with every call.

        With several processes all get True after the same step, whichever of them were sent a signal. No message is
        sent for this unless one was; then it waits, once, until every process has said how far it is.
        """
        with self._changed:
            self._step = step
            if not self._several:
                return self._signalled
            self._changed.wait_for(lambda: not self._agreeing)
            return self._last is not None and step >= self._last

    def __enter__(self) -> Stop:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("Stop handles signals, which Python gives to the main thread alone: enter it there.")
        self._read, self._write = socket.socketpair()
        self._write.setblocking(False)
        self._handlers: dict[signal.Signals, Any] = {
            # What `nohup` has a program ignore, it goes on to ignore.
            one: signal.signal(one, self._handle)
            for one in SIGNALS
            if signal.getsignal(one) != signal.SIG_IGN
        }
        # Python runs handlers when the main thread comes back from a compilation or a collective, which can take for
        # ever. What it writes here, in the moment of the signal, a thread can act upon.
        self._wakeup = signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._listen, name="jaxshard: stop", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, where: TracebackType | None) -> None:
        signal.set_wakeup_fd(self._wakeup)
        for one, handler in self._handlers.items():
            signal.signal(one, handler)
        self._write.send(_END)
        self._thread.join()
        self._read.close()
        self._write.close()
        if self._several and self._last is None and not self._agreeing:
            with suppress(ConnectionError):  # for others, which may be asked while they finish their last step
                processes.publish(f"{self._folder}/step", str(self._step))

    def _handle(self, number: int, frame: object) -> None:
        self._signalled = True  # before the main thread does anything else

    def _listen(self) -> None:
        """Hears of signals to this process and, with several, of those to others, until all know when to stop."""
        with suppress(ConnectionError):  # process 0 is gone, and JAX ends this one
            while True:
                waits_for_others = self._several and self._last is None
                self._read.settimeout((ANSWER if self._agreeing else LOOK) if waits_for_others else None)
                with suppress(TimeoutError):
                    numbers = self._read.recv(64)
                    if _END in numbers:
                        return
                    self._hear(numbers)
                if waits_for_others:
                    self._listen_to_others()

    def _hear(self, numbers: bytes) -> None:
        interrupts = numbers.count(signal.SIGINT)
        if self._interrupts + interrupts > 1:
            # The main thread may be where no exception reaches it.
            processes.say("left at once")
            processes.leave(130)
        if interrupts and processes.is_first():
            processes.say("stops after this step, and saves; Ctrl-C again leaves at once")
        self._interrupts += interrupts
        self._signalled |= any(one in numbers for one in SIGNALS)

    def _listen_to_others(self) -> None:
        asked, place = f"{self._folder}/asked", f"{self._folder}/step"
        if not self._agreeing:
            if self._signalled:
                processes.publish(asked, "")
            elif not processes.published(asked):
                return
            with self._changed:
                # From here on this process finishes the step it is in, and no other, until all have said theirs.
                self._agreeing, done = True, self._step
            processes.publish(place, str(done))
        steps = processes.published(place)
        if len(steps) == processes.count():
            with self._changed:
                # Each may be one step further than it said.
                self._last = 1 + max(map(int, steps.values()))
                self._agreeing = False
                self._changed.notify_all()
