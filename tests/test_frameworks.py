"""Any framework, unchanged: each trains as its own plain loop does on one device, on the same whole batches."""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from frameworks import CASES, DROPOUT
from frameworks.case import SGD, WIDTH, batches, mean_square
from frameworks.flax_nnx import LAYERS
from oracle import Run, assert_close
from quick import quick

import jaxshard as js

SMOKE = ["flax_nnx, scan with remat", "flax_linen, statistics of the batch", "eqx, list", "trees, nested"]
UNDER_DDP = [*SMOKE, "hk, statistics of the batch"]


@pytest.fixture(autouse=True)
def promotion():
    """Frameworks mix dtypes inside."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@functools.cache
def one_device(case):
    return case.train(batches())


def check(case, theirs, strategy):
    data = batches()
    training = quick(case.loss, case.init, data[0], strategy, optimizer=SGD, axis_name=case.axis_name)
    state = training.init(case.init, jax.random.key(0))
    start, metrics = training.whole(state), []
    for batch in data:
        state, now = training.step(state, batch)
        metrics.append((now["loss"], now["grad_norm"]))
    run, extra = theirs
    assert_close(Run(start, training.whole(state), *np.array(metrics, np.float32).T), run)
    training.contract()
    for have, want in zip(jax.tree.leaves(state.extra), jax.tree.leaves(extra), strict=True):
        np.testing.assert_allclose(have, want, rtol=1e-5, atol=1e-6)
    return training, state


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.smoke] * (n in SMOKE)) for n in CASES])
def test_zero3_is_the_frameworks_own_training(name):
    training, _ = check(CASES[name], one_device(CASES[name]), "zero3")
    assert sum(one.kind == "reduce_scatter" for one in training.contract()) > 1, "parameters are split"


@pytest.mark.parametrize("name", UNDER_DDP)
def test_ddp_is_the_frameworks_own_training(name):
    check(CASES[name], one_device(CASES[name]), "ddp")


def test_statistics_of_a_device_are_not_those_of_the_batch():
    """So the tests of either could fail."""
    (first, stats), (second, whole) = (
        one_device(CASES[f"flax_nnx, statistics of {of}"]) for of in ("a device", "the batch")
    )
    assert abs(first.loss[0] / second.loss[0] - 1) > 1e-3
    assert max(np.abs(a - b).max() for a, b in zip(jax.tree.leaves(stats), jax.tree.leaves(whole), strict=True)) > 1e-3


@pytest.mark.parametrize("name", ["flax_nnx, scan with remat", "flax_linen, scan with remat"])
def test_a_weight_is_gathered_twice_for_each_layer(name):
    """Once for each pass, though nnx hands every parameter back from a block that is recomputed."""
    case = CASES[name]
    sent = quick(case.loss, case.init, batches()[0]).contract()
    assert [one.count for one in sent if one.kind == "all_gather" and "kernel" in one.leaf] == [2 * LAYERS]


STATEFUL = {
    "norm/mean": lambda rngs: nnx.BatchNorm(WIDTH, rngs=rngs),
    "rngs/count": lambda rngs: nnx.Dropout(0.5, rngs=rngs),
}


@pytest.mark.parametrize("state", STATEFUL)
def test_a_module_that_keeps_state_is_not_its_own_parameters(state):
    """The statistics would learn, every device would drop the same units, and what the module writes would be lost."""

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
            self.norm = STATEFUL[state](rngs)

        def __call__(self, x):
            return self.norm(self.linear(x))

    def loss(model, batch):
        return mean_square(model(batch["x"]), batch)

    with pytest.raises(ValueError, match=rf"{state}.* in place.*`extra`"):
        quick(loss, lambda key: Model(nnx.Rngs(key)), batches()[0])


UNITS = 64


def kept(training, params, steps, seed=0):
    """How many of the 8 devices kept each unit, summed over steps: it is in the gradient of the unit's weight."""
    state = training.init(params, jax.random.key(seed))
    for _ in range(steps):
        state, _ = training.step(state, np.ones((8, UNITS), np.float32))
    return -training.whole(state)["w"] * 8 / 2


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.smoke] * ("reseed" in n)) for n in DROPOUT])
def test_dropout_by_the_key_is_another_on_every_device(name):
    def loss(params, batch, *, key):
        return (DROPOUT[name](batch, key) @ params["w"]).mean()

    params = {"w": np.zeros(UNITS, np.float32)}
    training = quick(loss, params, np.ones((8, UNITS), np.float32))
    first = kept(training, params, 1)
    # Binomial of 8 and 1/2: the mean of 64 has a deviation of 0.18, and one mask for all would give 0 or 8 alone.
    assert 3 < first.mean() < 5
    assert ((first > 0) & (first < 8)).mean() > 0.9
    np.testing.assert_array_equal(kept(training, params, 1), first)
    assert (kept(training, params, 2) != 2 * first).any(), "another step has other masks"
    assert (kept(training, params, 1, seed=1) != first).any()


def test_dropout_by_a_generator_in_extra_is_the_same_on_all_devices():
    graphdef, generator = nnx.split(nnx.Dropout(0.5, rngs=nnx.Rngs(0)))

    def loss(params, batch, *, extra):
        drop = nnx.merge(graphdef, extra, copy=True)
        return (drop(batch) @ params["w"]).mean(), nnx.state(drop)

    given = {"w": np.zeros(UNITS, np.float32)}, generator
    training = quick(loss, given, np.ones((8, UNITS), np.float32))
    first = kept(training, given, 1)
    assert set(first) == {0, 8}
    assert (kept(training, given, 2) != 2 * first).any(), "the generator counts on"


@pytest.mark.smoke
def test_the_library_imports_no_framework():
    """`flax` is a dependency of the training program and its models, not of the library."""
    code = "import sys, jaxshard; print(sorted({'flax', 'equinox', 'haiku', 'optax'} & set(sys.modules)))"
    root = Path(js.__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['optax']"
