"""The GPT's forms compute one function, and its parameters depend on nothing but the key."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxshard.models import gpt
from jaxshard.models.gpt import GPTConfig

TINY = GPTConfig(vocab=64, width=32, layers=3, heads=4, context=16, init_std=0.2)
GPT2 = replace(TINY, positions="learned", scan=False)
LLAMA = replace(TINY, kv_heads=2, norm="rms", mlp="swiglu", mlp_ratio=3.5, bias=False, rope_theta=5e5, tied=False)
FORMS = pytest.mark.parametrize("config", [TINY, GPT2, LLAMA], ids=["tiny", "gpt2", "llama"])


def batch_of(config: GPTConfig, size: int = 2, seed: int = 0):
    tokens = np.random.default_rng(seed).integers(0, config.vocab, (size, config.context + 1), np.int32)
    weights = np.ones((size, config.context), np.float32)
    return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights}


def mean_loss(config, params, batch):
    total, count = gpt.loss(config, params, batch)
    return total / count


def value_and_grad(config, params, batch):
    return jax.jit(jax.value_and_grad(partial(mean_loss, config)))(params, batch)


def unstack(params, layers: int):
    """The parameters of a scanned GPT, as those of the same GPT with a list of blocks."""
    blocks = {i: jax.tree.map(lambda leaf, i=i: leaf[i], params["blocks"]) for i in range(layers)}
    return params | {"blocks": blocks}


def stack(params):
    layers = [params["blocks"][i] for i in sorted(params["blocks"])]
    return params | {"blocks": jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)}


def assert_close(a, b, tolerance=2e-6):
    scale = max(float(jnp.max(jnp.abs(leaf))) for leaf in jax.tree.leaves(b))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=tolerance * scale), a, b)


@FORMS
def test_scan_and_list_are_one_function_from_one_key(config):
    """Oracle: the other form, on the same values restacked."""
    scanned, listed = replace(config, scan=True), replace(config, scan=False)
    params = gpt.init(scanned, jax.random.key(1))
    jax.tree.map(np.testing.assert_array_equal, unstack(params, 3), gpt.init(listed, jax.random.key(1)))

    batch = batch_of(config)
    loss, grads = value_and_grad(scanned, params, batch)
    loss_list, grads_list = value_and_grad(listed, unstack(params, 3), batch)
    assert float(loss) > 1
    assert all(np.any(leaf) for leaf in jax.tree.leaves(grads)), "a gradient that is zero compares nothing"
    np.testing.assert_allclose(loss, loss_list, rtol=1e-6)
    assert_close(grads, stack(grads_list))


@pytest.mark.parametrize("scan", [True, False], ids=["scan", "list"])
@pytest.mark.parametrize("remat", ["full", "dots"])
def test_remat_changes_what_is_saved_and_not_the_gradient(remat, scan):
    plain, recomputed = replace(TINY, scan=scan), replace(TINY, scan=scan, remat=remat)
    params, batch = gpt.init(plain, jax.random.key(0)), batch_of(TINY)
    assert "remat" not in str(jax.make_jaxpr(partial(mean_loss, plain))(params, batch))
    assert "remat" in str(jax.make_jaxpr(partial(mean_loss, recomputed))(params, batch))
    assert_close(value_and_grad(recomputed, params, batch), value_and_grad(plain, params, batch))


@FORMS
def test_a_token_sees_no_later_token(config):
    params, tokens = gpt.init(config, jax.random.key(0)), batch_of(config)["inputs"]
    changed = tokens.copy()
    changed[:, 9] = (changed[:, 9] + 1) % config.vocab
    score = jax.jit(partial(gpt.logits, config))
    before, after = score(params, tokens), score(params, changed)
    np.testing.assert_array_equal(before[:, :9], after[:, :9])
    assert np.all(np.any(before[:, 9:] != after[:, 9:], axis=(0, 2)))


@pytest.mark.parametrize("positions", ["rotary", "learned"])
def test_the_order_of_tokens_matters(positions):
    """Attention alone cannot tell the order of what came before; positions can."""
    config = replace(TINY, positions=positions)
    params, tokens = gpt.init(config, jax.random.key(0)), batch_of(config)["inputs"]
    swapped = tokens[:, [1, 0, *range(2, 16)]]
    assert np.any(tokens != swapped)
    last = [gpt.logits(config, params, t)[:, -1] for t in (tokens, swapped)]
    assert float(jnp.max(jnp.abs(last[0] - last[1]))) > 1e-3


def test_rotary_scores_depend_on_distance_alone():
    """Oracle: the same query and key, both moved by five positions."""
    angles = gpt.rotary_angles(TINY, 16)
    q, k = jax.random.normal(jax.random.key(0), (2, 1, 1, 1, TINY.head_width))
    at = [
        jnp.vdot(gpt.rotate(q, angles[i : i + 1]), gpt.rotate(k, angles[j : j + 1]))
        for i, j in [(7, 3), (12, 8), (7, 4)]
    ]
    np.testing.assert_allclose(at[0], at[1], rtol=1e-5)
    assert abs(float(at[0] - at[2])) > 1e-3


def test_grouped_heads_equal_repeated_heads():
    """Oracle: full attention whose key and value heads are copies of the grouped ones."""
    grouped, full = replace(LLAMA, layers=1), replace(LLAMA, layers=1, kv_heads=4)
    params = gpt.init(grouped, jax.random.key(0))
    attention = dict(params["blocks"]["attention"])
    for name in ("key", "value"):
        kernel = attention[name]["kernel"].reshape(1, 32, 2, 8)
        attention[name] = {"kernel": jnp.repeat(kernel, 2, axis=2).reshape(1, 32, 32)}
    copied = params | {"blocks": params["blocks"] | {"attention": attention}}
    batch = batch_of(LLAMA)
    np.testing.assert_allclose(mean_loss(grouped, params, batch), mean_loss(full, copied, batch), rtol=1e-6)


def test_weights_leave_tokens_out():
    """Oracle: a batch without the sequence whose weights are zero."""
    params, batch = gpt.init(TINY, jax.random.key(0)), batch_of(TINY)
    masked = batch | {"weights": np.stack([np.ones(16, np.float32), np.zeros(16, np.float32)])}
    total, count = gpt.loss(TINY, params, masked)
    alone, _ = gpt.loss(TINY, params, {name: leaf[:1] for name, leaf in batch.items()})
    assert count == 16
    np.testing.assert_allclose(total, alone, rtol=1e-6)
    assert not np.isclose(total, gpt.loss(TINY, params, batch)[0])


def test_computes_in_the_dtype_of_its_parameters_and_sums_in_float32():
    params, batch = gpt.init(TINY, jax.random.key(0)), batch_of(TINY)
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    assert gpt.logits(TINY, half, batch["inputs"]).dtype == jnp.bfloat16
    assert gpt.logits(replace(TINY, dtype="bfloat16"), params, batch["inputs"]).dtype == jnp.bfloat16
    total, _ = gpt.loss(TINY, half, batch)
    assert total.dtype == jnp.float32
    np.testing.assert_allclose(total, gpt.loss(TINY, params, batch)[0], rtol=0.02)


def test_born_sharded_with_the_same_values():
    """Oracle: the same key on one device; equal to the bit."""
    mesh = jax.make_mesh((8,), ("shard",), axis_types=(AxisType.Auto,))
    # Rows of 8 on each device: XLA's CPU code for shorter ones is not vectorised and rounds differently.
    config = replace(TINY, width=64)
    whole = jax.jit(partial(gpt.init, config))(jax.random.key(3))

    def split(leaf):
        axes = ["shard" if dim == 64 and leaf.ndim > 1 else None for dim in leaf.shape[-1:]]
        return NamedSharding(mesh, PartitionSpec(*[None] * (leaf.ndim - 1), *axes))

    born = jax.jit(partial(gpt.init, config), out_shardings=jax.tree.map(split, whole))(jax.random.key(3))
    assert any(not leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(born))
    jax.tree.map(np.testing.assert_array_equal, born, whole)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 5}, "width = 32 does not divide into model.heads = 5"),
        ({"kv_heads": 3}, "heads = 4 does not divide into model.kv_heads = 3"),
        ({"heads": 32}, "a head has 1"),
        ({"layers": 0}, "model.layers is 0"),
        ({"dropout": 1.0}, "model.dropout is 1.0"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(TINY, **change)


def test_a_sequence_beyond_the_context_is_refused():
    params = gpt.init(TINY, jax.random.key(0))
    with pytest.raises(ValueError, match="17 tokens is longer than the context of 16"):
        gpt.logits(TINY, params, np.zeros((1, 17), np.int32))


@pytest.mark.parametrize("remat", ["none", "full"])
def test_dropout_draws_from_its_key(remat):
    """Scanned or not, one key leaves out the same; each layer and each key another part; without a key none."""
    config = replace(TINY, dropout=0.5, remat=remat)
    params, batch = gpt.init(config, jax.random.key(0)), batch_of(config)

    @partial(jax.jit, static_argnums=0)
    def grads(config, params, key):
        return jax.value_and_grad(lambda params: gpt.loss(config, params, batch, key)[0])(params)

    keys = jax.random.split(jax.random.key(1))
    first = grads(config, params, keys[0])
    listed = grads(replace(config, scan=False), unstack(params, config.layers), keys[0])
    assert_close((listed[0], stack(listed[1])), first)
    assert abs(float(first[0]) - float(grads(config, params, keys[1])[0])) > 1e-2
    assert_close(grads(config, params, None), grads(replace(config, dropout=0.0), params, keys[0]))
    assert abs(float(first[0]) - float(grads(config, params, None)[0])) > 1e-2
    assert_close(first, grads(replace(config, remat="none"), params, keys[0]))


def test_dropout_keeps_the_mean():
    """Oracle: of ones, each element is 0 or 1 / (1 - rate), and the share of zeros is the rate."""
    kept = np.asarray(gpt._dropped(jnp.ones((200, 200), jnp.bfloat16), 0.25, jax.random.key(3)), np.float32)
    values, counts = np.unique(kept, return_counts=True)
    assert values.tolist() == [0, np.float32(jnp.bfloat16(4 / 3))]
    assert abs(counts[0] / kept.size - 0.25) < 0.01
