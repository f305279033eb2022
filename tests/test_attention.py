"""Attention in blocks, and cross-entropy in chunks, compute what they compute at once. Oracle: JAX's own attention."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from oracle import assert_close, one_device, run
from quick import QUICK, quick

import jaxshard as js
from jaxshard.cli import main
from jaxshard.jaxprs import shape_of, walk
from jaxshard.models import attention, gpt
from jaxshard.models.attention import BLOCK, blockwise_attention, causal_attention, cudnn_found
from jaxshard.models.gpt import GPTConfig, resolved
from jaxshard.models.loss import cross_entropy
from jaxshard.preflight import target
from jaxshard.preflight.facts import facts
from jaxshard.train.config import load

CONFIGS = Path(__file__).parent.parent / "configs"
TINY = GPTConfig(
    vocab=24, width=16, layers=2, heads=4, kv_heads=2, context=13, norm="rms", mlp="swiglu", bias=False, tied=False,
    remat="full", init_std=0.2,
)  # fmt: skip


def arrays(length: int, heads: int, groups: int, dtype="float32", channels: int = 8):
    """Queries, keys, values, and the gradient of the result."""
    keys = jax.random.split(jax.random.key(0), 4)
    counts = (heads, groups, groups, heads)
    return [jax.random.normal(key, (2, length, n, channels)).astype(dtype) for key, n in zip(keys, counts, strict=True)]


def result_and_gradients(attend, q, k, v, dout):
    out, pullback = jax.vjp(attend, q, k, v)
    return out, *pullback(dout)


@partial(jax.jit, static_argnums=0, compiler_options=QUICK)
def compiled(attend, *args):
    return result_and_gradients(attend, *args)


xla, cudnn = (partial(causal_attention, form=form) for form in ("xla", "cudnn"))


def off(have, want) -> list[float]:
    """Of each array, the largest difference as a part of the largest value."""
    pairs = [(np.asarray(a, np.float32), np.asarray(b, np.float32)) for a, b in zip(have, want, strict=True)]
    assert all(np.abs(b).max() > 0.1 for _, b in pairs), "what is zero compares nothing"
    return [float(np.abs(a - b).max() / np.abs(b).max()) for a, b in pairs]


@pytest.mark.parametrize(
    ("length", "heads", "groups", "block"),
    [
        pytest.param(16, 4, 4, 4, id="whole-blocks"),
        pytest.param(19, 6, 2, 8, id="a-part-of-a-block", marks=pytest.mark.smoke),
        pytest.param(5, 4, 1, 512, id="less-than-a-block"),
    ],
)
def test_blocks_equal_the_whole(length, heads, groups, block):
    """Values and gradients, with groups of heads; in bfloat16 within a bound: two of its ulps of the largest value."""
    args = arrays(length, heads, groups)
    want, blocks = compiled(xla, *args), partial(blockwise_attention, block=block)
    assert max(off(compiled(blocks, *args), want)) < 1e-6
    half = compiled(blocks, *(x.astype(jnp.bfloat16) for x in args))
    assert {x.dtype.name for x in half} == {"bfloat16"}
    assert 1e-4 < max(off(half, want)) < 2**-6


def test_one_token_sees_itself():
    """Exact: its value, and the value's gradient; query and key get none, up to rounding."""
    q, k, v, dout = arrays(1, 4, 2)
    out, dq, dk, dv = result_and_gradients(blockwise_attention, q, k, v, dout)
    np.testing.assert_array_equal(out, jnp.repeat(v, 2, axis=2))
    np.testing.assert_array_equal(dv, dout.reshape(2, 1, 2, 2, 8).sum(3))
    np.testing.assert_allclose([dq, jnp.repeat(dk, 2, axis=2)], 0, atol=1e-5)


def test_large_scores_do_not_overflow():
    """Scores of thousands, of which each row has one largest."""
    q, k, v, dout = arrays(12, 2, 2)
    q, k = q * 100, k * 100
    blocks = result_and_gradients(partial(blockwise_attention, block=4), q, k, v, dout)
    assert all(np.isfinite(x).all() for x in blocks)
    np.testing.assert_allclose(blocks[0], xla(q, k, v), atol=1e-5)


def largest(fn, *args) -> int:
    """The size of the largest array that a program names, in elements."""
    sites = walk(jax.make_jaxpr(fn)(*args).jaxpr)
    return max(math.prod(shape_of(v).shape) for site in sites for v in site.eqn.outvars)


def test_no_array_has_the_square_of_the_length():
    """Of the gradient's program, at twice and four times a block; `auto` changes form where there is a second block."""
    for length in (2 * BLOCK, 4 * BLOCK):
        args = [jax.ShapeDtypeStruct((1, length, 4, 8), jnp.float32)] * 4
        # Scores of one block; the diagonal's as many as a row's.
        assert largest(lambda *x: result_and_gradients(causal_attention, *x), *args) == 4 * BLOCK**2
        assert largest(lambda *x: result_and_gradients(xla, *x), *args) == 4 * length**2
    short = [jax.ShapeDtypeStruct((1, BLOCK, 4, 8), jnp.float32)] * 3
    for form, scans in (("auto", False), ("blockwise", True)):
        program = jax.make_jaxpr(lambda *x, form=form: causal_attention(*x, form=form))(*short)
        assert ("scan" in str(program)) == scans


# The choice

H100 = {"platform": "gpu", "cudnn": True, "compute": "bfloat16"}
LLAMA = load(CONFIGS / "llama3-8b.toml").model


@pytest.mark.parametrize(
    ("config", "where", "form"),
    [
        (LLAMA, {}, "cudnn"),
        (LLAMA, {"compute": "float16"}, "cudnn"),
        (LLAMA, {"compute": "float32"}, "blockwise"),
        (LLAMA, {"cudnn": False}, "blockwise"),
        (LLAMA, {"platform": "cpu"}, "blockwise"),
        (replace(LLAMA, heads=16), {}, "blockwise"),
        (replace(LLAMA, dtype="float32"), {}, "blockwise"),
        (replace(LLAMA, context=BLOCK), {"platform": "cpu"}, "xla"),
        (replace(LLAMA, context=BLOCK), {"platform": "cpu", "compute": "float16"}, "blockwise"),
        (replace(LLAMA, context=BLOCK), {}, "cudnn"),
        (replace(LLAMA, attention="xla"), {}, "xla"),
        (replace(LLAMA, attention="blockwise"), {}, "blockwise"),
        (replace(LLAMA, attention="cudnn"), {}, "cudnn"),
    ],
)
def test_what_auto_stands_for(config, where, form):
    assert resolved(config, **H100 | where) == replace(config, attention=form)


@pytest.mark.parametrize(
    ("change", "where", "message"),
    [
        ({}, {"platform": "cpu"}, "needs an NVIDIA GPU, and these devices are cpu; or leave .* 'auto'"),
        ({}, {"cudnn": False}, r"pip install 'jax\[cuda12\]'"),
        ({}, {"compute": "float32"}, "compute is in float32: set precision.compute = 'bfloat16'"),
        ({"heads": 16}, {}, "these have 256"),
    ],
)
def test_cudnn_where_it_cannot_be(change, where, message):
    with pytest.raises(ValueError, match=message):
        resolved(replace(LLAMA, attention="cudnn", **change), **H100 | where)


def test_xla_on_cpus_has_no_product_in_float16():
    with pytest.raises(ValueError, match="cannot compute in float16 on CPUs; take 'blockwise' or 'auto'"):
        resolved(replace(LLAMA, attention="xla"), platform="cpu", cudnn=False, compute="float16")


def test_train_refuses_cudnn_without_a_gpu_in_one_line(capsys):
    assert main(["train", str(CONFIGS / "zero3.toml"), "--model.attention", "cudnn"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("jaxshard: model.attention = 'cudnn' needs an NVIDIA GPU")


# The loss


def loss_and_gradients(chunk, x, head, weights):
    def loss(x, head, weights):
        targets = jnp.arange(weights.size, dtype=jnp.int32).reshape(weights.shape) % 5
        return cross_entropy(x, head, targets, weights, chunk=chunk)

    value, grads = jax.value_and_grad(loss, (0, 1, 2))(x, head, weights)
    return value, *grads


chunked = jax.jit(loss_and_gradients, static_argnums=0, compiler_options=QUICK)


def test_chunks_of_the_loss_equal_the_whole():
    """Value and gradients; with weights, and a last chunk that is not full. Oracle: a chunk larger than the batch."""
    x, head = jax.random.normal(jax.random.key(0), (2, 11, 8)), jax.random.normal(jax.random.key(1), (8, 24))
    args = x, head, jnp.linspace(0, 2, 22).reshape(2, 11)
    whole = chunked(22, *args)
    assert whole[0] == chunked(None, *args)[0]
    for chunk in (5, 11):
        assert max(off(chunked(chunk, *args), whole)) < 1e-6
        program = partial(loss_and_gradients, chunk)
        assert largest(program, *args) < largest(partial(loss_and_gradients, None), *args) == 22 * 24


def test_chunks_are_summed_in_float32():
    """The head's gradient in bfloat16 is about as far from float32's in 64 chunks as in one."""
    x, head = jax.random.normal(jax.random.key(0), (1, 256, 8)), jax.random.normal(jax.random.key(1), (8, 24)) / 4
    weights = jnp.ones((1, 256))
    want = chunked(None, x, head, weights)[2]
    half = x.astype(jnp.bfloat16), head.astype(jnp.bfloat16), weights

    def error(chunk):
        return float(jnp.linalg.norm(chunked(chunk, *half)[2].astype(jnp.float32) - want))

    assert 0 < error(4) < 1.5 * error(None)


def test_both_through_zero3_equal_one_device(monkeypatch):
    """Gather at use, remat and a scan over layers around them. Oracle: the plain forms on one device."""
    monkeypatch.setattr(attention, "blockwise_attention", partial(blockwise_attention, block=4))
    ours = replace(TINY, attention="blockwise", loss_chunk=5)
    tokens = np.random.default_rng(0).integers(0, TINY.vocab, (16, TINY.context + 1), np.int32)
    weights = np.random.default_rng(1).integers(1, 3, (16, TINY.context)).astype(np.float32)
    batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights}

    def mean(config, params, batch):
        total, count = gpt.loss(config, params, batch)
        return total / count

    init, optimizer = partial(gpt.init, TINY), optax.sgd(1.0)
    wanted = one_device(partial(mean, replace(TINY, attention="xla")), init, optimizer, [batch])
    training = quick(
        lambda params, batch: js.Loss(*gpt.loss(ours, params, batch)), init, batch, optimizer=optimizer, accumulate=2
    )
    assert_close(run(training, init, [batch]), wanted, ulps=8)


# On GPUs


@pytest.mark.gpu
@pytest.mark.parametrize("groups", [8, 2])
def test_cudnn_equals_the_others(groups):
    """Values and gradients, within two bfloat16 ulps of the largest value. Oracle: float32 on the CPU."""
    args = arrays(1000, 8, groups, channels=64)
    with jax.default_device(jax.devices("cpu")[0]):
        want = result_and_gradients(xla, *jax.device_put(args, jax.devices("cpu")[0]))
    half = [jax.device_put(x.astype(jnp.bfloat16), jax.devices("gpu")[0]) for x in args]
    assert cudnn_found()
    for form in (cudnn, blockwise_attention):
        assert max(off(jax.jit(partial(result_and_gradients, form))(*half), want)) < 2**-6


@pytest.mark.target
@pytest.mark.skipif(not target.compiler_installed(), reason=f"needs the GPU compiler: {target.INSTALL}")
class TestCompiled:
    @pytest.fixture(autouse=True)
    def _compiled_anew(self):
        with target.uncached():
            yield

    def compiled(self, attend, mesh):
        shapes = [
            jax.ShapeDtypeStruct((1, 8192, heads, 128), jnp.bfloat16, sharding=NamedSharding(mesh, P()))
            for heads in (32, 8, 8, 32)
        ]
        return jax.jit(partial(result_and_gradients, attend)).lower(*shapes).compile()

    def test_attention_of_8192_tokens_fits(self):
        """Forward and backward, 32 heads of 128, 8 of keys: 343 MiB; all scores would be 8 GiB in float32."""
        mesh = target.parse("h100:1").mesh()
        found = facts(self.compiled(blockwise_attention, mesh), mesh)
        assert found.memory.temps < 360 * 2**20
        # Two products forward and five backward, over half of the square and half of the diagonal's blocks.
        half = 8192 * (8192 + BLOCK) // 2
        assert found.flops == {"bfloat16": 7 * 2 * half * 32 * 128}

    def test_a_llama_block_of_8192_tokens(self):
        """As a step of training: no array in it has the square of the length."""
        mesh = target.parse("h100:2").mesh()
        model = replace(LLAMA, vocab=256, width=512, heads=4, kv_heads=2, layers=2)
        model = resolved(model, platform=mesh.devices.flat[0].platform, cudnn=False, compute="bfloat16")
        tokens = jax.ShapeDtypeStruct((2, 8192), jnp.int32)
        square = re.compile(r"8192[x,]8192")

        def lowered(model):
            training = js.parallelize(
                lambda params, batch: js.Loss(*gpt.loss(model, params, batch)),
                optax.sgd(0.1),
                params=partial(gpt.init, model),
                batch={"inputs": tokens, "targets": tokens, "weights": jax.ShapeDtypeStruct((2, 8192), jnp.float32)},
                mesh=mesh,
                strategy=replace(js.ZERO3, prefer="memory"),  # its loops are not unrolled, and compile sooner
                precision=js.Precision(compute="bfloat16"),
            )
            assert isinstance(training, js.Training)
            return training.lower()

        with jax.numpy_dtype_promotion("standard"):
            assert square.search(str(lowered(replace(model, attention="xla")).as_text()))
            program = lowered(model)
            assert not square.search(str(program.as_text()))
            compiled = program.compile()
        assert not square.search(str(compiled.as_text()))
        assert facts(compiled, mesh).memory.temps < 2**30 // 2  # all scores are 1 GiB

    def test_cudnn_compiles_where_it_is_installed(self):
        assert target.cudnn_installed() == cudnn_found()
        if not target.cudnn_installed():
            pytest.skip("needs cuDNN: pip install 'jax[cuda12]'")
        mesh = target.parse("h100:1").mesh()
        found = facts(self.compiled(cudnn, mesh), mesh)
        assert {one.target for one in found.work if one.target} == {
            "__cudnn$fmhaSoftmax",
            "__cudnn$fmhaSoftmaxBackward",
        }
        assert found.memory.temps < 2 * 2**20
