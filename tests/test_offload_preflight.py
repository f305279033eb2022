"""What preflight says of host memory: what lies there, what crosses the link to it each way, and how long that takes.

Oracles: sizes and seconds by hand, for compiled texts kept from both releases of JAX and for texts such as XLA writes;
for a whole step the bytes of Adam's moments, each of which is brought to the devices and taken back once.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cache

import jax
import optax
import pytest
from golden.programs import SIZES
from quick import quick
from rich.console import Console
from test_compare import SCRIPT, _loaded
from test_preflight_hlo import SOURCES, text_of
from test_preflight_ledger import LAYERS, MIXED, VOCAB, WIDTH, TOKENS_BxT, gpu_compiler, init, loss
from test_preflight_timeline import DEVICE, DOT, NODE, lanes, of

import jaxshard as js
from jaxshard.cli import main
from jaxshard.compiled import hlo
from jaxshard.preflight import estimate, plots, target, timelines
from jaxshard.preflight.compare import asked, room
from jaxshard.preflight.examine import examined
from jaxshard.preflight.idle import idle
from jaxshard.preflight.lanes import Event
from jaxshard.preflight.ledger import RESIDUAL, Transferred, books, ledger
from jaxshard.preflight.line import Line, Row, examine
from jaxshard.preflight.plan import plan
from jaxshard.preflight.records import from_json, to_json
from jaxshard.preflight.show import GIB, memory_table, show, step_table
from jaxshard.preflight.timeline import Pass, timeline
from jaxshard.preflight.work import work
from jaxshard.strategy import named, offload
from jaxshard.train import costs
from jaxshard.train.config import Config, ConfigError, parse

MIB = 2**20

# What crosses the link


def crossed(text: str) -> tuple[int, int, int]:
    """(to the device, to the host, what the host's processor reads and writes) in a step."""
    done = work(hlo.parse(text))
    return tuple(sum(getattr(one, name) * one.times for one in done) for name in ("to_device", "to_host", "on_host"))  # pyright: ignore[reportReturnType]


@pytest.mark.parametrize("source", SOURCES)
def test_a_streamed_update_crosses_once_each_way(source):
    """A momentum of 1 MiB on each device, in a loop over its layers; what is updated in place does not move."""
    assert crossed(text_of("streamed", source)) == (MIB, MIB, 0)


@pytest.mark.parametrize("source", SOURCES)
def test_what_the_host_computes_does_not_cross(source):
    """Gradients and parameters go there, and parameters come back, of 1 MiB each. The new momentum is copied to where
    the old one was, by the device. The host reads three arrays and writes two."""
    assert crossed(text_of("on_host", source)) == (2 * MIB, 3 * MIB, 5 * MIB)


KERNELS = """
%sum (a: f32[8,128], b: f32[8,128]) -> f32[8,128] {
  %a = f32[8,128]{1,0} parameter(0)
  %b = f32[8,128]{1,0} parameter(1)
  ROOT %total = f32[8,128]{1,0} add(%a, %b)
}
%row (h: f32[8,128], at: s32[]) -> f32[1,128] {
  %h = f32[8,128]{1,0} parameter(0)
  %at = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %taken = f32[1,128]{1,0} dynamic-slice(%h, %at, %zero), dynamic_slice_sizes={1,128}
}
%put (h: f32[8,128], x: f32[1,128], at: s32[]) -> f32[8,128] {
  %h = f32[8,128]{1,0} parameter(0)
  %x = f32[1,128]{1,0} parameter(1)
  %at = s32[] parameter(2)
  %zero = s32[] constant(0)
  ROOT %new = f32[8,128]{1,0:S(5)} dynamic-update-slice(%h, %x, %at, %zero)
}
ENTRY %main (d: f32[8,128], h: f32[8,128], n: s32[]) -> f32[8,128] {
  %d = f32[8,128]{1,0} parameter(0)
  %h = f32[8,128]{1,0:S(5)} parameter(1)
  %n = s32[] parameter(2)
  %room = f32[8,128]{1,0:S(5)} custom-call(), custom_call_target="AllocateBuffer"
  %read = f32[8,128]{1,0} fusion(%h, %d), kind=kLoop, calls=%sum
  %written = f32[8,128]{1,0:S(5)} copy(%d)
  %one = f32[1,128]{1,0} fusion(%h, %n), kind=kLoop, calls=%row
  %back = f32[8,128]{1,0:S(5)} fusion(%h, %one, %n), kind=kLoop, calls=%put
  %moved = f32[8,128]{1,0:S(5)} copy(%back)
  ROOT %out = f32[8,128]{1,0} copy(%moved)
}
"""


def test_kernels_that_read_and_write_host_memory_themselves():
    row, whole = 128 * 4, 8 * 128 * 4
    done = {one.name: (one.bytes, one.to_device, one.to_host) for one in work(hlo.parse(KERNELS))}
    assert done == {
        "room": (0, 0, 0),
        "read": (2 * whole, whole, 0),
        "written": (whole, 0, whole),
        "one": (row + 4, row, 0),
        "back": (row + 4, 0, row),
        "moved": (0, whole, whole),
        "out": (whole, whole, 0),
    }


# How long it takes. The device of these texts has a link of 1e5 bytes/s: 25000 floats take a second one way.

FETCH = "(f32[25000]{0}, f32[25000]{0:S(5)}, u32[]) copy-start(%there)"
PUT = "(f32[25000]{0:S(5)}, f32[25000]{0}, u32[]) copy-start(%here)"
BOTH = f"""
    %there = f32[25000]{{0:S(5)}} constant({{...}})
    %here = f32[25000]{{0}} constant({{...}})
    %fetch = {FETCH}
    %put = {PUT}
"""


def test_transfers_pass_each_other_on_the_link():
    found = of(f"""{BOTH}
        %more = {FETCH}
        %dot = f32[100,100]{{1,0}} {DOT}
        %put-done = f32[25000]{{0:S(5)}} copy-done(%put)
        %fetch-done = f32[25000]{{0}} copy-done(%fetch)
        %more-done = f32[25000]{{0}} copy-done(%more)
    """)
    assert lanes(found) == [
        ("fetch", "to device", 0, 1),
        ("put", "to host", 0, 1),
        ("more", "to device", 1, 1),
        ("dot", "compute", 0, 0.5),
    ]
    assert (found.seconds, found.compute, found.host) == (2, 0.5, 1.5)
    assert (found.to_device, found.to_host, found.bound_by) == (2, 1, "host")


LOOP = """
%body (given: f32[250000]) -> f32[250000] {
  %w = f32[250000]{0} parameter(0)
  %a = bf16[100,100]{1,0} constant({...})
  %b = bf16[100,100]{1,0} constant({...})
TRANSFERS
  %dot = f32[100,100]{1,0} DOT
  %put-done = f32[25000]{0:S(5)} copy-done(%put)
  %fetch-done = f32[25000]{0} copy-done(%fetch)
  ROOT %w2 = f32[250000]{0} bitcast(%w)
}
%more (given: f32[250000]) -> pred[] {
  %given = f32[250000]{0} parameter(0)
  ROOT %yes = pred[] constant(true)
}
""".replace("DOT", DOT)
WHILE = '%loop = f32[250000]{0} while(%w), condition=%more, body=%body, backend_config={"known_trip_count":{"n":"3"}}'


def test_transfers_in_a_loop():
    found = of(WHILE, LOOP.replace("TRANSFERS", BOTH))
    assert (found.seconds, found.compute, found.host, found.to_device, found.to_host) == (3, 1.5, 1.5, 3, 3)


@pytest.mark.parametrize(("transfers", "seconds", "host"), [("", 1.5, 0), (BOTH, 4, 2.5)], ids=["still", "moving"])
def test_a_transfer_under_way_beside_a_loop(transfers, seconds, host):
    """It is hidden where the loop transfers nothing, and where the link is full the loop's own wait for it."""
    found = of(
        f"""
        %before = f32[25000]{{0:S(5)}} constant({{...}})
        %first = {FETCH.replace("there", "before")}
        {WHILE}
        %done = f32[25000]{{0}} copy-done(%first)
        """,
        LOOP.replace("TRANSFERS", transfers),
    )
    assert (found.seconds, found.host) == (seconds, host)


def test_the_hosts_processor_takes_its_time():
    """It gets 100000 bytes from the device, reads 300000 and writes 300000, of which the device gets 100000."""
    call = (
        "((f32[25000]{0}, f32[50000]{0:S(5)}), (f32[25000]{0}, f32[50000]{0:S(5)}), u32[]) custom-call-start("
        '%here, %there), async_execution_thread="host", custom_call_target="HostExecute"'
    )
    text = f"""
        %there = f32[50000]{{0:S(5)}} constant({{...}})
        %here = f32[25000]{{0}} constant({{...}})
        %work = {call}
        %work-done = (f32[25000]{{0}}, f32[50000]{{0:S(5)}}) custom-call-done(%work)
    """
    found = of(text)
    assert lanes(found) == [("work", "to host", 0, 1), ("work", "host", 1, 6), ("work", "to device", 7, 1)]
    assert (found.seconds, found.host, found.to_device, found.to_host) == (8, 8, 1, 1)
    # With memory that is twice as fast as the link.
    fast = replace(NODE, device=replace(DEVICE, host_memory_bandwidth=2e5))
    assert of(text, at=fast).host == 1 + 3 + 1


@pytest.mark.parametrize("source", SOURCES[:2])
def test_a_streamed_update_waits_for_the_link(source):
    """1 MiB each way at 55e9 bytes/s, one after the other in each of four runs, and next to no work beside it."""
    found = timeline(hlo.parse(text_of("streamed", source)), SIZES, target.parse("h100:8"))
    once = MIB / 55e9
    assert (found.to_device, found.to_host) == pytest.approx((once, once))
    assert found.host == pytest.approx(2 * once)
    assert found.compute < 0.1 * found.host
    assert found.bound_by == "host"
    outside, update = sorted(found.passes, key=lambda one: one.name)
    assert (outside.name, update.name, update.times) == ("outside", "update", 4)
    assert [x.label for x in idle(outside, found.passes)] == ["4 x update loop"]
    step, *_, shown = timelines.panels(found)
    assert (step.title, shown.title, shown.run) == ("the step", "update", update)
    with plots.style():
        *_, axes = timelines.draw(found, timelines.scales([found])).axes
    assert {"compute", "to device", "to host"} <= {text.get_text() for text in axes.texts}


def test_a_wait_for_the_link_after_a_loop():
    """2 runs of 2 s, and a transfer of 1 s to the host that starts when they have ended."""
    body = Pass(name="update", loops=("scan",), times=2, seconds=2.0, events=())
    sent = Event(name="put", lane="to host", kind="host", start=5.0, seconds=1.0, label="put")
    kernel = Event(name="add", lane="compute", kind="memory", start=0.0, seconds=1.0, label="add")
    step = Pass(name="outside", loops=(), times=1, seconds=6.0, events=(kernel, sent))
    assert [(x.kind, x.start, x.seconds, x.label) for x in idle(step, (step, body))] == [
        ("loop", 1, 4, "2 x update loop"),
        ("host", 5, 1, ""),
    ]


def test_xla_has_no_time_for_transfers():
    module = hlo.parse(text_of("streamed", SOURCES[0]))
    said = "For computation: {}, module jit_step(1)\nTotal wasted cycles: 0\nTotal cycles: 10000.5\n"
    names = [module.entry.name, *(name for name in module.computations if "region" in name)]
    text = "".join(f"Statistics after scheduling\n{said.format(name)}" for name in names)
    assert "transfers to and from the host's memory" in estimate.missing(text, module)


# The books of a whole step

MOMENTS = 2 * 4 * (2 * VOCAB * WIDTH + LAYERS * WIDTH**2) // 8
"""Bytes on each of 8 devices: two float32 for each parameter."""


@cache
def for_h100s(states: str) -> tuple:
    training = js.parallelize(
        loss,
        optax.adamw(1e-3),
        params=init,
        batch=TOKENS_BxT,
        mesh=target.parse("h100:8").mesh(),
        strategy=offload("zero3", states),
        clip=1.0,
        precision=MIXED,
    )
    assert isinstance(training, js.Training)
    found = examined(training)
    return training, found, books(training, found)


@pytest.mark.target
@gpu_compiler
def test_an_optimizer_state_in_host_memory():
    _, found, made = for_h100s("opt")
    assert made["opt"].compiled == 4, "Adam's count alone stays on the device"
    assert made["opt"].planned == 4
    (opt,) = made.host
    assert (opt.name, opt.planned, opt.compiled) == ("opt", MOMENTS, MOMENTS)
    assert found.facts.host_memory.arguments == MOMENTS
    # Brought to the device once and taken back once.
    assert {(one.direction, one.planned, one.compiled) for one in made.link} == {
        ("to_device", MOMENTS, MOMENTS),
        ("to_host", MOMENTS, MOMENTS),
    }
    # What is in host memory is no part of the peak.
    held = sum(line.compiled or 0 for line in made.held if line.name != "peak")
    assert made["peak"].compiled == held == found.facts.memory.peak
    assert sum(made[each].compiled or 0 for each in RESIDUAL) == found.facts.memory.temps
    assert "over the link to the host in a step" in str(made)


@pytest.mark.target
@gpu_compiler
def test_parameters_in_host_memory():
    """Fetched in the forward pass and again in the backward pass, which does not need the embedding, which is only
    indexed; then all states are updated."""
    _, found, made = for_h100s("opt+params")
    params, embedding = MOMENTS // 2, 4 * VOCAB * WIDTH // 8
    assert made["params"].compiled == 0
    held = [("params", params, params), ("opt", MOMENTS, MOMENTS)]
    assert [(line.name, line.planned, line.compiled) for line in made.host] == held
    assert found.facts.host_memory.temps == 0
    to_device, to_host = made.link
    assert (to_host.planned, to_host.compiled) == (params + MOMENTS, params + MOMENTS)
    sent = params + (params - embedding) + (params + MOMENTS)
    # A pipelined loop over layers may find what the loop before it has fetched last.
    assert sent - (params - embedding) / LAYERS <= to_device.compiled <= sent
    assert to_device.planned == sent + embedding, "a plan is the most that a step may send"
    assert made["peak"].compiled == sum(line.compiled or 0 for line in made.held if line.name != "peak")


@pytest.mark.target
@gpu_compiler
def test_nothing_in_host_memory():
    _, found, made = for_h100s("none")
    assert made["opt"].compiled == MOMENTS + 4
    assert (made.host, made.link, found.facts.to_device, found.facts.to_host) == ((), (), 0, 0)
    assert "host" not in str(made)


def test_measured_on_cpu_devices():
    """Their memory is all one, and the books tell them apart all the same."""
    training = quick(loss, init, TOKENS_BxT, offload("zero3", "opt"), optimizer=optax.adamw(1e-3))
    made = ledger(training, training.init(init, jax.random.key(0)))
    assert (made["opt"].compiled, made["opt"].measured) == (4, 4)
    (opt,) = made.host
    assert (opt.name, opt.planned, opt.compiled, opt.measured) == ("opt", MOMENTS, MOMENTS, MOMENTS)
    assert made["peak"].compiled == sum(line.compiled or 0 for line in made.held if line.name != "peak")
    assert {one.compiled for one in made.link} == {None}, "a CPU has no link to itself"


# Plans, of a model of 8 MiB in four leaves, on 8 devices

MODEL = {name: jax.ShapeDtypeStruct((1024, 512), "float32") for name in "abcd"}
WEIGHTS = 4 * 1024 * 512 * 4


def planned(strategy, accumulate: int = 1):
    mesh = {"replica": 1, "shard": 8}
    strategy = replace(named(strategy), update="device")
    return plan(MODEL, optax.adamw(1e-3), strategy=strategy, mesh=mesh, accumulate=accumulate, whole_budget=0)


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize(
    ("name", "params", "opt", "fetches"),
    [
        pytest.param("ddp", 1, 1, 2, id="ddp"),
        pytest.param("zero1", 1, 8, 2, id="zero1"),
        pytest.param("zero3", 8, 8, 2, id="zero3"),
        pytest.param("shard_grad_op", 8, 8, None, id="shard_grad_op"),
    ],
)
def test_a_plan_by_formula(name, params, opt, fetches, accumulate):
    """params, opt: into how many pieces a strategy splits them. fetches: in each microbatch; None: one in a step."""
    before, after = planned(name, accumulate), planned(offload(name, "opt+params"), accumulate)
    assert (after.host["params"], after.host["opt"]) == (WEIGHTS // params, 2 * WEIGHTS // opt)
    assert (after.held["params"], after.held["opt"]) == (0, 4)
    assert after.states + after.in_host == before.states
    assert after.wire_bytes == before.wire_bytes
    # The update takes the moments and its slice of the parameters, and gives back the moments and what is held.
    fetched = WEIGHTS // params * (1 if fetches is None else fetches * accumulate)
    assert after.crossed("to_device") == fetched + 3 * WEIGHTS // opt
    assert after.crossed("to_host") == WEIGHTS // params + 2 * WEIGHTS // opt
    assert (before.host["params"], before.in_host, before.link) == (0, 0, ())


def test_a_plan_of_a_part():
    """Half of the bytes: four leaves of the eight moments, and two of the four parameters."""
    found = planned(offload("zero3", "opt+params", fraction=0.5))
    assert (found.host["params"], found.host["opt"]) == (WEIGHTS // 16, WEIGHTS // 8)
    assert found.held["params"] == WEIGHTS // 16
    assert {one.leaf for one in found.link if one.state == "params"} < set(MODEL)


# A comparison


def test_what_can_be_asked():
    lines = asked(("zero3",), {"offload": ["none", "opt", "all", "opt+params+grads"], "offload_fraction": [1.0, 0.5]})
    assert list(map(str, lines)) == [
        "zero3 offload=none offload_fraction=1.0",  # of nothing, half is as much
        "zero3 offload=opt offload_fraction=1.0",
        "zero3 offload=opt offload_fraction=0.5",
        "zero3 offload=all offload_fraction=1.0",  # all three by name are all
        "zero3 offload=all offload_fraction=0.5",
    ]
    assert lines[2].resolve() == (offload("zero3", "opt", fraction=0.5), {})
    # Where an update runs means something for what is in host memory alone.
    updates = asked(("zero3",), {"offload": ["none", "opt"], "update": ["device", "host"]})
    assert [(one.options["offload"], one.options["update"]) for one in updates] == [
        ("none", "device"),
        ("opt", "device"),
        ("opt", "host"),
    ]
    assert len(asked(("dp",), {"offload": ["none", "opt"], "regather": [True, False]})) == 2
    with pytest.raises(ValueError, match=r"offload='moments': 'none', 'all'"):
        asked(("zero3",), {"offload": ["moments"]})


H100S = target.parse("h100:2x4")
PLAIN = Row(line=Line(strategy="zero3"), held={"params": GIB, "opt": 2 * GIB})
OFFLOADED = Row(
    line=Line(strategy="zero3", options={"offload": "opt"}),
    held={"params": GIB},
    host={"opt": 2 * GIB, "temporaries": GIB // 2},
    link=(
        Transferred(direction="to_device", planned=2 * GIB, compiled=3 * GIB),
        Transferred(direction="to_host", planned=2 * GIB),
    ),
)


def cells(table) -> dict[str, list[str]]:
    return {str(column.header): list(map(str, column.cells)) for column in table.columns}


def test_the_tables():
    memory, step = cells(memory_table([PLAIN, OFFLOADED], H100S)), cells(step_table([PLAIN, OFFLOADED]))
    assert memory["peak"] == ["3.00", "1.00"], "what is in host memory is no part of it"
    assert (memory["host"], memory["host/node"]) == (["-", "2.50"], ["-", "10.0"])  # of 4 devices
    assert (step["to device"], step["to host"]) == (["-", "3.00"], ["-", "2.00"])  # compiled, else planned
    room_without, room_with = room(PLAIN, H100S), room(OFFLOADED, H100S)
    assert room_without is not None
    assert room_with == room_without + 2 * GIB
    # Where nothing is in host memory no column says so.
    assert not {"host", "host/node"} & cells(memory_table([PLAIN], H100S)).keys()
    assert not {"to device", "to host"} & cells(step_table([PLAIN])).keys()
    assert from_json(Row, json.loads(json.dumps(to_json(OFFLOADED)))) == OFFLOADED


def test_the_terminal_says_what_the_columns_are(capsys):
    show(Console(width=80), [OFFLOADED], H100S)
    assert "host: in the host's memory, for each device" in capsys.readouterr().out
    show(Console(width=80), [PLAIN], H100S)
    assert "host" not in capsys.readouterr().out


def test_the_report():
    from jaxshard.preflight.report import host_bar, memory_bar, report

    text = report([PLAIN, OFFLOADED], H100S)
    for said in (
        "In the host's memory, for each device, GiB",
        "2.00 GiB of opt, 0.50 GiB of temporaries",
        f"to device {2 * GIB:,} B planned, {3 * GIB:,} B compiled; to host {2 * GIB:,} B planned",
    ):
        assert said in text
    assert host_bar(OFFLOADED, H100S).parts == {"opt": 2 * GIB, "temporaries": GIB // 2}
    assert host_bar(OFFLOADED, H100S).note == "10.0 in a node"
    assert memory_bar(OFFLOADED, H100S).parts == {"params": GIB}
    assert "In the host's memory" not in report([PLAIN], H100S)


def test_a_row_of_a_script(tmp_path):
    script = tmp_path / "mine.py"
    script.write_text(SCRIPT)
    build, cpus = _loaded(script), target.parse("cpu:2")
    plain, hosted = (
        examine(build, Line(strategy="zero3", options={"offload": states}), cpus, None, {}, None)
        for states in ("none", "opt")
    )
    weights = 4 * 2 * 64 * 64
    # Each moment of the matrices, of which a device has half, and of the bias, which stays whole.
    assert hosted.host == {"opt": 2 * (weights // 2 + 12)}
    assert (hosted.held["opt"], plain.held["opt"]) == (4, 4 + hosted.in_host)
    assert not hosted.broken
    assert (plain.host, plain.link) == ({}, ())


# Configurations and the command line


def test_a_configuration():
    table = {"name": "zero3", "offload": "opt+params", "offload_fraction": 0.5, "update": "device", "buffers": 3}
    strategy = parse(Config, {"strategy": table}).strategy.resolve()
    assert strategy.opt.memory == strategy.params.memory == "pinned_host"
    assert (strategy.grads.memory, strategy.opt.fraction) == ("device", 0.5)
    assert (strategy.update, strategy.buffers) == ("device", 3)
    assert parse(Config, {"strategy": {"offload": "none"}}).strategy.resolve() == js.ZERO3


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"offload": "moments"}, "offload='moments': 'none', 'all', or one or more of params, grads, opt"),
        ({"offload": "opt+opt"}, "offload='opt+opt'"),
        ({"offload": 1}, "strategy.offload = 1; it must be a string."),
        ({"offload": "opt", "offload_fraction": 1.5}, "fraction=1.5): a share of the bytes, 0 to 1."),
        ({"offload_fraction": 0.5}, "strategy.offload_fraction = 0.5 is how much of what strategy.offload names"),
        ({"update": "gpu"}, "strategy.update = 'gpu'; it must be one of 'auto', 'device', 'host'."),
        ({"buffers": 0}, "buffers=0): how many pieces"),
    ],
    ids=str,
)
def test_mistakes_in_a_configuration(table, said):
    with pytest.raises(ValueError, match=re.escape(said)) as raised:
        parse(Config, {"strategy": table}).strategy.resolve()
    assert "\n" not in str(raised.value)
    if said.startswith("strategy."):
        assert isinstance(raised.value, ConfigError)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--offload", "moments"], "offload='moments': 'none', 'all'"),
        (["--offload", "opt", "--offload-fraction", "2"], "fraction=2.0): a share of the bytes"),
        (["--offload-fraction", "0.5"], "--offload-fraction is how much of what --offload names"),
        (["--offload", "opt", "--update", "gpu"], "--update"),
    ],
    ids=str,
)
def test_mistakes_on_the_command_line(args, said, tmp_path, capsys):
    path = tmp_path / "tiny.toml"
    path.write_text("[model]\nwidth = 32\ncontext = 16\n[data]\nbatch = 8\n")
    assert main(["compare", str(path), "--target", "cpu:8", *args]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert said in captured.err
    assert captured.out == ""


@pytest.mark.parametrize("states", ["opt", "opt+params", "all"])
def test_the_costs_of_strategies(states, capsys):
    """What is in host memory is no longer on the device, and is sent to nobody else."""
    plain, hosted = costs.rows(8), costs.rows(8, offload=states)
    assert (len(plain), len(hosted)) == (7, 6 if states == "all" else 7)
    for before, after in zip(plain[-len(hosted) :], hosted, strict=True):
        assert before.names == after.names
        assert after.cost.held + after.cost.host == pytest.approx(before.cost.held)
        assert after.cost.host >= before.cost.opt
        assert (after.cost.opt, after.cost.sent, before.cost.host) == (0, before.cost.sent, 0)
    assert main(["strategies", "--offload", states]) == 0
    assert "host: what lies in the host's memory" in capsys.readouterr().out
