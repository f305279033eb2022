"""`jaxshard train`, called many times in one process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache
from quick import QUICK

from jaxshard.train import build, session
from jaxshard.train.config import RunConfig


@contextmanager
def compiled_once() -> Iterator[None]:
    """Inside, trainings of one configuration on one mesh are one object, compiled quickly, without JAX's cache on disk.

    That saves most of the time of a run. And JAX 0.10 gives back programs for several CPU devices from that cache that
    compute something else now and then: their collectives do not keep their order.
    """
    whole, made = session.training_for, {}

    def training_for(config: Any, mesh: Any, strategy: Any) -> Any:
        run = replace(RunConfig(), steps=config.run.steps, accumulate=config.run.accumulate)
        run = replace(run, skip_nonfinite=config.run.skip_nonfinite)
        key = json.dumps(asdict(replace(config, run=run, data=replace(config.data, files=())))), mesh, strategy
        if key not in made:
            made[key] = whole(config, mesh, strategy)
        return made[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "training_for", training_for)
        patch.setattr(build, "parallelize", partial(build.parallelize, compiler_options=QUICK))
        _use_cache(False)
        try:
            yield
        finally:
            _use_cache(True)


def _use_cache(use: bool) -> None:
    jax.config.update("jax_enable_compilation_cache", use)
    compilation_cache.reset_cache()  # JAX decides once whether it has one
