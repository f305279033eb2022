"""Operations, bytes and memory of compiled programs. Oracles: XLA's cost analysis, which knows no loops; formulas."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from oracle import mesh_of
from quick import QUICK

from jaxshard.compiled import hlo
from jaxshard.preflight.facts import facts
from jaxshard.preflight.work import Work, work


def work_of(compiled: Any) -> tuple[Work, ...]:
    return work(hlo.parse(compiled.as_text()))


def flops(compiled: Any) -> dict:
    totals: Counter = Counter()
    for one in work_of(compiled):
        totals[one.dtype] += one.flops * one.times
    return {dtype: total for dtype, total in totals.items() if total}


CONVOLUTIONS = {
    "plain": {"window_strides": (1, 1), "padding": "SAME"},
    "strided": {"window_strides": (2, 3), "padding": "VALID"},
    "padded": {"window_strides": (1, 2), "padding": ((2, 0), (1, 3))},
    "dilated": {"window_strides": (1, 1), "padding": ((1, 1), (2, 1)), "lhs_dilation": (2, 1), "rhs_dilation": (1, 2)},
    "grouped": {"window_strides": (1, 1), "padding": "SAME", "feature_group_count": 2},
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_as_xla_counts_them(name):
    convolve = lambda x, k: lax.conv_general_dilated(
        x, k, dimension_numbers=("NHWC", "HWIO", "NHWC"), **CONVOLUTIONS[name]
    )
    groups = CONVOLUTIONS[name].get("feature_group_count", 1)
    x, k = jnp.zeros((2, 9, 11, 4)), jnp.zeros((3, 3, 4 // groups, 6))
    compiled: Any = jax.jit(convolve).lower(x, k).compile(compiler_options=dict(QUICK))
    assert flops(compiled) == {"float32": compiled.cost_analysis()["flops"]}


READS = {
    "product": lambda x, w: jnp.tanh(x @ w),
    "slice": lambda x, w: x[3:7] * 2,
    "row": lambda x, w: lax.dynamic_slice_in_dim(x, w[0, 0].astype(int), 4) * 2,
    "sum": lambda x, w: jnp.sum(x * w, 0),
}


@pytest.mark.parametrize("name", READS)
def test_bytes_as_xla_counts_them(name):
    shapes = jax.ShapeDtypeStruct((64, 64), "float32")
    compiled: Any = jax.jit(READS[name]).lower(shapes, shapes).compile()
    done = work_of(compiled)
    # XLA counts pointers of tuples and the indices of slices as well.
    expected = compiled.cost_analysis()["bytes accessed"]
    assert sum(one.bytes * one.times for one in done) == pytest.approx(expected, abs=64)


def test_a_scan_reads_its_stack_once():
    layers, width = 12, 64
    scanned = lambda w, x: lax.scan(lambda x, w: (jnp.tanh(x @ w), x), x, w)
    w, x = jnp.zeros((layers, width, width)), jnp.zeros((2, width))
    done = work_of(jax.jit(scanned).lower(w, x).compile())
    moved = sum(one.bytes * one.times for one in done if one.loops)
    assert w.nbytes < moved < 4 * w.nbytes < layers * w.nbytes
    assert sum(one.flops * one.times for one in done) == 2 * 2 * width * width * layers


def test_an_update_in_place_writes_what_it_updates():
    put = lambda x, row: lax.dynamic_update_index_in_dim(x, row * 2, 7, 0)
    x, row = jnp.zeros((1024, 64)), jnp.zeros((64,))
    done = work_of(jax.jit(put, donate_argnums=0).lower(x, row).compile())
    assert 2 * row.nbytes <= sum(one.bytes for one in done) <= 4 * row.nbytes + 64


OPERATIONS = """
ENTRY %main (x: f32[8,128], row: f32[1,128], at: s32[]) -> f32[8,128] {
  %x = f32[8,128]{1,0} parameter(0)
  %row = f32[1,128]{1,0} parameter(1)
  %at = s32[] parameter(2)
  %zero = s32[] constant(0)
  %taken = f32[1,128]{1,0} dynamic-slice(%x, %at, %zero), dynamic_slice_sizes={1,128}
  %put = f32[8,128]{1,0} dynamic-update-slice(%x, %row, %at, %zero)
  %sent-start = (f32[1,128]{1,0:S(5)}, f32[1,128]{1,0}, u32[]) copy-start(%taken)
  %sent = f32[1,128]{1,0:S(5)} copy-done(%sent-start)
  ROOT %double = f32[8,128]{1,0} add(%put, %put)
}
"""


def test_operations_that_take_or_put_a_part():
    row, whole = 128 * 4, 8 * 128 * 4
    moved = {one.name: (one.bytes, one.to_device, one.to_host) for one in work(hlo.parse(OPERATIONS))}
    assert moved == {
        "taken": (2 * row, 0, 0),
        "put": (2 * row, 0, 0),
        "sent-start": (row, 0, row),
        "double": (3 * whole, 0, 0),
    }


def test_memory_by_class():
    f = jax.jit(lambda x, y: (x + y, jnp.sum(y)), donate_argnums=0)
    x = jax.ShapeDtypeStruct((256, 4), "float32")
    found = facts(f.lower(x, x).compile(), mesh_of(1, 1))
    assert (found.memory.arguments, found.memory.aliased) == (2 * 4096, 4096)
    assert found.memory.outputs - 4096 in range(4, 64)  # the scalar, and a pointer to each output
    assert found.memory.peak == 2 * 4096 + found.memory.outputs - 4096 + found.memory.temps
    assert found.host_memory.peak == 0
