"""What is known of a compiled program without running it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from jax.sharding import Mesh

from jaxshard.compiled import hlo
from jaxshard.compiled.traffic import compiled_collectives
from jaxshard.contract import Collective
from jaxshard.mesh import axis_sizes
from jaxshard.preflight.memory import Memory, memory
from jaxshard.preflight.work import Work, uncounted, work


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What one device holds, sends and does in a step.

    memory, host_memory: bytes by class. collectives: as `contract` counts them. work: every instruction that computes,
    reads or writes. uncounted: targets of custom calls whose operations are in none of these figures.
    """

    memory: Memory
    host_memory: Memory
    collectives: tuple[Collective, ...]
    work: tuple[Work, ...]
    uncounted: tuple[str, ...]

    @property
    def flops(self) -> dict[str, int]:
        """Operations of matrix products and convolutions, by the dtype that is multiplied."""
        totals: Counter[str] = Counter()
        for one in self.work:
            if one.flops:
                totals[one.dtype] += one.flops * one.times
        return dict(totals)

    @property
    def bytes(self) -> int:
        """Read from and written to the device's memory."""
        return sum(one.bytes * one.times for one in self.work)

    @property
    def to_device(self) -> int:
        """What crosses the link from the host's memory to the device."""
        return sum(one.to_device * one.times for one in self.work)

    @property
    def to_host(self) -> int:
        """What crosses the link from the device to the host's memory."""
        return sum(one.to_host * one.times for one in self.work)

    @property
    def wire_bytes(self) -> int:
        """Sent by each device."""
        return sum(one.wire_bytes for one in self.collectives)

    @property
    def unknown_loops(self) -> bool:
        """Whether a loop's length is not known, so that what is inside counts as if it ran once."""
        return any("while" in one.loops for one in self.work)


def facts(compiled: Any, mesh: Mesh, module: hlo.Module | None = None) -> Facts:
    """The facts of a `jax.stages.Compiled` for the devices of a mesh, in the mesh's order.

    module: its text, where that has been read before.
    """
    module = hlo.parse(compiled.as_text()) if module is None else module
    device, host = memory(compiled)
    return Facts(
        memory=device,
        host_memory=host,
        collectives=compiled_collectives(module, axis_sizes(mesh)),
        work=work(module),
        uncounted=uncounted(module),
    )
