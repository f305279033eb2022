"""The timeline of a step. Oracles: times by hand, for a device of round figures; sums that must hold for any program.

The device multiplies 4e6 FLOP/s, moves 1e6 bytes/s at the 85 % of its memory's bandwidth that kernels reach, and sends
7e6 bytes/s to the others of its node of 8: an all_gather or a reduce_scatter of 8e6 bytes takes a second.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from golden.programs import SIZES

from jaxshard.compiled import hlo
from jaxshard.compiled.traffic import compiled_collectives
from jaxshard.compiled.walk import walk
from jaxshard.contract import Collective
from jaxshard.preflight import messages, target
from jaxshard.preflight.device import Device, Link
from jaxshard.preflight.lanes import OFFLOAD
from jaxshard.preflight.messages import Message
from jaxshard.preflight.records import from_json, to_json
from jaxshard.preflight.target import Target
from jaxshard.preflight.timeline import Timeline, timeline

DEVICE = Device(
    name="round",
    per_node=8,
    memory=2**30,
    memory_bandwidth=1e6 / 0.85,
    host_bandwidth=1e5,
    flops={"bfloat16": 8e6, "float32": 1e6},
    reached={"bfloat16": 4e6},
    inside=Link(bandwidth=7e6),
    between=Link(bandwidth=4e6),
    target_config={},
)
NODE = Target(name="round", device=DEVICE, nodes=1, per_node=8)

# The tiny arrays of these take next to no time: a product of 100 x 100 takes 0.5 s, in memory 0.06 s.
DOT = "dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
STEP = """
%wrapped (given: f32[125000]) -> f32[125000] {
  %given = f32[125000]{0} parameter(0)
  ROOT %double = f32[125000]{0} add(%given, %given)
}
BODIES
ENTRY %main (a: bf16[100,100], b: bf16[100,100], w: f32[250000], h: f32[125000], n: s32[]) -> f32[250000] {
  %a = bf16[100,100]{1,0} parameter(0)
  %b = bf16[100,100]{1,0} parameter(1)
  %w = f32[250000]{0} parameter(2)
  %h = f32[125000]{0} parameter(3)
  %n = s32[] parameter(4)
LINES
  ROOT %w2 = f32[250000]{0} bitcast(%w)
}
"""
GATHER = (
    "(f32[250000]{0}, f32[2000000]{0}) all-gather-start(%w), replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}, "
    'metadata={op_name="jit(step)/jvp()/while/body/jaxshard.use:blocks.up/jaxshard.gather:blocks.up/all_gather"}'
)


def of(lines: str, bodies: str = "", at: Target = NODE) -> Timeline:
    text = STEP.replace("LINES", "\n".join("  " + line.strip() for line in lines.strip().splitlines()))
    return timeline(hlo.parse(text.replace("BODIES", bodies)), {"replica": 1, "shard": at.size}, at)


def lanes(found: Timeline) -> list[tuple[str, str, float, float]]:
    (outside,) = (one for one in found.passes if one.name == "outside")
    return [(one.name, one.lane, round(one.start, 6), round(one.seconds, 6)) for one in outside.events]


def test_a_message_half_hidden():
    found = of(f"""
        %g = {GATHER}
        %dot = f32[100,100]{{1,0}} {DOT}
        %gd = f32[2000000]{{0}} all-gather-done(%g)
        %dot2 = f32[100,100]{{1,0}} {DOT}
    """)
    assert lanes(found) == [
        ("g", "collectives", 0, 1),
        ("dot", "compute", 0, 0.5),
        ("dot2", "compute", 1, 0.5),
    ]
    assert (found.seconds, found.compute, found.matmul, found.memory) == (1.5, 1, 1, 0)
    assert (found.messages, found.exposed, found.hidden) == (1, 0.5, 0.5)
    assert found.exposures == {"all_gather over shard": 0.5}
    assert found.bound_by == "compute"
    assert [(one.label, one.seconds) for one in found.slowest] == [
        ("blocks.up over shard", 1),
        ("dot float32[100,100]", 0.5),
        ("dot2 float32[100,100]", 0.5),
    ]


def test_messages_wait_for_each_other():
    found = of(f"""
        %g = {GATHER}
        %k = {GATHER}
        %kd = f32[2000000]{{0}} all-gather-done(%k)
        %gd = f32[2000000]{{0}} all-gather-done(%g)
    """)
    assert lanes(found) == [("g", "collectives", 0, 1), ("k", "collectives", 1, 1)]
    assert (found.seconds, found.exposed, found.hidden, found.bound_by) == (2, 2, 0, "all_gather over shard")


@pytest.mark.parametrize(
    "line",
    [
        GATHER + ', backend_config={"collective_backend_config":{"is_sync":true}}',
        GATHER.replace("all-gather-start", "all-gather").replace(
            "(f32[250000]{0}, f32[2000000]{0})", "f32[2000000]{0}"
        ),
    ],
    ids=["said", "without a start"],
)
def test_a_synchronous_message(line):
    found = of(f"%g = {line}\n%dot = f32[100,100]{{1,0}} {DOT}")
    assert lanes(found) == [("g", "collectives", 0, 1), ("dot", "compute", 1, 0.5)]
    assert (found.seconds, found.exposed, found.hidden) == (1.5, 1, 0)


def test_what_bounds_a_kernel():
    found = of("""
        %double = f32[125000]{0} fusion(%h), kind=kLoop, calls=%wrapped
        %sent-start = (f32[25000]{0:S(5)}, f32[25000]{0}, u32[]) copy-start(%double)
        %twice = f32[125000]{0} add(%double, %double)
        %sent = f32[25000]{0:S(5)} copy-done(%sent-start)
    """)
    # The fusion reads 500000 bytes and writes as many; the sum reads twice that. 100000 bytes go to the host.
    assert lanes(found) == [
        ("double", "compute", 0, 1),
        ("sent-start", "to host", 1, 1),
        ("twice", "compute", 1, 1.5),
    ]
    assert (found.seconds, found.memory, found.matmul, found.host, found.bound_by) == (2.5, 2.5, 0, 0, "memory")
    assert (found.to_device, found.to_host) == (0, 1)
    assert found.hidden == 1.0  # nothing was sent


def test_a_call_that_gives_nothing():
    found = of('%told = () custom-call(%h), custom_call_target="tell"')
    assert [(one.label, one.kind, one.seconds) for one in found.slowest] == [("told", "memory", 0.5)]


LOOP = """
%body (given: f32[250000]) -> f32[250000] {
  %w = f32[250000]{0} parameter(0)
  %a = bf16[100,100]{1,0} constant({...})
  %b = bf16[100,100]{1,0} constant({...})
LINES
  ROOT %w2 = f32[250000]{0} bitcast(%w)
}

%more (given: f32[250000]) -> pred[] {
  %given = f32[250000]{0} parameter(0)
  ROOT %yes = pred[] constant(true)
}
"""
WHILE = (
    """%loop = f32[250000]{0} while(%w), condition=%more, body=%body, backend_config={"known_trip_count":{"n":"3"}}"""
)
SENDING = LOOP.replace(
    "LINES", f"  %g = {GATHER}\n  %dot = f32[100,100]{{1,0}} {DOT}\n  %gd = f32[] all-gather-done(%g)"
)
STILL = LOOP.replace("LINES", f"  %dot = f32[100,100]{{1,0}} {DOT}")


def test_a_loop_counts_as_often_as_it_runs():
    found = of(f"{WHILE}\n%dot = f32[100,100]{{1,0}} {DOT}", SENDING)
    assert (found.seconds, found.compute, found.messages, found.exposed) == (3.5, 2, 3, 1.5)
    outside, forward = found.passes
    assert (forward.name, forward.loops, forward.times, forward.seconds) == ("forward", ("scan",), 3, 1)
    assert (outside.times, outside.seconds, [one.start for one in outside.events]) == (1, 3.5, [3])
    gather = found.slowest[0]
    assert (gather.label, gather.seconds) == ("blocks.up over shard", 3)


@pytest.mark.parametrize(("body", "seconds", "exposed"), [(STILL, 1.5, 0), (SENDING, 4, 2.5)], ids=["still", "sending"])
def test_a_message_under_way_beside_a_loop(body, seconds, exposed):
    """It is hidden where the loop sends nothing, and where the loop's own messages fill the links they wait for it."""
    found = of(f"%first = {GATHER}\n{WHILE}\n%done = f32[] all-gather-done(%first)", body)
    assert (found.seconds, found.exposed) == (seconds, exposed)


def test_the_slower_branch_counts():
    branch = STILL.replace("%body", "%branch").partition("%more")[0] + SENDING
    found = of(
        f"%dot = f32[100,100]{{1,0}} {DOT}\n"
        "%either = f32[250000]{0} conditional(%n, %w, %w), branch_computations={%branch, %body}",
        branch,
    )
    assert lanes(found)[1:] == [("g", "collectives", 0.5, 1), ("dot", "compute", 0.5, 0.5)]
    assert (found.seconds, found.exposed) == (1.5, 0.5)


def test_attention_of_cudnn():
    q, kv, scores = "bf16[1,800,4,10]{3,2,1,0}", "bf16[1,800,2,10]{3,2,1,0}", '["1", "4", "800", "800"]'
    call = (
        f'%CALL = ({q}, f32[1,4,800]{{2,1,0}}) custom-call(%q, %kv, %kv), custom_call_target="__cudnn$fmhaSoftmaxWAY", '
        f'backend_config={{"cudnn_fmha_backend_config": {{"intermediate_tensor_shape": {{"element_type": "BF16", '
        f'"dimensions": {scores}}}, "mask_type": "MASK", "sliding_window_length": WINDOW}}}}'
    )

    def seconds(way: str, mask: str, window: int = 0) -> float:
        line = call.replace("WAY", way).replace("MASK", mask).replace("WINDOW", str(window)).replace("CALL", "call")
        found = of(f"%q = {q} constant({{...}})\n%kv = {kv} constant({{...}})\n{line}")
        assert found.slowest[0].kind == "attention"
        return found.matmul * DEVICE.flops["bfloat16"] * 0.55

    product = 2 * 4 * 800 * 800 * 10  # heads, queries, keys, channels
    assert seconds("", "NO_MASK") == pytest.approx(2 * product)
    assert seconds("", "CAUSAL") == pytest.approx(product)
    assert seconds("Backward", "PADDING_CAUSAL") == pytest.approx(5 * product / 2)
    assert seconds("", "CAUSAL", window=200) == pytest.approx(2 * product / 4)


def message(kind: str, bytes: int, *members: tuple[int, ...]) -> float:
    sent = Collective(
        kind=kind, purpose="", leaf="", axes=("x",), devices=len(members[0]), dtype="int8", bytes=bytes, count=1
    )
    return messages.seconds(Message(sent=sent, groups=members), DEVICE, per_node=4)


def test_messages_on_two_levels():
    """16 devices in nodes of 4. Inside 7e6 bytes/s for each device, between 4e6 for each node."""
    everyone, size = tuple(range(16)), 8_000_000
    across = [(i, i + 4, i + 8, i + 12) for i in range(4)]
    # A reduction and a gather in the node, 2 x 3/4 of the buffer at 7e6; between 4 nodes 2 x 3/4 at 4e6.
    assert message("all_reduce", size, everyone) == pytest.approx(2 * 3 / 4 * size / 4e6)
    assert message("all_gather", size, everyone) == pytest.approx(3 / 4 * size / 4e6)
    assert message("all_reduce", size, (0, 1, 2, 3), (4, 5, 6, 7)) == pytest.approx(2 * 3 / 4 * size / 7e6)
    # The four groups, each with a member in every node, share each node's network.
    assert message("all_reduce", size, *across) == pytest.approx(4 * 2 * 3 / 4 * size / 4e6)
    # Each device sends 12 of its 16 pieces to other nodes, as do the other 3 of its node, and 3 inside.
    assert message("all_to_all", size, everyone) == pytest.approx(4 * 12 / 16 * size / 4e6)
    # Two pairs leave node 0, one stays in node 1.
    assert message("permute", size, (0, 4), (1, 8), (5, 6)) == pytest.approx(2 * size / 4e6)
    assert message("permute", size, (0, 1), (5, 6)) == pytest.approx(size / 7e6)
    # The inner level is the slower one where most of a group is in one node: 3 of 4 members, and 2 nodes.
    assert message("all_gather", size, (0, 1, 2, 4)) == pytest.approx(max(2 / 3 * size / 7e6, 1 / 2 * size / 4e6))


GOLDEN = sorted((Path(__file__).parent / "golden").glob("*-jax*.txt"))


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
@pytest.mark.parametrize("name", ["h100:8", "a100-80:4x2"])
def test_what_holds_of_any_program(path, name):
    module, at = hlo.parse(path.read_text()), target.parse(name)
    found = timeline(module, SIZES, at)
    assert found.seconds == pytest.approx(found.compute + found.exposed + found.host)
    assert found.compute > 0
    assert found.seconds >= max(found.compute, found.messages) * (1 - 1e-9)
    assert found.compute == pytest.approx(found.matmul + found.memory)
    assert 0 <= found.exposed <= found.messages * (1 + 1e-9)
    for one in found.passes:
        assert one.seconds * one.times <= found.seconds * (1 + 1e-9)
        for lane in ("compute", "collectives", *OFFLOAD):
            events = [event for event in one.events if event.lane == lane]
            for before, after in itertools.pairwise(events):
                assert before.start + before.seconds <= after.start * (1 + 1e-9)
            assert all(event.start + event.seconds <= one.seconds * (1 + 1e-9) for event in events)
    assert from_json(Timeline, json.loads(json.dumps(to_json(found)))) == found


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_messages_send_what_the_program_is_known_to_send(path):
    module = hlo.parse(path.read_text())
    sent = sum(
        one.sent.bytes * site.times
        for site in walk(module)
        if site.start is None
        for one in messages.messages_in(module, site.computation, site.instruction, SIZES)
    )
    assert sent == sum(one.bytes * one.count for one in compiled_collectives(module, SIZES))


def test_cpus_have_no_timeline():
    with pytest.raises(ValueError, match=r"cpu:8: CPU devices only stand in .* such as h100:8"):
        timeline(hlo.parse(GOLDEN[0].read_text()), SIZES, target.parse("cpu:8"))
