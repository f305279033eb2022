"""A digest depends on an array's bits and on nothing else.

Oracle: the formula in Python's own integers, element by element, for arrays on devices and on the host alike.
"""

from __future__ import annotations

import hashlib
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from oracle import mesh_of

from jaxshard.train import digest as module
from jaxshard.train.digest import digests, host_digest, host_key_digest

DTYPES = (
    *("bool", "int8", "int16", "int32", "uint8", "uint16", "uint32", "int4", "uint4", "int2"),
    *("float16", "bfloat16", "float32", "complex64"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz", "float8_e8m0fnu", "float4_e2m1fn"),
)


def fmix(h: int) -> int:
    h = ((h ^ h >> 16) * 0x85EBCA6B) % 2**32
    h = ((h ^ h >> 13) * 0xC2B2AE35) % 2**32
    return h ^ h >> 16


def by_hand(words: np.ndarray, dtype: str, shape: tuple[int, ...]) -> str:
    """words: uint32, of the array's shape and one dim more, the words of each element."""
    sums = []
    for seed in (0x243F6A88, 0x85A308D3):
        total = 0
        for at in itertools.product(*map(range, shape)):
            h = seed
            for dim, i in enumerate(at):
                h += fmix(i ^ (0x243F6A88 + 0x9E3779B9 * (dim + 1)) % 2**32 ^ seed)
            for word in words[at]:
                h = fmix(h % 2**32 ^ int(word))
            total += h
        sums.append(total % 2**32)
    return hashlib.blake2b(" ".join(map(str, (dtype, *shape, *sums))).encode(), digest_size=8).hexdigest()


def some(shape: tuple[int, ...], dtype: str = "float32") -> np.ndarray:
    """Every bit pattern of a small dtype may come, NaNs included."""
    kind = jnp.dtype(dtype)
    random = np.random.default_rng(0)
    if dtype == "bool" or module._bits(kind) < 8:
        return random.integers(0, 2, shape).astype(kind)
    return np.frombuffer(random.bytes(np.prod(shape, dtype=int) * kind.itemsize), kind).reshape(shape)


@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (2, 3, 2), (0, 3), (1, 1)], ids=str)
@pytest.mark.smoke
def test_the_formula_on_devices_and_on_the_host(shape):
    x = some(shape)
    want = by_hand(x.view("u4").reshape(*shape, 1) if x.size else np.zeros((*shape, 1)), "float32", shape)
    assert host_digest(x) == want
    assert digests([jnp.asarray(x)]) == [want]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype(dtype):
    x = some((5, 7), dtype)
    assert len({row.tobytes() for row in x}) > 1, "all rows are the same"
    assert digests([jnp.asarray(x)]) == [host_digest(x)]


def test_wide_dtypes():
    with jax.enable_x64(True):
        for dtype in ("float64", "int64", "uint64", "complex128"):
            x = some((3, 5), dtype)
            assert digests([jnp.asarray(x)]) == [host_digest(x)]
            words = x.view("<u4").reshape(3, 5, -1)
            assert words.shape[-1] == x.dtype.itemsize // 4
            assert host_digest(x) == by_hand(words, dtype, (3, 5))


@pytest.mark.parametrize("mesh", [(1, 1), (1, 8), (2, 4), (4, 2), (1, 5)], ids=str)
def test_the_same_on_every_mesh(mesh):
    x = some((40, 16, 8))
    specs = [P(), P("shard"), P(None, None, ("replica", "shard")), P(("shard", "replica")), P("shard", "replica")]
    at = [NamedSharding(mesh_of(*mesh), spec) for spec in specs]
    arrays = [jax.device_put(x, s) for s in at if all(n % m == 0 for n, m in zip(x.shape, pieces(s), strict=False))]
    assert len(arrays) > 2
    assert set(digests(arrays)) == {host_digest(x)}


def pieces(sharding: NamedSharding) -> list[int]:
    names = [(entry,) if isinstance(entry, str) else entry or () for entry in sharding.spec]
    return [int(np.prod([sharding.mesh.shape[name] for name in entry])) for entry in names]


def test_one_device_and_host_memory():
    x = some((16, 8))
    alone = jax.device_put(x, SingleDeviceSharding(jax.devices()[3]))
    host = jax.device_put(x, NamedSharding(mesh_of(1, 8), P("shard"), memory_kind="pinned_host"))
    assert host.sharding.memory_kind == "pinned_host"
    assert digests([alone, host]) == [host_digest(x)] * 2


def test_keys():
    fry, rbg = jax.random.key(7), jax.random.key(7, impl="rbg")
    batch = jax.random.split(fry, 3)
    found = digests([fry, rbg, batch, jax.random.key_data(batch)])
    assert len(set(found)) == 4  # the kind of key counts, and so does being one
    data = np.asarray(jax.random.key_data(batch))
    assert found[2] == host_key_digest(data, str(batch.dtype), batch.shape)


def test_dtype_and_shape_count():
    x = np.zeros((4, 6), np.float32)
    alike = [x, x.reshape(6, 4), x.reshape(24), x.view(np.int32), x.astype(bool), x[:0], x[:, :0]]
    assert len({host_digest(y) for y in alike}) == len(alike)


def test_in_pieces_as_at_once(monkeypatch):
    x = some((6, 5, 7))
    whole = host_digest(x)
    for piece in (1, 3, 7, 10, 36, 70, 209):
        monkeypatch.setattr(module, "PIECE", piece)
        parts = [part for _, part in module._pieces(x, (0, 0, 0))]
        assert max(part.size for part in parts) <= piece
        assert len(parts) > 1
        assert host_digest(x) == whole
        assert host_digest(x.transpose(2, 0, 1)) == host_digest(np.ascontiguousarray(x.transpose(2, 0, 1)))


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_a_flipped_bit_is_seen(data):
    dtype = data.draw(st.sampled_from(["float32", "bfloat16", "int8", "complex64", "float64"]))
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=0, max_size=3)))
    x = some(shape, dtype)
    changed = bytearray(x.tobytes())
    bit = data.draw(st.integers(0, 8 * len(changed) - 1))
    changed[bit // 8] ^= 1 << bit % 8
    assert host_digest(np.frombuffer(changed, x.dtype).reshape(shape)) != host_digest(x)


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_swapped_elements_are_seen(data):
    shape = tuple(data.draw(st.lists(st.integers(2, 6), min_size=1, max_size=3)))
    x = np.arange(np.prod(shape), dtype=np.float32)
    i, j = data.draw(st.lists(st.integers(0, x.size - 1), min_size=2, max_size=2, unique=True))
    swapped = x.copy()
    swapped[[i, j]] = x[[j, i]]
    assert host_digest(swapped.reshape(shape)) != host_digest(x.reshape(shape))


def test_what_compares_equal_and_is_not_the_same():
    quiet, other = np.array([0x7FC00000, 0x7FC00001], np.uint32).view(np.float32)
    values = [np.float32(0.0), np.float32(-0.0), quiet, other]
    on_host = [host_digest(np.asarray([v])) for v in values]
    assert len(set(on_host)) == 4
    assert digests([jnp.asarray([v]) for v in values]) == on_host


def test_parts_in_each_others_place_are_seen():
    x = some((8, 4, 4))
    parts = [np.concatenate([x[4:], x[:4]]), x[:, ::-1], x.transpose(0, 2, 1), np.roll(x, 1, axis=2)]
    assert len({host_digest(y) for y in (x, *parts)}) == 5
    assert len({host_digest(np.ones((4, 4), np.float32) * n) for n in range(4)}) == 4


def test_nothing_is_gathered():
    x = jax.device_put(some((256, 1024)), NamedSharding(mesh_of(1, 8), P(None, "shard")))
    with jax.numpy_rank_promotion("raise"):
        compiled = module._sums.lower(x).compile()
    text, memory = compiled.as_text(), compiled.memory_analysis()
    assert text is not None
    assert memory is not None
    assert "all-reduce" in text
    assert not any(kind in text for kind in ("all-gather", "all-to-all", "collective-permute"))
    assert memory.argument_size_in_bytes == x.nbytes // 8
    # The CPU compiler keeps both lanes of a device's part; that of GPUs fuses them into their sums.
    assert memory.temp_size_in_bytes < 2.1 * x.nbytes // 8
