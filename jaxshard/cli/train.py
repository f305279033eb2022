"""`jaxshard train CONFIG`."""

from __future__ import annotations

from rich.console import Console

from jaxshard.cli.options import override
from jaxshard.train import loop
from jaxshard.train.config import Config, ConfigError, dotted_keys, load

SHORT = ("strategy", "devices", "steps")
"""Keys that may be written without their section."""


def train(args: list[str]) -> int:
    console = Console()
    path = args[0] if args and not args[0].startswith("-") else None
    if path is None and not {"-h", "--help"} & set(args):
        raise ConfigError("train needs a TOML file, such as configs/zero3.toml.")
    config = load(path) if path else Config()
    config = override(
        config, args[1:] if path else args, f"jaxshard train {path or 'CONFIG'}", [*dotted_keys(), *SHORT]
    )
    if config is None:
        return 0
    try:
        session = loop.prepare(config)
    except (ValueError, RuntimeError) as error:
        raise ConfigError(" ".join(str(error).split())) from error
    loop.run(session, console)
    return 0
