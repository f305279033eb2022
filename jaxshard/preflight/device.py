"""A device as data: what it holds, computes and sends, and how its compiler knows it. A TOML file for each kind."""

from __future__ import annotations

import bisect
import itertools
import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import jax.numpy as jnp

_FOLDER = Path(__file__).parent / "devices"
KNOWN = tuple(sorted(path.stem for path in _FOLDER.glob("*.toml")))
"""The devices that come with the library, by name."""
_WORDS = ("feature_extension",)  # text fields that are enumerations, so that their words stand without quotes


class DeviceError(ValueError):
    """A mistake in the description of a device: the file, the key, and what would be right."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """What joins devices: the GPUs of a node, or the nodes.

    bandwidth: its peak, bytes/s one way, of one GPU inside a node and of a whole node between nodes.
    all_reduce: measured points (bytes of the message, bus bandwidth in bytes/s), in ascending order.
    ring: the most, in bytes/s, that the other kinds reach, which switches do not help; None: as much as an all_reduce.
    """

    bandwidth: float
    all_reduce: tuple[tuple[int, float], ...] = ()
    ring: float | None = None

    def bus_bandwidth(self, kind: str, bytes: int) -> float:
        """Bytes/s on the link of each device while one message of so many bytes goes round.

        kind, bytes: as in `Collective`. A message takes its bytes on the wire over this. Between measured points it is
        interpolated over the logarithm of the size; a message smaller than all of them takes as long as the smallest;
        without points it is the peak.
        """
        if not self.all_reduce:
            return self.bandwidth
        sizes = [size for size, _ in self.all_reduce]
        at = bisect.bisect_right(sizes, bytes)
        if at == 0:
            reached = self.all_reduce[0][1] * bytes / sizes[0]
        elif at == len(sizes):
            reached = self.all_reduce[-1][1]
        else:
            (below, slow), (above, fast) = self.all_reduce[at - 1 : at + 1]
            reached = slow + (fast - slow) * math.log(bytes / below) / math.log(above / below)
        return reached if kind == "all_reduce" or self.ring is None else min(reached, self.ring)


@dataclass(frozen=True, kw_only=True)
class Device:
    """One kind of device.

    per_node: how many a node has. memory: bytes. memory_bandwidth, host_bandwidth: bytes/s, to its own memory and, one
    way, to the host's. host_memory_bandwidth: of its share of the host's memory, as the host's processor reads and
    writes it; None: as fast as the link. flops, reached: FLOP/s by dtype, the dense peak and what the best matmul is
    known to reach. inside, between: what joins a node's devices, and nodes. target_config: the fields of XLA's
    GpuTargetConfigProto, nested as they are there.
    """

    name: str
    per_node: int
    memory: int
    memory_bandwidth: float
    host_bandwidth: float
    flops: Mapping[str, float]
    inside: Link
    between: Link
    target_config: Mapping[str, Any]
    reached: Mapping[str, float] = field(default_factory=dict)
    host_memory_bandwidth: float | None = None

    @property
    def target_config_text(self) -> str:
        """`target_config` in the text form that XLA reads."""
        return _text_form(self.target_config)


def known(name: str) -> Device:
    """A device that comes with the library. Raises DeviceError, with the nearest name, for an unknown one."""
    return _parsed(Device, _table(name), f"{name}: ")


def load(path: str | Path) -> Device:
    """A device of one's own, from a TOML file.

    Its keys are the fields of `Device`; after ``like = "h100"``, what the file does not say is as it is there.

    Raises DeviceError for an absent file, bad TOML, and a key that is unknown, missing, or of no possible value.
    """
    return _parsed(Device, _read(Path(path)), f"{path}: ")


def _table(name: Any) -> dict[str, Any]:
    if name not in KNOWN:
        raise DeviceError(
            f"no device is called {name!r}; {_nearest(str(name), KNOWN)} Describe any other in a TOML file."
        )
    return _read(_FOLDER / f"{name}.toml")


def _read(path: Path) -> dict[str, Any]:
    try:
        table = tomllib.loads(path.read_text())
    except OSError as error:
        raise DeviceError(f"cannot read {path}: {error.strerror}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise DeviceError(f"{path} is no TOML: {error}.") from None
    like = table.pop("like", None)
    return table if like is None else _merged(_table(like), table)


def _merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in changes.items():
        sections = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merged(merged[key], value) if sections else value
    return merged


def _parsed(kind: type, table: Mapping[str, Any], where: str) -> Any:
    hints = get_type_hints(kind)
    for key in table:
        if key not in hints:
            raise DeviceError(f"{where}unknown key {key}; {_nearest(key, hints)}")
    required = [one.name for one in fields(kind) if one.default is MISSING and one.default_factory is MISSING]
    missing = [name for name in required if name not in table]
    if missing:
        raise DeviceError(f"{where}{', '.join(missing)} missing; or start from a known device: like = {KNOWN[-1]!r}.")
    return kind(**{key: _value(hints[key], value, where + key) for key, value in table.items()})


def _value(hint: Any, value: Any, key: str) -> Any:
    if get_origin(hint) is UnionType:
        hint = get_args(hint)[0]
    if is_dataclass(hint) and isinstance(hint, type):
        if not isinstance(value, dict):
            raise DeviceError(f"{key} = {value!r}; it must be a section, [{key.rsplit(' ', 1)[-1]}].")
        return _parsed(hint, value, f"{key}.")
    if hint == Mapping[str, Any] and isinstance(value, dict):
        return value
    if hint == Mapping[str, float] and isinstance(value, dict):
        return {_dtype(name, key): _value(float, rate, f"{key}.{name}") for name, rate in value.items()}
    if hint is str and isinstance(value, str) and value:
        return value
    if hint in (int, float) and _is_number(value, hint):
        return hint(value)
    if hint not in _MUST_BE and _are_points(value):
        return tuple((int(size), float(rate)) for size, rate in value)
    raise DeviceError(
        f"{key} = {value!r}; it must be {_MUST_BE.get(hint, 'points [bytes, bytes/s] in ascending order')}."
    )


_MUST_BE = {
    str: "a text",
    int: "a whole number above 0",
    float: "a number above 0",
    Mapping[str, Any]: "a section of XLA's fields",
    Mapping[str, float]: "a section of FLOP/s by dtype, such as bfloat16 = 989e12",
}


def _is_number(value: Any, kind: type) -> bool:
    fits = isinstance(value, int if kind is int else int | float) and not isinstance(value, bool)
    return fits and 0 < value < math.inf


def _are_points(value: Any) -> bool:
    return (
        isinstance(value, list)
        and all(isinstance(one, list) and len(one) == 2 and all(_is_number(x, float) for x in one) for one in value)
        and all(low < high for (low, _), (high, _) in itertools.pairwise(value))
    )


def _dtype(name: str, key: str) -> str:
    try:
        return jnp.dtype(name).name
    except TypeError:
        raise DeviceError(f"{key}: {name!r} is no dtype; write bfloat16, float16, float32 or float8_e4m3fn.") from None


def _nearest(name: str, valid: Any) -> str:
    near = get_close_matches(name, valid, n=1)
    return f"did you mean {near[0]}?" if near else f"choose one of {', '.join(valid)}."


def _text_form(message: Mapping[str, Any]) -> str:
    parts = []
    for key, value in message.items():
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, dict):
                parts.append(f"{key} {{ {_text_form(one)} }}")
            else:
                parts.append(f"{key}: {one if key in _WORDS else json.dumps(one)}")
    return " ".join(parts)
