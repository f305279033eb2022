"""What the backward pass computes again, what it finds saved, and what of that waits in host memory.

Whatever a policy says, a gathered weight is never saved: it is gathered again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import Offloadable, checkpoint_name
from jax.extend.core import Jaxpr

from jaxshard.collectives import SCOPE, WHOLE, is_hosted
from jaxshard.jaxprs import stands_for, subjaxprs
from jaxshard.strategy import DEVICE, HOST

Policy = Callable[..., Any]
NEVER_SAVED = (WHOLE, "all_gather", "all_gather_invariant", "optimization_barrier")
CARRIED = f"{SCOPE}.carried"
"""The name, for remat policies, of what a layer of a scan is given by the layer before."""


def body_remat(remat: str | Policy, *, tie: bool) -> Callable[[Callable], Callable] | None:
    """What wraps the body of a scan over layers: ``"none"``, ``"full"``, ``"dots"``, ``"offload"``, or a policy.

    ``"offload"`` recomputes as much as ``"full"``, and what that keeps of a layer, the activations that come from the
    layer before, waits in the host's memory. Raises ValueError for another word.
    """
    policies = jax.checkpoint_policies
    offload = policies.save_and_offload_only_these_names(
        names_which_can_be_saved=(), names_which_can_be_offloaded=(CARRIED,), offload_src=DEVICE, offload_dst=HOST
    )
    named: dict[str, Policy | None] = {"full": None, "dots": policies.dots_saveable, "offload": offload}
    if remat == "none":
        return None
    if not callable(remat) and remat not in named:
        raise ValueError(f"remat={remat!r}: 'none', 'full', 'dots', 'offload', or a policy of jax.checkpoint_policies.")
    policy = remat if callable(remat) else named[remat]
    policy = None if policy is None else recomputing_gathers(policy)

    def wrap(body):
        body = _naming_carry(body) if remat == "offload" else body
        return jax.checkpoint(body, policy=policy, prevent_cse=tie)

    return wrap


def _naming_carry(body: Callable) -> Callable:
    """A checkpoint saves its inputs as they are; a policy decides about what has a name inside."""

    def named(fixed, carry, layer):
        return body(fixed, [checkpoint_name(x, CARRIED) if is_activation(x) else x for x in carry], layer)

    return named


def offloads(policy: Policy, jaxpr: Jaxpr) -> bool:
    """Whether a remat policy sends anything of a program to another memory."""

    def asked(eqn):
        return policy(eqn.primitive, *(v.aval for v in eqn.invars), **eqn.params)

    inside = [(eqn, subjaxprs(eqn)) for eqn in jaxpr.eqns]
    return any(
        any(offloads(policy, sub) for sub in subs) if subs else isinstance(asked(eqn), Offloadable)
        for eqn, subs in inside
    )


def waiting_for_host(recomputed: Callable, operands: Sequence[Any]) -> list[Any]:
    """The results of a function, which wait until what it offloads is on the host.

    The backward pass alone wants that: XLA would start to send it only then, and hold it on the device until then.
    """

    @jax.custom_vjp
    def waiting(*operands):
        return recomputed(*operands)

    def forward(*operands):
        results, backward = jax.vjp(recomputed, *operands)
        kept, tree = jax.tree.flatten(backward)
        sent = {i: x for i, x in enumerate(kept) if is_hosted(x)}
        results, arrived = lax.optimization_barrier((results, sent))
        return results, jax.tree.unflatten(tree, [arrived.get(i, x) for i, x in enumerate(kept)])

    def backward(backward, gradients):
        # A leaf in host memory has no gradient of its own, and what JAX takes for its zero is not in host memory.
        return jax.tree.map(lambda x, g: None if is_hosted(x) else g, tuple(operands), backward(gradients))

    waiting.defvjp(forward, backward)
    return waiting(*operands)


def recomputing_gathers(policy: Policy | None) -> Policy:
    """A remat policy that gathers (and ties, and picks) again, and leaves the rest to `policy` (None: save all)."""

    def saves(primitive, *avals, **params):
        # What lies in host memory is part of a state, which is there anyway.
        picks = any(getattr(x, "memory_space", None) == jax.memory.Space.Host for x in avals)
        if picks or stands_for(primitive.name, params, NEVER_SAVED):
            return False
        return True if policy is None else policy(primitive, *avals, **params)

    return saves


def is_activation(x: Any) -> bool:
    """Whether a value is a float array."""
    return isinstance(x, jax.Array) and x.ndim > 0 and jnp.issubdtype(x.dtype, jnp.floating)
