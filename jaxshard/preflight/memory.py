"""What a compiled program holds on each device, by class."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of one kind of memory, on one device.

    arguments, outputs: what it is given and gives. aliased: outputs that lie where an argument lay. temps: the rest of
    what is held at once, at the worst moment.
    """

    arguments: int
    outputs: int
    aliased: int
    temps: int

    @property
    def peak(self) -> int:
        """All that is held at once."""
        return self.arguments + self.outputs - self.aliased + self.temps


def memory(compiled: Any) -> tuple[Memory, Memory]:
    """(the device's memory, the host's) of a `jax.stages.Compiled`.

    XLA's own `peak_memory_in_bytes` leaves temporaries out on CPUs, and on GPUs counts the host's buffers as well. A
    CPU's memory is all one: the second is then 0. Raises ValueError for a compiler that does not say.
    """
    stats = compiled.memory_analysis()
    if stats is None:
        raise ValueError("this compiler does not say what its program holds.")
    device, host = (
        Memory(
            arguments=getattr(stats, f"{prefix}argument_size_in_bytes"),
            outputs=getattr(stats, f"{prefix}output_size_in_bytes"),
            aliased=getattr(stats, f"{prefix}alias_size_in_bytes"),
            temps=getattr(stats, f"{prefix}temp_size_in_bytes"),
        )
        for prefix in ("", "host_")
    )
    return device, host
