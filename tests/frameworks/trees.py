"""Plain pytrees: a registered dataclass, a NamedTuple, lists, tuples, dicts, and None where there is nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from oracle import one_device

from frameworks.case import SGD, WIDTH, Case, mean_square


class Linear(NamedTuple):
    kernel: jax.Array
    bias: jax.Array | None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Net:
    first: Linear
    rest: list[Any]
    unused: None = None


def init(key):
    kernels = jax.random.normal(key, (4, WIDTH, WIDTH)) / 4
    first = Linear(kernels[0], jnp.zeros(WIDTH))
    return Net(first, [(Linear(kernels[1], None), None), {"deep": [Linear(kernels[2], jnp.zeros(WIDTH)), kernels[3]]}])


def loss(net, batch):
    (second, nothing), more = net.rest
    assert second.bias is None
    assert nothing is None
    assert net.unused is None
    third, fourth = more["deep"]
    x = jnp.tanh(batch["x"] @ net.first.kernel + net.first.bias)
    return mean_square(jnp.tanh(x @ second.kernel) @ third.kernel + third.bias + x @ fourth, batch)


def train(data):
    return one_device(loss, init, SGD, data), None


CASES = {"nested": Case(init=init, loss=loss, train=train)}
