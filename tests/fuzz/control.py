"""The language's control flow and its transformations: whatever holds a program of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .nodes import Env, Node

POLICIES: dict[str, Callable[..., Any] | None] = {
    "nothing": None,
    "everything": jax.checkpoint_policies.everything_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "named": jax.checkpoint_policies.save_only_these_names("named"),
    "not_named": jax.checkpoint_policies.save_anything_except_these_names("named"),
}


@dataclass(frozen=True, repr=False)
class Jit(Node):
    x: Node

    def value(self, env):
        return jax.jit(lambda: self.x.value(env))()


@dataclass(frozen=True, repr=False)
class Remat(Node):
    x: Node
    policy: str = "nothing"
    prevent_cse: bool = True

    def value(self, env):
        return jax.checkpoint(lambda: self.x.value(env), policy=POLICIES[self.policy], prevent_cse=self.prevent_cse)()


@dataclass(frozen=True, repr=False)
class Switch(Node):
    """`cond` of two branches, `switch` of more."""

    at: Node
    branches: tuple[Node, ...]

    def value(self, env):
        at = jnp.asarray(self.at.value(env), jnp.int32) % len(self.branches)
        branches = [lambda x=x: x.value(env) for x in self.branches]
        return lax.cond(at == 0, *branches) if len(branches) == 2 else lax.switch(at, branches)


@dataclass(frozen=True, repr=False)
class Loop(Node):
    """A carry that changes `length` times; the body sees it, one layer of every stack, and the iteration.

    how: the stacks are sliced by "scan" (also "reversed", and "unrolled" by two), or by index in a scan ("indexed"),
    a `fori_loop` ("fori") or Python ("python").
    """

    name: str
    how: str
    length: int
    stacks: tuple[Node, ...]
    carry: Node
    body: Node

    def value(self, env):
        stacks = [stack.value(env) for stack in self.stacks]

        def layer(carry, i, layers):
            return self.body.value(env.bind(**{self.name: carry, self.name + "i": i}, **_named(self.name, layers)))

        def sliced(carry, i):
            return layer(carry, i, [stack[i] for stack in stacks])

        carry, numbers = self.carry.value(env), jnp.arange(self.length)
        if self.how == "python":
            for i in range(self.length):
                carry = sliced(carry, i)
            return carry
        if self.how == "fori":
            return lax.fori_loop(0, self.length, lambda i, carry: sliced(carry, i), carry)
        if self.how == "indexed":
            return lax.scan(lambda carry, i: (sliced(carry, i), None), carry, numbers)[0]
        options = {"reversed": {"reverse": True}, "unrolled": {"unroll": 2}}.get(self.how, {})
        return lax.scan(lambda carry, xs: (layer(carry, *xs), None), carry, (numbers, stacks), **options)[0]


@dataclass(frozen=True, repr=False)
class Map(Node):
    """A body applied to every layer of the stacks, stacked again along the first dim. how: "scan", "map" or "vmap".

    dim: where the layers are, of the first stack (0 unless it is "vmap").
    """

    name: str
    how: str
    stacks: tuple[Node, ...]
    body: Node
    dim: int = 0

    def value(self, env):
        stacks = [stack.value(env) for stack in self.stacks]

        def layer(*layers):
            return self.body.value(env.bind(**_named(self.name, layers)))

        if self.how == "vmap":
            return jax.vmap(layer, in_axes=(self.dim, *(0,) * (len(stacks) - 1)))(*stacks)
        if self.how == "map":
            return lax.map(lambda layers: layer(*layers), stacks)
        return lax.scan(lambda _, layers: (None, layer(*layers)), None, stacks)[1]


@dataclass(frozen=True, repr=False)
class Each(Node):
    """A body applied to each example by itself, by `vmap` or `lax.map`. It sees the example's integer."""

    name: str
    how: str
    inputs: tuple[Node, ...]
    body: Node

    def value(self, env):
        def one(args):
            ids, inputs = args
            return self.body.value(env.bind(**{self.name + "i": ids}, **_named(self.name, inputs)))

        args = env.batch["ids"], [x.value(env) for x in self.inputs]
        return jax.vmap(one)(args) if self.how == "vmap" else lax.map(one, args)


@dataclass(frozen=True, repr=False)
class While(Node):
    """Up to three iterations, of which no gradient is taken."""

    name: str
    times: Node
    carry: Node
    body: Node

    def value(self, env):
        env = env.stopped()
        times = jnp.asarray(self.times.value(env), jnp.int32) % 4
        result = lax.while_loop(
            lambda state: state[0] < times,
            lambda state: (state[0] + 1, self.body.value(env.bind(**{self.name: state[1]}))),
            (jnp.zeros((), jnp.int32), self.carry.value(env)),
        )
        return lax.stop_gradient(result[1])


@dataclass(frozen=True, repr=False)
class Custom(Node):
    """A function of its inputs alone, whose custom rule ("vjp" or "jvp") doubles its derivative, on purpose."""

    name: str
    rule: str
    inputs: tuple[Node, ...]
    body: Node

    def value(self, env):
        def plain(*inputs):
            return self.body.value(Env({}, {}, _named(self.name, inputs)))

        if self.rule == "vjp":
            function = jax.custom_vjp(plain)
            function.defvjp(lambda *xs: (plain(*xs), xs), lambda xs, g: _twice(jax.vjp(plain, *xs)[1](g)))
        else:
            function = jax.custom_jvp(plain)

            @function.defjvp
            def _(primals, tangents):
                y, dy = jax.jvp(plain, primals, tangents)
                return y, _twice(dy)

        return function(*(x.value(env) for x in self.inputs))


@dataclass(frozen=True, repr=False)
class Gradient(Node):
    """The gradient of a sum with respect to a variable in it, inside the loss."""

    name: str
    x: Node
    body: Node

    def value(self, env):
        return jax.grad(lambda x: jnp.sum(jnp.sin(self.body.value(env.bind(**{self.name: x})))))(self.x.value(env))


def _named(name: str, values: Any) -> dict[str, Any]:
    return {f"{name}x{i}": value for i, value in enumerate(values)}


def _twice(tree: Any) -> Any:
    return jax.tree.map(lambda x: 2 * x, tree)
