"""The command line: `jaxshard train`, `launch`, `compare`, `strategies` and `checkpoint`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.metadata import version

from jax.errors import JaxRuntimeError

from jaxshard.cli.checkpoint import checkpoint
from jaxshard.cli.compare import compare
from jaxshard.cli.launch import launch
from jaxshard.cli.strategies import strategies
from jaxshard.cli.train import train
from jaxshard.train.config import ConfigError, unknown
from jaxshard.train.nonfinite import Diverged

USAGE = """\
usage: jaxshard train CONFIG [--KEY VALUE ...]          train the model of a TOML file
       jaxshard launch --processes N --devices M CONFIG the same in N processes of this machine, with M devices each
       jaxshard compare CONFIG --target h100:64 [...]   compile it under every strategy, for GPUs that need not be there
       jaxshard strategies [--devices N] [--replica R]  compare the strategies' memory and traffic
       jaxshard checkpoint show|verify|export DIR [...] what a checkpoint holds; prove it whole; its parameters
       jaxshard --version

`jaxshard train CONFIG --help` lists every key, with its value in that file. Short names: --strategy NAME,
--devices N (forced CPU devices), --steps N. `jaxshard compare --help` lists what can be compared."""

MEMORY = (
    "Take a smaller data.batch, more microbatches (run.accumulate), model.remat = 'full', or a strategy that holds "
    "less; `jaxshard compare` says what each holds."
)

COMMANDS = {"train": train, "launch": launch, "compare": compare, "strategies": strategies, "checkpoint": checkpoint}


def main(args: Sequence[str] | None = None) -> int:
    """Runs a command. Returns 0; 2 for a mistake in what was asked, said in one line; 1 for a failed run."""
    args = list(sys.argv[1:] if args is None else args)
    try:
        code = _command(args)
        sys.stdout.flush()
        return code
    except ConfigError as error:
        return _fail(error, 2)
    except Diverged as error:
        return _fail(error, 1)
    except JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return _fail(f"{str(error).splitlines()[0]} {MEMORY}", 1)
    except KeyboardInterrupt:
        return _fail("stopped", 130)
    except BrokenPipeError:  # whoever read has read enough, as `head` does; nor is there anything to flush at the end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


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
    return COMMANDS[command](rest)


def _fail(message: object, code: int) -> int:
    print(f"jaxshard: {message}", file=sys.stderr)
    return code
