"""For a test suite of one's own: forced CPU devices, and assertions on what a step sends.

A pytest plugin, asked for by name in ``pyproject.toml`` (it starts JAX, so it does not load by itself)::

    [tool.pytest.ini_options]
    addopts = "-p jaxshard.testing --forced-devices 8"

Then::

    from jaxshard.testing import check, sent

    def test_the_step_sends_only_gradients(forced_devices):
        training = js.parallelize(loss, optimizer, params=init, batch=batch, strategy="ddp")
        check(training)
        assert sent(training) == {"all_reduce float32 over shard": 4 * 1_024_000 + 8}
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from jaxshard.contract import Collective
from jaxshard.dp import DataParallel
from jaxshard.mesh import force_cpu_devices
from jaxshard.preflight.check import check
from jaxshard.step import Training

__all__ = ["check", "planned", "sent"]


def sent(training: Training | DataParallel) -> dict[str, int]:
    """What the compiled step sends: bytes of whole buffers by kind, ``"all_gather bfloat16 over shard"``.

    It is held to the strategy's contract first. On CPU devices XLA sends float32 for bfloat16. Raises ContractError,
    and TypeError for `dp`, which is several programs; see `planned`.
    """
    return _by_kind(check(training))


def planned(training: Training | DataParallel) -> dict[str, int]:
    """What the step should send by its contract, as `sent` says it; nothing is compiled."""
    return _by_kind(training.contract())


def _by_kind(collectives: tuple[Collective, ...]) -> dict[str, int]:
    totals: Counter[str] = Counter()
    for one in collectives:
        totals[f"{one.kind} {one.dtype} over {' x '.join(one.axes)}"] += one.bytes * one.count
    return dict(totals)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("jaxshard").addoption(
        "--forced-devices",
        type=int,
        metavar="N",
        help="run on N forced CPU devices, whatever devices there are",
    )


def pytest_configure(config: pytest.Config) -> None:
    count = config.getoption("--forced-devices")
    if count is None:
        return
    try:
        force_cpu_devices(count)
    except (RuntimeError, ValueError) as error:
        raise pytest.UsageError(f"--forced-devices {count}: {error}") from None


@pytest.fixture(scope="session")
def forced_devices(pytestconfig: pytest.Config) -> list[Any]:
    """The forced CPU devices. Fails where pytest was not given ``--forced-devices N``."""
    import jax

    if pytestconfig.getoption("--forced-devices") is None:
        pytest.fail("forced_devices needs pytest --forced-devices N, such as 8.", pytrace=False)
    return jax.devices("cpu")
