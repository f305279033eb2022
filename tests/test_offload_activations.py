"""Activations that wait in the host's memory between the passes: the same numbers, and a program that sends them there.

Oracle for numbers: the same training with everything recomputed and kept on the device, to the bit under plain descent
(so the update is the gradient). CPU devices have one memory, so where things lie is read off the program for GPUs.
"""

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name
from oracle import Model
from quick import quick

import jaxshard as js
from jaxshard import strategy as strategies
from jaxshard.compiled import hlo
from jaxshard.compiled.walk import walk
from jaxshard.models import gpt
from jaxshard.models.gpt import GPTConfig
from jaxshard.preflight import target
from jaxshard.preflight.facts import facts

STACK = Model(form="scan")
BATCH = {
    name: np.random.default_rng(seed).integers(0, 32, (24, 4), np.int32)
    for seed, name in enumerate(("tokens", "targets"))
}


def by_names(*offloaded: str, saved: tuple[str, ...] = ()):
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=saved,
        names_which_can_be_offloaded=offloaded,
        offload_src="device",
        offload_dst="pinned_host",
    )


def for_gpus(training, params, batch) -> str:
    """A step's program for GPUs, as JAX hands it to the compiler."""
    state = jax.eval_shape(training.init, params)
    return jax.jit(training.step_fn).trace(state, batch).lower(lowering_platforms=("cuda",)).as_text()


def sent(training, params, batch) -> tuple[int, int]:
    """How many equations of a step's program for GPUs send an array to the host, and how many bring one back."""
    text = for_gpus(training, params, batch)
    placed = text.count("@annotate_device_placement(")
    to_host, back = (text.count(f'_xla_buffer_placement = "{kind}"') for kind in ("pinned_host", "device"))
    assert to_host + back == placed
    return to_host, back


def after_a_step(training, params, batch):
    state, metrics = training.step(training.init(params), batch)
    return training.whole(state), metrics["loss"]


def assert_same(ours, theirs, params):
    """Both are what `after_a_step` gives."""
    moved = jax.tree.map(lambda before, after: bool(np.any(before != np.asarray(after))), params, theirs[0])
    assert all(jax.tree.leaves(moved)), "a gradient that is zero compares nothing"
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize(("strategy", "mesh"), [("ddp", (1, 8)), ("zero3", (1, 8)), ("hsdp", (2, 4))])
def test_a_scan_over_layers(strategy, mesh, accumulate):
    params = jax.jit(STACK.init)(jax.random.key(0))
    choices = {"strategy": strategy, "mesh": mesh, "accumulate": accumulate, "warn_whole": 1}
    full, offload = (quick(STACK.loss, params, BATCH, remat=remat, **choices) for remat in ("full", "offload"))
    assert sent(full, params, BATCH) == (0, 0)
    assert sent(offload, params, BATCH) == (1, 1), "one carry, out in the forward loop and in in the backward loop"
    assert_same(after_a_step(offload, params, BATCH), after_a_step(full, params, BATCH), params)


def carrying_more(params, batch):
    """What a layer hands on: an activation, a count, and a scalar that is summed over the layers."""

    def layer(carry, block):
        x, index, penalty = carry
        x = x + jnp.tanh((x * block["norm"]) @ block["up"] + block["bias"]) @ block["down"]
        return (x, index + 1, penalty + index.astype(jnp.float32) * jnp.mean(x * x)), None

    start = params["embed"][batch["tokens"]], jnp.int32(0), jnp.float32(0)
    (x, _, penalty), _ = jax.lax.scan(layer, start, params["blocks"])
    return jnp.mean((x @ params["head"]) ** 2) + penalty


def test_only_activations_of_a_carry_are_sent():
    params = jax.jit(STACK.init)(jax.random.key(0))
    full, offload = (quick(carrying_more, params, BATCH, remat=r, warn_whole=1) for r in ("full", "offload"))
    assert sent(offload, params, BATCH) == (1, 1), "counts and scalars are not worth a transfer"
    assert_same(after_a_step(offload, params, BATCH), after_a_step(full, params, BATCH), params)


def named_block(x, block):
    """Two activations with names; the product before the second is what a backward pass would recompute."""
    x = checkpoint_name(x, "input")
    hidden = checkpoint_name(jnp.tanh((x * block["norm"]) @ block["up"] + block["bias"]), "hidden")
    return x + hidden @ block["down"]


def with_names(params, batch, *, policy=None, scanned=True, own=True):
    """The model of the oracle with names. own: it recomputes its blocks itself, by a policy."""
    block = jax.checkpoint(named_block, policy=policy, prevent_cse=not scanned) if own else named_block
    x = params["embed"][batch["tokens"]]
    if scanned:
        x, _ = jax.lax.scan(lambda x, weights: (block(x, weights), None), x, params["blocks"])
    else:
        for weights in params["blocks"]:
            x = block(x, weights)
    logits = x @ params["head"]
    return jnp.mean(jax.nn.logsumexp(logits, -1) - logits[..., 0])


POLICIES = [
    pytest.param(by_names("input", "hidden"), 2, id="both"),
    pytest.param(by_names("hidden", saved=("input",)), 1, id="one-of-each"),
    pytest.param(jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host"), 1, id="products"),
]


def training_with(policy, where: str, strategy: str | js.Strategy = "zero3"):
    """(the training, its parameters): recomputed by `parallelize`, or by the model's own `jax.checkpoint`."""
    model = Model(form="list" if where == "own-list" else "scan")
    params = jax.jit(model.init)(jax.random.key(0))
    loss = partial(with_names, policy=policy, scanned=model.form == "scan", own=where != "remat")
    remat = "none" if where != "remat" else "full" if policy is None else policy
    return quick(loss, params, BATCH, strategy, remat=remat, warn_whole=1), params


@cache
def kept_on_the_device(where: str):
    training, params = training_with(None, where)
    assert sent(training, params, BATCH) == (0, 0)
    return after_a_step(training, params, BATCH)


EVERYWHERE = pytest.mark.parametrize("where", ["remat", "own-scan", "own-list"])


@EVERYWHERE
@pytest.mark.parametrize(("policy", "count"), POLICIES)
def test_a_policy_of_the_users(policy, count, where):
    """It decides about activations wherever it stands, and a gathered weight is neither saved nor sent."""
    training, params = training_with(policy, where)
    # A list of blocks holds an equation of each kind for every block.
    times = len(params["blocks"]) if where == "own-list" else 1
    assert sent(training, params, BATCH) == (count * times, count * times)
    assert_same(after_a_step(training, params, BATCH), kept_on_the_device(where), params)


@EVERYWHERE
def test_with_parameters_in_host_memory_too(where):
    training, params = training_with(by_names("input"), where, strategies.offload("zero3", "params"))
    assert_same(after_a_step(training, params, BATCH), kept_on_the_device(where), params)


def test_a_block_of_a_list_ends_when_its_activations_are_on_the_host():
    """Else XLA keeps them, and sends them when the backward pass is about to bring them back."""
    params = training_with(None, "own-list")[1]
    layers = len(params["blocks"])
    barriers = [
        for_gpus(training_with(policy, "own-list")[0], params, BATCH).count("optimization_barrier")
        for policy in (None, by_names("input"))
    ]
    assert barriers[1] - barriers[0] == layers


TINY = GPTConfig(vocab=32, width=16, layers=2, heads=2, context=8, init_std=0.2, dropout=0.5)
TOKENS = np.random.default_rng(3).integers(0, 32, (16, 9), np.int32)
TEXT = {"inputs": TOKENS[:, :-1], "targets": TOKENS[:, 1:], "weights": np.ones((16, 8), np.float32)}


def gpt_training(config: GPTConfig, **choices):
    def loss(params, batch, key):
        return js.Loss(*gpt.loss(config, params, batch, key))

    return quick(loss, partial(gpt.init, config), TEXT, warn_whole=1, **choices)


def test_gpt():
    """The model's own word, and the same by `parallelize` on a model that recomputes nothing itself."""
    params = jax.jit(partial(gpt.init, TINY))(jax.random.key(0))
    full = gpt_training(replace(TINY, remat="full"))
    assert sent(full, params, TEXT) == (0, 0)
    theirs = after_a_step(full, params, TEXT)
    for offload in (gpt_training(replace(TINY, remat="offload")), gpt_training(TINY, remat="offload")):
        assert sent(offload, params, TEXT) == (1, 1)
        assert_same(after_a_step(offload, params, TEXT), theirs, params)


def test_the_names_of_gpt():
    params = jax.eval_shape(partial(gpt.init, TINY), jax.random.key(0))
    every = (gpt.INPUT, gpt.MIXED, gpt.HIDDEN)
    for names in (every[:1], every[1:], every):
        training = gpt_training(TINY, remat=by_names(*names))
        assert sent(training, params, TEXT) == (len(names), len(names))


def test_gpt_as_a_list():
    """A block with dropout: a key among what it is given, and randomness in what it recomputes."""
    config = replace(TINY, scan=False, layers=1)
    params = jax.jit(partial(gpt.init, config))(jax.random.key(0))
    full, offload = (gpt_training(replace(config, remat=remat)) for remat in ("full", "offload"))
    assert sent(offload, params, TEXT) == (1, 1)
    assert_same(after_a_step(offload, params, TEXT), after_a_step(full, params, TEXT), params)


def test_another_word_is_refused():
    with pytest.raises(ValueError, match="remat='host': 'none', 'full', 'dots', 'offload', or a policy"):
        quick(STACK.loss, jax.eval_shape(STACK.init, jax.random.key(0)), BATCH, remat="host")


# Large enough that activations, not one block's workings, are most of what a step holds.
SMALL = GPTConfig(vocab=512, width=512, layers=12, heads=8, context=512, attention="blockwise", dropout=0.0)
STACKED = SMALL.layers * 4 * SMALL.context * SMALL.width * 2
"""Bytes of the inputs of all blocks, of 4 examples in bfloat16."""


@pytest.mark.target
@pytest.mark.skipif(not target.compiler_installed(), reason=f"needs the GPU compiler's wheels: {target.INSTALL}")
def test_compiled_for_8_h100s():
    """The inputs of the blocks leave the device, for the host, and every transfer is asynchronous."""
    mesh = target.parse("h100:8").mesh()
    tokens = jax.ShapeDtypeStruct((32, SMALL.context), np.int32)
    batch = {"inputs": tokens, "targets": tokens, "weights": jax.ShapeDtypeStruct(tokens.shape, np.float32)}

    def loss(params, batch):
        return js.Loss(*gpt.loss(SMALL, params, batch))

    def compiled(remat, prefer):
        training = js.parallelize(
            loss,
            optax.sgd(1.0),
            params=partial(gpt.init, SMALL),
            batch=batch,
            mesh=mesh,
            strategy=replace(js.ZERO3, prefer=prefer),
            precision=js.Precision(compute="bfloat16"),
            remat=remat,
        )
        assert isinstance(training, js.Training)
        return training.built().compiled

    programs = (("full", "memory"), ("offload", "memory"), ("offload", "speed"))
    # Where loops are pipelined, for speed, how much memory is saved depends on the schedule as well.
    with target.uncached():
        full, offload, pipelined = (compiled(*of) for of in programs)
    before, after = facts(full, mesh), facts(offload, mesh)
    assert before.host_memory.peak == 0
    assert before.memory.temps - after.memory.temps >= 0.9 * STACKED, "what waits on the host, the device does not hold"
    for program in (offload, pipelined):
        assert facts(program, mesh).host_memory.temps == STACKED
        transfers = [site for site in walk(hlo.parse(program.as_text() or "")) if touches_host(site.instruction)]
        assert {site.instruction.opcode for site in transfers} == {"fusion-start", "fusion-done"}, "all asynchronous"
        starts = [site for site in transfers if site.instruction.opcode == "fusion-start"]
        out, back = (sum(site.times for site in starts if to_host(site.instruction) is way) for way in (True, False))
        # The compiler may see that the last block's input is still at hand when the backward loop starts.
        assert out == SMALL.layers
        assert back in (SMALL.layers - 1, SMALL.layers)


def touches_host(one: hlo.Instruction) -> bool:
    """Whether it reads or writes there, and does not merely pass the array on."""
    passing = ("tuple", "get-tuple-element", "parameter", "while", "bitcast", "custom-call")
    return one.opcode not in passing and any(array.space == hlo.HOST for array in one.arrays)


def to_host(start: hlo.Instruction) -> bool:
    """Of what a start gives, (operands, result, context), the result."""
    return start.arrays[-2].space == hlo.HOST
