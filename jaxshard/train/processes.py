"""Several processes that train as one: they start together, agree on what they run, and end together.

They speak through the key-value store of JAX's coordination service, which lives in process 0.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import logging
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

import jax
from jax._src import distributed  # JAX has no public way to its key-value store
from jax.errors import JaxRuntimeError

from jaxshard.train import cluster
from jaxshard.train.config import ConfigError

LAUNCHER = "JAXSHARD_LAUNCHER"
"""The variable that names a pipe whose other end the launcher holds."""
FAILED, GONE = "failed", "gone"
LOOK = 0.5
"""Seconds between two looks at whether another process has failed."""
GRACE = 3.0
"""Seconds for a process to leave by itself, once another has failed."""
GOODBYE = 5.0
"""Seconds that process 0 stays when it fails, so that the others can read why."""

_lock, _leaving = threading.Lock(), threading.Event()
_rounds: Counter[str] = Counter()
_watched: list[int] = []
_code: int | None = None  # what this process ends with, once it or another has failed


class Disagreement(ConfigError):
    """The processes do not run the same thing, or one of them has stopped."""


def initialize(*, heartbeat_seconds: int = 8, start_seconds: int = 300) -> None:
    """Joins the other processes of the job, if there are any. Must run before JAX is first used.

    They are found by JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID if they are set, as `jaxshard
    launch` does, and otherwise as JAX detects clusters: Slurm, Open MPI, Kubernetes, TPUs. A second call does nothing.

    heartbeat_seconds: a process that has died without a word ends the others after this time, and about a second.
    start_seconds: how long to wait for all processes to come.

    Raises ConfigError when the variables contradict each other, and where JAX has already started.
    """
    _end_with_the_launcher()
    if not jax.distributed.is_initialized():
        job = cluster.found()
        if job is None:
            return
        # It takes SIGTERM and tells nobody but who asks it, so that a process that starts could not be stopped.
        jax.config.update("jax_enable_preemption_service", False)
        waiting = threading.Timer(10, say, [f"waits for all processes of the job to start ({job.name})"])
        waiting.daemon = True
        waiting.start()
        try:
            jax.distributed.initialize(
                **job.arguments, heartbeat_timeout_seconds=heartbeat_seconds, initialization_timeout=start_seconds
            )
        except (ValueError, RuntimeError) as error:
            if job.certain:
                raise ConfigError(f"cannot join the job ({job.name}): {_one_line(error)}") from error
            return
        finally:
            waiting.cancel()
    with _lock:
        if count() > 1 and not _watched:
            _watched.append(os.getpid())
            atexit.register(_at_exit)
            threading.Thread(target=_watch_the_others, name="jaxshard: other processes", daemon=True).start()


def count() -> int:
    """How many processes there are. Does not start JAX."""
    return distributed.global_state.num_processes if jax.distributed.is_initialized() else 1


def index() -> int:
    """Which of the processes this is, from 0. Does not start JAX."""
    return distributed.global_state.process_id if jax.distributed.is_initialized() else 0


def is_first() -> bool:
    """Whether this is the process that prints and writes metrics. Does not start JAX."""
    return index() == 0


def publish(folder: str, value: str) -> None:
    """Makes a text of this process known to all, once. Raises ConnectionError if process 0 cannot be reached."""
    with _reaching():
        _client().key_value_set(f"jaxshard/{folder}/{index()}", value, allow_overwrite=True)


def published(folder: str) -> dict[int, str]:
    """The texts that processes have made known, by process. Raises ConnectionError."""
    with _reaching():
        pairs = _client().key_value_dir_get(f"jaxshard/{folder}/")
    return {int(key.rpartition("/")[2]): value for key, value in pairs}


def agree(topic: str, facts: Mapping[str, Any], *, seconds: float = 10) -> None:
    """Compares facts with those of all other processes; every process calls it, with the same topics in the same order.

    topic: what they are, such as ``configuration``. facts: nested dicts of what JSON can say. seconds: how long to wait
    for the slowest.

    Raises Disagreement, on every process, which names a process that has something else, or did not come, or has
    failed (see `told_to_others`).
    """
    if count() == 1:
        return
    said = json.dumps(facts, sort_keys=True)
    _rounds[topic] += 1
    place = f"agree/{topic}/{_rounds[topic]}"
    # Facts can be long, and n processes that read those of n others are a lot for process 0 to send.
    publish(f"{place}/facts", said)
    publish(f"{place}/digest", hashlib.sha256(said.encode()).hexdigest())
    digests = _wait_for_all(f"{place}/digest", topic, seconds)
    others = [one for one in sorted(digests) if digests[one] != digests[0]]
    if others:
        texts = published(f"{place}/facts")
        raise Disagreement(
            f"{difference(others, json.loads(texts[others[0]]), json.loads(texts[0]))} "
            f"All processes must be started with the same {topic}."
        )
    _raise_if_another_failed()  # it may have lost patience just before this one came


def _wait_for_all(folder: str, topic: str, seconds: float) -> dict[int, str]:
    deadline, pause = time.monotonic() + seconds, 0.005
    while True:
        came = published(folder)
        if len(came) == count():
            return came
        _raise_if_another_failed()
        if time.monotonic() > deadline:
            late = [one for one in range(count()) if one not in came]
            raise Disagreement(
                f"{_named(late)} did not come within {seconds:g} s to compare the {topic}; the others wait. "
                "Look at what it printed last."
            )
        pause = min(2 * pause, 0.2)
        time.sleep(pause)


def difference(others: Sequence[int], theirs: Mapping[str, Any], first: Mapping[str, Any]) -> str:
    """What the first of the `others` has, and process 0 has not: `theirs` against `first`."""
    a, b = _flat(theirs), _flat(first)
    keys = [key for key in sorted({*a, *b}) if a.get(key) != b.get(key)]
    said = [f"{key} = {_short(a[key])}" if key in a else f"no {key}" for key in keys[:1]]
    more = f" ({len(keys) - 1} more differ: {_short(', '.join(keys[1:]))})" if keys[1:] else ""
    also = f"{_named(others)} differ from process 0: " if others[1:] else ""
    return f"{also}process {others[0]} has {said[0]}, and process 0 has {_short(b.get(keys[0], 'none'))}{more}."


def _flat(facts: Mapping[str, Any], where: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for key, value in facts.items():
        nested = isinstance(value, Mapping) and value
        flat |= _flat(value, f"{where}{key}.") if nested else {f"{where}{key}": json.dumps(value, sort_keys=True)}
    return flat


def _short(text: str, most: int = 80) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."


def _named(processes: Sequence[int]) -> str:
    texts = [str(one) for one in processes]
    return f"processes {', '.join(texts[:-1])} and {texts[-1]}" if texts[1:] else f"process {texts[0]}"


@contextmanager
def told_to_others() -> Iterator[None]:
    """Whatever is raised inside is told to the other processes, which stop within seconds and say it.

    It is raised again; but what JAX raises because another process has stopped becomes a Disagreement that says so.
    After that this process ends with a code other than 0, however the caller goes on: with 2 for a ConfigError, 130
    for Ctrl-C, that of a SystemExit, else 1; or as the one that failed first. Put it around all that a process does.
    """
    try:
        yield
    except BaseException as error:
        if count() > 1 and _code_of(error):
            with suppress(ConnectionError):
                if isinstance(error, JaxRuntimeError):
                    _raise_if_another_failed(error)
                _tell(_code_of(error), _one_line(error))
            _end_within(GRACE)
        raise


def _tell(code: int, said: str) -> None:
    global _code
    if _code is None:
        _code = code
        publish(FAILED, json.dumps({"code": code, "said": said}))


def _raise_if_another_failed(cause: BaseException | None = None) -> None:
    message = _another_failed()
    if message:
        raise Disagreement(message) from cause


def _another_failed() -> str | None:
    """What another process said when it failed. Then this one ends with the same code."""
    global _code
    failed = {one: json.loads(said) for one, said in published(FAILED).items() if one != index()}
    if not failed:
        return None
    first = min(failed)
    _code = failed[first]["code"] if _code is None else _code
    return f"process {first} stopped: {failed[first]['said']}"


def _code_of(error: BaseException) -> int:
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    return 2 if isinstance(error, ConfigError) else 130 if isinstance(error, KeyboardInterrupt) else 1


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, ConfigError) else f"{type(error).__name__}: {text}".rstrip(": ")


def _watch_the_others() -> None:
    """Ends this process when another has failed: it would wait for that one in a collective, for ever."""
    with suppress(ConnectionError):  # then JAX ends this process
        while not _leaving.wait(LOOK):
            message = _another_failed()
            if message:
                if not _leaving.wait(GRACE):
                    say(message)
                    _end()
                return


def _end_within(seconds: float) -> None:
    """Python waits for threads before it exits, and one that saves can wait for another process."""
    timer = threading.Timer(seconds, _end)
    timer.daemon = True
    timer.start()


def _at_exit() -> None:
    """Ends a process that has failed before JAX can: its goodbye waits for processes that may hang.

    JAX's own runs after this one, since it was registered before.
    """
    _leaving.set()
    if _code is not None:
        _end()


def _end() -> NoReturn:
    _lock.acquire()  # of two threads the second waits here for the end
    with suppress(ConnectionError):
        publish(GONE, "")
        deadline = time.monotonic() + GOODBYE
        while index() == 0 and len(published(GONE)) < count() and time.monotonic() < deadline:
            time.sleep(0.02)
    leave(_code or 1)


def leave(code: int) -> NoReturn:
    """Ends the process at once: there is no other way while a thread waits in a collective."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    logging.shutdown()
    os._exit(code)


def _end_with_the_launcher() -> None:
    """Watches the launcher's pipe: it closes when the launcher ends, however that ends."""
    pipe = os.environ.pop(LAUNCHER, None)
    if pipe is None:
        return

    def watch(pipe: int) -> None:
        os.read(pipe, 1)
        say("ends because its launcher did")
        leave(1)

    os.set_inheritable(int(pipe), False)
    threading.Thread(target=watch, args=[int(pipe)], name="jaxshard: launcher", daemon=True).start()


def say(message: str) -> None:
    """Prints a line about this process to stderr, if there still is one."""
    with suppress(OSError, ValueError):
        print(f"jaxshard: {message}", file=sys.stderr, flush=True)


def _client() -> Any:
    client = distributed.global_state.client
    if client is None:
        raise ConnectionError("this process has left the others.")
    return client


@contextmanager
def _reaching() -> Iterator[None]:
    try:
        yield
    except JaxRuntimeError as error:
        raise ConnectionError(f"cannot reach process 0: {_short(_one_line(error), 200)}") from error
