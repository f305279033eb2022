"""What a compiled program computes, reads and writes: operations and bytes of each instruction that runs by itself."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from jaxshard.compiled.hlo import HOST, Array, Computation, Instruction, Module
from jaxshard.compiled.walk import walk

# They only name values, or what they do is counted where they lead to.
_FREE = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "opt-barrier", "add-dependency"),
    *("partition-id", "replica-id", "while", "conditional", "call", "async-start", "async-update", "async-done"),
}
_SLICES = ("dynamic-slice", "slice", "gather")
_UPDATES = ("dynamic-update-slice", "scatter")
_ALLOCATION = "AllocateBuffer"  # a custom call that makes room, and writes nothing


@dataclass(frozen=True, kw_only=True)
class Work:
    """What an instruction does each time it runs.

    name, opcode: of the instruction. times: how often it runs in a step. loops: as in `walk.Site`.
    flops: of matrix products, convolutions and cuDNN's attention, 2 for each multiply-add; all else is bound by memory.
    dtype: of what they multiply. bytes: read from and written to the device's memory. to_device, to_host: over the link
    to the host's memory; what a device copies inside of that passes it both ways. on_host: read and written by the
    host's own processor, which passes nothing. target: of a custom call.
    """

    name: str
    opcode: str
    times: int
    loops: tuple[str, ...]
    flops: int
    dtype: str
    bytes: int
    to_device: int
    to_host: int
    on_host: int = 0
    target: str = ""


def work(module: Module) -> tuple[Work, ...]:
    """Every instruction that computes, reads or writes, in the order in which they are scheduled."""
    found = (
        (site, work_of(module, site.computation, site.instruction))
        for site in walk(module)
        if not site.instruction.opcode.endswith("-done")
    )
    return tuple(replace(one, times=site.times, loops=site.loops) for site, one in found if one)


def work_of(module: Module, computation: Computation, one: Instruction) -> Work | None:
    """What one instruction does when it runs once; None for those that do nothing or only lead to others."""
    if one.opcode in _FREE:
        return None
    flops = _flops(module, computation, one)
    read, written = (_bytes(arrays) for arrays in _moved(module, computation, one))
    by_host = _runs_on_host(one)
    return Work(
        name=one.name,
        opcode=one.opcode,
        times=1,
        loops=(),
        flops=sum(count for count, _ in flops),
        dtype=max(flops, default=(0, ""))[1],
        bytes=read.device + written.device,
        # To the host's processor it is the device's memory that lies at the other end.
        to_device=written.device if by_host else read.host,
        to_host=read.device if by_host else written.host,
        on_host=sum(read) + sum(written) if by_host else 0,
        target=_target(one) if one.opcode == "custom-call" else "",
    )


class _Bytes(NamedTuple):
    device: int
    host: int


def _bytes(arrays: Iterable[Array]) -> _Bytes:
    """By the memory that they lie in."""
    sizes = [(array.space == HOST, array.bytes) for array in arrays]
    return _Bytes(*(sum(size for host, size in sizes if host == wanted) for wanted in (False, True)))


def _runs_on_host(one: Instruction) -> bool:
    return 'async_execution_thread="host"' in one.attributes


def uncounted(module: Module) -> tuple[str, ...]:
    """The targets of custom calls whose operations nobody here can count, such as a Pallas kernel's."""
    targets = {}
    for site in walk(module):
        if site.instruction.opcode == "custom-call" and not _flops(module, site.computation, site.instruction):
            targets[_target(site.instruction)] = None
    return tuple(name for name in targets if name != _ALLOCATION)


def _target(one: Instruction) -> str:
    found = re.search(r'custom_call_target="([^"]*)"', one.attributes)
    return found[1] if found else one.name


def _flops(module: Module, computation: Computation, one: Instruction) -> list[tuple[int, str]]:
    """(operations, dtype multiplied) of every product that an instruction consists of."""
    operands = [array for operand in computation.operands(one) for array in operand.arrays]
    if one.opcode == "dot":
        return [_product(one.arrays[0], operands[0], one.numbers("lhs_contracting_dims"))]
    if one.opcode == "convolution":
        return [_convolution(one, operands[0], operands[1], one.arrays[0])]
    if one.opcode in ("fusion", "fusion-start"):
        return [
            count
            for inner in module.called(one)
            for instruction in inner.instructions.values()
            for count in _flops(module, inner, instruction)
        ]
    if one.opcode == "custom-call":
        if role := re.search(r'"__cudnn\$conv(Forward|BackwardInput|BackwardFilter)', one.attributes):
            return [_convolution(one, *_roles(role[1], operands, one.arrays[0]))]
        if _target(one).startswith("__cudnn$fmha"):
            return [_attention(one, operands[0])]
        if dims := re.search(r'"lhs_contracting_dimensions": ?\[([^\]]*)\]', one.attributes):
            return [_product(one.arrays[0], operands[0], [int(n) for n in re.findall(r"\d+", dims[1])])]
    return []


def _product(result: Array, left: Array, contracted: Sequence[int]) -> tuple[int, str]:
    return 2 * result.size * math.prod(left.dims[dim] for dim in contracted), left.dtype


def _attention(one: Instruction, queries: Array) -> tuple[int, str]:
    """Two products of queries with keys, or of their weights with values; five in the backward pass (Dao 2023).

    A causal mask leaves half of the pairs, a sliding window so many keys to each query.
    """
    shape = re.search(r'"intermediate_tensor_shape":.*?"dimensions": ?\[([^\]]*)\]', one.attributes)
    if shape is None:
        raise ValueError(f"{one.name}: a call of cuDNN's attention without the shape of its weights.")
    *outer, length, keys = (int(n) for n in re.findall(r"\d+", shape[1]))
    seen = keys // 2 if re.search(r'"mask_type": ?"\w*CAUSAL"', one.attributes) else keys
    if window := re.search(r'"sliding_window_length": ?"?([1-9]\d*)', one.attributes):
        seen = min(seen, int(window[1]))
    products = 5 if "Backward" in _target(one) else 2
    return 2 * products * math.prod(outer) * length * seen * queries.dims[-1], queries.dtype


def _roles(direction: str, operands: list[Array], result: Array) -> tuple[Array, Array, Array]:
    """(input, filter, output) of the convolution whose derivative a call computes."""
    first, second = operands[:2]
    if direction == "BackwardInput":
        return result, second, first
    return (first, result, second) if direction == "BackwardFilter" else (first, second, result)


def _convolution(one: Instruction, source: Array, kernel: Array, result: Array) -> tuple[int, str]:
    """Multiply-adds with elements that are there: those with padding, or between dilated elements, are none."""
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", one.attributes)
    if labels is None:
        raise ValueError(f"{one.name}: a convolution without dim_labels.")
    window = _window(one)
    pairs = 1
    for position, label in enumerate(sorted(set(labels[1]) - set("bf"))):
        size = kernel.dims[labels[2].index(label)]
        taken = np.arange(result.dims[labels[3].index(label)])[:, None] * window("stride", 1, position)
        taken = taken + np.arange(size) * window("rhs_dilate", 1, position) - window("pad", 0, position)
        dilation = window("lhs_dilate", 1, position)
        last = (source.dims[labels[1].index(label)] - 1) * dilation
        pairs *= int(np.sum((taken >= 0) & (taken <= last) & (taken % dilation == 0)))
    channels = kernel.dims[labels[2].index("i")]
    others = result.dims[labels[3].index("b")] * result.dims[labels[3].index("f")]
    return 2 * pairs * channels * others, source.dtype


def _window(one: Instruction):
    def of(name: str, default: int, position: int) -> int:
        """A number of the window along one spatial dim: ``stride=2x2``; of padding, ``pad=1_1x1_1``, that before."""
        found = re.search(rf"window={{[^}}]*\b{name}=([\dx_-]+)", one.attributes)
        return int(found[1].split("x")[position].split("_")[0]) if found else default

    return of


def _moved(module: Module, computation: Computation, one: Instruction) -> tuple[list[Array], list[Array]]:
    """The arrays, or parts of arrays, that an instruction reads, and those that it writes."""
    operands = computation.operands(one)
    if one.opcode in ("fusion", "fusion-start"):
        (inner,) = module.called(one)
        parameters = sorted(
            (x for x in inner.instructions.values() if x.opcode == "parameter"), key=lambda x: int(x.literal)
        )
        given = zip(parameters, operands, strict=True)
        read = [part for parameter, operand in given for part in _placed(_read(inner, parameter), operand.arrays)]
        return read, list(_written(inner, inner.instructions[inner.root]))
    if _target(one) == _ALLOCATION:
        return [], []
    return _part(computation, one, operands)


def _part(computation: Computation, one: Instruction, operands: list[Instruction]) -> tuple[list[Array], list[Array]]:
    """What a single operation moves; those that take or put a part move no more than that."""
    if one.opcode in _SLICES:
        return list(_placed(one.arrays, operands[0].arrays)), list(one.arrays)
    if one.opcode in _UPDATES:
        update = _update(computation, one)
        return list(update.arrays), list(_placed(update.arrays, one.arrays))
    return [array for operand in operands for array in operand.arrays], list(_results(computation, one))


def _results(computation: Computation, one: Instruction) -> tuple[Array, ...]:
    """The arrays an instruction gives; those of an asynchronous start are named by what ends it."""
    if not one.opcode.endswith("-start"):
        return one.arrays
    done = [user for user in computation.users[one.name] if user.opcode.endswith("-done")]
    return done[0].arrays if done else one.arrays


def _placed(parts: Iterable[Array], wholes: Sequence[Array]) -> Iterable[Array]:
    """Parts of arrays, in the memory that the arrays are in."""
    space = wholes[0].space if wholes else 0
    return (Array(part.dtype, part.dims, space) for part in parts)


def _read(fused: Computation, parameter: Instruction) -> list[Array]:
    """What a fusion reads of a parameter: all of it, or only the parts that it slices; nothing of what it updates."""
    parts: list[Array] = []
    pending = [(parameter, user) for user in fused.users[parameter.name]]
    while pending:
        read, user = pending.pop()
        first = user.operands[0] == read.name and user.operands.count(read.name) == 1
        if user.opcode == "bitcast":
            pending += [(user, further) for further in fused.users[user.name]]
        elif user.opcode in _SLICES and first:
            parts += user.arrays
        elif not (user.opcode in _UPDATES and first):
            return list(parameter.arrays)
    return parts


def _written(fused: Computation, root: Instruction) -> Iterable[Array]:
    """What a fusion writes: its result, or the parts that it updates of what it was given."""
    if root.opcode == "tuple":
        for one in fused.operands(root):
            yield from _written(fused, one)
    elif root.opcode == "bitcast":
        (inner,) = fused.operands(root)
        yield from _placed(_written(fused, inner), root.arrays)
    elif root.opcode in _UPDATES and _is_given(fused, fused.instructions[root.operands[0]]):
        yield from _placed(_update(fused, root).arrays, root.arrays)
    else:
        yield from root.arrays


def _is_given(fused: Computation, one: Instruction) -> bool:
    return one.opcode == "parameter" or (one.opcode == "bitcast" and _is_given(fused, *fused.operands(one)))


def _update(computation: Computation, one: Instruction) -> Instruction:
    """What is put into a larger array: by a scatter of n arrays, operand n + 1."""
    position = 1 if one.opcode == "dynamic-update-slice" else len(one.operands) // 2 + 1
    return computation.instructions[one.operands[position]]
