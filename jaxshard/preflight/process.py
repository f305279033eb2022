"""A function called in a Python process of its own, whose JAX sees CPUs alone and has not started.

That is what compiling for absent GPUs needs (see `target`), whatever the caller's own JAX has done. Arguments and
result travel as JSON.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any


class ProcessError(RuntimeError):
    """What went wrong in the other process, with its traceback, and what it printed if it was quiet."""


def run(
    function: Callable[..., Any] | str, /, *, environment: Mapping[str, str] | None = None, **arguments: Any
) -> Any:
    """``function(**arguments)`` in a fresh process with ``JAX_PLATFORMS=cpu``.

    function: one that can be found by its name in its module or script, or its place as text:
    ``"package.module:name"`` or ``"path/script.py:name"``. A script is loaded under a name that is not ``__main__``.
    environment: variables that are set there besides. arguments, and the result: what JSON can say. What it prints is
    printed.

    Raises ValueError for a function that has no such place, and ProcessError if it fails.
    """
    with Call(function, arguments, environment=environment) as call:
        return call.result()


class Call:
    """A call as `run` makes it, under way: `result` waits for it, leaving the ``with`` block ends it.

    quiet: what it prints is kept, and said only if it fails.
    """

    def __init__(
        self,
        function: Callable[..., Any] | str,
        arguments: Mapping[str, Any],
        *,
        environment: Mapping[str, str] | None = None,
        quiet: bool = False,
    ):
        self._place = function if isinstance(function, str) else place_of(function)
        self._folder = tempfile.TemporaryDirectory()
        self._made, self._said = Path(self._folder.name, "made"), Path(self._folder.name, "said")
        with self._said.open("wb") as said:
            self._process = subprocess.Popen(
                # -P: a script's folder is not searched for modules, and this one's has names of its own.
                [sys.executable, "-P", __file__, self._place, str(self._made)],
                stdin=subprocess.PIPE,
                stdout=said if quiet else None,
                stderr=said if quiet else None,
                env={
                    **os.environ,
                    "JAX_PLATFORMS": "cpu",
                    "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                    **(environment or {}),
                },
                # Ctrl-C in a terminal is the caller's to deal with.
                start_new_session=True,
                text=True,
            )
        assert self._process.stdin is not None
        # It stays open: the other process ends when this one does, however that ends.
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(arguments) + "\n")
            self._process.stdin.flush()

    def __enter__(self) -> Call:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._folder.cleanup()

    def stop(self) -> None:
        """Ends the process, if it is still there."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()

    def result(self) -> Any:
        """Waits for the function's result. Raises ProcessError if it failed, or its process was ended."""
        code = self._process.wait()
        if not self._made.exists():
            raise ProcessError(_ended(self._place, code) + "\n" + self._said.read_text(errors="replace"))
        outcome = json.loads(self._made.read_text())
        if "error" in outcome:
            raise ProcessError(f"{outcome['summary']}\n{self._place} failed in its own process:\n{outcome['error']}")
        return outcome["result"]


def _ended(place: str, code: int) -> str:
    if code >= 0:
        return f"{place} ended its process with code {code} before it gave a result."
    why = " (was there memory enough?)" if -code == signal.SIGKILL else ""
    return f"{place}: its process was ended by {signal.Signals(-code).name}{why}."


def place_of(function: Callable[..., Any]) -> str:
    name, module = getattr(function, "__qualname__", "<"), getattr(function, "__module__", None)
    if module is None or "<" in name:
        raise ValueError(
            f"{function!r} cannot be found by name in another process; define it with `def` at the top of a module "
            "or script."
        )
    if module != "__main__":
        return f"{module}:{name}"
    script = getattr(sys.modules["__main__"], "__file__", None)
    if script is None:
        raise ValueError(f"{name} was typed into an interpreter; another process finds only what stands in a file.")
    return f"{Path(script).resolve()}:{name}"


def load(place: str) -> Callable[..., Any]:
    where, _, name = place.rpartition(":")
    if where.endswith(".py"):
        spec = importlib.util.spec_from_file_location("_script", where)
        if spec is None or spec.loader is None:
            raise ImportError(f"{where} is no Python file.")
        module = importlib.util.module_from_spec(spec)
        sys.modules["_script"] = module
        sys.path.insert(0, str(Path(where).parent))
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(where)
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            raise ValueError(f"{where} has no function {name!r}.")
        found = getattr(found, part)
    return found


def _summary(error: BaseException) -> str:
    """``ValueError: what, in build (mine.py:12)``: an error, in one line, and where it came from."""
    said = f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(": ")
    frames = [one for one in traceback.extract_tb(error.__traceback__) if one.filename != __file__]
    return f"{said}, in {frames[-1].name} ({frames[-1].filename}:{frames[-1].lineno})" if frames else said


def _end_with_the_caller() -> None:
    sys.stdin.read()
    os._exit(1)


def _main(place: str, result: str) -> None:
    arguments = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_the_caller, daemon=True).start()
    try:
        outcome = {"result": load(place)(**arguments)}
        said = json.dumps(outcome)
    except (Exception, SystemExit) as error:
        said = json.dumps({"error": traceback.format_exc(), "summary": _summary(error)})
    Path(result).write_text(said)


if __name__ == "__main__":
    _main(*sys.argv[1:])
