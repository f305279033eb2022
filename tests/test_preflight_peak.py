"""What lies in temporary memory at its worst moment, from the compiler's own account of it."""

from __future__ import annotations

import pytest

from jaxshard.preflight.peak import dumped, peak

ASSIGNMENT = """\
BufferAssignment:
allocation 0: size 64, parameter 0, shape |f32[16]| at ShapeIndex {}, maybe-live-out:
 value: <1 p @0> (size=64,offset=0): f32[16]{0}
allocation 1: size 4096, preallocated-temp, color 5:
 value: <2 on_host @0> (size=4096,offset=0): f32[1024]{0:S(5)}
allocation 2: size 448, preallocated-temp:
 value: <3 first @0> (size=256,offset=0): f32[64]{0}
 value: <4 pair{} @0> (size=16,offset=384): (f32[16], f32[16])
 value: <5 pair{0} @0> (size=64,offset=256): f32[16]{0}
 value: <6 pair{1} @0> (size=64,offset=320): f32[16]{0}
 value: <7 late (phi) @0> (size=128,offset=0): f32[32]{0}
 value: <8 loop{1} (phi) @0> (size=64,offset=256): f32[16]{0}
"""
# At 3, the pair's first element has been passed on to the loop, in place; `late` lies where `first` was.
LIVES = """\
HloLiveRange (max 9):
  BufferLiveRange:
    p{}:0-9
    on_host{}:0-9
    first{}:1-2
    pair{}:2-3
    pair{0}:2-4
    pair{1}:2-4
    loop{1}:3-6
    late{}:4-6
  Live ranges at 2 (peak):
    first{}: 256 bytes (cumulative: 256 bytes)
"""
MODULE = """\
HloModule jit_step, is_scheduled=true

body (b: (s32[], f32[16])) -> (s32[], f32[16]) {
  b = (s32[], f32[16]) parameter(0)
  i = s32[] get-tuple-element(%b), index=0
  x = f32[16] get-tuple-element(%b), index=1
  twice = f32[16] add(%x, %x), metadata={op_name="jit(step)/while/body/add"}
  ROOT t = (s32[], f32[16]) tuple(%i, %twice)
}

ENTRY main (p: f32[16]) -> f32[32] {
  p = f32[16] parameter(0), metadata={op_name="state"}
  first = f32[64] concatenate(%p, %p, %p, %p), metadata={op_name="jit(step)/jvp()/concatenate"}
  pair = (f32[16], f32[16]) custom-call(%first), metadata={op_name="jit(step)/pair"}
  loop = (s32[], f32[16]) while(%pair), condition=%body, body=%body
  ROOT late = f32[32] concatenate(%p, %p)
}
"""


def dump(folder, **texts):
    for kind, text in texts.items():
        suffix = "" if kind == "module" else f"-{kind.replace('_', '-')}"
        (folder / f"module_0001.jit_step.sm_9.0a_gpu_after_optimizations{suffix}.txt").write_text(text)


def test_the_worst_moment_and_who_made_what(tmp_path):
    dump(tmp_path, module=MODULE, buffer_assignment=ASSIGNMENT, live_range=LIVES)
    found = peak(tmp_path)
    # At 2: the first (256) and both elements of the pair (64 each) are there; the tuple's table does not count.
    assert [(one.bytes, one.scope) for one in found.buffers] == [
        (256, "jit(step)/jvp()/concatenate"),
        (64, "jit(step)/pair"),
        (64, "jit(step)/pair"),
    ]
    assert (found.temps, found.gaps) == (448, 64)


def test_what_a_loop_carries_is_named_by_its_body(tmp_path):
    longer = (
        LIVES.replace("first{}:1-2", "first{}:1-1")
        .replace("pair{0}:2-4", "pair{0}:2-3")
        .replace("pair{1}:2-4", "pair{1}:2-3")
    )
    dump(tmp_path, module=MODULE, buffer_assignment=ASSIGNMENT.replace("size=128", "size=320"), live_range=longer)
    # At 4: what the loop carries, and `late`, whose own name the compiler dropped.
    assert [(one.bytes, one.scope) for one in peak(tmp_path).buffers] == [
        (320, ""),
        (64, "jit(step)/while/body/add"),
    ]


def test_a_folder_without_a_dump():
    with dumped() as (options, folder):
        assert options == {"xla_dump_to": str(folder)}
        with pytest.raises(ValueError, match="pass it the options that `dumped` gives"):
            peak(folder)
    assert not folder.exists()
