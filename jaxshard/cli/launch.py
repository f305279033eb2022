"""`jaxshard launch CONFIG`: `jaxshard train` in several processes on this machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields

from jaxshard.cli.options import override
from jaxshard.train.config import ConfigError, load
from jaxshard.train.launch import launch as run


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """Trains the model of CONFIG.toml in several processes on this machine. Keys of the file, and what else `jaxshard
    train` understands, may follow CONFIG."""

    processes: int = 0
    """How many."""
    devices: int | None = None
    """Devices of each process: forced CPU devices, or with --gpu, GPUs. None: what the file says."""
    gpu: bool = False
    """Give each process its own GPUs of this machine."""
    restarts: int = 0
    """How often the job starts again from its last checkpoint when a process fails."""
    min_processes: int | None = None
    """A restart leaves out the process that failed, down to this number; none: all start again."""


def launch(args: list[str]) -> int:
    """Runs the command. Raises ConfigError for a mistake in what was asked."""
    ours, config, rest = _apart(args)
    options = override(LaunchOptions(), ours, "jaxshard launch CONFIG", _names(), flags=True)
    if options is None:
        return 0
    if config is None:
        raise ConfigError("launch needs a TOML file, such as configs/zero3.toml.")
    _check(options)
    load(config)
    command = [sys.executable, "-m", "jaxshard", "train", config, *rest]
    if options.gpu:
        command += ["--mesh.devices", "None"]
    elif options.devices is not None:
        command += ["--devices", str(options.devices)]
    gpus = _gpus(options) if options.gpu else [{}] * options.processes
    return run(
        command,
        count=options.processes,
        restarts=options.restarts,
        fewest=options.min_processes,
        environment=lambda place: gpus[place],
    )


def _names() -> list[str]:
    return [*(one.name for one in fields(LaunchOptions)), "no_gpu"]


def _apart(args: list[str]) -> tuple[list[str], str | None, list[str]]:
    """(options of the launcher, the file, what is left for `jaxshard train`)."""
    ours, rest, config = [], [], None
    left = list(args)
    while left:
        one = left.pop(0)
        name, equals, _ = one.lstrip("-").replace("-", "_").partition("=")
        if one in ("-h", "--help") or (one.startswith("--") and name in _names()):
            ours.append(one)
            if left and not equals and one not in ("-h", "--help", "--gpu", "--no-gpu"):
                ours.append(left.pop(0))
        elif config is None and one.startswith("-"):
            known = ", ".join("--" + field.name.replace("_", "-") for field in fields(LaunchOptions))
            raise ConfigError(
                f"{one} before the TOML file is no option of launch, which are {known}; keys of the file come after it."
            )
        elif config is None:
            config = one
        else:
            rest.append(one)
    return ours, config, rest


def _check(options: LaunchOptions) -> None:
    if options.processes < 1:
        raise ConfigError(f"--processes {options.processes}: how many to start, 1 or more.")
    if options.devices is not None and options.devices < 1:
        raise ConfigError(f"--devices {options.devices}: of each process, 1 or more.")
    if options.gpu and options.devices is None:
        raise ConfigError("--gpu needs --devices: how many GPUs each process gets.")
    if options.restarts < 0:
        raise ConfigError(f"--restarts {options.restarts}: 0 or more.")
    if options.min_processes is not None and not 1 <= options.min_processes <= options.processes:
        raise ConfigError(
            f"--min-processes {options.min_processes}: at least 1, and at most --processes {options.processes}."
        )
    if options.min_processes is not None and not options.restarts:
        raise ConfigError("--min-processes is for restarts: add --restarts N.")


def _gpus(options: LaunchOptions) -> list[Mapping[str, str]]:
    """The GPUs of each process: the first N of those that may be seen, the next N, and so on."""
    assert options.devices is not None, "checked before"
    need = options.processes * options.devices
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    visible = [str(i) for i in range(need)] if given is None else [one for one in given.split(",") if one]
    if len(visible) < need:
        raise ConfigError(
            f"{options.processes} processes x {options.devices} GPUs are {need}, and CUDA_VISIBLE_DEVICES={given} "
            f"names {len(visible)}."
        )
    # Without a GPU, or its wheels, JAX would train on a CPU.
    return [
        {"CUDA_VISIBLE_DEVICES": ",".join(visible[i : i + options.devices]), "JAX_PLATFORMS": "cuda"}
        for i in range(0, need, options.devices)
    ]
