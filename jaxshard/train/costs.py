"""What each strategy costs in memory and traffic, in multiples of the parameters: read off its placements."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxshard.strategy import BATCH_AXES, HOST, REPLICA, SHARD, STATES, STRATEGIES, Strategy
from jaxshard.strategy import offload as offloaded


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What one device holds and sends under a strategy, as multiples of the parameters.

    params, grads, opt: held, where `opt` is Adam's two moments. host: of all three, what lies in host memory instead.
    sent: in a step of one microbatch; as much is received. For a strategy that keeps its states on the first device,
    all are that device's.
    """

    params: float
    grads: float
    opt: float
    sent: float
    host: float = 0.0

    @property
    def held(self) -> float:
        return self.params + self.grads + self.opt


@dataclass(frozen=True, kw_only=True)
class Row:
    """A strategy under all its names, on a mesh of ``replica x shard``."""

    names: tuple[str, ...]
    strategy: Strategy
    replica: int
    shard: int
    cost: Cost


def rows(devices: int, replica: int = 1, offload: str = "none") -> list[Row]:
    """Every named strategy once, on `devices` devices.

    replica: how many copies of the states there are; a strategy that makes sense only from some number of
    replicas gets at least that many, and is left out where those do not divide the devices. offload: what of it lies in
    host memory, as for `jaxshard.strategy.offload`; `dp` is left out where that is gradients, which it gathers.

    Raises ValueError when `replica` itself does not divide them, and for an unknown word in `offload`.
    """
    if replica < 1 or devices < 1 or devices % replica:
        raise ValueError(
            f"--devices {devices} --replica {replica}: {devices} devices cannot be {replica} equal copies; "
            f"choose a divisor of {devices} as --replica."
        )
    hosted = offloaded("ddp", offload)
    names: dict[Strategy, list[str]] = {}
    for name, strategy in STRATEGIES.items():
        names.setdefault(strategy, []).append(name)
    table = []
    for strategy, known_as in names.items():
        copies = max(replica, strategy.min_replicas)
        if devices % copies or (strategy.params.devices == "first" and hosted.grads.memory == HOST):
            continue
        shape = {REPLICA: copies, SHARD: devices // copies}
        cost = cost_of(offloaded(strategy, offload), shape)
        table.append(Row(names=tuple(known_as), strategy=strategy, replica=copies, shard=shape[SHARD], cost=cost))
    return table


def cost_of(strategy: Strategy, mesh: dict[str, int]) -> Cost:
    """The cost of a strategy on a mesh of these axis sizes, with collectives that go round a ring."""

    def pieces(axes: Sequence[str]) -> int:
        return math.prod(mesh[axis] for axis in axes)

    params, grads, opt = (pieces(state.axes) for state in (strategy.params, strategy.grads, strategy.opt))
    if strategy.params.devices == "first":
        others = pieces(BATCH_AXES) - 1
        # All devices' gradients arrive before they are added up; parameters go out to each of the others.
        return _split(strategy, {"params": 1.0, "grads": others + 1.0, "opt": 2.0}, float(others))

    gathers = 2 if strategy.regather and strategy.gather == "use" else 1
    rest = pieces([axis for axis in BATCH_AXES if axis not in strategy.opt.axes])
    sent = (
        gathers * (1 - 1 / params)  # all_gather of weights
        + (1 - 1 / opt)  # reduce_scatter of gradients
        + 2 * (1 - 1 / rest) / opt  # all_reduce of what each device then has
        + (1 / params - 1 / opt)  # all_gather of updated parameters
    )
    return _split(strategy, {"params": 1 / params, "grads": 1 / grads, "opt": 2 / opt}, sent)


def _split(strategy: Strategy, held: Mapping[str, float], sent: float) -> Cost:
    """What is held, on the device and in host memory."""
    hosted = {
        state: size * placement.fraction
        for state, size in held.items()
        if (placement := getattr(strategy, state)).memory == HOST
    }
    params, grads, opt = (held[state] - hosted.get(state, 0.0) for state in STATES)
    return Cost(params=params, grads=grads, opt=opt, sent=sent, host=sum(hosted.values()))
