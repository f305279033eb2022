"""Groups of devices, in the three notations of compiled text, and the mesh axes they are.

Oracle: the groups written out, and, for any mesh, those of ``arange`` with the axes moved to the end.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxshard.compiled.groups import axes_between, axes_over, parse

MESH = {"replica": 2, "shard": 4}
WRITTEN = {
    "{{0,1,2,3},{4,5,6,7}}": ((0, 1, 2, 3), (4, 5, 6, 7)),
    "[2,4]<=[8]": ((0, 1, 2, 3), (4, 5, 6, 7)),
    "mesh['replica'=2,'shard'=4] {'shard'}": ((0, 1, 2, 3), (4, 5, 6, 7)),
    "{{0,4},{1,5},{2,6},{3,7}}": ((0, 4), (1, 5), (2, 6), (3, 7)),
    "[4,2]<=[2,4]T(1,0)": ((0, 4), (1, 5), (2, 6), (3, 7)),
    "mesh['replica'=2,'shard'=4] {'replica'}": ((0, 4), (1, 5), (2, 6), (3, 7)),
    "{}": (tuple(range(8)),),
    "mesh['replica'=2,'shard'=4] {'replica','shard'}": (tuple(range(8)),),
    "mesh['replica'=2,'shard'=4] {'shard','replica'}": ((0, 4, 1, 5, 2, 6, 3, 7),),
    "mesh[a=2,b=2], device_ids=([3,2,1,0]) {b}": ((3, 2), (1, 0)),
    "mesh['a'=1,'b'=4,'c'=2], device_ids=([2,4]T(1,0)) {'b'}": ((0, 1, 2, 3), (4, 5, 6, 7)),
    "mesh['a'=8] {'a':(1)2}": ((0, 4), (1, 5), (2, 6), (3, 7)),
    "mesh['a'=8] {'a':(4)2}": ((0, 1), (2, 3), (4, 5), (6, 7)),
    "mesh['a'=8,'b'=1] {'a':(1)2,'a':(4)2}": ((0, 1, 4, 5), (2, 3, 6, 7)),
}


@pytest.mark.parametrize("text", WRITTEN)
def test_every_notation(text):
    assert parse(text, 8) == WRITTEN[text]


@pytest.mark.smoke
def test_the_axes_of_groups():
    over = {text: axes_over(groups, MESH) for text, groups in WRITTEN.items() if "'a'" not in text and "[a" not in text}
    assert list(over.values()) == [
        *[("shard",)] * 3,
        *[("replica",)] * 3,
        *[("replica", "shard")] * 2,
        ("shard", "replica"),
    ]


def test_groups_that_are_no_axes():
    assert axes_over(((0, 1), (2, 3), (4, 5), (6, 7)), MESH) is None
    assert axes_over(((0, 1, 2, 3),), MESH) is None, "not all devices take part"


def test_another_order_of_the_same_devices():
    assert axes_over(((3, 2, 1, 0), (4, 5, 6, 7)), MESH) == ("shard",)


def test_an_unknown_notation():
    with pytest.raises(ValueError, match="notation"):
        parse("<<0,1>>", 8)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(sizes=st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=4), data=st.data())
def test_any_axes_in_any_order(sizes, data):
    mesh = dict(zip("abcd", sizes, strict=False))
    axes = data.draw(st.permutations([axis for axis in mesh if mesh[axis] > 1]))
    chosen = tuple(axes[: data.draw(st.integers(0, len(axes)))])
    devices = np.arange(math.prod(sizes)).reshape(sizes)
    moved = np.moveaxis(devices, ["abcd".index(axis) for axis in chosen], range(-len(chosen), 0))
    groups = tuple(map(tuple, moved.reshape(-1, math.prod(mesh[axis] for axis in chosen)).tolist()))
    assert axes_over(groups, mesh) == chosen
    named = ",".join(f"'{axis}'={size}" for axis, size in mesh.items())
    assert parse(f"mesh[{named}] {{{','.join(map(repr, chosen))}}}", 0) == groups
    assert parse(str(groups).replace(" ", "").replace(",)", ")").translate(str.maketrans("()", "{}")), 0) == groups


def test_the_axes_between_pairs():
    along = {
        axes: tuple(itertools.permutations(groups[0][:2]))
        for axes, groups in ((("shard",), WRITTEN["[2,4]<=[8]"]), (("replica",), WRITTEN["[4,2]<=[2,4]T(1,0)"]))
    }
    for axes, pairs in along.items():
        assert axes_between(pairs, MESH) == axes
    assert axes_between(((0, 5), (5, 0)), MESH) == ("replica", "shard")
    assert axes_between(((0, 0),), MESH) == ()
