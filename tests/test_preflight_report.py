"""The report of a comparison. Oracles: the rows' own figures, read back from what was drawn; HTML's parser; and for
what is drawn as exposed, the seconds that the timeline counts."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from golden.programs import SIZES

from jaxshard.compiled import hlo
from jaxshard.contract import Collective
from jaxshard.preflight import plots, timelines
from jaxshard.preflight.device import Device, Link
from jaxshard.preflight.estimate import Estimate
from jaxshard.preflight.idle import idle
from jaxshard.preflight.lanes import Event
from jaxshard.preflight.line import Line, Row, Whole
from jaxshard.preflight.palette import CLASSES, KERNELS, KINDS
from jaxshard.preflight.report import memory_bar, report, time_bar, traffic_bar
from jaxshard.preflight.show import GIB
from jaxshard.preflight.target import Target, parse
from jaxshard.preflight.timeline import Pass, Timeline, timeline

DEVICE = Device(
    name="round",
    per_node=8,
    memory=80 * GIB,
    memory_bandwidth=1e12,
    host_bandwidth=1e10,
    flops={"bfloat16": 1e15},
    inside=Link(bandwidth=1e11),
    between=Link(bandwidth=1e11),
    target_config={},
)
GPUS = Target(name="round", device=DEVICE, nodes=1, per_node=8)
CPUS = Target(name="cpu", device=None, nodes=1, per_node=8, source="cpu")


def message(kind: str, gib: int, count: int = 1, leaf: str = "blocks.up+blocks.down") -> Collective:
    return Collective(
        kind=kind,
        purpose="gather",
        leaf=leaf,
        axes=("shard",),
        devices=8,
        dtype="bfloat16",
        bytes=gib * GIB,
        count=count,
    )


def event(lane: str, kind: str, start: float, seconds: float, label: str) -> Event:
    return Event(name=label, lane=lane, kind=kind, start=start, seconds=seconds, label=label)


def scanned(slower: float = 1.0) -> Timeline:
    """A forward loop of 3 runs, in each of which 10 of the 20 ms of a gather are exposed; 5 ms before it, 5 after."""
    ms = 1e-3 * slower
    gather = event("collectives", "all_gather", 0, 20 * ms, "blocks.up+blocks.down over shard")
    body = (
        gather,
        event("compute", "memory", 0, 10 * ms, "layer/add float32[8]"),
        event("compute", "matmul", 20 * ms, 5 * ms, "layer/dot_general bfloat16[8,8]"),
    )
    entry = (
        event("compute", "memory", 0, 5 * ms, "embed"),
        event("compute", "matmul", 80 * ms, 5 * ms, "head"),
    )
    return Timeline(
        seconds=85 * ms,
        compute=55 * ms,
        matmul=20 * ms,
        memory=35 * ms,
        messages=60 * ms,
        exposed=30 * ms,
        host=0.0,
        exposures={"all_gather over shard": 30 * ms},
        passes=(
            Pass(name="outside", loops=(), times=1, seconds=85 * ms, events=entry),
            Pass(name="forward", loops=("scan",), times=3, seconds=25 * ms, events=body),
        ),
        slowest=(replace(gather, seconds=60 * ms),),
    )


def unrolled() -> Timeline:
    """200 kernels of a microsecond, one after another."""
    kernels = tuple(event("compute", "memory", i * 1e-6, 1e-6, f"kernel{i}") for i in range(200))
    step = Pass(name="outside", loops=(), times=1, seconds=200e-6, events=kernels)
    return replace(
        scanned(), seconds=200e-6, matmul=0.0, memory=200e-6, exposed=0.0, exposures={}, passes=(step,), slowest=()
    )


def row(name: str = "zero3", times: Timeline | None = None, /, **changes) -> Row:
    held = {"params": 2 * GIB, "opt": 4 * GIB, "activations": 6 * GIB, "temporaries": 3 * GIB}
    planned = (message("all_gather", 8, 3), message("reduce_scatter", 8, 1))
    usual = Row(
        line=Line(strategy=name),
        mesh={"replica": 1, "shard": 8},
        held=held | {"batch": GIB, "gaps": GIB},
        contract=planned,
        sent=(message("all_gather", 16), planned[1]),
        timeline=times,
        seconds=12.0,
    )
    return replace(usual, **changes)


ROWS = (
    row("zero3", scanned()),
    row("zero2", unrolled(), estimate=Estimate(seconds=1e-3, exposed=2e-4)),
    row("ddp", scanned(2.0), held={"params": 90 * GIB}),
    row(
        "dp", compiled=False, held={"params": 2000 * GIB}, sent=(), contract=(message("broadcast", 1),), notes=("odd",)
    ),
    Row(line=Line(strategy="hsdp", options={"accumulate": 3}), problem="a batch of 32 does not divide"),
)


class Page(HTMLParser):
    """The tags of a page, held to be closed in order, its texts, and what it asks for from elsewhere."""

    ALONE = ("meta",)

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.links: list[str] = []
        self.ids: list[str] = []
        self.handlers: list[str] = []
        self.tags: set[str] = set()
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.links += [value or "" for name, value in attrs if name.split(":")[-1] in ("src", "href", "data", "action")]
        self.ids += [value or "" for name, value in attrs if name == "id"]
        self.handlers += [name for name, _ in attrs if name.startswith("on")]
        if tag not in self.ALONE:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_data(self, data):
        self.texts.append(data)


@pytest.mark.parametrize("target", [GPUS, CPUS], ids=str)
def test_a_page_stands_alone(target):
    rows = ROWS if target is GPUS else [replace(one, timeline=None) for one in ROWS]
    text = report(rows, target)
    page = Page(text)
    assert page.tags.isdisjoint({"script", "link", "img", "iframe"})
    assert page.links
    assert all(link.removeprefix("#") in page.ids for link in page.links)
    assert len(set(page.ids)) == len(page.ids)
    assert "://" not in text
    assert "@import" not in text
    assert all(found in page.ids for found in re.findall(r"url\(#?([^)]*)\)", text))
    for one in rows:
        assert str(one.line) in page.texts
    assert "a batch of 32 does not divide" in page.texts
    assert text.count("<svg") == (6 if target is GPUS else 2)
    assert text.count("<details") == 4
    assert report(rows, target) == text


def test_what_a_page_says():
    texts = Page(report(ROWS, GPUS)).texts
    said = " ".join(texts)
    assert "5 lines compared for round:8" in texts
    assert "zero2 has the shortest estimated step, 0.20 ms; zero3 holds least, 17.0 GiB" not in said  # as much as zero2
    assert "zero2 has the shortest estimated step, 0.20 ms; zero2 holds least, 17.0 GiB; 2 of 5 do not fit" in said
    assert "1 of 5 does not compile" in said
    assert "14.0 too much" in texts  # of ddp's 90 GiB, where 76 are to be had
    assert "1.00 ms, of which 0.20 ms exposed" in texts
    # The contract: 3 gathers planned, 1 of twice their size compiled.
    for figure in (f"{24 * GIB:,}", f"{16 * GIB:,}", f"{8 * GIB:,}", "not compiled"):
        assert figure in texts
    assert "blocks.up + 1 over shard" in texts  # what takes the most
    assert "3 x forward loop" in texts
    assert "forward, one of 3 runs of its loop: 25 ms" in texts
    assert "all_gather blocks.up + 1, 20 ms" in texts
    assert {"a device has 80.0 GiB, 5% reserved", "exposed", "collectives"} <= set(texts)


def test_texts_of_others_are_escaped():
    evil = "<script>alert(1)</script>\" onload='x' $\\frac{$ &amp; \N{SNOWMAN}\N{CJK UNIFIED IDEOGRAPH-4E00}"
    times = scanned()
    body = replace(times.passes[1].events[0], label=f"{evil} over shard")
    times = replace(times, passes=(times.passes[0], replace(times.passes[1], events=(body,))), slowest=(body,))
    hostile = row(
        "zero3",
        times,
        line=Line(strategy="zero3", options={"remat": evil}),
        whole=(Whole(path=evil, shape=(3,), dtype="float32", because=evil, costs=5),),
        notes=(evil,),
        broken=f"first\n  {evil}",
        unestimated=evil,
    )
    text = report([hostile, Row(line=Line(strategy=evil), problem=evil)], GPUS)
    page = Page(text)
    assert "script" not in page.tags
    assert not page.handlers
    assert page.texts.count(evil) >= 5
    assert any(f"first\n  {evil}" == one for one in page.texts)
    assert re.search(r'<div class="broken">first', text)


def widths(drawn) -> list[dict[str, tuple[float, float]]]:
    """(left, width) of each part of each bar."""
    (axes,) = drawn.axes
    lines: dict[int, dict[str, tuple[float, float]]] = {}
    for one in axes.patches:
        if one.get_gid():
            at = round(one.get_y() + one.get_height() / 2)
            lines.setdefault(at, {})[one.get_gid()] = one.get_x(), one.get_width()
    return [lines[i] for i in sorted(lines)]


def drawn(bars, paints, unit: float = GIB, mark=None):
    with plots.style():
        return plots.bars(bars, paints, unit, "GiB", lambda size: f"{size / unit:g}", mark)


def test_bars_are_as_long_as_what_is_held_and_sent():
    memory = widths(drawn([memory_bar(one, GPUS) for one in ROWS[:3]], CLASSES))
    # 2 + 4 + 6 + 3 GiB, and the batch with the gaps.
    of_zero3 = {"params": (0, 2), "opt": (2, 4), "activations": (6, 6), "temporaries": (12, 3), "other": (15, 2)}
    assert memory == [of_zero3, of_zero3, {"params": (0, 90)}]
    traffic = widths(drawn([traffic_bar(ROWS[0]), traffic_bar(ROWS[3])], KINDS))
    # 7/8 of 16 and of 8 GiB; of what dp plans, 7 times one.
    assert traffic == [{"all_gather": (0, 14), "reduce_scatter": (14, 7)}, {"broadcast": (0, 7)}]
    (times,) = widths(drawn([time_bar("zero3", scanned())], KERNELS | KINDS, unit=1e-3))
    assert {name: pytest.approx(size) for name, (_, size) in times.items()} == {
        "matmul": 20,
        "memory": 35,
        "all_gather": 30,
    }


def test_the_scale_of_bars():
    bars = [plots.Bar(label=str(size), parts={"params": size}) for size in (10.0, 20.0, 40.0, 9000.0)]
    mark = plots.Mark(at=60.0, reserved=50.0, label="all of it")
    one = drawn(bars, CLASSES, 1, mark)
    (axes,) = one.axes
    assert 60 < axes.get_xlim()[1] < 62
    texts = [text.get_text() for text in axes.texts]
    assert "\N{RIGHTWARDS ARROW} 9000" in texts
    assert "40" in texts
    assert "all of it" in texts
    # A device that holds far more than any line needs is not drawn to scale.
    (axes,) = drawn(bars[:3], CLASSES, 1, replace(mark, at=1000.0)).axes
    assert axes.get_xlim()[1] == 40
    assert "all of it \N{RIGHTWARDS ARROW} " in [text.get_text() for text in axes.texts]


@pytest.mark.parametrize(
    "path", sorted((Path(__file__).parent / "golden").glob("*-jax*.txt")), ids=lambda path: path.stem
)
def test_what_is_drawn_as_exposed_is_what_is_counted(path):
    found = timeline(hlo.parse(path.read_text()), SIZES, parse("h100:8"))
    gaps = [(one.times * x.seconds, x) for one in found.passes for x in idle(one, found.passes)]
    assert sum(seconds for seconds, x in gaps if x.kind == "exposed") == pytest.approx(found.exposed)
    assert sum(seconds for seconds, x in gaps if x.kind == "host") == pytest.approx(found.host)
    assert sum(x.kind == "loop" for _, x in gaps) >= sum(bool(one.loops) for one in found.passes)
    if path.stem.startswith("layers"):
        assert {"4 x forward loop", "4 x backward loop"} <= {x.label for _, x in gaps}


def test_a_loop_after_a_wait():
    """5 runs of 2 s, after a wait of 1 s for a message; a wait of 1 s; 1 s that no loop explains."""
    inner = Pass(name="forward", loops=("scan",), times=5, seconds=2.0, events=())
    kernels = [event("compute", "memory", start, 1, "kernel") for start in (0, 12, 14, 16)]
    sent = event("collectives", "all_gather", 0, 2, "a"), event("collectives", "all_gather", 5, 9, "b")
    step = Pass(name="outside", loops=(), times=1, seconds=17.0, events=(*kernels, *sent))
    assert [(x.kind, x.start, x.seconds, x.label) for x in idle(step, (step, inner))] == [
        ("exposed", 1, 1, ""),
        ("loop", 2, 10, "5 x forward loop"),
        ("exposed", 13, 1, ""),
        ("loop", 15, 1, "loops"),
    ]


def test_one_scale_for_the_timelines_of_all_lines():
    both = [scanned(), scanned(2.0)]
    widths = timelines.scales(both)
    assert widths == {"step": 0.17, "layer": 0.05}
    with plots.style():
        figures = [timelines.draw(one, widths) for one in both]
    for step, layer in (figure.axes for figure in figures):
        assert (step.get_xlim(), layer.get_xlim()) == ((0, 0.17), (0, 0.05))
    # Exposed: 10 ms of each run, from the end of its first kernel to the end of the gather.
    (exposed,) = (patch for patch in figures[0].axes[1].patches if patch.get_gid() == "exposed")
    box = exposed.get_path().get_extents()
    assert (box.x0, box.x1) == pytest.approx((0.010, 0.020))


def test_a_window_on_a_model_without_loops():
    step, early, middle = timelines.panels(unrolled())
    assert (step.kind, early.kind, middle.kind) == ("step", "window", "window")
    assert early.seconds == middle.seconds == pytest.approx(80e-6)
    assert (early.start, middle.start) == (pytest.approx(200e-6 / 6), pytest.approx(100e-6))
    assert [one.kind for one in timelines.panels(scanned())] == ["step", "layer"]


def test_nothing_to_draw():
    """One device sends nothing, and a comparison may fail as a whole."""
    alone = row("ddp", contract=(), sent=())
    text = report([alone], CPUS)
    assert "Nothing is sent." in Page(text).texts
    assert text.count("<svg") == 1
    text = report([Row(line=Line(strategy="ddp"), problem="no")], GPUS)
    assert "no" in Page(text).texts
    assert "<svg" not in text
