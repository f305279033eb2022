"""A digest of an array's bits that does not depend on how the array lies on devices.

Every element's bits are mixed with its position into 64 bits, and these are added up. Integers add to the same sum in
any order: a program over a global array gives it on any mesh without gathering anything, and numpy gives it piece by
piece. It finds a flipped bit, swapped elements and a part in the wrong place. It is no protection against someone who
changes data on purpose.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

SEEDS = (0x243F6A88, 0x85A308D3)  # the first bits of pi's fraction; one for each half of the 64 bits
NEXT_DIM = 0x9E3779B9  # added to the seed from one dim to the next, so that (i, j) is another place than (j, i)
PIECE = 1 << 16  # elements that numpy mixes at a time: its temporaries stay in a core's cache


def digests(arrays: Sequence[jax.Array]) -> list[str]:
    """The digest of each array, 16 hexadecimal digits, computed where the arrays lie.

    arrays: of any dtype, shape and sharding, or of PRNG keys; what lies in host memory passes through the devices, one
    array at a time. With several processes, all of them call this with the same global arrays.
    """
    sums = jax.device_get([_device_sums(x) for x in arrays])
    return [_name(x.dtype, x.shape, pair) for x, pair in zip(arrays, sums, strict=True)]


def host_digest(x: np.ndarray) -> str:
    """The same digest of an array on the host, by numpy alone and in bounded memory."""
    return _name(x.dtype, x.shape, _host_sums(x))


def host_key_digest(data: np.ndarray, dtype: str, shape: Sequence[int]) -> str:
    """The digest of PRNG keys from their data. dtype: of the keys, such as ``key<fry>``; shape: of the keys."""
    return _name(dtype, shape, _host_sums(data))


def _name(dtype: Any, shape: Sequence[int], sums: Sequence[Any]) -> str:
    """The sums, bound to the dtype and the shape."""
    text = " ".join(map(str, (dtype, *shape, *(int(half) for half in sums))))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _device_sums(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    device = next(iter(x.sharding.device_set))
    near = device.default_memory().kind
    if x.sharding.memory_kind not in (None, near):
        x = jax.device_put(x, x.sharding.with_memory_kind(near))
    sums = _sums(x)
    # Programs on forced CPU devices share one pool of threads: several at once can wait for each other for ever.
    return jax.block_until_ready(sums) if device.platform == "cpu" else sums


@jax.jit
def _sums(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    words = _device_words(x)
    index = [lax.iota(jnp.uint32, size) for size in x.shape]
    first, second = (jnp.sum(_mixed(words, index, jnp.uint32(seed)), dtype=jnp.uint32) for seed in SEEDS)
    return first, second


def _host_sums(x: np.ndarray) -> tuple[int, int]:
    first, second = 0, 0
    for start, piece in _pieces(x, (0,) * x.ndim):
        words = _host_words(piece)
        index = [np.arange(at, at + size, dtype=np.uint32) for at, size in zip(start, piece.shape, strict=True)]
        # One dim more, of size 1: numpy warns of the overflow of scalars, and not of arrays.
        one, two = (_mixed([w[None] for w in words], index, np.array([seed], np.uint32)) for seed in SEEDS)
        first += int(np.sum(one, dtype=np.uint32))
        second += int(np.sum(two, dtype=np.uint32))
    return first % 2**32, second % 2**32


def _pieces(x: np.ndarray, start: tuple[int, ...], dim: int = 0) -> Iterator[tuple[tuple[int, ...], np.ndarray]]:
    """Parts of at most PIECE elements, and where in the array each begins."""
    if x.size <= PIECE:
        yield start, x
        return
    rows = max(1, PIECE // math.prod(x.shape[dim + 1 :]))
    for at in range(0, x.shape[dim], rows):
        part = x[(slice(None),) * dim + (slice(at, at + rows),)]
        yield from _pieces(part, (*start[:dim], at, *start[dim + 1 :]), dim + 1)


def _mixed(words: Sequence[Any], index: Sequence[Any], seed: Any) -> Any:
    """32 bits for each element, uint32. words: its bits, in 32-bit words; index: its place along each dim.

    The arithmetic is modulo 2^32, for numpy and JAX alike.
    """
    place = seed
    for dim, along in enumerate(index):
        # Each dim by itself, so that an array of more than 2^32 elements has as many places.
        apart = _scrambled(along ^ np.uint32((SEEDS[0] + NEXT_DIM * (dim + 1)) % 2**32) ^ seed)
        place = place + apart.reshape(*(1,) * dim, -1, *(1,) * (len(index) - dim - 1))
    for word in words:
        place = _scrambled(place ^ word)
    return place


def _scrambled(h: Any) -> Any:
    """A one-to-one map of 32 bits in which every bit of the result depends on every bit given (murmur3's last step)."""
    h = (h ^ (h >> 16)) * np.uint32(0x85EBCA6B)
    h = (h ^ (h >> 13)) * np.uint32(0xC2B2AE35)
    return h ^ (h >> 16)


def _bits(dtype: Any) -> int:
    if jnp.issubdtype(dtype, jnp.bool_):
        return 8
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).bits
    return jnp.finfo(dtype).bits


def _device_words(x: jax.Array) -> list[jax.Array]:
    """The bits of each element, in uint32 arrays of the array's shape, the lowest first."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return [*_device_words(jnp.real(x)), *_device_words(jnp.imag(x))]
    if x.dtype == bool:
        return [x.astype(jnp.uint32)]
    bits = _bits(x.dtype)
    if bits <= 32:
        return [lax.bitcast_convert_type(x, jnp.dtype(f"uint{bits}")).astype(jnp.uint32)]
    halves = lax.bitcast_convert_type(x, jnp.uint32)
    return [halves[..., i] for i in range(bits // 32)]


def _host_words(x: np.ndarray) -> list[np.ndarray]:
    """The same of an array on the host."""
    size = x.dtype.itemsize
    words = np.ascontiguousarray(x[..., None]).view(f"<u{min(size, 4)}").astype(np.uint32)
    if size == 1 and _bits(x.dtype) < 8:  # numpy keeps each in a byte
        words &= np.uint32(2 ** _bits(x.dtype) - 1)
    return [words[..., i] for i in range(words.shape[-1])]
