"""A training step compiled for the devices of its mesh, and looked at."""

from __future__ import annotations

import time
from dataclasses import dataclass

from jax.stages import Lowered

from jaxshard.compiled import hlo
from jaxshard.compiler import build, options_for
from jaxshard.mesh import platform_of
from jaxshard.preflight.facts import Facts, facts
from jaxshard.preflight.peak import Peak, dumped, peak
from jaxshard.preflight.target import uncached
from jaxshard.step import Training


@dataclass(frozen=True, kw_only=True)
class Examined:
    """What is known of a compiled step.

    peak: what is in temporary memory at its worst moment. arguments: bytes of what the step is given, on one device, by
    its path: ``state.params['w']``. seconds: that compiling took. left_out: XLA options that this compiler does not
    know.
    """

    module: hlo.Module
    facts: Facts
    peak: Peak
    arguments: dict[str, int]
    seconds: float
    left_out: dict[str, str]


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
    given = [one for one in module.entry.instructions.values() if one.opcode == "parameter"]
    return Examined(
        module=module,
        facts=facts(built.compiled, training.mesh, module),
        peak=held,
        arguments={one.op_name or one.name: one.bytes for one in given},
        seconds=seconds,
        left_out=built.left_out,
    )
