"""Annotations of layouts and meshes that the caller has set do no harm: the results are those without them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from frameworks.annotated import ANNOTATED
from frameworks.case import SGD, WIDTH, batches, mean_square
from jax.lax import with_sharding_constraint as constrain
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from oracle import assert_close, one_device, run
from quick import quick

import jaxshard as js


@pytest.fixture(autouse=True)
def promotion():
    """Frameworks mix dtypes inside."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.smoke] * ("our axes" in n)) for n in ANNOTATED])
def test_annotated_models_train_as_those_without_annotations(name):
    annotated = ANNOTATED[name]
    data, (theirs, _) = batches(), annotated.plain.train(batches())
    with annotated.around():
        case = annotated.case()
        ours = run(quick(case.loss, case.init, data[0], optimizer=SGD), case.init, data)
    assert_close(ours, theirs)
    assert annotated.name in str(jax.tree.structure(ours.end)), "the annotations are still there"


def auto(**sizes):
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def init(key):
    return {"w": jax.random.normal(key, (2, WIDTH, WIDTH)) / 4}


def loss_with(weights, activations):
    """Layers scanned over, whose weights and activations go through these."""

    def loss(params, batch):
        @jax.checkpoint
        def layer(x, w):
            return activations(jnp.tanh(x @ weights(w))), None

        return mean_square(jax.lax.scan(layer, activations(batch["x"]), params["w"])[0], batch)

    return loss


MESHES = {"data": lambda: auto(data=8), "ours": js.make_mesh}
SPECS = {"data": (P(None, "data"), P("data")), "ours": (P("shard"), P(("replica", "shard")))}


@pytest.mark.parametrize("bare", [False, True], ids=["with a mesh", "bare"])
@pytest.mark.parametrize("axes", MESHES)
def test_sharding_constraints_in_a_loss_change_nothing(axes, bare):
    data, mesh = batches(), MESHES[axes]()
    specs = [spec if bare else NamedSharding(mesh, spec) for spec in SPECS[axes]]
    weights, activations = (lambda x, spec=spec: constrain(x, spec) for spec in specs)
    theirs = one_device(loss_with(lambda w: w, lambda x: x), init, SGD, data)
    with jax.set_mesh(mesh if bare else None):
        training = quick(loss_with(weights, activations), init, data[0], optimizer=SGD)
        assert_close(run(training, init, data), theirs)
        sent = training.contract()
    assert sum(one.kind == "reduce_scatter" for one in sent) == 1, "in the loop over layers: the stack stays split"


def test_a_mesh_that_the_caller_has_set_is_put_aside():
    data = batches()
    loss = loss_with(lambda w: w, lambda x: x)
    theirs = one_device(loss, init, SGD, data)
    with jax.set_mesh(auto(data=2, model=4)):
        training = quick(loss, init, data[0], "zero1", optimizer=SGD)
        state, step = training.init(init, jax.random.key(0)), jax.jit(training.step_fn)
        for batch, wanted in zip(data, theirs.loss, strict=True):
            found = training.evaluate(state, jax.tree.map(lambda x: x[:19], batch))
            np.testing.assert_allclose(
                found["loss"], loss(training.whole(state), jax.tree.map(lambda x: x[:19], batch)), rtol=1e-5
            )
            state, metrics = step(state, batch)
            np.testing.assert_allclose(metrics["loss"], wanted, rtol=1e-5)
    np.testing.assert_allclose(training.whole(state)["w"], theirs.end["w"], rtol=0, atol=1e-6)
