"""An update taken apart, and arrays cut into pieces.

Oracles: the program itself, evaluated whole; and what a cut must be, element by element.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.extend.core import ClosedJaxpr, Var
from oracle import assert_same_bits

from jaxshard.host_memory import Cut
from jaxshard.jaxprs import shape_of
from jaxshard.parts import SMALL, Parted, parted, run, run_piece

# Cuts

SHAPES = st.lists(st.integers(1, 13), min_size=1, max_size=4).map(tuple)


@given(SHAPES, st.integers(1, 200))
def test_pieces_cover_every_element_once_and_lie_together(shape, most):
    cut = Cut.of(shape, most)
    places = np.arange(math.prod(shape)).reshape(shape)
    covered = []
    for i in range(cut.count):
        start = cut.start(i)
        end = [begin + size for begin, size in zip(start, cut.piece, strict=True)]
        assert all(begin >= 0 and stop <= size for begin, stop, size in zip(start, end, shape, strict=True))
        covered.append(places[tuple(slice(*one) for one in zip(start, end, strict=True))].ravel())
    # In order, without a gap: each piece is one stretch of memory.
    np.testing.assert_array_equal(np.concatenate(covered), places.ravel())


@given(SHAPES, st.integers(1, 200))
def test_pieces_are_as_large_as_they_may_be_and_seldom_larger(shape, most):
    cut = Cut.of(shape, most)
    size = math.prod(cut.piece)
    if size > most:  # nothing but tiny pieces would do
        row = math.prod(cut.piece[cut.dim + 1 :])
        smaller = [rows * row for rows in range(1, cut.rows) if shape[cut.dim] % rows == 0]
        assert all(other < most / 16 for other in smaller)
    else:
        assert size >= most / 16 or cut.rows == shape[cut.dim]
        rows = (rows for rows in range(cut.rows + 1, shape[cut.dim] + 1) if shape[cut.dim] % rows == 0)
        assert all(more * size // cut.rows > most for more in rows), "fewer pieces would do"


@pytest.mark.parametrize(
    ("shape", "most", "piece", "count"),
    [
        ((12, 4096, 4096), 2**23, (1, 2048, 4096), 24),
        ((12, 1024, 4096), 2**23, (2, 1024, 4096), 6),
        ((50257, 8), 2**12, (1733, 8), 29),  # of 512 rows at most 29 divide 50257, and these are few
        ((8191,), 1000, (8191,), 1),  # a prime: pieces of one element are no use
        ((3, 8191), 1000, (1, 8191), 3),
        ((5,), 10**9, (5,), 1),
        ((1, 1, 7), 3, (1, 1, 1), 7),
    ],
)
def test_cuts_by_hand(shape, most, piece, count):
    cut = Cut.of(shape, most)
    assert (cut.piece, cut.count) == (piece, count)


# Parts

UNARY = {
    "tanh": jnp.tanh,
    "double": lambda x: x * 2.0,
    "jitted": jax.jit(lambda x: jnp.where(x > 0, x, jnp.zeros_like(x)) + 1.0),
    "cast": lambda x: x.astype(jnp.bfloat16).astype(x.dtype),
    "relu": jax.nn.relu,
    "power": lambda x: x**2,
}
BINARY = {"add": jnp.add, "times": jnp.multiply, "where": lambda x, y: jnp.where(x < y, x, y), "max": jnp.maximum}
STEP = st.one_of(
    st.tuples(st.sampled_from(sorted(UNARY)), st.integers(0, 9)),
    st.tuples(st.sampled_from(sorted(BINARY)), st.integers(0, 9), st.integers(0, 9)),
    st.tuples(st.sampled_from(("scaled", "filled")), st.integers(0, 9)),
)
LEAF = st.tuples(st.sampled_from(((40, 40), (2, 33, 32), (1100,))), st.lists(STEP, min_size=1, max_size=6))


def program_of(leaves: list[Any]):
    """(a program over two arrays of each leaf and a scalar for all, arguments for it)."""

    def program(states, rate):
        rate = jnp.sin(rate) + 0.5
        results = []
        for (first, second), (_, steps) in zip(states, leaves, strict=True):
            found = [first, second]
            for name, *at in steps:
                operands = [found[i % len(found)] for i in at]
                if name == "scaled":
                    found.append(operands[0] * rate)
                elif name == "filled":
                    found.append(operands[0] + jnp.full(first.shape, rate))
                else:
                    found.append((UNARY | BINARY)[name](*operands))
            results.append((found[-1], found[-1] * first + second))
        return results, rate + 1.0

    random = np.random.default_rng(0)
    states = [tuple(random.normal(size=shape).astype(np.float32) for _ in range(2)) for shape, _ in leaves]
    return program, (states, np.float32(0.3))


def values_of(closed: ClosedJaxpr, args: Any) -> dict[Any, Any]:
    variables = [*closed.jaxpr.constvars, *closed.jaxpr.invars]
    return dict(zip(variables, [*closed.consts, *jax.tree.leaves(args)], strict=True))


def results_of(closed: ClosedJaxpr, values: dict[Any, Any]) -> list[Any]:
    return [values[v] if isinstance(v, Var) else jnp.asarray(v.val, shape_of(v).dtype) for v in closed.jaxpr.outvars]


def taken_apart(program: Any, args: Any, hosted: Any = None) -> tuple[ClosedJaxpr, Parted]:
    """hosted: which inputs lie in host memory; by default all arrays with dims."""
    closed = jax.make_jaxpr(program)(*args)
    flags = [bool(x.ndim) for x in jax.tree.leaves(args)] if hosted is None else jax.tree.leaves(hosted)
    apart = parted(closed, flags)
    return apart.closed, apart


@settings(max_examples=10, deadline=None)
@given(st.lists(LEAF, min_size=1, max_size=4))
def test_parts_give_what_the_program_gives(leaves):
    program, args = program_of(leaves)
    closed, apart = taken_apart(program, args)
    values = values_of(closed, args)
    run(apart.shared, values)
    assert len(apart.parts) == len(leaves), "each leaf is a part of its own"
    known = set(values)
    for part in reversed(apart.parts):  # in any order
        mine = {v: values[v] for v in (*part.inputs, *part.shared)}  # and from nothing but what they say
        run(part.eqns, mine)
        values |= {v: x for v, x in mine.items() if v not in known}
    assert_same_bits(results_of(closed, values), jax.tree.leaves(program(*args)))


@settings(max_examples=10, deadline=None)
@given(LEAF, st.integers(1, 500))
def test_a_piece_of_the_results_comes_from_a_piece_of_the_inputs(leaf, most):
    program, args = program_of([leaf])
    closed, apart = taken_apart(program, args)
    values = values_of(closed, args)
    run(apart.shared, values)
    (part,) = apart.parts
    assert part.elementwise
    wanted = jax.tree.leaves(program(*args))
    cut = Cut.of(leaf[0], most)
    for i in {0, cut.count // 2, cut.count - 1}:
        at = tuple(slice(begin, begin + size) for begin, size in zip(cut.start(i), cut.piece, strict=True))
        mine = {v: values[v] for v in part.shared} | {v: values[v][at] for v in part.inputs}
        run_piece(part.eqns, mine, cut.piece)
        for k in part.results:
            result: Any = mine[closed.jaxpr.outvars[k]]
            assert result.shape == cut.piece
            np.testing.assert_allclose(result, wanted[k][at], rtol=1e-6, atol=1e-6)


A, B = np.ones((40, 40), np.float32), np.ones((33, 40), np.float32)


def members(apart: Parted, closed: ClosedJaxpr) -> list[tuple[set[int], set[int]]]:
    """For each part, which inputs it reads and which results it gives."""
    order = list(closed.jaxpr.invars)
    return sorted((({order.index(v) for v in part.inputs}, set(part.results)) for part in apart.parts), key=str)


def test_adamw_has_a_part_for_each_parameter():
    optimizer = optax.adamw(optax.linear_schedule(1e-2, 0.0, 5))
    params = {"a": A, "b": B, "small": np.ones(3, np.float32)}

    def update(states, grads):
        with jax.numpy_dtype_promotion("standard"):
            updates, opt = optimizer.update(grads, states[1], states[0])
        return optax.apply_updates(states[0], updates), opt

    args = (params, optimizer.init(params)), params
    closed, apart = taken_apart(update, args)
    assert all(part.elementwise for part in apart.parts)
    # Inputs and results: three parameters, a count, three mu, three nu, a count; and the gradients.
    assert members(apart, closed) == [({k, 4 + k, 7 + k, 11 + k}, {k, 4 + k, 7 + k}) for k in range(3)]
    assert all(shape_of(v).size == 1 for part in apart.parts for v in part.shared)


def test_what_the_devices_know_is_shared_and_what_the_host_holds_ties():
    def scaled(states, grads):
        norm = jnp.sqrt(sum(jnp.vdot(g, g) for g in grads))
        return [x - g / norm for x, g in zip(states, grads, strict=True)]

    def scaled_by_states(states, grads):
        return scaled(states, states)

    args = ([A, B], [A, B])
    on_host = ([True, True], [False, False])
    closed, apart = taken_apart(scaled_by_states, args, on_host)
    assert members(apart, closed) == [({0, 1}, {0, 1})]  # the norm is known when all states are
    closed, apart = taken_apart(scaled, args, on_host)
    assert members(apart, closed) == [({0, 2}, {0}), ({1, 3}, {1})]  # that of gradients before
    values = values_of(closed, args)
    run(apart.shared, values)
    assert {float(values[v]) for part in apart.parts for v in part.shared} == {float(np.sqrt(np.float32(73 * 40)))}


def test_a_row_that_the_host_holds_ties_the_matrices_that_read_it():
    args = [A, B], np.ones(40, np.float32)
    closed, apart = taken_apart(lambda states, row: [x * row for x in states], args)
    assert members(apart, closed) == [({0, 1, 2}, {0, 1})]
    assert not apart.parts[0].elementwise, "a row is no piece of a matrix"


def test_a_number_is_shared_wherever_it_comes_from_on_the_devices():
    args = [A, B], np.full(SMALL + 1, 2, np.float32)

    def program(states, wide):
        return [x * wide.sum() for x in states]

    closed, apart = taken_apart(program, args, ([True, True], False))
    assert len(apart.parts) == 2
    values = values_of(closed, args)
    run(apart.shared, values)
    assert {float(values[v]) for part in apart.parts for v in part.shared} == {2 * (SMALL + 1)}
    closed, apart = taken_apart(program, args)
    assert len(apart.parts) == 1, "of what the host holds nothing is known before"


def test_what_is_drawn_from_shared_keys_is_drawn_for_each_part():
    key = jnp.arange(2, dtype=jnp.uint32)

    def noisy(states, step):
        keys = jax.random.split(jax.random.fold_in(jax.random.wrap_key_data(key), step), len(states))
        return [x + jax.random.normal(k, x.shape) for x, k in zip(states, keys, strict=True)]

    args = [A, B], np.int32(3)
    closed, apart = taken_apart(noisy, args)
    assert members(apart, closed) == [({0}, {0}), ({1}, {1})]
    values = values_of(closed, args)
    run(apart.shared, values)
    for part in apart.parts:
        run(part.eqns, values)
    assert_same_bits(results_of(closed, values), noisy(*args))


def test_results_that_come_from_no_input_or_are_one():
    def program(states):
        a, b = states
        return a, jnp.zeros_like(b), 3.0, jnp.cumsum(b, axis=0)

    closed, apart = taken_apart(program, ([A, B],))
    # A number and an input as it is come from nowhere; zeros are large, and made by a part that reads nothing.
    assert {part.results: len(part.inputs) for part in apart.parts} == {(1,): 0, (3,): 1}
    assert not any(part.elementwise for part in apart.parts)
    values = values_of(closed, ([A, B],))
    run(apart.shared, values)
    for part in apart.parts:
        run(part.eqns, values)
    assert_same_bits(results_of(closed, values), [*program([A, B])[:2], np.float32(3), program([A, B])[3]])


NOT = {
    "reversed": lambda x, y: x[::-1] + y,
    "transposed": lambda x, y: x.T.reshape(x.shape) + y,
    "summed": lambda x, y: x + y.sum(axis=0),
    "mean": lambda x, y: x - y.mean(),
    "product": lambda x, y: x.T @ x @ y.T,
    "sorted inside a jit": lambda x, y: jax.jit(jnp.sort)(x) + y,
    "counted": lambda x, y: x + jax.lax.broadcasted_iota(jnp.float32, x.shape, 0) * y,
    "drawn": lambda x, y: x + jax.random.normal(jax.random.key(0), x.shape) * y,
    "constant": lambda x, y: x * np.arange(x.size, dtype=np.float32).reshape(x.shape) + y,
}


@pytest.mark.parametrize("name", NOT)
def test_what_is_not_elementwise(name):
    x = np.ones((40, 40), np.float32)
    _, apart = taken_apart(lambda states: NOT[name](*states), ([x, x],))
    assert [part.elementwise for part in apart.parts] == [False]
