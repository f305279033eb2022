"""Where states in host memory are updated, what that sends over the link, and what `explain` says of it.

Oracles: the same numbers from the other place, bit for bit; formulas for bytes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import jax
import numpy as np
import optax
import pytest
from oracle import FORMS, assert_same_bits, batches, run
from quick import quick

import jaxshard as js
from jaxshard import link, step, update_place
from jaxshard.link import Transfer, host_bytes, link_bytes, transfers
from jaxshard.strategy import name_of

SCAN = FORMS[0]
ADAMW = optax.adamw(1e-2, weight_decay=0.1)
DATA = batches(3, 48)


def training_for(states="opt", update="device", name="zero3", optimizer=ADAMW, **choices):
    strategy = replace(js.offload(name, states), update=update)
    return quick(SCAN.loss, SCAN.init, DATA[0], strategy, optimizer=optimizer, clip=0.1, **choices)


@pytest.mark.parametrize(("name", "states"), [("zero3", "opt"), ("zero1", "opt+params"), ("dp", "opt+params")])
def test_the_host_gives_what_the_device_gives(name, states):
    device, host = (run(training_for(states, update, name), SCAN.init, DATA) for update in ("device", "host"))
    assert (device.norm > 0.1).all()
    assert_same_bits(host, device)


def test_the_host_updates_no_more_than_its_own_elements():
    with pytest.raises(ValueError, match=r"update='host': \d+ of \d+ independent parts .* not elementwise"):
        training_for(update="host", optimizer=optax.adafactor(1e-2))
    said = str(training_for(update="auto", optimizer=optax.lamb(1e-2)).explain())
    assert "6 of 6 parts, which are not elementwise, whole arrays at once" in said


@pytest.mark.parametrize(("speed", "place"), [(1.0, "device"), (1e-6, "host")])
def test_the_cheaper_place_is_chosen_and_both_costs_are_said(speed, place, monkeypatch):
    """A state that is small beside its gradient, on a link that is slow beside the host's memory."""
    monkeypatch.setattr(update_place, "LINK", update_place.LINK * speed)
    monkeypatch.setattr(update_place, "_costs", _without_copies(update_place._costs))
    training = training_for("opt", "auto")
    assert training.strategy.update == place
    said = str(training.explain())
    assert "updated on the device" in said if place == "device" else "updated by the host" in said
    assert said.count(" ms") == 2


def _without_copies(costs):
    """The costs of a compiler that has the host write where the state lies."""

    def found(*args):
        device, host = costs(*args)
        return device, replace(host, to_device=device.to_device // 2, to_host=device.to_host // 2)

    return found


def test_a_compiler_that_refuses_has_the_device_update(monkeypatch):
    tried = []

    def build(lowered, *args, **kwargs):
        tried.append(lowered)
        if len(tried) == 1:
            raise jax.errors.JaxRuntimeError("UNIMPLEMENTED: no host here\nand more")
        return _build(lowered, *args, **kwargs)

    _build = step.build
    monkeypatch.setattr(step, "build", build)
    training = training_for(update="host")
    ours = run(training, SCAN.init, DATA)
    assert len(tried) == 2
    assert training.strategy.update == "device"
    assert "not by the host, because this compiler refuses: UNIMPLEMENTED: no host here)" in str(training.explain())
    assert_same_bits(ours, run(training_for(update="device"), SCAN.init, DATA))

    # Nor is another error taken for that.
    tried.clear()
    with pytest.raises(jax.errors.JaxRuntimeError, match="no host here"):
        training_for(update="device").built()


WIDTH = 16


def square(params, batch):
    return ((batch @ params["w"]) ** 2).mean()


def small(states, accumulate=1, update="device", name="zero3"):
    params = {"w": jax.ShapeDtypeStruct((WIDTH, WIDTH), "float32")}
    batch = np.ones((48, WIDTH), np.float32)
    strategy = replace(js.offload(name, states), update=update)
    return quick(square, params, batch, strategy, optimizer=ADAMW, accumulate=accumulate)


PIECE = 4 * WIDTH * WIDTH // 8  # of the matrix, on one of 8 devices


@pytest.mark.parametrize(
    ("states", "accumulate", "update", "to_device", "to_host"),
    [
        ("opt", 1, "device", 2, 2),  # two moments, each way
        ("opt", 3, "device", 2, 2),
        ("params", 1, "device", 3, 1),  # for the loss and (at most) again in the backward pass, and for the update
        ("params", 3, "device", 7, 1),
        ("grads", 1, "device", 2, 1),  # for the norm and the update; as they are reduced
        ("grads", 3, "device", 8, 7),  # zeros; of each microbatch out, in with the sum, and out
        ("all", 1, "device", 7, 4),
        ("opt", 1, "host", 3, 4),  # gradients and parameters out, parameters back, and a copy of the moments
    ],
)
def test_bytes_over_the_link(states, accumulate, update, to_device, to_host):
    made = small(states, accumulate, update).setup
    assert link_bytes(transfers(made)) == {"to_device": to_device * PIECE, "to_host": to_host * PIECE}


def test_explain_says_where_every_byte_is():
    training = small("opt+params")
    explained = training.explain()
    assert explained.host_bytes == host_bytes(training.setup) == {"params": PIECE, "grads": 0, "opt": 2 * PIECE}
    assert explained.bytes_per_device == {"params": 0, "grads": PIECE, "opt": 4, "extra": 0}  # the count of steps
    (row,) = explained.leaves
    assert (row.params, row.grads, row.host_bytes, row.bytes_per_device) == (
        "dim 0 over shard, host",
        "dim 0 over shard",
        3 * PIECE,
        PIECE,
    )
    assert Transfer(state="opt", leaf="0/mu/w", direction="to_host", bytes=PIECE, count=1) in explained.transfers
    said = str(explained)
    assert f"over the link in a step, {5 * PIECE:,} B to the device and {3 * PIECE:,} B to the host" in said
    assert "link" not in str(small("none").explain())


def test_more_than_a_gpus_client_pins_is_an_error(monkeypatch):
    training = small("opt")
    monkeypatch.setattr(link, "platform_of", lambda mesh: "gpu")
    link.check_host_memory(training.setup)
    monkeypatch.setenv(link.PINNED, "0")
    with pytest.raises(ValueError, match=f"Set {link.PINNED}=1 in the environment"):
        training.init(lambda key: {"w": jax.random.normal(key, (WIDTH, WIDTH))}, jax.random.key(0))


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (lambda: js.offload("zero3", "optimizer"), r"offload='optimizer': 'none', 'all', or one or more of params"),
        (lambda: js.offload("zero3", "opt+opt"), r"offload='opt\+opt'"),
        (lambda: js.offload("zero3", "opt", fraction=1.5), r"fraction=1.5\): a share of the bytes, 0 to 1"),
        (lambda: js.Placement(fraction=0.5), r"it is the fraction in host memory; add memory='pinned_host'"),
        (lambda: js.Placement(memory=cast(Any, "host")), r"memory='host'\): choose one of 'device', 'pinned_host'"),
        (lambda: replace(js.ZERO3, buffers=0), r"buffers=0\): how many pieces are on a device at a time, 1 or more"),
        (lambda: replace(js.ZERO3, update="cpu"), r"update='cpu'\): choose one of 'auto', 'device', 'host'"),
        (lambda: js.offload("dp", "all"), r"gathers every device's gradients at once"),
    ],
)
def test_mistakes(made, says):
    with pytest.raises(ValueError, match=says):
        made()


def test_a_name_says_what_is_offloaded():
    assert name_of(js.offload("zero3", "params+opt")) == "zero3 + offload opt+params"
    assert name_of(js.offload("fsdp", "opt", fraction=0.5)) == "zero3 + offload opt (0.5)"
    assert js.offload(js.offload("zero3", "all"), "none") == js.ZERO3
