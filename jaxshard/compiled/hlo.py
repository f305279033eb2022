"""Compiled text as data: computations and their instructions.

Reads what ``compiled.as_text()`` gives on CPUs, GPUs and TPUs. What runs how often, what is sent, and what it costs are
the business of `walk`, `traffic` and `work`.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

HOST = 5
"""The memory space, ``S(5)`` in a layout, that is the host's."""
_PREFIXES = {"f": "float", "bf": "bfloat", "s": "int", "u": "uint", "c": "complex"}


@dataclass(frozen=True)
class Array:
    """The type of one array. dtype: JAX's name of it. space: the memory it lies in, 0 is the device's own."""

    dtype: str
    dims: tuple[int, ...]
    space: int = 0

    @property
    def size(self) -> int:
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        return -(-self.size * _bits(self.dtype) // 8)


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """One line.

    arrays: of its result, a tuple's flat. operands: names. literal: what stands in place of operands, of a constant its
    value and of a parameter its number. attributes: the text after that.
    """

    name: str
    opcode: str
    arrays: tuple[Array, ...]
    operands: tuple[str, ...]
    attributes: str
    literal: str = ""

    @property
    def bytes(self) -> int:
        """Of its result."""
        return sum(array.bytes for array in self.arrays)

    @property
    def op_name(self) -> str:
        """JAX's name stack, ``jit(step)/.../dot_general``; empty where a pass of the compiler dropped it."""
        found = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.attributes)
        return found[1] if found else ""

    def calls(self, *roles: str) -> tuple[str, ...]:
        """The computations it names as ``ROLE=%name`` or ``ROLE={%name, %name}``."""
        named = re.findall(rf"\b(?:{'|'.join(roles)})=(\{{[^}}]*\}}|%?[\w.-]+)", self.attributes)
        return tuple(name for one in named for name in re.findall(r"[\w.-]+", one))

    def numbers(self, name: str) -> tuple[int, ...]:
        """The numbers of an attribute such as ``lhs_contracting_dims={1,2}`` or ``index=3``; () without it."""
        found = re.search(rf"\b{name}=\{{?([\d,]*)", self.attributes)
        return tuple(int(n) for n in found[1].split(",") if n) if found else ()


@dataclass(frozen=True, kw_only=True)
class Computation:
    """A computation's instructions by name, in the order they are scheduled in."""

    name: str
    instructions: Mapping[str, Instruction]
    root: str

    def operands(self, instruction: Instruction) -> list[Instruction]:
        return [self.instructions[name] for name in instruction.operands]

    @functools.cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """Who reads each instruction."""
        found: dict[str, list[Instruction]] = {name: [] for name in self.instructions}
        for one in self.instructions.values():
            for name in one.operands:
                found[name].append(one)
        return found


@dataclass(frozen=True, kw_only=True)
class Module:
    """A compiled program."""

    entry: Computation
    computations: Mapping[str, Computation]

    def called(self, instruction: Instruction) -> list[Computation]:
        """What a fusion, or an asynchronous start, runs."""
        return [self.computations[name] for name in instruction.calls("calls")]


_OPENED = re.compile(r"^(ENTRY )?%?([\w.-]+)(?: \(.*)? \{$")
_NAMED = re.compile(r"^\s+(ROOT )?%?([\w.-]+) = ")
_ARRAY = re.compile(r"(\w+)\[([\d,<=]*)\](?:\{([^}]*)\})?")


def parse(text: str) -> Module:
    """The module of ``compiled.as_text()``. Raises ValueError for a text without an entry computation."""
    computations: dict[str, Computation] = {}
    entry, name, root, lines = "", "", "", {}
    for line in text.splitlines():
        if line.startswith("}"):
            if lines:
                computations[name] = Computation(name=name, instructions=lines, root=root or next(reversed(lines)))
            lines = {}
        elif named := _NAMED.match(line):
            lines[named[2]] = _instruction(named[2], line, named.end())
            root = named[2] if named[1] else root
        elif opened := _OPENED.match(line):
            name, root, lines = opened[2], "", {}
            entry = name if opened[1] else entry
    if entry not in computations:
        raise ValueError("this is no compiled program: it has no ENTRY computation. Pass compiled.as_text().")
    return Module(entry=computations[entry], computations=computations)


def _instruction(name: str, line: str, start: int) -> Instruction:
    """The instruction whose type starts at `start`: ``TYPE opcode(OPERANDS), ATTRIBUTES``."""
    end = _closing(line, start) + 1 if line[start] == "(" else line.index(" ", start)
    opened = line.index("(", end)
    closed = _closing(line, opened)
    operands = re.findall(r"%([\w.-]+)", line[opened:closed])
    return Instruction(
        name=name,
        opcode=line[end:opened].strip(),
        arrays=arrays(line[start:end]),
        operands=tuple(operands),
        attributes=line[closed + 1 :],
        literal="" if operands else line[opened + 1 : closed],
    )


def arrays(type: str) -> tuple[Array, ...]:
    """The arrays of a type as XLA writes it, a tuple's flat: ``(f32[2,3]{1,0}, s32[])``."""
    return tuple(_array(*found) for found in _ARRAY.findall(type) if found[0] not in ("token", "opaque"))


def _closing(line: str, opened: int) -> int:
    """The parenthesis that closes the one at `opened`."""
    depth = 0
    for found in re.compile(r"[()]").finditer(line, opened):
        depth += 1 if found[0] == "(" else -1
        if depth == 0:
            return found.start()
    raise ValueError(f"an instruction of the compiled text does not end: {line[:200]}")


def _array(dtype: str, dims: str, layout: str) -> Array:
    space = re.search(r"S\((\d+)\)", layout)
    return Array(
        dtype=_dtype(dtype),
        dims=tuple(int(n.removeprefix("<=")) for n in dims.split(",") if n),
        space=int(space[1]) if space else 0,
    )


@functools.cache
def _dtype(name: str) -> str:
    """JAX's name of a dtype of XLA: ``float8_e4m3fn`` for ``f8e4m3fn``."""
    if name == "pred":
        return "bool"
    found = re.fullmatch(r"([a-z]+)(\d+)(\w*)", name)
    if found is None or found[1] not in _PREFIXES:
        raise ValueError(f"the compiled text has arrays of {name}, a dtype that is not known here.")
    prefix, bits, rest = found.groups()
    return f"{_PREFIXES[prefix]}{bits}" + (f"_{rest}" if rest else "")


@functools.cache
def _bits(dtype: str) -> int:
    found = re.search(r"\d+", dtype)
    return int(found[0]) if found else 8
