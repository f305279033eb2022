"""What a program holds at its worst moment, buffer by buffer, as its compiler laid them out.

XLA writes that down when it is asked for a dump: which value lies where in temporary memory, and from when to when.
"""

from __future__ import annotations

import re
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from jaxshard.compiled.hlo import HOST, Array, Computation, Instruction, arrays, parse


@dataclass(frozen=True, kw_only=True)
class Buffer:
    """A value in temporary memory. array: its type. scope: JAX's name stack of what made it, ``""`` if that is lost."""

    bytes: int
    array: Array
    scope: str


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The moment at which most of the temporary memory is in use, on one device.

    buffers: what is held then, largest first. temps: bytes of temporary memory; `gaps` is what the buffers leave of it,
    because those of other moments did not fit into one place.
    """

    buffers: tuple[Buffer, ...]
    temps: int

    @property
    def gaps(self) -> int:
        return self.temps - sum(one.bytes for one in self.buffers)


@contextmanager
def dumped() -> Iterator[tuple[dict[str, str], Path]]:
    """Compiler options that make XLA write down what it does, and the folder it writes to, removed at the end."""
    with tempfile.TemporaryDirectory() as folder:
        yield {"xla_dump_to": folder}, Path(folder)


def peak(folder: Path) -> Peak:
    """The peak of the program that was compiled with the options of `dumped`.

    Raises ValueError when the compiler wrote down no live ranges.
    """
    temps, values = _assigned(_written(folder, "-buffer-assignment"))
    held = _held_at_worst(values, _lives(_written(folder, "-live-range")))
    # The text of the executable has other names here and there, so this is read as it was dumped.
    scopes = _Scopes(_written(folder, ""))
    buffers = [Buffer(bytes=one.bytes, array=one.array, scope=scopes(one.name, one.index)) for one in held]
    return Peak(buffers=tuple(sorted(buffers, key=lambda one: -one.bytes)), temps=temps)


def _written(folder: Path, kind: str) -> str:
    # Small programs of the compiler's own, such as constants that it folds, may be dumped as well.
    found = sorted(folder.glob(f"*after_optimizations{kind}.txt"), key=lambda path: path.stat().st_size)
    if not found:
        raise ValueError(
            f"the compiler wrote no after_optimizations{kind}.txt; pass it the options that `dumped` gives."
        )
    return found[-1].read_text()


@dataclass(frozen=True)
class _Value:
    """An element of what an instruction gives, ``name{index}``, and where it lies: (allocation, offset)."""

    name: str
    index: tuple[int, ...]
    place: tuple[int, int]
    bytes: int
    array: Array


_ALLOCATION = re.compile(r"allocation (\d+): size (\d+)(.*)")
_VALUE = re.compile(
    r"\s+value: <\d+ ([\w.-]+?)(?:\{([\d,]*)\})?(?: \(phi\))?(?: @\d+)?(?: \(phi\))?> \(size=(\d+),offset=(\d+)\): (.*)"
)
_LIFE = re.compile(r"\s+([\w.-]+?)\{([\d,]*)\}:(\d+)-(\d+)$")


def _numbers(text: str | None) -> tuple[int, ...]:
    return tuple(int(n) for n in (text or "").split(",") if n)


def _assigned(text: str) -> tuple[int, list[_Value]]:
    """(bytes of the device's temporary memory, the values in it)."""
    temps, values, allocation = 0, [], None
    for line in text.splitlines():
        if opened := _ALLOCATION.match(line):
            ours = "preallocated-temp" in opened[3] and f"color {HOST}" not in opened[3]
            allocation = int(opened[1]) if ours else None
            temps += int(opened[2]) if ours else 0
        elif allocation is not None and (found := _VALUE.match(line)):
            name, index, size, offset, type = found.groups()
            if not type.startswith("("):  # a tuple is a table of addresses
                place = allocation, int(offset)
                values.append(_Value(name, _numbers(index), place, int(size), arrays(type)[0]))
    return temps, values


def _lives(text: str) -> dict[tuple[str, tuple[int, ...]], tuple[int, int]]:
    """The first and the last moment of each value, as positions in the schedule."""
    found = filter(None, map(_LIFE.match, text.splitlines()))
    return {(one[1], _numbers(one[2])): (int(one[3]), int(one[4])) for one in found}


def _held_at_worst(values: Iterable[_Value], lives: dict[tuple[str, tuple[int, ...]], tuple[int, int]]) -> list[_Value]:
    """The values that are alive when most of the memory is in use; of several in one place, the first."""
    begun, ended = defaultdict(list), defaultdict(list)
    for value in values:
        if (value.name, value.index) in lives:
            first, last = lives[value.name, value.index]
            begun[first].append(value)
            ended[last + 1].append(value)
    alive: dict[tuple[int, int], list[_Value]] = defaultdict(list)
    size, most, worst = 0, -1, []
    for moment in sorted({*begun, *ended}):
        for changes, change in (ended, list.remove), (begun, list.append):
            for value in changes[moment]:
                here = alive[value.place]
                before = max((one.bytes for one in here), default=0)
                change(here, value)
                size += max((one.bytes for one in here), default=0) - before
        if size > most:
            most, worst = size, [max(here, key=lambda one: one.bytes) for here in alive.values() if here]
    return worst


class _Scopes:
    """The name stack of what made a value, through whatever only passes it on."""

    def __init__(self, text: str):
        self.module = parse(text)
        self.homes = {name: home for home in self.module.computations.values() for name in home.instructions}

    def __call__(self, name: str, index: tuple[int, ...] = (), depth: int = 0) -> str:
        home = self.homes.get(name)
        if home is None or depth > 8:
            return ""
        one = home.instructions[name]
        if one.op_name and one.opcode != "while":
            return one.op_name
        source = self._source(home, one, index)
        return self(*source, depth + 1) if source else ""

    def _source(self, home: Computation, one: Instruction, index: tuple[int, ...]):
        """The value that an instruction passes on as its element `index`."""
        if one.opcode == "while" and index:
            (body,) = one.calls("body")
            return self.module.computations[body].root, index
        if one.opcode == "tuple" and index:
            return one.operands[index[0]], index[1:]
        if one.opcode == "get-tuple-element":
            return one.operands[0], (*one.numbers("index"), *index)
        if one.opcode.endswith("-done") or one.opcode in ("bitcast", "copy", "fusion", "convert"):
            return (one.operands[0], ()) if one.operands else None
        return None
