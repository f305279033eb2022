"""Functions called in a process of their own, whose JAX sees CPUs alone."""

from __future__ import annotations

import functools
import os
import subprocess
import sys

import pytest

from jaxshard.preflight import process, target
from jaxshard.preflight.process import ProcessError, run


def test_a_function_in_a_process_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    assert run("os:getenv", key="JAX_PLATFORMS") == "cpu"
    script = tmp_path / "script.py"
    script.write_text("def double(x):\n    return {'twice': 2 * x}\n\nassert __name__ != '__main__'\n")
    assert run(f"{script}:double", x=4) == {"twice": 8}
    with pytest.raises(ProcessError, match=r"(?s)json:loads failed .*JSONDecodeError"):
        run("json:loads", s="{")
    with pytest.raises(ProcessError, match="os:_exit ended its process with code 3"):
        run("os:_exit", status=3)


def test_it_ends_with_its_caller(tmp_path):
    """However that ends: nothing may compile on for a command that was killed."""
    script, fifo = tmp_path / "script.py", tmp_path / "fifo"
    script.write_text("def waits(path):\n    open(path).read()\n")
    os.mkfifo(fifo)
    call = f"from jaxshard.preflight.process import run; run({f'{script}:waits'!r}, path={str(fifo)!r})"
    caller = subprocess.Popen([sys.executable, "-c", call], env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    pipe = os.open(fifo, os.O_WRONLY)  # as soon as the function reads
    caller.kill()
    caller.wait()
    with pytest.raises(BrokenPipeError):
        _write_on(pipe)
    os.close(pipe)


def _write_on(pipe: int) -> None:
    while True:
        os.write(pipe, bytes(1 << 16))


def test_functions_that_no_other_process_can_find(monkeypatch):
    assert process.place_of(target.parse) == "jaxshard.preflight.target:parse"
    with pytest.raises(ValueError, match="define it with `def`"):
        run(lambda: 1)
    with pytest.raises(ValueError, match="define it with `def`"):
        run(functools.partial(target.parse, "h100:8"))


@pytest.mark.target
@pytest.mark.skipif(not target.compiler_installed(), reason=f"needs the GPU compiler: {target.INSTALL}")
def test_a_process_that_looked_for_a_gpu(tmp_path):
    """It is told so, and can still have it done in another."""
    script = tmp_path / "script.py"
    script.write_text(
        "import jax\n"
        "from jaxshard.preflight import process, target\n"
        "def count():\n"
        "    return len(target.parse('h100:2x8').devices())\n"
        "if __name__ == '__main__':\n"
        "    jax.devices()\n"
        "    try:\n"
        "        count()\n"
        "    except target.TargetError as error:\n"
        "        print(error)\n"
        "    print('counted', process.run(count))\n"
    )
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=True)
    assert "JAX looked for a GPU when it started" in done.stdout
    assert "counted 16" in done.stdout
