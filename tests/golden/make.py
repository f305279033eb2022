"""Writes the golden texts, in tests/: ``JAX_PLATFORMS=cpu python -m golden.make``, with the `targets` extra installed.

Each is what XLA's GPU compiler makes of a program of `programs.py` for 8 H100s with this version of JAX, without what
no reader of it looks at: tables of source lines, metadata but the name stack, and most of the backend's configuration.
``python -m golden.make tpu``, with libtpu installed, does so for 8 TPU v5e.
"""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path

import jax
from jax.experimental import topologies

import jaxshard as js
from golden.programs import PROGRAMS
from jaxshard.preflight import target

FOLDER = Path(__file__).parent
KEPT = r'"known_trip_count":\{[^}]*\}|"is_sync":\w+|"lhs_contracting_dimensions":\[[^\]]*\]'


def shortened(text: str) -> str:
    module, _, rest = text.partition("\n")
    lines = [module.partition(",")[0]]
    for line in rest.splitlines():
        if not re.match(r"%|ENTRY|\s|\}", line) or not line.strip():
            continue
        line = re.sub(r", metadata=\{(?:(op_name=\"[^\"]*\"))?[^}]*\}", _name_stack, line)
        line = re.sub(r", (frontend_attributes|control-predecessors|sharding|origin)=\{[^}]*\}+", "", line)
        found = re.search(r", backend_config=(\{.*)", line)
        kept = ",".join(re.findall(KEPT, found[1])) if found else ""
        lines.append(line[: found.start()] + (f", backend_config={{{kept}}}" if kept else "") if found else line)
    return "\n".join(lines) + "\n"


def _name_stack(metadata: re.Match) -> str:
    return f", metadata={{{metadata[1]}}}" if metadata[1] else ""


def main(device: str = "h100") -> None:
    if device == "tpu":
        devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4").devices
        programs = {"layers": replace(PROGRAMS["layers"], options={})}
    else:
        devices, programs = target.parse("h100:8").devices(), PROGRAMS
    mesh = js.make_mesh(replica=2, devices=devices)
    suffix = "tpu" if device == "tpu" else "jax" + ".".join(jax.__version__.split(".")[:2])
    for name, program in programs.items():
        (FOLDER / f"{name}-{suffix}.txt").write_text(shortened(program.compiled(mesh).as_text()))


if __name__ == "__main__":
    main(*sys.argv[1:])
