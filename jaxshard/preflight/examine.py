"""A training step compiled for the devices of its mesh, and looked at."""

from __future__ import annotations

import time
from dataclasses import dataclass

import jax
from jax.stages import Lowered

from jaxshard.compiled import hlo
from jaxshard.compiler import build, options_for
from jaxshard.mesh import platform_of
from jaxshard.preflight.facts import Facts, facts
from jaxshard.preflight.peak import Peak, dumped, peak
from jaxshard.preflight.target import uncached
from jaxshard.step import Training
from jaxshard.strategy import HOST


@dataclass(frozen=True, kw_only=True)
class Examined:
    """What is known of a compiled step.

    peak: what is in temporary memory at its worst moment. arguments: bytes of what the step is given, on one device, by
    its path: ``state.params['w']``; host_arguments: of what lies in the host's memory. seconds: that compiling took.
    left_out: XLA options that this compiler does not know.
    """

    module: hlo.Module
    facts: Facts
    peak: Peak
    arguments: dict[str, int]
    host_arguments: dict[str, int]
    seconds: float
    left_out: dict[str, str]

    @property
    def peak_bytes(self) -> int:
        """All that one device holds at its worst moment; a CPU's compiler counts the host's memory as well."""
        one_memory = not self.facts.host_memory.arguments
        return self.facts.memory.peak - (sum(self.host_arguments.values()) if one_memory else 0)


def examined(training: Training, lowered: Lowered | None = None) -> Examined:
    """Compiles the step anew and examines it; nothing runs, and the devices need not exist.

    lowered: the step's own, where it has been lowered before.
    """
    own = training.setup.compiler_options
    options = options_for(training.strategy, platform_of(training.mesh), own)
    lowered = training.lower() if lowered is None else lowered
    start = time.perf_counter()
    with uncached(), dumped() as (dump, folder):
        built = build(lowered, options | dump, required=own)
        seconds = time.perf_counter() - start
        held = peak(folder)
    module = hlo.parse(built.compiled.as_text() or "")
    asked, arguments, host_arguments = _asked_for_host(training), {}, {}
    for one in module.entry.instructions.values():
        if one.opcode == "parameter":
            path = one.op_name.replace("\\'", "'") or one.name
            in_host = path in asked or any(array.space == hlo.HOST for array in one.arrays)
            (host_arguments if in_host else arguments)[path] = one.bytes
    return Examined(
        module=module,
        facts=facts(built.compiled, training.mesh, module),
        peak=held,
        arguments=arguments,
        host_arguments=host_arguments,
        seconds=seconds,
        left_out=built.left_out,
    )


def _asked_for_host(training: Training) -> frozenset[str]:
    """The paths of what the state keeps in host memory, which the text of a CPU's program does not say."""
    if platform_of(training.mesh) != "cpu":
        return frozenset()
    leaves = jax.tree_util.tree_leaves_with_path(training.setup.state_shapes)
    kept = (path for path, x in leaves if getattr(x.sharding, "memory_kind", None) == HOST)
    return frozenset(f"state{jax.tree_util.keystr(path)}" for path in kept)
