"""Two processes of four devices train as one process of eight does.

Oracle: the same script in one process. Gloo adds in another order than XLA's own collectives may, so that losses agree
to rounding; what is read, and which rows, exactly.
"""

from __future__ import annotations

import json

import numpy as np
from several import run

SCRIPT = """
import json, sys
import jax, jax.numpy as jnp, numpy as np, optax
import jaxshard as js
from jaxshard.train.processes import count, index, initialize

initialize()
js.force_cpu_devices(8 // count())
random = np.random.default_rng(0)


def init(key):
    return {"w": jax.random.normal(key, (16, 32)) / 4, "o": jnp.ones((32, 1)), "k": jnp.zeros(3)}


def loss(params, batch, *, key):
    h = jnp.tanh(batch["x"] @ params["w"])
    h = jnp.where(jax.random.bernoulli(key, 0.9, h.shape), h, 0)
    return jnp.mean((h @ params["o"] + params["k"][0] - batch["y"]) ** 2)


batch = {"x": random.normal(size=(16, 16)).astype("float32"), "y": random.normal(size=(16, 1)).astype("float32")}
options = json.loads(sys.argv[1])
results = {}
for strategy in ("ddp", "zero1", "zero3", "hsdp"):
    training = js.parallelize(
        loss, optax.sgd(0.1), params=init, batch=batch, strategy=strategy, whole_budget=0, clip=1.0, accumulate=2,
        compiler_options=options,
    )
    state = training.init(init, jax.random.key(0))
    part = jax.tree.map(lambda x: x[training.rows], batch)
    for given in (batch, training.global_batch(part), training.global_batch(part)):
        state, metrics = training.step(state, given)
    whole = training.whole(state)
    again = training.init(whole, jax.random.key(0))  # from the host's copies
    results[strategy] = {
        "loss": float(metrics["loss"]),
        "norm": float(metrics["grad_norm"]),
        "evaluated": float(training.evaluate(state, jax.tree.map(lambda x: x[:11], batch))["loss"]),
        "w": whole["w"].tolist(),
        "again": float(np.abs(training.whole(again)["w"] - whole["w"]).max()),
        "rows": training.rows.tolist(),
    }
try:
    training.global_batch(batch if count() > 1 else jax.tree.map(lambda x: x[:8], batch))
except ValueError as error:
    results["uneven"] = str(error)
if count() > 1:
    try:
        js.parallelize(loss, optax.sgd(0.1), params=init, batch=batch, strategy="dp")
    except ValueError as error:
        results["dp"] = str(error)
print("results", json.dumps(results))
"""


def results(count: int) -> list[dict]:
    from quick import QUICK

    ended = run(SCRIPT, json.dumps(QUICK), count=count, devices=8 // count)
    for code, out in ended:
        assert code == 0, out
    return [json.loads(out.partition("results ")[2]) for _, out in ended]


def test_two_processes_are_one():
    (one,) = results(1)
    two = results(2)
    for strategy, expected in one.items():
        if strategy == "uneven":
            continue
        rows = [found[strategy].pop("rows") for found in two]
        assert sorted(rows[0] + rows[1]) == expected.pop("rows") == list(range(16)), "each row is read once"
        assert len(rows[0]) == len(rows[1]) == 8
        assert two[0][strategy] == two[1][strategy], "both know the same"
        for name in ("loss", "norm", "evaluated", "w"):
            np.testing.assert_allclose(two[0][strategy][name], expected[name], rtol=2e-6, atol=1e-7)
        assert expected["norm"] > 1, "the clip clips"
        assert two[0][strategy]["again"] == 0
    assert one["ddp"]["loss"] != one["ddp"]["evaluated"]
    assert "this process's 8 rows of a batch, x is float32[16, 16], not float32[8, 16]" in two[1]["uneven"]
    assert "dp runs in one process only" in two[0]["dp"]
