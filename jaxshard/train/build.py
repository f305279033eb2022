"""The training of a configuration, on any mesh: of devices that are there, or of a target's that are not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxshard.dp import DataParallel
from jaxshard.loss import Loss
from jaxshard.mesh import platform_of
from jaxshard.models import gpt
from jaxshard.models.attention import cudnn_found
from jaxshard.step import Training, parallelize
from jaxshard.strategy import Strategy
from jaxshard.train import optimizer
from jaxshard.train.config import Config, parse

OPTIONS = {"accumulate": "run", "remat": "model", "attention": "model", "loss_chunk": "model", "batch": "data"}
"""What `build` can change in a configuration, and the section it stands in."""


def training_for(config: Config, mesh: Mesh, strategy: Strategy) -> Training | DataParallel:
    """The training step. Raises ValueError or TypeError, with what to change, when parts do not fit each other."""
    model = model_for(config, mesh)
    loss_fn, drops = held_out_loss(model), model.dropout > 0

    def dropping(params, batch, *, key):
        return Loss(*gpt.loss(model, params, batch, key))

    shape = config.data.batch, model.context
    return parallelize(
        dropping if drops else loss_fn,
        optimizer.make(config.optimizer, batch=config.data.batch, steps=config.run.steps),
        params=partial(gpt.init, model),
        batch={
            "inputs": jax.ShapeDtypeStruct(shape, jnp.int32),
            "targets": jax.ShapeDtypeStruct(shape, jnp.int32),
            "weights": jax.ShapeDtypeStruct(shape, jnp.float32),
        },
        mesh=mesh,
        strategy=strategy,
        accumulate=config.run.accumulate,
        clip=config.optimizer.clip,
        skip_nonfinite=config.run.skip_nonfinite > 0,
        precision=config.precision,
    )


def held_out_loss(model: gpt.GPTConfig) -> Callable[..., Loss]:
    """The loss with nothing left out, of a model all of which is decided."""

    def loss_fn(params, batch):
        return Loss(*gpt.loss(model, params, batch))

    return loss_fn


def model_for(config: Config, mesh: Mesh) -> gpt.GPTConfig:
    """The model with all decided that depends on the mesh's devices.

    Raises ValueError when they cannot use cuDNN, and the configuration asks for it.
    """
    platform = platform_of(mesh)
    return gpt.resolved(
        config.model,
        platform=platform,
        cudnn=platform != "cpu" and cudnn_found(),
        compute=config.precision.compute or config.precision.params or "float32",
    )


def build(mesh: Mesh, strategy: Strategy, *, config: Mapping[str, Any], **options: Any) -> Training | DataParallel:
    """The training of a configuration that travelled as JSON, for `preflight.compare`.

    config: of ``dataclasses.asdict``, as JSON gives it back. options: values of `OPTIONS`. Raises
    ValueError for another one.
    """
    changed: dict[str, dict[str, Any]] = {section: dict(table) for section, table in config.items()}
    for name, value in options.items():
        if name not in OPTIONS:
            raise ValueError(f"no option is called {name}; choose from {', '.join(OPTIONS)}.")
        changed.setdefault(OPTIONS[name], {})[name] = value
    return training_for(parse(Config, changed), mesh, strategy)
