"""Which mesh axes a compiled collective goes over, read off its groups of devices.

Devices are numbered in the order of the mesh's flat devices: the last axis varies fastest.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence

import numpy as np

Groups = tuple[tuple[int, ...], ...]


def parse(text: str, devices: int) -> Groups:
    """Groups of device numbers, from the text after ``replica_groups=``.

    Three notations: ``{{0,1},{2,3}}`` (``{}`` is all `devices`), ``[2,2]<=[4]`` or ``[2,2]<=[2,2]T(1,0)``, and
    ``mesh['a'=2,'b'=2] {'b'}``, which may number its devices (``device_ids=([3,2,1,0])`` or ``([2,2]T(1,0))``) and
    split an axis (``'b':(1)2``).

    Raises ValueError for another one.
    """
    if text.startswith("{"):
        listed = tuple(tuple(map(int, one.split(","))) for one in re.findall(r"\{([\d,]+)\}", text))
        return listed or (tuple(range(devices)),)
    if iota := re.match(r"\[([\d,]+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)", text):
        return _tuples(_iota(iota[2]).reshape(_numbers(iota[1])))
    if mesh := re.match(r"mesh\[([^\]]*)\](?:, device_ids=\((.*?)\))? \{([^}]*)\}", text):
        return _mesh_groups(*mesh.groups())
    raise ValueError(f"replica_groups={text[:80]}: a notation that is not known here.")


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)))


def _iota(text: str) -> np.ndarray:
    """``[2,4]T(1,0)``: the numbers from 0 on, as an array of these dims, in this order of dims."""
    dims, _, order = text.partition("T")
    counted = np.arange(math.prod(_numbers(dims))).reshape(_numbers(dims))
    return counted.transpose(_numbers(order)) if order else counted


def _tuples(groups: np.ndarray) -> Groups:
    return tuple(tuple(map(int, group)) for group in groups)


def _mesh_groups(axes: str, device_ids: str | None, over: str) -> Groups:
    sizes = {name: int(size) for name, size in re.findall(r"'?([^',=]+)'?=(\d+)", axes)}
    count = math.prod(sizes.values())
    if device_ids is not None and "T" not in device_ids:
        devices = np.array(_numbers(device_ids))
    else:
        devices = _iota(device_ids or f"[{count}]")
    # NAME, or the factor NAME:(BEFORE)SIZE of its size, with a product BEFORE of slower factors.
    parts = [
        (name, int(before or 1), int(size or sizes[name]))
        for name, before, size in re.findall(r"'?([^',:]+)'?(?::\((\d+)\)(\d+))?", over)
    ]
    factors = [
        (name, low, high // low)
        for name, size in sizes.items()
        for low, high in itertools.pairwise(
            sorted({1, size, *(x for n, before, part in parts if n == name for x in (before, before * part))})
        )
    ]
    inside = [factors.index(part) for part in parts if part[2] > 1]
    outside = [i for i in range(len(factors)) if i not in inside]
    shaped = devices.reshape([size for _, _, size in factors]).transpose(outside + inside)
    return _tuples(shaped.reshape(-1, math.prod(size for _, _, size in parts)))


def axes_over(groups: Groups, mesh: Mapping[str, int]) -> tuple[str, ...] | None:
    """The mesh axes, outermost first, whose devices form exactly these groups; None if no axes do.

    mesh: size by axis name. The order of axes is that of the devices in a group; where no order is that of the groups,
    it is the mesh's. Axes of size one are in none.
    """
    axes = tuple(axis for axis, size in mesh.items() if size > 1)
    sets = set(map(frozenset, groups))
    for count in range(len(axes) + 1):
        for chosen in itertools.combinations(axes, count):
            if set(map(frozenset, _groups_over(chosen, mesh))) != sets:
                continue
            orders = itertools.permutations(chosen)
            return next((order for order in orders if set(_groups_over(order, mesh)) == set(groups)), chosen)
    return None


def _groups_over(axes: Sequence[str], mesh: Mapping[str, int]) -> Groups:
    names = list(mesh)
    devices = np.arange(math.prod(mesh.values())).reshape(tuple(mesh.values()))
    others = [names.index(axis) for axis in names if axis not in axes]
    moved = devices.transpose(others + [names.index(axis) for axis in axes])
    return _tuples(moved.reshape(-1, math.prod(mesh[axis] for axis in axes)))


def axes_between(pairs: Groups, mesh: Mapping[str, int]) -> tuple[str, ...]:
    """The mesh axes along which the devices of (source, target) pairs differ."""
    places = np.array(pairs).T
    coordinates = np.unravel_index(places, tuple(mesh.values()))
    return tuple(axis for axis, (source, target) in zip(mesh, coordinates, strict=True) if np.any(source != target))
