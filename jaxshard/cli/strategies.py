"""`jaxshard strategies`."""

from __future__ import annotations

from dataclasses import dataclass, fields

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from jaxshard.cli.options import override
from jaxshard.strategy import STRATEGIES
from jaxshard.train import costs
from jaxshard.train.config import ConfigError
from jaxshard.train.report import say


@dataclass(frozen=True, kw_only=True)
class StrategiesOptions:
    """What each strategy holds and sends, in multiples of the parameters."""

    devices: int = 8
    """Devices in all."""
    replica: int = 1
    """Copies of the states: 1 splits over all devices."""
    offload: str = "none"
    """What lies in host memory: none, all, or names out of params, grads and opt joined by +, such as opt+params."""


def strategies(args: list[str]) -> int:
    names = [field.name for field in fields(StrategiesOptions)]
    options = override(StrategiesOptions(), args, "jaxshard strategies", names)
    if options is None:
        return 0
    try:
        rows = costs.rows(options.devices, options.replica, options.offload)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    host = ["host"] if any(row.cost.host for row in rows) else []
    table = Table("strategy", "mesh", "params", "grads", "Adam", "held", *host, "sent", box=SIMPLE_HEAD)
    for column in table.columns[2:]:
        column.justify = "right"
    for row in rows:
        cost = row.cost
        numbers = (cost.params, cost.grads, cost.opt, cost.held, *([cost.host] if host else []), cost.sent)
        mesh = f"{row.replica} x {row.shard}"
        table.add_row(", ".join(row.names), mesh, *(f"{number:.3f}" for number in numbers))
    console = Console()
    say(
        console,
        f"What each of {options.devices} devices holds, and what it sends in a step of one microbatch,",
    )
    say(console, "in multiples of the parameters. It receives as much as it sends. mesh: replica x shard.")
    if host:
        say(console, "host: what lies in the host's memory for each device, in place of the device's own.")
    console.print(table)
    left_out = {name for name, strategy in STRATEGIES.items() if strategy not in [row.strategy for row in rows]}
    if "dp" in left_out:
        say(console, "dp: gathers all gradients on the first device, and holds none in host memory.")
    if left_out := left_out - {"dp"}:
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
