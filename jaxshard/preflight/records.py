"""Frozen dataclasses to JSON and back: what travels between processes and lies in the cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")


def to_json(record: Any) -> dict[str, Any]:
    """A dataclass as dicts, lists and plain values."""
    return asdict(record)


def from_json(kind: type[T], data: Mapping[str, Any]) -> T:
    """The dataclass that `to_json` was given. Raises TypeError for data of another one, KeyError for missing fields."""
    hints = get_type_hints(kind)
    return kind(**{name: _value(hints[name], value) for name, value in data.items()})


def _value(hint: Any, value: Any) -> Any:
    if get_origin(hint) in (Union, UnionType):
        options = [option for option in get_args(hint) if option is not NoneType]
        return None if value is None else _value(options[0], value)
    if isinstance(hint, type) and is_dataclass(hint):
        return from_json(hint, value)
    if get_origin(hint) is tuple:
        kinds = get_args(hint)
        each = [kinds[0]] * len(value) if kinds[1:] == (...,) else kinds
        return tuple(_value(one, x) for one, x in zip(each, value, strict=True))
    if get_origin(hint) in (dict, Mapping):
        return {key: _value(get_args(hint)[1], x) for key, x in value.items()}
    return value
