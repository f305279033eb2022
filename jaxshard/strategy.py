"""A strategy is data: where parameters, gradients and optimizer state live, and when they move.

A reader starts here. Every collective of a training step is the difference between two neighbouring
rungs of the ladder ``params <= grads <= opt`` (see `Strategy`); the step builder never asks which strategy it has.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Literal

REPLICA, SHARD = "replica", "shard"
BATCH_AXES = (REPLICA, SHARD)
"""The mesh axes over which the global batch is split, outermost first."""
DEVICE, HOST = "device", "pinned_host"
STATES = ("params", "grads", "opt")
"""What a strategy places, in the order of the ladder."""


def _choice(kind: str, field: str, value: object, valid: tuple[str, ...]) -> None:
    if value not in valid:
        raise ValueError(f"{kind}({field}={value!r}): choose one of {', '.join(map(repr, valid))}.")


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where one of the three states lives.

    axes: the mesh axes it is split over, in order; ``()`` is whole on every device.
    memory: ``"device"``, or ``"pinned_host"`` for memory of the host that devices read and write by themselves. Each
        piece lies on the host of the device that would hold it. Scalars stay on the devices.
    fraction: how much of it lies in ``pinned_host``, 0 to 1 by bytes, the largest leaves first.
    devices: ``"all"``, or ``"first"`` for a state that only the first device holds.
    """

    axes: tuple[str, ...] = ()
    memory: Literal["device", "pinned_host"] = "device"
    fraction: float = 1.0
    devices: Literal["all", "first"] = "all"

    def __post_init__(self):
        object.__setattr__(self, "axes", tuple(self.axes))
        unknown = [axis for axis in self.axes if axis not in BATCH_AXES]
        if unknown or len(set(self.axes)) != len(self.axes):
            raise ValueError(
                f"Placement(axes={self.axes}): a state can be split over each of {BATCH_AXES} at most once, "
                "because these are the axes that split the batch."
            )
        _choice("Placement", "memory", self.memory, (DEVICE, HOST))
        if isinstance(self.fraction, bool) or not isinstance(self.fraction, int | float) or not 0 <= self.fraction <= 1:
            raise ValueError(f"Placement(fraction={self.fraction!r}): a share of the bytes, 0 to 1.")
        if self.memory == DEVICE and self.fraction != 1:
            raise ValueError(
                f"Placement(memory='device', fraction={self.fraction}): it is the fraction in host memory; add "
                "memory='pinned_host'."
            )
        _choice("Placement", "devices", self.devices, ("all", "first"))
        if self.devices == "first" and self.axes:
            raise ValueError(f"Placement(devices='first', axes={self.axes}): what one device holds is not split.")

    @property
    def on_device(self) -> Placement:
        """The same split, in the devices' memory."""
        return replace(self, memory=DEVICE, fraction=1.0)

    def __str__(self) -> str:
        split = f"split over {' x '.join(self.axes)}" if self.axes else "whole"
        split += " on the first device" if self.devices == "first" else ""
        if self.memory == DEVICE:
            return split
        return f"{split}, in host memory" if self.fraction == 1 else f"{split}, {self.fraction:g} of it in host memory"


WHOLE = Placement()
SPLIT = Placement(axes=(SHARD,))


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """Three placements and the moments at which data moves between them.

    params, grads, opt: placements at rest (gradients: between microbatches). Each one's axes must begin
        with those of the one before; the collectives of a step are then

        - weights: all_gather over ``params.axes``;
        - gradients: reduce_scatter over the axes they go to (``grads.axes``, and in the end ``opt.axes``),
          all_reduce over the batch axes that remain;
        - parameters after the update: all_gather over ``opt.axes`` minus ``params.axes``.
    gather: ``"use"``: a split parameter becomes whole just before the operation that reads it;
        ``"step"``: once, at the start of the step.
    regather: gather again in the backward pass instead of keeping the whole weight until then.
    reduce: with several microbatches, reduce gradients in each (``"microbatch"``, gradients are held split)
        or once after the last (``"step"``, whole gradients are held and nothing is sent in between).
    prefer: ``"speed"`` leaves the compiler free to start a gather early; ``"memory"`` ties each gather
        to its moment of use.
    bucket_mb: how many MiB of collectives the compiler may combine into one; None leaves its default.
    update: where states in host memory are updated: ``"device"``: brought there piece by piece, and taken back;
        ``"host"``: by the host's processor; ``"auto"``: what takes less time by `update_place`.
    buffers: how many pieces of a leaf are on a device at a time when it is updated from host memory: with 2 the next
        one is on its way while one is updated.
    min_replicas: the least size of the replica axis that this strategy makes sense for.

    Raises ValueError when the placements are no ladder or a choice is unknown.
    """

    params: Placement
    grads: Placement
    opt: Placement
    gather: Literal["use", "step"] = "use"
    regather: bool = True
    reduce: Literal["microbatch", "step"] = "microbatch"
    prefer: Literal["speed", "memory"] = "speed"
    bucket_mb: float | None = None
    update: Literal["auto", "device", "host"] = "auto"
    buffers: int = 2
    min_replicas: int = 1

    def defers(self, accumulate: int) -> bool:
        """Whether gradients are reduced after the last of so many microbatches, instead of at each use."""
        return self.params.devices == "first" or (accumulate > 1 and self.reduce == "step")

    def __post_init__(self):
        _choice("Strategy", "gather", self.gather, ("use", "step"))
        _choice("Strategy", "reduce", self.reduce, ("microbatch", "step"))
        _choice("Strategy", "prefer", self.prefer, ("speed", "memory"))
        _choice("Strategy", "update", self.update, ("auto", "device", "host"))
        if isinstance(self.buffers, bool) or not isinstance(self.buffers, int) or self.buffers < 1:
            raise ValueError(
                f"Strategy(buffers={self.buffers!r}): how many pieces are on a device at a time, 1 or more."
            )
        rungs = tuple(getattr(self, state) for state in STATES)
        for low, high in itertools.pairwise(rungs):
            if high.axes[: len(low.axes)] != low.axes or low.devices != high.devices:
                ladder = "\n".join(f"  {name:6} {placement}" for name, placement in zip(STATES, rungs, strict=True))
                raise ValueError(
                    f"these placements are no ladder:\n{ladder}\n"
                    "The axes of params must begin those of grads, and these must begin those of opt, because "
                    "each collective is the step from one rung to the next."
                )
        if self.grads.memory == HOST and self.grads.devices == "first":
            raise ValueError(
                "Strategy(grads in pinned_host, on the first device): it gathers every device's gradients at once. "
                "Leave them on the device, or use ddp."
            )
        if self.bucket_mb is not None and not self.bucket_mb > 0:
            raise ValueError(f"Strategy(bucket_mb={self.bucket_mb}): a size in MiB above 0, or None.")
        if self.min_replicas < 1:
            raise ValueError(f"Strategy(min_replicas={self.min_replicas}): at least 1.")


DDP = Strategy(params=WHOLE, grads=WHOLE, opt=WHOLE, reduce="step")
ZERO1 = Strategy(params=WHOLE, grads=WHOLE, opt=SPLIT, reduce="step")
ZERO2 = Strategy(params=WHOLE, grads=SPLIT, opt=SPLIT)
SHARD_GRAD_OP = Strategy(params=SPLIT, grads=SPLIT, opt=SPLIT, gather="step", regather=False)
ZERO3 = Strategy(params=SPLIT, grads=SPLIT, opt=SPLIT)
HSDP = replace(ZERO3, min_replicas=2)

_FIRST = Placement(devices="first")
DP = Strategy(params=_FIRST, grads=_FIRST, opt=_FIRST)
"""torch's DataParallel: one device holds everything, broadcasts it and updates it. The baseline to beat."""

STRATEGIES: dict[str, Strategy] = {
    "dp": DP,
    "ddp": DDP,
    "no_shard": DDP,
    "zero1": ZERO1,
    "zero2": ZERO2,
    "shard_grad_op": SHARD_GRAD_OP,
    "zero3": ZERO3,
    "fsdp": ZERO3,
    "full_shard": ZERO3,
    "hsdp": HSDP,
    "hybrid_shard": HSDP,
}
"""Every name a strategy is known by; torch's names are aliases."""


def named(strategy: str | Strategy) -> Strategy:
    """The strategy of this name, or the strategy itself. Raises ValueError with the nearest valid name."""
    if isinstance(strategy, Strategy):
        return strategy
    if not isinstance(strategy, str):
        raise TypeError(
            f"strategy is a {type(strategy).__name__}; pass a jaxshard.Strategy, or one of {', '.join(STRATEGIES)}."
        )
    if strategy not in STRATEGIES:
        near = get_close_matches(strategy, STRATEGIES, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"no strategy is called {strategy!r}; choose one of {', '.join(STRATEGIES)}.{hint}")
    return STRATEGIES[strategy]


def name_of(strategy: Strategy) -> str:
    """The first name of a built-in strategy, and what of it is in host memory; of a user's own, its placements."""
    held = [state for state in STATES if getattr(strategy, state).memory == HOST]
    fractions = {getattr(strategy, state).fraction for state in held}
    near = replace(offload(strategy, "none"), update="auto", buffers=2)
    name = next((name for name, known in STRATEGIES.items() if known == near), None)
    if name is None or len(fractions) > 1:
        return f"params {strategy.params}, grads {strategy.grads}, opt {strategy.opt}"
    if not held:
        return name
    return f"{name} + offload {'+'.join(reversed(held))}" + (f" ({fractions.pop():g})" if fractions != {1} else "")


def offload(strategy: str | Strategy, states: str, *, fraction: float = 1.0) -> Strategy:
    """The same strategy with some of its states in host memory, and the others on the devices.

    states: ``"none"``, ``"all"``, or names out of params, grads and opt joined by ``+``, such as ``"opt+params"``.
    fraction: of their bytes, the largest leaves first.

    Raises ValueError for another word, or a fraction below 0 or above 1.
    """
    strategy = named(strategy)
    words = {"none": [], "all": list(STATES)}.get(states, states.split("+") if isinstance(states, str) else [states])
    if any(word not in STATES for word in words) or len(set(words)) != len(words):
        raise ValueError(
            f"offload={states!r}: 'none', 'all', or one or more of {', '.join(STATES)} joined by +, as in 'opt+params'."
        )
    placements = {
        state: replace(getattr(strategy, state), memory=HOST, fraction=fraction)
        if state in words
        else getattr(strategy, state).on_device
        for state in STATES
    }
    return replace(strategy, **placements)
