"""What a compiled program sends: the record of `contract`, counted in its text."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace

from jaxshard.compiled import groups
from jaxshard.compiled.hlo import Computation, Instruction, Module
from jaxshard.compiled.walk import Site, walk
from jaxshard.contract import Collective, names_in

KINDS = {
    "all-reduce": "all_reduce",
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all",
    "ragged-all-to-all": "all_to_all",
    "collective-permute": "permute",
    "collective-broadcast": "broadcast",
}
"""The kind, as `Collective` names it, by opcode."""
_MEMBERS = re.compile(r"(?:replica_groups|source_target_pairs)=(mesh.*? \{[^}]*\}|\{\{.*?\}\}|\{\}|\[[^ ]*[\])])")


def compiled_collectives(module: Module, mesh: Mapping[str, int]) -> tuple[Collective, ...]:
    """Every collective of a compiled program, equal ones together.

    mesh: size by axis name, in the order of the mesh. Messages that the compiler combined are one, of the sum of their
    bytes in each dtype, and bear the names of all leaves that it still knows (``"a+b"``; no purpose and no leaf where
    it forgot). dtype and bytes are what is sent: CPUs send float32 for bfloat16. Groups that are no mesh axes are named
    as ``"groups of 2"``. Groups of one send nothing and are left out.
    """
    counts: Counter[Collective] = Counter()
    for site in walk(module):
        for one, computation in _inside(module, site):
            for found in collectives_of(one, computation, mesh):
                asynchronous = _is_asynchronous(site, one)
                counts[replace(found, loops=site.loops, asynchronous=asynchronous)] += site.times
    return tuple(replace(one, count=count) for one, count in counts.items())


def _inside(module: Module, site: Site) -> Iterator[tuple[Instruction, Computation]]:
    """The instruction itself, or those of the kernel that it starts: a small all-reduce can be fused into one."""
    if site.instruction.opcode in ("fusion", "fusion-start"):
        for computation in module.called(site.instruction):
            yield from ((one, computation) for one in computation.instructions.values())
    else:
        yield site.instruction, site.computation


def _is_asynchronous(site: Site, instruction: Instruction) -> bool:
    starts = [one for one in (instruction, site.instruction, site.start) if one and one.opcode.endswith("-start")]
    return bool(starts) and not any('"is_sync":true' in one.attributes for one in (*starts, instruction))


def members_of(one: Instruction, mesh: Mapping[str, int]) -> groups.Groups:
    """The devices, by number in the mesh, that send to each other; (source, target) pairs of a permute."""
    found = _MEMBERS.search(one.attributes)
    return groups.parse(found[1] if found else "{}", math.prod(mesh.values()))


def collectives_of(one: Instruction, computation: Computation, mesh: Mapping[str, int]) -> list[Collective]:
    """What an instruction sends by itself, one for each dtype, with no count; nothing within groups of one device."""
    kind = KINDS.get(one.opcode.removesuffix("-start"))
    if kind is None:
        return []
    members = members_of(one, mesh)
    if kind == "permute":
        over = groups.axes_between(members, mesh)
        devices = math.prod(mesh[axis] for axis in over)
    else:
        devices = len(members[0])
        over = groups.axes_over(members, mesh)
        over = (f"groups of {devices}",) if over is None else over
    if devices == 1:
        return []
    bytes: Counter[str] = Counter()
    for operand in computation.operands(one):
        for array in operand.arrays:
            bytes[array.dtype] += array.bytes * (devices if kind == "all_gather" else 1)
    purpose, leaf = _purpose(one)
    return [
        Collective(kind=kind, purpose=purpose, leaf=leaf, axes=over, devices=devices, dtype=dtype, bytes=total, count=0)
        for dtype, total in bytes.items()
    ]


def _purpose(one: Instruction) -> tuple[str, str]:
    """What it is for and for which leaves, from the scopes in its name stack."""
    if not one.op_name:
        return "", ""
    named = [(purpose, leaf) for purpose, leaf in names_in(one.op_name) if purpose not in ("use", "fetch", "put")]
    if not named:
        return "loss", ""
    purposes, leaves = (dict.fromkeys(column) for column in zip(*named, strict=True))
    return "+".join(purposes), "+".join(leaves)
