"""States in host memory change where things lie, and nothing else.

Oracle: the same strategy without offload, bit for bit: parameters, optimizer state, losses and norms.
"""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib
from oracle import FORMS, Model, assert_same_bits, batches
from quick import EVERY, quick
from test_precision import brittle, brittle_loss

import jaxshard as js
from jaxshard import host_memory
from jaxshard.jaxprs import walk
from jaxshard.strategy import Strategy

SCAN, LIST = FORMS
STEPS, CLIP = 3, 0.1
ADAMW = optax.adamw(1e-2, weight_decay=0.1)
WHOLE, SMALL = host_memory.PIECE_BYTES, 256  # bytes; with the second the leaves below are updated in many pieces


@dataclass(frozen=True)
class Steps:
    """What training gave: the states (on the host), and each step's loss and norm."""

    states: list[Any]
    loss: np.ndarray
    norm: np.ndarray


def on_host(state: Any) -> Any:
    def fetch(x):
        return np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)

    return jax.tree.map(fetch, (state.step, state.params, state.opt, state.extra, state.scale))


def kinds(tree: Any) -> Counter[str]:
    """How many arrays with dims lie in which memory. Scalars are on the devices, always."""
    leaves = [x for x in jax.tree.leaves(tree) if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)]
    assert {x.sharding.memory_kind for x in leaves if not x.ndim} <= {"device"}
    return Counter(x.sharding.memory_kind for x in leaves if x.ndim)


def check_places(training: Any, state: Any) -> None:
    """What the strategy names is in host memory whole, and nothing else is."""
    strategy = training.strategy
    for tree, placement in ((state.params, strategy.params), (state.opt, strategy.opt)):
        assert set(kinds(tree)) <= {placement.memory}
    assert set(kinds((state.extra, state.key, state.scale))) <= {"device"}
    wanted = training.state_shapes
    assert jax.tree.all(jax.tree.map(lambda x, y: x.sharding.is_equivalent_to(y.sharding, x.ndim), state, wanted))


def stepped(training: Any, init: Any, data: Any, places: Any = check_places) -> Steps:
    state = training.init(init, jax.random.key(0))
    places(training, state)
    states, metrics = [on_host(state)], []
    for batch in data:
        state, now = training.step(state, batch)
        places(training, state)
        states.append(on_host(state))
        metrics.append((now["loss"], now["grad_norm"]))
    loss, norm = np.array(metrics, np.float32).T
    return Steps(states, loss, norm)


LATER = jax.__version_info__ >= (0, 11)
"""JAX 0.12's CPU compiler fuses some programs otherwise when a copy stands in them, and a last bit differs."""


def assert_equal(ours: Steps, theirs: Steps, *, moved: bool = True, fused: bool = False) -> None:
    """Everything that two runs gave is the same to the bit; if they are fused otherwise, to rounding."""
    both = [(run.loss, run.norm, run.states) for run in (ours, theirs)]
    if fused:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), *both)
    else:
        assert_same_bits(*both)
    if moved:
        far = jax.tree.map(lambda a, b: np.abs(a - b).max(), theirs.states[0][1], theirs.states[-1][1])
        assert min(jax.tree.leaves(far)) > 0


MESH = dict(EVERY)


def offload(strategy: str | Strategy, states: str, **choices: Any) -> Strategy:
    """States in host memory that the devices update; that the host updates them is another program."""
    return replace(js.offload(strategy, states, **choices), update="device")


def training_for(
    loss: Any,
    params: Any,
    batch: Any,
    strategy: Any,
    mesh: tuple[int, int] = (1, 8),
    pieces: int = SMALL,
    **choices: Any,
) -> Any:
    """A training, compiled while pieces are so large."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_memory, "PIECE_BYTES", pieces)
        choices = {"optimizer": ADAMW, "clip": CLIP} | choices
        training = quick(loss, params, batch, strategy, mesh, **choices)
        training.step(training.init(params, jax.random.key(0)), batch)
        return training


# Every strategy


@functools.cache
def trained(
    name: str, states: str, model: Model = SCAN, pieces: int = SMALL, buffers: int = 2, **choices: Any
) -> Steps:
    strategy, data = replace(offload(name, states), buffers=buffers), batches(STEPS, 48)
    training = training_for(model.loss, model.init, data[0], strategy, MESH[name], pieces, **choices)
    return stepped(training, model.init, data)


CASES = [("opt", 1, WHOLE), ("opt", 3, SMALL), ("opt+params", 1, SMALL), ("opt+params", 3, WHOLE)]
# In pieces a norm would be summed in another order.
CASES += [("all", 1, WHOLE), ("all", 3, WHOLE)]


@pytest.mark.parametrize(
    ("name", "states", "accumulate", "pieces"),
    [(name, *case) for name in MESH for case in CASES if (name, case[0]) != ("dp", "all")],  # dp keeps its gradients
)
def test_adamw_with_an_active_clip(name, states, accumulate, pieces):
    theirs = trained(name, "none", accumulate=accumulate)
    assert (theirs.norm > CLIP).all(), "the clip must be active in every step"
    assert len(set(theirs.loss)) == STEPS
    # Where whole gradients are reduced last, XLA merges the numbers that they are multiplied by, or does not.
    merged = states == "all" and accumulate > 1 and name in ("ddp", "zero1")
    assert_equal(trained(name, states, pieces=pieces, accumulate=accumulate), theirs, fused=merged)


def test_blocks_in_a_list():
    assert_equal(trained("zero3", "opt+params", LIST, WHOLE), trained("zero3", "none", LIST))


@pytest.mark.parametrize("buffers", [1, 3])
def test_so_many_pieces_on_the_device_at_a_time(buffers):
    assert_equal(trained("zero3", "opt+params", buffers=buffers, accumulate=1), trained("zero3", "none", accumulate=1))


def test_every_device_sees_its_own_data():
    """Without this, a strategy that forgets to reduce would pass."""
    params = SCAN.init(jax.random.key(0))
    for batch in batches(STEPS, 48):
        losses = [float(SCAN.loss(params, {k: x[i : i + 6] for k, x in batch.items()})) for i in range(0, 48, 6)]
        assert len(set(losses)) == 8


# No list: of blocks in a list, accumulated, XLA's CPU compiler folds the casts of float16 otherwise, to the last bits.
@pytest.mark.parametrize(("name", "accumulate"), [("ddp", 3), ("zero1", 1), ("zero3", 3)])
def test_a_step_that_overflows_is_skipped(name, accumulate):
    data = [brittle(0), brittle(1, broken=13), brittle(2)]
    precision = js.Precision(compute="float16", initial_scale=2.0**12)

    def run(states):
        training = training_for(
            brittle_loss, SCAN.init, data[0], offload(name, states), accumulate=accumulate, precision=precision
        )
        return stepped(training, SCAN.init, data)

    theirs, ours = run("none"), run("all")
    assert [int(step) for step, *_ in theirs.states] == [0, 1, 1, 2]
    assert np.isfinite(theirs.norm).tolist() == [True, False, True]
    assert_same_bits(ours.states[2][:3], ours.states[1][:3])
    assert_equal(ours, theirs)


# Optimizers. A small network is enough: two matrices, and a vector that nothing divides.

PARAMS = {
    "up": np.random.default_rng(1).normal(size=(24, 32)).astype(np.float32) / 4,
    "down": np.random.default_rng(2).normal(size=(32, 8)).astype(np.float32) / 4,
    "bias": np.linspace(-1, 1, 5, dtype=np.float32),
}
DATA = [np.random.default_rng(k).normal(size=(48, 24)).astype(np.float32) for k in range(STEPS)]


def loss(params, batch):
    return jnp.mean((jnp.tanh(batch @ params["up"]) @ params["down"] - 1 + params["bias"].sum()) ** 2)


# Products with these numbers are exact: it does not matter which of them XLA's CPU compiler merges with a sum.
EXACT = {"optimizer": optax.sgd(0.125, momentum=0.5), "clip": None}


def compared(loss, params, data, strategy: Any = "zero3", states="opt+params", **choices) -> tuple[Steps, Steps]:
    """(with, without) offload."""
    ours, theirs = (
        stepped(training_for(loss, params, data[0], offload(strategy, what), **choices), params, data)
        for what in (states, "none")
    )
    return ours, theirs


OPTIMIZERS = {
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=8),
    "lamb": optax.lamb(1e-2),
    "muon": contrib.muon(1e-2),
    "sm3": optax.sm3(0.1),
    "clipped before": optax.chain(optax.clip_by_global_norm(0.05), ADAMW),
    "clipped after": optax.chain(ADAMW, optax.clip_by_global_norm(0.01)),
    "multi_steps": optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(),
    "apply_if_finite": optax.apply_if_finite(ADAMW, 3),
    "ema": optax.chain(optax.sgd(0.1), optax.ema(0.9)),
    "inject_hyperparams": optax.inject_hyperparams(optax.adam)(learning_rate=1e-2),
    "mu in bfloat16": optax.adam(1e-2, mu_dtype="bfloat16"),
    "masked": optax.masked(optax.adam(1e-2), {"up": True, "down": False, "bias": True}),
    "sgd": optax.sgd(0.1),
}
"""Some look at a whole leaf, or at all leaves, and are updated by whole leaves; some have states of other shapes."""


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_other_optimizers(name):
    ours, theirs = compared(loss, PARAMS, DATA, optimizer=OPTIMIZERS[name])
    assert_equal(ours, theirs, fused=LATER and name == "adafactor")


# Leaves


def test_the_largest_leaves_go_first():
    """8 * 32 of 24 * 32 + 8 * 32 + 5 elements is a quarter."""
    hosted = {}
    for fraction in (0, 0.5, 0.7, 0.8, 1):
        strategy = offload("zero3", "opt+params", fraction=fraction)
        shapes = quick(loss, PARAMS, DATA[0], strategy, optimizer=ADAMW).state_shapes
        for tree in (shapes.params, shapes.opt[0].mu, shapes.opt[0].nu):
            found = [name for name, x in tree.items() if x.sharding.memory_kind == "pinned_host"]
            if tree is shapes.params:
                hosted[fraction] = sorted(found)
        moments = [x.sharding.memory_kind for x in jax.tree.leaves(shapes.opt) if x.size == 24 * 32]
        assert moments == ["pinned_host" if fraction else "device"] * 2
    assert hosted == {
        0: [],
        0.5: ["up"],
        0.7: ["up"],
        0.8: ["down", "up"],
        1: ["bias", "down", "up"],
    }


@pytest.mark.parametrize("name", ["zero1", "zero3"])
def test_a_part_of_the_states(name):
    strategy = offload(name, "opt+params", fraction=0.5)
    training = training_for(loss, PARAMS, DATA[0], strategy)

    def places(_, state):
        assert {k for k, x in state.params.items() if x.sharding.memory_kind == "pinned_host"} == {"up"}
        assert kinds(state.opt) == {"pinned_host": 2, "device": 4}

    ours = stepped(training, PARAMS, DATA, places)
    assert_equal(ours, stepped(training_for(loss, PARAMS, DATA[0], name), PARAMS, DATA))


RANDOM = np.random.default_rng(5)


def normal(*shape):
    return RANDOM.normal(size=shape).astype(np.float32) / 2


ODD = {
    "half": normal(24, 8).astype(jnp.bfloat16),
    "filter": normal(8, 3) + 1j * normal(8, 3),
    "prime": normal(7, 3),
    "one": normal(1, 8),
    "scalar": normal(),
    "empty": np.zeros((0, 4), np.float32),
    "integers": np.arange(16, dtype=np.int32),
    "flags": np.arange(8) % 3 == 0,
    "frozen": normal(16, 8),
    "keys": jax.random.split(jax.random.key(7), 8),
}


def odd_loss(params, batch):
    h = (batch @ params["half"].astype(jnp.float32)) * params["one"] + params["flags"].astype(jnp.float32)
    h += batch[:, params["integers"]] @ params["frozen"] + params["empty"].sum()
    z = h.astype(jnp.complex64) @ params["filter"]
    noise = jax.random.normal(params["keys"][3], (3,))
    return jnp.mean(jnp.real(z) ** 2 + jnp.imag(z)) + jnp.sum(jnp.sin(params["prime"]) * noise) + params["scalar"] ** 2


@pytest.mark.parametrize(
    ("name", "states"), [("ddp", "opt+params"), ("zero1", "opt+params"), ("zero3", "opt+params"), ("zero3", "opt")]
)
def test_odd_leaves(name, states):
    def places(training, state):
        strategy = training.strategy
        at_rest = {k: x.sharding.memory_kind for k, x in state.params.items()}
        apart = {"scalar", "empty", "keys"}  # nothing to gain, and of keys JAX knows no host memory
        assert {at_rest[k] for k in apart} == {"device"}
        assert {at_rest[k] for k in ODD.keys() - apart} == {strategy.params.memory}
        trace = state.opt[0].trace
        assert trace["frozen"] is trace["integers"] is None
        lie = {k: x.sharding.memory_kind for k, x in trace.items() if x is not None}
        gone = {"half", "filter", "prime", "one"} if strategy.opt.memory == "pinned_host" else set()
        assert {k for k, kind in lie.items() if kind == "pinned_host"} == gone

    choices = {"trainable": lambda path: path != "frozen", **EXACT}
    ours, theirs = (
        stepped(training_for(odd_loss, ODD, DATA[0], offload(name, what), **choices), ODD, DATA, places)
        for what in (states, "none")
    )
    assert_equal(ours, theirs, moved=False, fused=LATER)
    learning = {"half", "filter", "prime", "one", "scalar"}
    for k in ODD.keys() - {"empty"}:
        start, end = (theirs.states[at][1][k] for at in (0, -1))
        assert (start != end).any() == (k in learning), k


# Uses: in a list, in loops, twice, and recomputed


def scanned(params, batch):
    x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), batch, params["layers"])
    return x


def by_rows_in_a_loop(params, batch):
    return jax.lax.fori_loop(0, 3, lambda i, x: jnp.tanh(x @ params["layers"][i]), batch)


def by_rows(params, batch):
    for i in range(3):
        batch = jnp.tanh(batch @ params["layers"][i])
    return batch


def tied(params, batch):
    first = params["layers"][0]
    return jnp.tanh(batch @ first) @ first.T + scanned(params, batch) @ params["layers"][2].T


def turned_and_cast(params, batch):
    layers = jnp.swapaxes(params["layers"].astype(jnp.bfloat16), 1, 2)
    x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), batch.astype(jnp.bfloat16), layers)
    return (x + batch.astype(jnp.bfloat16) @ layers[0]).astype(jnp.float32)


def before_branches(params, batch):
    layers = params["layers"]
    x = jax.lax.cond(batch.sum() > 0, lambda: batch @ layers[0], lambda: batch @ layers[1])
    return jnp.tanh(x) @ layers[2]


LAYERS = {"layers": np.random.default_rng(4).normal(size=(3, 24, 24)).astype(np.float32) / 5}


@pytest.mark.parametrize(
    "strategy", [js.DDP, js.ZERO3, replace(js.ZERO3, prefer="memory")], ids=["ddp", "zero3", "tied"]
)
@pytest.mark.parametrize("used", [by_rows_in_a_loop, by_rows, tied, turned_and_cast, before_branches])
def test_leaves_read_in_other_ways(used, strategy):
    ours, theirs = compared(lambda p, b: jnp.mean(used(p, b) ** 2), LAYERS, DATA[:2], strategy, **EXACT)
    assert_equal(ours, theirs)


CHOICES = {
    "recomputed": {"remat": "full"},
    "products kept": {"remat": "dots"},
    "skips": {"skip_nonfinite": True},
    "bfloat16": {"precision": js.Precision(compute="bfloat16")},
    "seven devices": {"mesh": (1, 7)},
    "one device": {"mesh": (1, 1)},
    "replicas": {"mesh": (4, 2)},
}


@pytest.mark.parametrize("name", CHOICES)
def test_choices_of_a_run(name):
    size = 42 if CHOICES[name].get("mesh") == (1, 7) else 48
    data = [x[:size] for x in DATA[:2]]
    params = {"layers": LAYERS["layers"], "ends": np.ones((14, 24), np.float32)}

    def used(params, batch):
        batch = batch.astype(params["ends"].dtype)
        return jnp.mean((scanned(params, batch) @ params["ends"].T) ** 2)

    assert_equal(*compared(used, params, data, **EXACT, **CHOICES[name]))


@pytest.mark.parametrize("name", ["dp", "zero1", "zero3"])
def test_what_else_a_training_does(name):
    here, there = (training_for(loss, PARAMS, DATA[0], offload(name, what)) for what in ("none", "opt+params"))
    states = here.init(PARAMS), there.init(lambda key: jax.tree.map(jnp.asarray, PARAMS), jax.random.key(0))
    assert_same_bits(there.whole(states[1]), PARAMS)
    rest = DATA[1][:13]  # 13 is no multiple of 8
    for x in (DATA[1], rest):
        assert there.evaluate(states[1], x) == here.evaluate(states[0], x)
    broken = DATA[0].copy()
    broken[3, 4] = np.inf
    found = there.nonfinite(states[1], broken)
    assert found
    assert found == here.nonfinite(states[0], broken)
    assert there.nonfinite(states[1], DATA[0]) == ()
    check_places(there, states[1])


# The program. CPU devices read the host's memory as their own, and would compute in it by accident.

MOVES = {"device_put", "slice", "dynamic_slice", "dynamic_update_slice", "squeeze", "reshape", "optimization_barrier"}
HOLDS = {"jit", "pjit", "scan", "while", "shard_map", "custom_vjp_call", "remat2", "checkpoint"}
"""Primitives that hold programs, whose own equations are looked at."""


def is_host(x: Any) -> bool:
    return getattr(x.aval, "memory_space", None) == jax.memory.Space.Host


def in_host_memory(jaxpr: Any) -> Counter[str]:
    """How many equations, by name, read or give an array in host memory."""
    eqns = (site.eqn for site in walk(jaxpr))
    return Counter(eqn.primitive.name for eqn in eqns if any(map(is_host, (*eqn.invars, *eqn.outvars))))


def step_jaxpr(training: Any) -> Any:
    return jax.make_jaxpr(training.step_fn)(training.state_shapes, training.setup.batch).jaxpr


@pytest.mark.parametrize("model", [Model(form="scan"), Model(form="list", tied=True)], ids=str)
@pytest.mark.parametrize("name", ["ddp", "zero1", "zero3"])
def test_nothing_is_computed_in_host_memory(name, model, monkeypatch):
    monkeypatch.setattr(host_memory, "PIECE_BYTES", SMALL)
    for states, choices in (
        ("all", {"accumulate": 3}),
        ("opt+params", {"precision": js.Precision(compute="bfloat16")}),
    ):
        strategy, batch = offload(name, states), batches(1, 48)[0]
        training = quick(model.loss, model.init, batch, strategy, MESH[name], optimizer=ADAMW, **choices)
        found = in_host_memory(step_jaxpr(training))
        assert found["device_put"] > 2 * len(jax.tree.leaves(training.state_shapes.params))
        assert found.keys() - MOVES - HOLDS == set()


def test_what_is_computed_in_host_memory_would_be_found():
    sharding = jax.sharding.NamedSharding(js.make_mesh(), jax.sharding.PartitionSpec(), memory_kind="pinned_host")
    x = jax.ShapeDtypeStruct((8, 4), np.float32, sharding=sharding)
    assert in_host_memory(jax.make_jaxpr(lambda x: jax.jit(lambda x: x[0] * 2)(x))(x).jaxpr).keys() - MOVES - HOLDS == {
        "mul"
    }


def crossings(training: Any) -> tuple[int, int]:
    """How many places of the program for GPUs bring something to the device, and how many take it to the host."""
    traced = jax.jit(lambda *args: training.step_fn(*args)).trace(training.state_shapes, training.setup.batch)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    there, back = (text.count(f'_xla_buffer_placement = "{kind}"') for kind in ("device", "pinned_host"))
    assert there + back == text.count("@annotate_device_placement(")
    return there, back


TOKENS = np.arange(48, dtype=np.int32) % 24


def token_loss(params, tokens):
    return jnp.mean((jnp.tanh(params["up"][tokens]) @ params["down"] - 1 + params["bias"].sum()) ** 2)


# Each is read once by the forward pass, and by the backward pass the second matrix, behind which is something to learn.
USES = 3 + 1


@pytest.mark.parametrize(
    ("name", "states", "uses"),
    [
        ("zero3", "none", 0),
        ("zero3", "opt", 0),
        ("zero3", "opt+params", USES),
        ("ddp", "opt+params", USES),
        ("zero1", "opt+params", USES),
        ("zero2", "opt", 0),
        ("shard_grad_op", "opt+params", 3),  # once, at the step's start
    ],
)
def test_each_state_crosses_once_each_way_and_parameters_for_each_use(name, states, uses):
    training = quick(token_loss, PARAMS, TOKENS, offload(name, states), optimizer=ADAMW, clip=CLIP)
    held = {"none": 0, "opt": 2, "opt+params": 3}[states] * len(PARAMS)
    assert crossings(training) == (held + uses, held)


@pytest.mark.parametrize(("buffers", "fetched"), [(1, 1), (2, 2), (3, 3)])
def test_loops_over_pieces_for_gpus(buffers, fetched, monkeypatch):
    """Of `up` each device has three rows in as many pieces. With two buffers a piece is on its way before the loop, and
    the last one is written after it; with three it is two."""
    monkeypatch.setattr(host_memory, "PIECE_BYTES", SMALL)
    strategy = replace(offload("zero3", "opt"), buffers=buffers)
    training = quick(loss, PARAMS, DATA[0], strategy, optimizer=ADAMW, clip=CLIP)
    pieces, whole = 2, 4  # of the moments of `up`, and of those of the others
    assert crossings(training) == (pieces * fetched + whole, pieces * fetched + whole)
