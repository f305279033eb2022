"""Facts read off compiled text: what it sends, and what it computes on GPUs.

Oracles: facts of small programs worked out by hand (`golden/programs.py`), for compiled texts kept from both releases
of JAX and, with the compiler's wheels, for fresh ones; on CPU devices the count of the program's jaxpr.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest
from golden.programs import BOTH, PROGRAMS, SIZES, Program, kinds, layers, mapped
from jax import lax
from jax.sharding import PartitionSpec as P
from oracle import FORMS, batches, mesh_of
from quick import QUICK

import jaxshard as js
from jaxshard.compiled import hlo
from jaxshard.compiled.traffic import compiled_collectives
from jaxshard.compiled.walk import walk
from jaxshard.contract import count_collectives
from jaxshard.preflight import target
from jaxshard.preflight.facts import facts
from jaxshard.preflight.work import uncounted, work

GOLDEN = Path(__file__).parent / "golden"
HERE = pytest.param(
    "here",
    marks=[
        pytest.mark.target,
        pytest.mark.skipif(not target.compiler_installed(), reason=f"needs the GPU compiler: {target.INSTALL}"),
    ],
)
SOURCES = ["jax0.10", "jax0.12", HERE]
MATRIX = 256 * 256 * 4

# (kind, axes, dtype) -> bytes of whole buffers in a step.
SENT = {
    "kinds": {
        ("all_to_all", ("shard",), "float32"): 64 * 32 * 4,
        ("permute", ("replica",), "bfloat16"): 48 * 2,
        ("reduce_scatter", ("replica", "shard"), "float32"): 64 * 32 * 4,
        ("all_reduce", ("shard",), "bfloat16"): 48 * 2,
        ("all_reduce", ("replica", "shard"), "float32"): 64 * 32 * 4,
        ("all_reduce", ("replica", "shard"), "bfloat16"): 48 * 2,
        ("all_gather", ("shard", "replica"), "bfloat16"): 8 * 48 * 2,
    },
    "nested": {("all_reduce", ("replica",), "float32"): 3 * 5 * 16 * 4},
    "branches": {("all_reduce", ("shard",), "float32"): 2 * 16 * 4, ("all_reduce", ("replica",), "float32"): 16 * 4},
    "layers": {
        ("all_gather", ("shard",), "float32"): 9 * MATRIX,
        ("reduce_scatter", ("shard",), "float32"): 9 * MATRIX,
        ("all_reduce", ("replica",), "float32"): 9 * MATRIX // 4,
        ("all_reduce", ("replica", "shard"), "float32"): 4,
    },
    "products": {},
    "from_host": {},
    "streamed": {},
    "on_host": {},
}
# 2 for each multiply-add. The convolution of 15 rows with a stride of 2 has 22 pairs of a row and a row of the kernel
# that is inside, and of 16 columns with a stride of 1 it has 46.
FLOPS = {
    "layers": {"float32": 9 * 3 * 2 * 8 * 256 * 256},
    "products": {
        "bfloat16": 2 * 256 * 128 * 512 + 2 * 4 * 64 * 64 * 128,
        "float32": 2 * 2 * 22 * 46 * 8 * 32,
    },
    "from_host": {"float32": 4 * 2 * 16 * 512 * 512},
}


def text_of(name: str, source: str) -> str:
    if source != "here":
        return (GOLDEN / f"{name}-{source}.txt").read_text()
    with target.uncached():
        return PROGRAMS[name].compiled(target.parse("h100:8").mesh(replica=2)).as_text()


def sent(collectives) -> dict:
    totals: Counter = Counter()
    for one in collectives:
        totals[one.kind, one.axes, one.dtype] += one.bytes * one.count
    return dict(totals)


def flops(text: str) -> dict:
    totals: Counter = Counter()
    for one in work(hlo.parse(text)):
        totals[one.dtype] += one.flops * one.times
    return {dtype: total for dtype, total in totals.items() if total}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_what_a_gpu_program_sends_and_computes(name, source):
    text = text_of(name, source)
    module = hlo.parse(text)
    assert sent(compiled_collectives(module, SIZES)) == SENT[name]
    assert flops(text) == FLOPS.get(name, {})
    assert uncounted(module) == ()


def test_a_tpu_program():
    """It gathers in bfloat16, in which it multiplies, and its products are convolutions."""
    module = hlo.parse(text_of("layers", "tpu"))
    gathered = {("all_gather", ("shard",), "bfloat16"): 9 * MATRIX // 2}
    rest = {key: size for key, size in SENT["layers"].items() if key[0] != "all_gather"}
    assert sent(compiled_collectives(module, SIZES)) == gathered | rest
    assert sum(flops(text_of("layers", "tpu")).values()) == sum(FLOPS["layers"].values())
    assert uncounted(module) == ()


@pytest.mark.parametrize("source", SOURCES[:2])
@pytest.mark.parametrize("name", ["nested", "layers"])
def test_a_loop_whose_length_the_compiler_forgot_is_counted(name, source):
    text = text_of(name, source)
    forgot, times = re.subn(r'"known_trip_count":\{"n":"\d+"\}', "", text)
    assert times >= 2
    assert sent(compiled_collectives(hlo.parse(forgot), SIZES)) == SENT[name]
    # Without a bound nobody knows: what is inside counts once.
    endless = forgot.replace("direction=LT", "direction=NE")
    unknown = compiled_collectives(hlo.parse(endless), SIZES)
    assert sent(unknown) != SENT[name]
    assert "while" in {loop for one in unknown for loop in one.loops}


LOOP = """
%body (state: (s32[], f32[8])) -> (s32[], f32[8]) {{
  %state = (s32[], f32[8]{{0}}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %step = s32[] constant({step})
  %next = s32[] add(%i, %step)
  %x = f32[8]{{0}} get-tuple-element(%state), index=1
  %twice = f32[8]{{0}} add(%x, %x)
  ROOT %new = (s32[], f32[8]{{0}}) tuple(%next, %twice)
}}
%condition (state.1: (s32[], f32[8])) -> pred[] {{
  %state.1 = (s32[], f32[8]{{0}}) parameter(0)
  %i.1 = s32[] get-tuple-element(%state.1), index=0
  %ahead = s32[] constant({ahead})
  %then = s32[] add(%i.1, %ahead)
  %bound = s32[] constant({bound})
  ROOT %more = pred[] compare(%then, %bound), direction=LT
}}
ENTRY %main (x.1: f32[8]) -> (s32[], f32[8]) {{
  %x.1 = f32[8]{{0}} parameter(0)
  %start = s32[] constant({start})
  %begin = (s32[], f32[8]{{0}}) tuple(%start, %x.1)
  ROOT %loop = (s32[], f32[8]{{0}}) while(%begin), condition=%condition, body=%body
}}
"""


@pytest.mark.parametrize(
    ("start", "step", "ahead", "bound"),
    [(0, 1, 0, 7), (1, 2, 0, 8), (3, 2, 1, 8), (0, 3, 2, 7), (5, 1, 0, 5), (-2, 1, 0, 3)],
)
def test_the_length_of_a_counted_loop(start, step, ahead, bound):
    expected, i = 0, start
    while i + ahead < bound:
        expected, i = expected + 1, i + step
    text = LOOP.format(start=start, step=step, ahead=ahead, bound=bound)
    (times,) = (site.times for site in walk(hlo.parse(text)) if site.instruction.name == "twice")
    assert times == expected


@pytest.mark.parametrize("source", SOURCES[:2])
def test_where_a_collective_stands(source):
    (one,) = compiled_collectives(hlo.parse(text_of("nested", source)), SIZES)
    assert (one.count, one.bytes, one.loops, one.devices) == (15, 64, ("scan", "scan"), 2)
    assert one.wire_bytes == 15 * 64  # 2 (n - 1) / n of it for n = 2
    loops = [one.loops for one in compiled_collectives(hlo.parse(text_of("branches", source)), SIZES)]
    assert sorted(loops) == [(), (), ("while",)]
    # The last reduction of a pipelined loop is outside of it.
    reductions = [c for c in compiled_collectives(hlo.parse(text_of("layers", source)), SIZES) if "scatter" in c.kind]
    assert sorted((c.count, c.loops) for c in reductions) == [(1, ()), (8, ("scan",))]


def test_asynchronous_is_what_the_scheduler_found_work_for():
    """JAX 0.10 writes all of these as start and done, with `is_sync`; 0.12 as one instruction where it is."""
    found = {}
    for source in SOURCES[:2]:
        for one in compiled_collectives(hlo.parse(text_of("kinds", source)), SIZES):
            found[source, one.kind, one.dtype, one.axes] = one.asynchronous
        assert {c.asynchronous for c in compiled_collectives(hlo.parse(text_of("nested", source)), SIZES)} == {True}
    assert found["jax0.10", "permute", "bfloat16", ("replica",)]
    assert not found["jax0.10", "all_gather", "bfloat16", ("shard", "replica")]
    assert not found["jax0.12", "all_gather", "bfloat16", ("shard", "replica")]
    assert found["jax0.12", "reduce_scatter", "float32", ("replica", "shard")]


@pytest.mark.parametrize("source", SOURCES)
def test_bytes_from_the_host(source):
    """Each layer is read once, not the stack of layers in each iteration."""
    done = work(hlo.parse(text_of("from_host", source)))
    layer = 512 * 512 * 4
    assert sum(one.to_device * one.times for one in done) == 4 * layer
    assert not any(one.to_host for one in done)
    moved = sum(one.bytes * one.times for one in done)
    assert 2 * 4 * layer < moved < 3 * 4 * layer, "written here, read by the product, and little more"


# On CPU devices

ON_CPU = {
    "kinds": Program(fn=mapped(kinds, (P(), P()), P()), args=(((64, 32), "float32", P()), ((48,), "float32", P()))),
    "nested": PROGRAMS["nested"],
    "branches": PROGRAMS["branches"],
    "layers": Program(
        fn=mapped(layers, (P(None, "shard"), BOTH), (P(), P(None, "shard"))),
        args=(((3, 16, 16), "float32", P(None, "shard")), ((16, 16), "float32", BOTH)),
        options=QUICK,
    ),
}


@pytest.mark.parametrize("name", ON_CPU)
def test_a_cpu_program_sends_what_its_jaxpr_says(name):
    program, mesh = ON_CPU[name], mesh_of(2, 4)
    shapes = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype, *_ in program.args]
    counted = count_collectives(jax.make_jaxpr(program.fn(mesh))(*shapes).jaxpr, SIZES)
    found = compiled_collectives(hlo.parse(program.compiled(mesh).as_text()), SIZES)
    assert sent(found) == sent(counted) != {}
    assert {one.asynchronous for one in found} == {False}
    assert {one.asynchronous for one in counted} == {None}
    assert max(len(one.loops) for one in found) == {"kinds": 0, "nested": 2}.get(name, 1)


def test_combined_messages_are_one():
    both = Program(
        fn=mapped(lambda x, y: lax.psum((x, y), "shard"), (P(), P()), P()),
        args=(((64, 32), "float32", P()), ((48,), "float32", P())),
    )
    (one,) = compiled_collectives(hlo.parse(both.compiled(mesh_of(2, 4)).as_text()), SIZES)
    assert (one.count, one.bytes, one.axes) == (1, 64 * 32 * 4 + 48 * 4, ("shard",))


@pytest.mark.smoke
def test_a_training_step_by_purpose_and_leaf():
    """XLA moves what does not change out of the microbatch loop, and combines; what is left is the contract's."""
    training = js.parallelize(
        FORMS[0].loss,
        optax.sgd(0.1),
        params=FORMS[0].init,
        batch=batches(1, 48)[0],
        mesh=mesh_of(1, 8),
        accumulate=3,
        compiler_options=QUICK,
    )
    assert isinstance(training, js.Training)
    compiled = facts(training.built().compiled, training.mesh)
    rows = [
        {
            (one.kind, one.purpose, one.leaf, one.bytes, one.count, one.loops)
            for one in collectives
            if one.leaf.startswith("blocks")
        }
        for collectives in (compiled.collectives, training.contract())
    ]
    assert rows[0] == rows[1]
    assert ("all_gather", "gather", "blocks.up", 1792, 18, ("microbatches", "scan")) in rows[0]
    # Forward, and twice as much backward; the model has 2 products of 16 x 28 in each of 3 layers, and a head.
    tokens = 48 // 8 * 4
    assert sum(compiled.flops.values()) == 3 * 2 * tokens * (3 * 2 * 16 * 28 + 16 * 32)
    assert compiled.wire_bytes > 0
    assert not compiled.unknown_loops


def test_groups_that_are_no_axes_are_named_so():
    text = text_of("nested", "jax0.10").replace("{{0,4},{1,5},{2,6},{3,7}}", "{{0,1},{2,3},{4,5},{6,7}}")
    (one,) = compiled_collectives(hlo.parse(text), SIZES)
    assert (one.axes, one.devices) == (("groups of 2",), 2)


def test_a_custom_call_that_nobody_can_count_is_said():
    text = text_of("products", "jax0.12")
    unknown = re.sub(r"__cublas\$lt\$matmul(.*)lhs_contracting", r"my_kernel\1other", text)
    assert uncounted(hlo.parse(unknown)) == ("my_kernel",)
    assert flops(unknown) == {"float32": FLOPS["products"]["float32"]}


def test_what_is_no_compiled_text():
    with pytest.raises(ValueError, match="no ENTRY computation"):
        hlo.parse("module @jit_f { }")
    with pytest.raises(ValueError, match="q7, a dtype that is not known"):
        hlo.parse("ENTRY %main () -> q7[] {\n  ROOT %c = q7[] constant(0)\n}\n")


DTYPES = {"pred": ("bool", 1), "bf16": ("bfloat16", 2), "s4": ("int4", 0.5), "u32": ("uint32", 4)} | {
    "f8e4m3fn": ("float8_e4m3fn", 1),
    "c64": ("complex64", 8),
}


@pytest.mark.parametrize("name", DTYPES)
def test_dtypes_are_named_as_jax_does(name):
    text = f"ENTRY %main (x: {name}[3,2]) -> {name}[3,2] {{\n  ROOT %x = {name}[3,2]{{1,0:S(5)}} parameter(0)\n}}\n"
    (site,) = walk(hlo.parse(text))
    (array,) = site.instruction.arrays
    assert (array.dtype, array.bytes, array.space) == (DTYPES[name][0], 6 * DTYPES[name][1], hlo.HOST)
    assert jnp.dtype(array.dtype)
