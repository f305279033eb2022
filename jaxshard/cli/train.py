"""`jaxshard train CONFIG`."""

from __future__ import annotations

from dataclasses import fields

from rich.console import Console

from jaxshard.cli.options import apart, override
from jaxshard.train import loop, session
from jaxshard.train.config import Config, ConfigError, dotted_keys, load
from jaxshard.train.processes import initialize, told_to_others
from jaxshard.train.resume import Resume

SHORT = ("strategy", "devices", "steps")
"""Keys that may be written without their section."""


def train(args: list[str]) -> int:
    path = args[0] if args and not args[0].startswith("-") else None
    asks = bool({"-h", "--help"} & set(args))
    if path is None and not asks:
        raise ConfigError("train needs a TOML file, such as configs/zero3.toml.")
    of_resume = [one.name for one in fields(Resume)]
    about_resume, changes = apart(args[1:] if path else args, lambda name: name in of_resume)
    prog = f"jaxshard train {path or 'CONFIG'}"
    if asks:
        override(Resume(), ["--help"], prog, of_resume, flags=True)
    config = override(load(path) if path else Config(), changes, prog, [*dotted_keys(), *SHORT, *of_resume])
    if config is None:
        return 0
    resume = override(Resume(), about_resume, prog, of_resume, flags=True)
    assert resume is not None, "help is asked for above"
    initialize(heartbeat_seconds=config.run.heartbeat_seconds)
    with told_to_others():
        try:
            prepared = session.prepare(config, resume)
        except (ValueError, RuntimeError) as error:
            raise ConfigError(" ".join(str(error).split())) from error
        loop.run(prepared, Console())
    return 0
