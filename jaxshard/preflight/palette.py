"""The colours of a report and what they stand for, alike in every plot: Okabe and Ito's, told apart by every eye.

What a device holds and what moves it match: a gather is of the gathered weights' colour, a reduction of the gradients'.
Kernels are grey, so that messages stand out.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Paint:
    """fill: of an area. ink: of text on it. name: in plots. meaning: in the legend."""

    fill: str
    ink: str
    name: str
    meaning: str


def _paint(fill: str, name: str, meaning: str, ink: str = "#000001") -> Paint:
    return Paint(fill=fill, ink=ink, name=name, meaning=meaning)


_ORANGE, _SKY, _GREEN, _YELLOW = "#e69f00", "#56b4e9", "#009e73", "#f0e442"
_BLUE, _VERMILION, _PURPLE = "#0072b2", "#d55e00", "#cc79a7"
_WHITE = "#fffffe"

CLASSES = {
    "params": _paint(_BLUE, "params", "the parameters, as they are between steps", _WHITE),
    "opt": _paint(_SKY, "opt", "the optimizer's state, such as Adam's two moments"),
    "gradients": _paint(_VERMILION, "grads", "gradients of parameters, whole or a shard", _WHITE),
    "gathered weights": _paint(_ORANGE, "gathered", "split weights that were made whole to be used"),
    "logits": _paint(_YELLOW, "logits", "floats as wide as the vocabulary"),
    "activations": _paint(_GREEN, "activ.", "values of the forward pass, saved or recomputed", _WHITE),
    "temporaries": _paint(
        "#b5b5b5", "temp.", "all else: gradients of activations, workspaces, the update; in the table, in other"
    ),
    "other": _paint("#7d7d7d", "other", "the batch, other state, the metrics, and gaps in which no value lies", _WHITE),
}
"""What a device holds, by the names of `ledger.Ledger`; what is not here is ``other``."""

KINDS = {
    "all_gather": _paint(_ORANGE, "all_gather", "split values become whole on every device"),
    "reduce_scatter": _paint(_VERMILION, "reduce_scatter", "sums, of which each device keeps its part", _WHITE),
    "all_reduce": _paint(_PURPLE, "all_reduce", "sums, whole on every device"),
    "all_to_all": _paint(_YELLOW, "all_to_all", "each device gives every other one a part of its own"),
    "permute": _paint(_SKY, "permute", "each device gives one other what it has"),
    "broadcast": _paint(_BLUE, "broadcast", "the first device gives all others what it has", _WHITE),
    "gather": _paint(_GREEN, "gather", "all devices give the first one what they have", _WHITE),
}
"""Messages by kind."""

KERNELS = {
    "matmul": _paint("#4b5a6b", "matmul", "bound by FLOP/s", _WHITE),
    "attention": _paint("#74879b", "attention", "cuDNN's attention, bound by FLOP/s", _WHITE),
    "memory": _paint("#b9c4cf", "memory", "bound by the bytes that they read and write"),
    "host": _paint(_YELLOW, "host", "transfers to and from the host's memory, and what its processor does"),
}
"""Kernels by what bounds them."""
