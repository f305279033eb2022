"""The command line: `jaxshard train CONFIG` and `jaxshard strategies`."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass, fields
from importlib.metadata import version
from typing import TypeVar

import tyro
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from jaxshard.strategy import STRATEGIES
from jaxshard.train import costs, loop
from jaxshard.train.config import Config, ConfigError, dotted_keys, load, unknown
from jaxshard.train.report import say

USAGE = """\
usage: jaxshard train CONFIG [--KEY VALUE ...]          train the model of a TOML file
       jaxshard strategies [--devices N] [--replica R]  compare the strategies' memory and traffic
       jaxshard --version

`jaxshard train CONFIG --help` lists every key, with its value in that file. Short names: --strategy NAME,
--devices N (forced CPU devices), --steps N."""

COMMANDS = ("train", "strategies")
SHORT = ("strategy", "devices", "steps")
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class StrategiesOptions:
    """What each strategy holds and sends, in multiples of the parameters."""

    devices: int = 8
    """Devices in all."""
    replica: int = 1
    """Copies of the states: 1 splits over all devices."""


def main(args: Sequence[str] | None = None) -> int:
    """Runs a command. Returns 0; 2 for a mistake in what was asked, said in one line; 1 for a failed run."""
    args = list(sys.argv[1:] if args is None else args)
    try:
        return _command(args)
    except ConfigError as error:
        return _fail(error, 2)
    except loop.Diverged as error:
        return _fail(error, 1)
    except KeyboardInterrupt:
        return _fail("stopped", 130)


def _command(args: list[str]) -> int:
    if not args or args[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if args else 2
    command, *rest = args
    if command == "--version":
        print(f"jaxshard {version('jaxshard')}")
        return 0
    if command not in COMMANDS:
        raise ConfigError(unknown(command, list(COMMANDS)).replace("key", "command", 1))
    return _train(rest) if command == "train" else _strategies(rest)


def _train(args: list[str]) -> int:
    console = Console()
    path = args[0] if args and not args[0].startswith("-") else None
    if path is None and not {"-h", "--help"} & set(args):
        raise ConfigError("train needs a TOML file, such as configs/zero3.toml.")
    config = load(path) if path else Config()
    config = _override(config, args[1:] if path else args, f"jaxshard train {path or 'CONFIG'}", dotted_keys())
    if config is None:
        return 0
    try:
        session = loop.prepare(config)
    except (ValueError, RuntimeError) as error:
        raise ConfigError(" ".join(str(error).split())) from error
    loop.run(session, console)
    return 0


def _strategies(args: list[str]) -> int:
    names = [field.name for field in fields(StrategiesOptions)]
    options = _override(StrategiesOptions(), args, "jaxshard strategies", names)
    if options is None:
        return 0
    try:
        rows = costs.rows(options.devices, options.replica)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    table = Table("strategy", "mesh", "params", "grads", "Adam", "held", "sent", box=SIMPLE_HEAD)
    for column in table.columns[2:]:
        column.justify = "right"
    for row in rows:
        cost = row.cost
        numbers = (cost.params, cost.grads, cost.opt, cost.held, cost.sent)
        mesh = f"{row.replica} x {row.shard}"
        table.add_row(", ".join(row.names), mesh, *(f"{number:.3f}" for number in numbers))
    console = Console()
    say(
        console,
        f"What each of {options.devices} devices holds, and what it sends in a step of one microbatch,",
    )
    say(console, "in multiples of the parameters. It receives as much as it sends. mesh: replica x shard.")
    console.print(table)
    left_out = {name for name, strategy in STRATEGIES.items() if strategy not in [row.strategy for row in rows]}
    if left_out:
        say(
            console,
            f"{', '.join(sorted(left_out))}: needs at least 2 replicas, which {options.devices} devices do not give.",
        )
    for row in rows:
        if row.strategy.params.devices == "first":
            say(
                console,
                f"{row.names[0]}: what the first device holds and sends. The others hold a copy of the",
            )
            say(console, "parameters and their own gradients while they compute, and nothing between steps.")
    return 0


def _override(default: T, args: list[str], prog: str, valid: list[str]) -> T | None:
    """`default` with the changes that `args` ask for; None after printing the help. Raises ConfigError."""
    for option in args:
        if option.startswith("--"):
            name = option[2:].partition("=")[0].replace("-", "_")
            if name not in (*valid, *SHORT, "help"):
                raise ConfigError(unknown(name, [*valid, *SHORT], f"{prog} --help lists the keys."))
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            return tyro.cli(type(default), default=default, args=args, prog=prog, config=(tyro.conf.FlagConversionOff,))
    except SystemExit as stop:
        if not stop.code:
            return None
        raise ConfigError(_one_line(said.getvalue())) from None


def _one_line(box: str) -> str:
    """The message of tyro's box: the lines between its title and its first rule."""
    lines = [line.strip("│ ") for line in box.splitlines() if line.startswith("│")]
    end = next((i for i, line in enumerate(lines) if line and not line.strip("─")), len(lines))
    return " ".join(lines[:end]) or " ".join(box.split())


def _fail(message: object, code: int) -> int:
    print(f"jaxshard: {message}", file=sys.stderr)
    return code
