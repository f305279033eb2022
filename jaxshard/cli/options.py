"""Options of the command line: a dataclass of defaults, changed by what was typed."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from typing import TypeVar

import tyro

from jaxshard.train.config import ConfigError, unknown

T = TypeVar("T")


def apart(args: Sequence[str], belongs: Callable[[str], bool]) -> tuple[list[str], list[str]]:
    """(options whose names belong, with their values; all others). A name is without its dashes: ``run.dir``."""
    ours, others = [], []
    into = others
    for one in args:
        if one.startswith("-") and not one[1:2].isdigit():
            into = ours if belongs(one.lstrip("-").partition("=")[0].replace("-", "_")) else others
        into.append(one)
    return ours, others


def override(default: T, args: Sequence[str], prog: str, valid: Sequence[str], *, flags: bool = False) -> T | None:
    """`default` with the changes that `args` ask for; None after printing the help.

    valid: names of options. flags: whether bools are written ``--json`` and ``--no-cache``, without a value. Raises
    ConfigError.
    """
    for option in args:
        if option.startswith("--"):
            name = option[2:].partition("=")[0].replace("-", "_")
            if name not in (*valid, "help"):
                raise ConfigError(unknown(name, list(valid), f"{prog} --help lists the keys."))
    # Without flags, bools are spelled as in TOML; tyro reads Python's spelling.
    args = args if flags else [{"true": "True", "false": "False"}.get(one, one) for one in args]
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            config = () if flags else (tyro.conf.FlagConversionOff,)
            return tyro.cli(type(default), default=default, args=args, prog=prog, config=config)
    except SystemExit as stop:
        if not stop.code:
            return None
        raise ConfigError(_one_line(said.getvalue())) from None


def _one_line(box: str) -> str:
    """The message of tyro's box: the lines between its title and its first rule."""
    lines = [line.strip("│ ") for line in box.splitlines() if line.startswith("│")]
    end = next((i for i, line in enumerate(lines) if line and not line.strip("─")), len(lines))
    return " ".join(lines[:end]) or " ".join(box.split())
