"""Parameters that no strategy can split: a warning names them, with their bytes and what would split them."""

import warnings

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from oracle import mesh_of

import jaxshard as js

PARAMS = {"embed": np.ones((50257, 2), np.float32), "w": np.ones((2, 8 * 50257), np.float32)}
SHARE = PARAMS["embed"].nbytes / sum(x.nbytes for x in PARAMS.values())


def loss(params, batch):
    return jnp.mean(params["embed"][batch] @ params["w"])


def parallelize(mesh=(1, 8), params=PARAMS, **choices):
    return js.parallelize(
        loss, optax.sgd(1.0), params=params, batch=np.zeros(8, np.int32), mesh=mesh_of(*mesh), **choices
    )


@pytest.mark.smoke
@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_a_warning_names_the_leaf_its_bytes_and_the_fix(strategy):
    with pytest.warns(js.WholeLeavesWarning) as caught:
        parallelize(strategy=strategy)
    (warning,) = caught
    said = str(warning.message)
    assert "1 of 2 leaves of params, 402,056 of 3,618,504 B (11.1%), stay whole on every device" in said
    assert "warn_whole=0.02" in said
    assert "embed float32[50257, 2], 402,056 B: no dim of (50257, 2) divides by 8; e.g. 50264 in place of 50257" in said
    assert warning.filename == __file__


@pytest.mark.parametrize("choices", [{"warn_whole": 1}, {"warn_whole": SHARE}, {"strategy": "ddp"}, {"mesh": (8, 1)}])
def test_no_warning_within_the_bound_nor_where_nothing_is_split(choices):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parallelize(**choices)


def test_the_bound_counts_bytes():
    with pytest.warns(js.WholeLeavesWarning):
        parallelize(warn_whole=0.999 * SHARE)
    padded = PARAMS | {"embed": np.ones((50264, 2), np.float32)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parallelize(params=padded, warn_whole=0)


def test_many_leaves_are_cut_short():
    params = {f"leaf{i}": np.ones((3 + 2 * i,), np.float32) for i in range(12)}

    def loss(params, batch):
        return jnp.mean(batch) * sum(jnp.sum(x) for x in params.values())

    with pytest.warns(js.WholeLeavesWarning, match=r"(?s)leaf11.*leaf4.*and 4 smaller ones") as caught:
        js.parallelize(loss, optax.sgd(1.0), params=params, batch=np.zeros(8, np.float32), mesh=mesh_of(1, 8))
    assert "leaf3" not in str(caught[0].message)


@pytest.mark.parametrize(("bound", "error"), [(-0.1, ValueError), (float("nan"), ValueError), ("2 %", TypeError)])
def test_bounds_that_are_none(bound, error):
    with pytest.raises(error, match="warn_whole"):
        parallelize(warn_whole=bound)
