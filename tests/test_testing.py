"""The pytest plugin, as another project's suite uses it: forced devices, and what a step sends."""

from __future__ import annotations

import pytest

pytest_plugins = ["pytester"]

SUITE = """
    import jax, jax.numpy as jnp, optax, pytest
    import jaxshard as js
    from jaxshard.testing import check, planned, sent

    PARAMS = {"w": jnp.ones((64, 32)), "b": jnp.ones(7)}

    def loss(params, batch):
        return jnp.mean((batch @ params["w"]) ** 2) + jnp.sum(params["b"] ** 2)

    def training(**choices):
        return js.parallelize(
            loss, optax.sgd(0.1), params=PARAMS, batch=jnp.ones((16, 64)), mesh=js.make_mesh(shard=4), **choices
        )

    def test_devices(forced_devices):
        assert len(forced_devices) == len(jax.devices()) == 4

    def test_exactly(forced_devices):
        ddp = training(strategy="ddp")
        # Every gradient, the loss and the norm.
        assert sent(ddp) == planned(ddp) == {"all_reduce float32 over shard": 4 * (64 * 32 + 7) + 8}
        assert sent(training(strategy="zero1", warn_whole=1)) == {
            "reduce_scatter float32 over shard": 4 * 64 * 32,
            "all_gather float32 over shard": 4 * 64 * 32,
            "all_reduce float32 over shard": 4 * 7 + 8,  # 7 does not divide by 4
        }

    def test_of_something_else(forced_devices):
        assert sent(training(strategy="ddp")) == {"all_reduce float32 over shard": 4}
"""


def test_a_suite_of_one_s_own(pytester: pytest.Pytester):
    pytester.makepyfile(SUITE)
    options = ["-p", "jaxshard.testing", "-p", "no:cacheprovider"]
    result = pytester.runpytest_subprocess(*options, "--forced-devices", "4")
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(["*all_reduce float32 over shard*"])


def test_without_the_option(pytester: pytest.Pytester):
    pytester.makepyfile("def test(forced_devices): pass")
    result = pytester.runpytest_inprocess("-p", "jaxshard.testing")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*forced_devices needs pytest --forced-devices N, such as 8.*"])
