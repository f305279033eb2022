"""A run as data: one dataclass for each section of its TOML file, and strict reading of that file."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field, fields, is_dataclass, replace
from difflib import SequenceMatcher, get_close_matches
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from tyro.conf import arg

from jaxshard.models.gpt import GPTConfig
from jaxshard.precision import Precision
from jaxshard.strategy import Strategy, named, offload


class ConfigError(ValueError):
    """A mistake in a configuration, in one line: what is wrong, and what would be right."""


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """The devices and how they are arranged; both axes split the batch."""

    replica: int | None = None
    """How many copies of the states there are; None: the fewest that the strategy makes sense for."""
    shard: int = -1
    """Over how many devices each copy may be split; -1: what is left."""
    devices: Annotated[int | None, arg(aliases=["--devices"])] = None
    """Train on this many forced CPU devices, in each process; None: on the devices there are."""


@dataclass(frozen=True, kw_only=True)
class StrategyConfig:
    """A strategy by name, and what to change in it; None keeps what the strategy says."""

    name: Annotated[str, arg(aliases=["--strategy"])] = "zero3"
    """One of those that `jaxshard strategies` lists."""
    gather: Literal["use", "step"] | None = None
    """When split parameters become whole."""
    regather: bool | None = None
    """Whether the backward pass gathers them again."""
    reduce: Literal["microbatch", "step"] | None = None
    """Whether gradients are reduced in each microbatch or once a step."""
    prefer: Literal["speed", "memory"] | None = None
    """Whether gathers may start early or are tied to their use."""
    bucket_mb: float | None = None
    """How many MiB of collectives the compiler may combine into one."""
    offload: str | None = None
    """What lies in host memory: none, all, or names out of params, grads and opt joined by +, such as opt+params."""
    offload_fraction: float | None = None
    """How much of it, 0 to 1 by bytes, the largest leaves first; None: all of it."""
    update: Literal["auto", "device", "host"] | None = None
    """Where what lies in host memory is updated: on the devices, piece by piece, or by the host's processor."""
    buffers: int | None = None
    """How many pieces of a leaf are on a device at a time when it is updated there."""

    def resolve(self) -> Strategy:
        """The strategy itself. Raises ValueError for an unknown name, with the nearest one, and for a bad value."""
        own = {"name", "offload", "offload_fraction"}
        names = [field.name for field in fields(self) if field.name not in own]
        changes = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        strategy = replace(named(self.name), **changes)
        if self.offload is None:
            if self.offload_fraction is not None:
                raise ConfigError(
                    f"strategy.offload_fraction = {self.offload_fraction:g} is how much of what strategy.offload names "
                    "lies in host memory; set that too, to 'opt' or the like."
                )
            return strategy
        fraction = 1.0 if self.offload_fraction is None else self.offload_fraction
        return offload(strategy, self.offload, fraction=fraction)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The tokens and how they are cut into batches."""

    files: tuple[str, ...] = ()
    """Paths of the corpus, read in this order; none: the documentation texts that Python ships, as bytes."""
    format: Literal["text", "uint16", "uint32"] = "text"
    """Text is read as bytes; the others are files of little-endian token numbers and nothing else."""
    batch: int = 16
    """Sequences in a global batch, over all devices and microbatches."""
    held_out: float = 0.1
    """The share of the corpus, its end, that is kept for evaluation."""
    seed: int = 0
    """The order of the training sequences."""

    def __post_init__(self):
        _at_least("data", self, batch=1, seed=0)
        if not 0 < self.held_out < 1:
            raise ConfigError(f"data.held_out = {self.held_out} is a share; it must lie between 0 and 1.")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW or SGD with warm-up and cosine decay."""

    name: Literal["adamw", "sgd"] = "adamw"
    """The optimizer."""
    learning_rate: float = 3e-3
    """The peak of the schedule, for a batch of `base_batch` sequences."""
    lr_scaling: Literal["linear", "none"] = "none"
    """Whether the learning rate grows with the batch."""
    base_batch: int = 16
    """The batch that `learning_rate` was found for."""
    warmup_steps: int = 20
    """Steps of linear growth from 0."""
    final: float = 0.1
    """The share of the peak at which the cosine ends."""
    weight_decay: float = 0.1
    """Decoupled weight decay, of matrices alone."""
    beta1: float = 0.9
    """AdamW's mean of gradients; SGD's momentum."""
    beta2: float = 0.95
    """AdamW's mean of squares."""
    clip: float | None = 1.0
    """The largest norm of the whole gradient; None: no limit."""

    def __post_init__(self):
        _at_least("optimizer", self, learning_rate=0, base_batch=1, warmup_steps=0, final=0, weight_decay=0)
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"optimizer.{name} = {getattr(self, name)}; it must lie in [0, 1).")
        if self.clip is not None and not self.clip > 0:
            raise ConfigError(f"optimizer.clip = {self.clip}; it must be above 0, or left out.")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """How long to train, what to report, and where."""

    dir: str = "runs/gpt"
    """The folder that holds everything the run writes."""
    steps: Annotated[int, arg(aliases=["--steps"])] = 300
    """Steps to train."""
    accumulate: int = 1
    """Microbatches in a step; they divide the batch."""
    log_every: int = 10
    """Steps between two reports."""
    eval_every: int = 100
    """Steps between two looks at the held-out part; 0: only at the end."""
    eval_batches: int = 4
    """Batches of held-out sequences in each look."""
    seed: int = 0
    """The initial parameters, and any randomness of the loss."""
    weights: str | None = None
    """A safetensors file, or the index of several, with the parameters to begin with; None: random ones."""
    save_every: int = 100
    """Steps between two checkpoints; there is one after the last step in any case. 0: that one alone."""
    keep_last: int = 2
    """How many of the newest checkpoints are kept."""
    keep_every: int = 0
    """Checkpoints of steps that divide by this are kept besides; 0: none."""
    skip_nonfinite: int = 0
    """How many steps with a loss or gradients that are not finite are left out before the run stops at one."""
    watchdog: float = 20.0
    """How many times the longest of the latest steps one may take (and a minute at least) before it is said what all
    threads are doing; 0: never."""
    heartbeat_seconds: int = 8
    """With several processes: after how long without a sign of life from one the others end."""

    def __post_init__(self):
        _at_least("run", self, steps=1, accumulate=1, log_every=1, eval_every=0, eval_batches=1, seed=0)
        _at_least("run", self, save_every=0, keep_last=1, keep_every=0, skip_nonfinite=0, watchdog=0)
        _at_least("run", self, heartbeat_seconds=1)
        if not self.dir:
            raise ConfigError("run.dir is empty; name a folder.")


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything that decides what a run computes."""

    mesh: MeshConfig = field(default_factory=MeshConfig)
    strategy: StrategyConfig = field(default_factory=StrategyConfig)
    model: GPTConfig = field(default_factory=GPTConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    precision: Precision = field(default_factory=Precision)
    run: RunConfig = field(default_factory=RunConfig)


def load(path: str | Path) -> Config:
    """Reads a TOML file. Raises ConfigError for an absent file, bad TOML, an unknown key or a wrong type."""
    try:
        text = Path(path).read_bytes().decode()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is no TOML: it is not UTF-8 text.") from None
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is no TOML: {error}.") from None
    try:
        return parse(Config, table)
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None


def parse(kind: type, table: dict[str, Any], where: str = "") -> Any:
    """A dataclass from the table of its keys. Raises ConfigError, naming the dotted key."""
    hints = get_type_hints(kind)
    for key in table:
        if key not in hints:
            raise ConfigError(unknown(f"{where}{key}", [where + name for name in hints]))
    return kind(**{key: _value(hints[key], value, where + key) for key, value in table.items()})


def unknown(key: str, valid: list[str], otherwise: str = "") -> str:
    """The message for a key that does not exist: the nearest that does, else `otherwise`, else all of them."""
    near = [one for one in get_close_matches(key, valid, n=3, cutoff=0.5) if _alike(key, one)]
    hint = f"did you mean {near[0]}?" if near else otherwise or f"choose from {', '.join(valid)}."
    return f"unknown key {key}; {hint}"


def _alike(key: str, valid: str) -> bool:
    """Whether one may be a misspelling of the other: without their section they are alike as well."""
    ends = key.rpartition(".")[2], valid.rpartition(".")[2]
    return SequenceMatcher(None, *ends).ratio() >= 0.6


def dotted_keys(kind: type = Config, where: str = "") -> list[str]:
    """Every key of a configuration by its dotted name."""
    keys = []
    for name, hint in get_type_hints(kind).items():
        section = isinstance(hint, type) and is_dataclass(hint)
        keys += dotted_keys(hint, f"{name}.") if section else [where + name]
    return keys


def _value(hint: Any, value: Any, key: str) -> Any:
    if is_dataclass(hint) and isinstance(hint, type):
        if not isinstance(value, dict):
            raise ConfigError(f"{key} = {value!r} must be a section: [{key}].")
        return parse(hint, value, f"{key}.")
    for option in get_args(hint) if get_origin(hint) in (Union, UnionType) else [hint]:
        if _fits(option, value):
            return float(value) if option is float else tuple(value) if isinstance(value, list) else value
    raise ConfigError(f"{key} = {value!r}; it must be {_described(hint)}.")


def _fits(hint: Any, value: Any) -> bool:
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if get_origin(hint) is tuple:
        return isinstance(value, list) and all(_fits(get_args(hint)[0], item) for item in value)
    if isinstance(value, bool):
        return hint is bool
    return isinstance(value, (int, float) if hint is float else hint)


def _described(hint: Any) -> str:
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(_described(option) for option in get_args(hint) if option is not NoneType)
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(map(repr, get_args(hint)))
    if get_origin(hint) is tuple:
        return "a list, each item " + _described(get_args(hint)[0])
    return {int: "an integer", float: "a number", bool: "true or false", str: "a string"}[hint]


def _at_least(section: str, config: Any, **least: int) -> None:
    for name, bound in least.items():
        if not getattr(config, name) >= bound:
            raise ConfigError(f"{section}.{name} = {getattr(config, name)}; it must be {bound} or more.")
