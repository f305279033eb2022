"""The largest model: the search, a whole answer on a CPU device, and 40 billion parameters on an H200.

Oracles: a search by trying every size, the shapes that the model itself says, and 12 bytes for each parameter.
"""

from __future__ import annotations

import importlib.util
import json
import math
import resource
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import pytest
from quick import QUICK

import jaxshard as js
from jaxshard.models import gpt
from jaxshard.preflight import compare, line, process, target
from jaxshard.preflight.records import to_json
from jaxshard.train import build as training

SCRIPT = Path(__file__).parents[1] / "examples" / "largest_model.py"
spec = importlib.util.spec_from_file_location("largest_model", SCRIPT)
assert spec is not None
assert spec.loader is not None
script = importlib.util.module_from_spec(spec)
sys.modules["largest_model"] = script
spec.loader.exec_module(script)

SMALL = {"sequence": 32, "batch": 2, "vocab": 64}


def in_this_process(place, where, cases, *, arguments, cache):
    """As `compare.compare`, without processes of their own and without what was found before."""
    return (line.examine(process.load(place), case, where, None, arguments, None) for case in cases)


@pytest.fixture
def ask(monkeypatch, capsys):
    """Runs the script's main with these arguments, and gives what it prints."""
    monkeypatch.setattr(training, "parallelize", partial(js.parallelize, compiler_options=QUICK))
    monkeypatch.setattr(compare, "compare", in_this_process)
    monkeypatch.setattr(process, "run", lambda function, environment, **arguments: function(**arguments))

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["largest_model.py", *map(str, arguments)])
        with jax.numpy_dtype_promotion("standard"):  # JAX lowers products of bfloat16 to float32, which strict forbids
            script.main()
        return capsys.readouterr()

    return run


@pytest.mark.parametrize("first", [1, 10, 60, 500])
def test_the_search_finds_what_trying_every_size_finds(first):
    for bound in (0.5, 1, 2, 3.7, 20, 59.5, 95, 96, 300):
        tried = []

        def used(layers, bound=bound, tried=tried):
            tried.append(layers)
            return (layers**3 + 5 * layers) / (bound**3 + 5 * bound)

        found = script.largest(used, first)
        assert found == max((n for n in range(1, script.LAST + 1) if n <= bound), default=0)
        assert len(tried) <= 6
        assert len(tried) == len(set(tried))


def test_parameters_are_counted_as_the_model_has_them():
    for layers in (1, 3):
        model = script.config_of(layers, **SMALL).model
        shapes = jax.eval_shape(lambda key, model=model: gpt.init(model, key), jax.random.key(0))
        sizes = [math.prod(x.shape) for x in jax.tree.leaves(shapes)]
        assert script.parameters(layers, sequence=SMALL["sequence"], vocab=SMALL["vocab"]) == sum(sizes)
        assert script.array_bytes(layers) == 4 * max(sizes)


def test_a_whole_answer_on_a_device_of_16_mib(ask, monkeypatch):
    """Without offload one layer fits, with it the two of the largest model; after real steps of both."""
    monkeypatch.setattr(script, "LAST", 2)
    sizes = [word for name, value in SMALL.items() for word in (f"--{name}", value)]
    said = ask(
        "--target", "cpu:1", "--memory-gib", 1 / 64, *sizes, "--steps", 1, "--only", "none/full", "opt+params/full"
    )
    rows = {words[0]: words[1:] for words in map(str.split, said.out.splitlines()) if words}
    assert rows["none/full"][:3] == ["1", "0.000211", "B"]
    assert rows["opt+params/full"][:3] == ["2", "0.0016", "B"]
    assert rows["none/full"][-2:] == ["1", "x"]  # it is what the other is compared with
    assert float(rows["opt+params/full"][-2]) > 0
    assert "none/full: device memory: 2 layers hold" in said.out
    assert "opt+params/full: the family ends at 2 layers" in said.out
    losses = [
        float(loss) for one in said.err.splitlines() if "losses" in one for loss in one.split("[")[1][:-1].split(", ")
    ]
    assert len(losses) == 3 * 2
    assert losses == pytest.approx([math.log(64)] * 6, rel=0.2)


def test_steps_are_refused_before_anything_is_made_when_the_host_has_no_room(monkeypatch):
    monkeypatch.setattr(script, "available", lambda: 2**20)
    with pytest.raises(MemoryError, match=r"0\.0\d+ GiB of the host's memory are needed, and 0\.001 are free"):
        script.trained(to_json(script.CASES["opt+params/full"]), 1, SMALL, 1, "cpu:1")


def test_making_the_states_bounds_the_search_as_well():
    """Of a device with room for any step: on a host with room for the states of two layers, and for their largest array
    once more; on a device with room for the largest array of three."""

    def compiled(case, layers):
        states = 12 * script.parameters(layers, sequence=32, vocab=64)
        return line.Row(line=script.CASES[case], held={"params": 1}, host={"opt": states})

    two = script.host_bytes(12 * script.parameters(2, sequence=32, vocab=64), 2)
    found = script.find("opt+params/full", compiled, script.Room(device=1e12, host=two))
    assert found.layers == 2
    assert found.limit.startswith("host memory: 3 layers need")
    made = script.find("opt+params/full", compiled, script.Room(device=script.array_bytes(3), host=math.inf))
    assert made.layers == 3
    assert made.limit.startswith("device memory: one array of 4 layers is")
    endless = script.find("opt+params/full", compiled, script.Room(device=1e12, host=math.inf))
    assert (endless.layers, endless.limit) == (script.LAST, f"the family ends at {script.LAST} layers")


def test_a_gpu_of_this_machine_is_found_in_another_process_and_its_steps_may_take_it_whole(monkeypatch):
    """JAX sees none here, so a target takes its place, and travels as it would."""
    local = replace(target.parse("h200:1"), name="local", source="local")
    monkeypatch.setattr(process, "run", lambda function, environment: json.loads(json.dumps(to_json(local))))
    monkeypatch.setattr(script, "available", lambda: 480 * 2**30)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    found = script._target(None)
    assert found == local
    assert script.for_steps(found) == {
        "JAX_PLATFORMS": "cuda,cpu",
        "XLA_CLIENT_MEM_FRACTION": "0.95",
        "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB": "480",
    }
    assert script.for_steps(target.parse("cpu:1")) == {}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "JAX sees no GPU here"),
        (("--target", "h300"), "did you mean h"),
        (("--target", "h200:2"), "2 devices; name one, such as h200:1"),
        (("--target", "cpu:1"), "Add --memory-gib"),
    ],
)
def test_what_can_not_be_answered_is_one_line(ask, arguments, said):
    with pytest.raises(SystemExit, match=said) as left:
        ask(*arguments)
    assert len(str(left.value).splitlines()) == 1


@pytest.mark.target
@pytest.mark.skipif(not target.compiler_installed(), reason=f"needs the GPU compiler's wheels: {target.INSTALL}")
def test_40_billion_parameters_fit_on_an_h200():
    """A model of half a terabyte, compiled in a process of a gigabyte or two."""
    h200, sizes = target.parse("h200:1"), {"sequence": 2048, "vocab": 50304}
    size = script.parameters(59, **sizes)
    assert size > 40e9
    arguments = {"layers": 59, "batch": 1, **sizes}
    (row,) = compare.compare(f"{SCRIPT}:build", h200, [script.CASES["opt+params/full"]], arguments=arguments)
    assert row.problem == ""
    free = compare.room(row, h200)
    assert free is not None
    assert free > 0
    assert row.in_host == pytest.approx(12 * size, rel=1e-3)
    assert row.host["params"] == 4 * size
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 < 4 * 2**30
