"""Strategies side by side: what is asked, in which order it is shown, and rows made in processes of their own."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from jaxshard.cli import main
from jaxshard.preflight import compare as comparison
from jaxshard.preflight import target
from jaxshard.preflight.compare import RESERVED, asked, ranked, room
from jaxshard.preflight.line import Line, Row, examine
from jaxshard.preflight.records import from_json, to_json
from jaxshard.preflight.show import show
from jaxshard.preflight.timeline import Timeline

SCRIPT = """
import jax, jax.numpy as jnp, optax
import jaxshard as js

PARAMS = {"w": jax.ShapeDtypeStruct((2, 64, 64), jnp.float32), "b": jax.ShapeDtypeStruct((3,), jnp.float32)}

def loss(params, batch):
    x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), batch, params["w"])
    return jnp.mean(x**2) + jnp.sum(params["b"] ** 2)

def build(mesh, strategy, accumulate=1):
    batch = jax.ShapeDtypeStruct((8, 64), jnp.float32)
    return js.parallelize(
        loss, optax.adamw(1e-3), params=PARAMS, batch=batch, mesh=mesh, strategy=strategy, accumulate=accumulate
    )

def broken(mesh, strategy):
    raise ValueError("no [/such]\\nmodel")

def silent(mesh, strategy):
    raise NotImplementedError

def killed(mesh, strategy):
    import os, signal
    os.kill(os.getpid(), signal.SIGKILL)

def asserts(mesh, strategy):
    assert mesh is None, "a mesh"

def waits(mesh, strategy):
    open("FIFO").read()
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(SCRIPT)
    return path


def test_every_combination_that_means_something():
    lines = asked(("ddp", "zero3", "dp"), {"regather": [True, False], "accumulate": [1, 4]})
    assert list(map(str, lines)) == [
        # ddp gathers nothing, and dp is one program whatever is asked of it.
        "ddp regather=true accumulate=1",
        "ddp regather=true accumulate=4",
        "zero3 regather=true accumulate=1",
        "zero3 regather=true accumulate=4",
        "zero3 regather=false accumulate=1",
        "zero3 regather=false accumulate=4",
        "dp regather=true accumulate=1",
    ]
    # Of ddp, too, prefer changes what the compiler is asked for.
    assert len(asked(("ddp",), {"prefer": ["speed", "memory"]})) == 2
    strategy, options = lines[4].resolve()
    assert (strategy.regather, options) == (False, {"accumulate": 1})
    with pytest.raises(ValueError, match="zero3"):
        asked(("zero33",))


def timed(seconds: float) -> Timeline:
    return Timeline(
        seconds=seconds,
        compute=seconds,
        matmul=seconds,
        memory=0.0,
        messages=0.0,
        exposed=0.0,
        host=0.0,
        exposures={},
        passes=(),
        slowest=(),
    )


def test_the_order_and_the_room():
    h100s = target.parse("h100:8")
    assert h100s.device is not None
    capacity = h100s.device.memory
    fits = Row(line=Line(strategy="zero3"), held={"params": 10**9, "activations": 10**9}, timeline=timed(0.3))
    faster = replace(fits, line=Line(strategy="zero2"), timeline=timed(0.2))
    large = replace(fits, line=Line(strategy="ddp"), held={"params": capacity}, timeline=timed(0.1))
    plan = replace(fits, line=Line(strategy="dp"), timeline=None, compiled=False)
    broken = Row(line=Line(strategy="hsdp"), problem="no")
    order = [row.line.strategy for row in ranked([broken, plan, large, fits, faster], h100s)]
    assert order == ["zero2", "zero3", "dp", "ddp", "hsdp"]
    assert room(fits, h100s) == round(capacity * (1 - RESERVED)) - 2 * 10**9
    assert room(large, h100s) == round(capacity * (1 - RESERVED)) - capacity < 0
    assert room(broken, h100s) is None
    assert room(fits, target.parse("cpu:8")) is None


def test_a_row_travels_as_json():
    row = Row(line=Line(strategy="zero3", options={"regather": False}), held={"params": 4}, timeline=timed(0.5))
    assert from_json(Row, json.loads(json.dumps(to_json(row)))) == row


def test_rows_of_a_script_and_their_cache(script, tmp_path):
    cpus, cache = target.parse("cpu:2"), tmp_path / "cache"
    lines = asked(("dp", "zero3"), {"accumulate": [1, 3]})
    place = f"{script}:build"
    rows = {str(row.line): row for row in comparison.compare(place, cpus, lines, cache=cache)}
    weights = 4 * 2 * 64 * 64
    zero3 = rows["zero3 accumulate=1"]
    assert zero3.held["params"] == weights // 2 + 12
    assert zero3.held["opt"] == 2 * (weights // 2 + 12) + 4
    assert zero3.peak == sum(zero3.held.values()) > 3 * weights // 2
    assert [(one.path, one.shape) for one in zero3.whole] == [("b", (3,))]
    assert zero3.wire_bytes == sum(one.wire_bytes for one in zero3.sent) > 0
    assert not zero3.broken
    assert zero3.timeline is None
    assert "a batch of 8 does not divide" in rows["zero3 accumulate=3"].problem
    assert rows["dp accumulate=1"].compiled is False
    # Both gradients lie on the first device.
    assert rows["dp accumulate=1"].held["gradients"] == 2 * (weights + 12)

    # From the cache: what stands there is what comes back; a damaged one is made anew.
    (kept,) = cache.glob("*.json")
    marked = json.loads(kept.read_text()) | {"seconds": 12345.0}
    kept.write_text(json.dumps(marked))
    (again,) = comparison.compare(place, cpus, [lines[1]], cache=cache)
    assert again == replace(zero3, seconds=12345.0)
    kept.write_text("{")
    assert examine(_loaded(script), lines[1], cpus, None, {}, cache).held == zero3.held
    assert json.loads(kept.read_text())["seconds"] != 12345.0


def test_what_went_wrong_is_said_in_a_line(script, capsys):
    cpus, (line,) = target.parse("cpu:2"), asked(("zero3",))

    def problem(name):
        (row,) = comparison.compare(f"{script}:{name}", cpus, [line], workers=1)
        show(Console(width=80), [row], cpus)
        assert capsys.readouterr().out == f"zero3: {row.problem}\n"
        return row.problem

    assert problem("broken") == "no [/such] model"
    assert problem("silent") == "NotImplementedError"
    assert problem("killed").endswith("its process was ended by SIGKILL (was there memory enough?).")
    assert problem("asserts") == f"AssertionError: a mesh, in asserts ({script}:28)"
    assert problem("absent").endswith("mine.py has no function 'absent'.")


def test_a_cache_that_cannot_be_written_costs_no_row(script, tmp_path):
    (line,) = asked(("zero3",))
    place = tmp_path / "file"
    place.write_text("")
    row = examine(_loaded(script), line, target.parse("cpu:2"), None, {}, place / "cache")
    assert row.held["params"] > 0
    assert row.notes[-1].startswith("not kept in the cache")


def _loaded(script: Path):
    space: dict = {}
    exec(compile(script.read_text(), str(script), "exec"), space)
    return space["build"]


def test_leaving_early_ends_the_processes(script, tmp_path, monkeypatch):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    script.write_text(SCRIPT.replace("FIFO", str(fifo)))
    calls = []
    real = comparison.start
    monkeypatch.setattr(comparison, "start", lambda *args, **more: calls.append(real(*args, **more)) or calls[-1])
    lines = asked(("zero3", "ddp"))
    rows = comparison.compare(f"{script}:waits", target.parse("cpu:2"), lines[:1], workers=1)
    broken = comparison.compare(f"{script}:broken", target.parse("cpu:2"), lines[1:], workers=1)
    assert next(broken).problem == "no [/such] model"

    def interrupted(_):
        with fifo.open("w"):  # opens as soon as the other process reads
            raise KeyboardInterrupt

    monkeypatch.setattr(comparison, "as_completed", interrupted)
    with pytest.raises(KeyboardInterrupt):
        next(rows)
    assert len(calls) == 2
    assert all(call._process.poll() is not None for call in calls)


@pytest.mark.target
@pytest.mark.skipif(not target.compiler_installed(), reason=f"needs the GPU compiler's wheels: {target.INSTALL}")
def test_a_row_of_gpus_that_are_not_there(script):
    row = examine(_loaded(script), Line(strategy="hsdp"), target.parse("h100:2x4"), None, {}, None)
    assert row.mesh == {"replica": 2, "shard": 4}, "the states are copied on each node"
    assert row.timeline is not None
    assert row.timeline.seconds > 0
    assert not row.broken
    assert {one.kind for one in row.sent} == {"all_gather", "reduce_scatter", "all_reduce"}


def config(tmp_path: Path) -> str:
    path = tmp_path / "tiny.toml"
    path.write_text("[model]\nwidth = 32\ncontext = 16\n[data]\nbatch = 8\n")
    return str(path)


def test_the_command_as_json(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    args = ["compare", config(tmp_path), "--target", "cpu:2", "--strategies", "zero1", "dp", "--json"]
    assert main([*args, "--model.layers", "1"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["target"] == "cpu:2"
    assert {row["line"]["strategy"] for row in told["rows"]} == {"zero1", "dp"}
    zero1 = next(row for row in told["rows"] if row["line"]["strategy"] == "zero1")
    params, opt = zero1["held"]["params"], zero1["held"]["opt"]
    assert 0 < opt < 1.1 * params, "two moments of each parameter, split in two"
    assert zero1["peak"] == sum(zero1["held"].values())
    # The same again, as tables, from the cache.
    assert main([*args[:-1], "--model.layers=1"]) == 0
    out = capsys.readouterr().out
    assert "held by one device" in out
    assert "dp: from its plan" in out


@pytest.mark.parametrize(
    ("args", "said"),
    [
        pytest.param([], "compare needs a TOML file", id="nothing"),
        pytest.param(["CONFIG"], "compare needs --target", id="no target"),
        pytest.param(["CONFIG", "--target", "h1000:8"], "did you mean h100?", id="unknown device"),
        pytest.param(["CONFIG", "--target", "h100:12"], "a node has 8 GPUs", id="half a node"),
        pytest.param(["CONFIG", "--target", "cpu:8", "--strategies", "zero9"], "zero9", id="unknown strategy"),
        pytest.param(["CONFIG", "--target", "cpu:8", "--workers", "0"], "--workers 0", id="no workers"),
        pytest.param(
            ["CONFIG", "--target", "cpu:8", "--model.withd", "8"], "did you mean model.width?", id="unknown key"
        ),
        pytest.param(["CONFIG", "--target", "cpu:8", "--stratgies", "zero3"], "strategies", id="unknown option"),
        pytest.param(["CONFIG", "--target", "cpu:8", "--html", "nowhere/a.html"], "there is no folder", id="no folder"),
        pytest.param(["absent.toml", "--target", "cpu:8"], "cannot read absent.toml", id="no file"),
        pytest.param(["absent.py:build", "--target", "cpu:8"], "cannot read absent.py", id="no script"),
    ],
)
def test_mistakes(args, said, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = config(tmp_path)
    assert main(["compare", *(path if one == "CONFIG" else one for one in args)]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert said in captured.err
    assert captured.out == ""
