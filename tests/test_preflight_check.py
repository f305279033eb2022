"""Compiled programs held to their contracts: what a compiler may change, what it may not, and how it is said."""

from __future__ import annotations

import jax.numpy as jnp
import pytest
from quick import quick

import jaxshard as js
from jaxshard import Collective, ContractError
from jaxshard.preflight.check import check, exceeding


def message(kind="all_reduce", leaf="w", *, dtype="float32", bytes=1024, count=1, loops=(), axes=("shard",)):
    return Collective(
        kind=kind, purpose="reduce", leaf=leaf, axes=axes, devices=8, dtype=dtype, bytes=bytes, count=count, loops=loops
    )


LOOP, NESTED = ("scan",), ("microbatches", "scan")


@pytest.mark.parametrize(
    ("allowed", "compiled"),
    [
        pytest.param([message(leaf="a"), message(leaf="b")], [message(leaf="a+b", bytes=2048)], id="combined"),
        pytest.param([message(leaf="a"), message(leaf="b")], [message(leaf="a", bytes=2048)], id="a name forgotten"),
        pytest.param([message(leaf="a"), message(leaf="b")], [message(leaf="", bytes=2048)], id="all names forgotten"),
        pytest.param([message(count=4, loops=LOOP)], [message(bytes=4096)], id="moved out of the loop"),
        pytest.param([message(count=4, loops=NESTED)], [message(count=2, loops=("microbatches",))], id="out of one"),
        pytest.param([message(count=4, loops=LOOP)], [message(), message(count=3, loops=LOOP)], id="one run peeled"),
        pytest.param([message()], [message("reduce_scatter")], id="all_reduce to reduce_scatter"),
        pytest.param([message(), message()], [message()], id="equal ones once"),
        pytest.param(
            [message(axes=("replica", "shard"))], [message(axes=("shard", "replica"))], id="axes in any order"
        ),
        pytest.param(
            [message(dtype="bfloat16", bytes=512, count=2)],
            [message(dtype="float32")],
            id="two added up, and sent wider",
        ),
        pytest.param(
            [message("reduce_scatter", "b", count=2, loops=LOOP), message(leaf="a", bytes=256)],
            [message("reduce_scatter", "b", bytes=2048), message(leaf="", bytes=256)],
            id="a changed message takes no other's place",
        ),
        pytest.param(
            [message(leaf="a", dtype="bfloat16", bytes=512, count=2), message(dtype="bfloat16", count=2, loops=LOOP)],
            [message(leaf="", dtype="bfloat16", bytes=2048), message(leaf="a")],
            id="nor does one that has forgotten its name",
        ),
        pytest.param(
            [message(leaf="a", dtype="bfloat16", bytes=512, count=2), message(leaf="norm", bytes=8)],
            [message(leaf="a", bytes=1024), message(leaf="", bytes=8)],
            id="added up beside scalars",
        ),
    ],
)
def test_what_a_compiler_may_do(allowed, compiled):
    assert exceeding(allowed, compiled) == []
    spare = total(allowed) - total(compiled)
    assert sum(bytes for _, bytes in exceeding(allowed, [*compiled, message(bytes=8)])) == max(0, 8 - spare)


def total(collectives):
    return sum(one.bytes * one.count for one in collectives)


@pytest.mark.parametrize(
    ("allowed", "compiled", "bytes"),
    [
        pytest.param([], message(), 1024, id="added"),
        pytest.param([message(count=2)], message(count=3), 1024, id="too often"),
        pytest.param([message(count=4)], message(count=4, loops=LOOP), 4096, id="into a loop"),
        pytest.param([message(count=4, loops=LOOP)], message(count=4, loops=NESTED), 4096, id="into another loop"),
        pytest.param([message(dtype="bfloat16", bytes=512)], message(), 512, id="a wider dtype"),
        pytest.param(
            [message("all_gather", dtype="bfloat16", count=2)], message("all_gather", "v"), 1024, id="another's"
        ),
        pytest.param([message()], message(axes=("replica", "shard")), 1024, id="over more devices"),
        pytest.param([message("reduce_scatter")], message(), 1024, id="reduce_scatter to all_reduce"),
        pytest.param([message("all_gather")], message("all_to_all"), 1024, id="another kind"),
    ],
)
def test_what_it_may_not(allowed, compiled, bytes):
    assert exceeding(allowed, [compiled]) == [(compiled, bytes)]


PARAMS = {"w": jnp.ones((2, 16, 16)), "out": jnp.ones((16, 8))}
BATCH = jnp.ones((32, 16))


def loss(params, batch):
    x = batch
    for i in range(2):
        x = jnp.tanh(x @ params["w"][i])
    return jnp.mean((x @ params["out"]) ** 2)


def test_a_step_on_cpu_devices_keeps_its_contract():
    training = quick(loss, PARAMS, BATCH, "zero1", accumulate=2, precision=js.Precision(reduce="bfloat16"))
    sent = check(training)
    # Not vacuous: both leaves are reduced and gathered again. XLA's CPU compiler sends bf16 as float32.
    bytes = 4 * (2 * 16 * 16 + 16 * 8)
    for kind in ("reduce_scatter", "all_gather"):
        assert sum(one.bytes * one.count for one in sent if one.kind == kind) == bytes


def test_another_strategy_s_program_breaks_it_readably():
    zero1, zero2 = (quick(loss, PARAMS, BATCH, name, accumulate=2) for name in ("zero1", "zero2"))
    sent = check(zero2)
    with pytest.raises(ContractError) as error:
        check(zero1, sent)
    said = str(error.value)
    assert "the compiled step sends what its strategy does not" in said
    assert "reduce_scatter float32" in said
    assert "over shard inside microbatches" in said
    assert "not in zero1's contract, which has reduce_scatter float32" in said


def test_dp_is_no_one_program():
    with pytest.raises(TypeError, match="dp is several programs"):
        check(quick(loss, PARAMS, BATCH, "dp"))
