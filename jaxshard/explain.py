"""What a step holds and sends, as a table: every leaf, where it lives and why, and every collective."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp

from jaxshard.compiler import options_for
from jaxshard.contract import Collective
from jaxshard.link import Transfer, gradient, gradients, host_bytes, hosted_leaves, link_bytes, transfers
from jaxshard.mesh import axis_sizes, platform_of
from jaxshard.setup import Setup
from jaxshard.specs import Leaf, bytes_per_device
from jaxshard.strategy import Placement, name_of
from jaxshard.update_traffic import update_collectives


@dataclass(frozen=True, kw_only=True)
class LeafRow:
    """One parameter: the placement of its three states, its bytes on a device, and why it stays whole if it does.

    host_bytes: that a device's host memory has of them. whole_costs: bytes per device that splitting it would save,
    over the states that the strategy splits.
    """

    leaf: Leaf
    params: str
    grads: str
    opt: str
    bytes_per_device: int
    host_bytes: int
    whole_costs: int


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """What a step holds and sends; ``str()`` prints it all.

    leaves: a row per parameter. bytes_per_device: by class (params, grads, opt, extra). contract: every collective of
    a step. host_bytes: what host memory holds for each device, by class. transfers: what passes the link between them
    in a step. offloaded: where that is updated, and why there. update: what the optimizer's update sends besides, as
    this compiler chose. options: XLA options of the target. left_out: those that its compiler does not know. device,
    moves: whose figures these are, and whether it sends or (the first device under `dp`) receives as well.
    """

    strategy: str
    mesh: dict[str, int]
    leaves: tuple[LeafRow, ...]
    bytes_per_device: dict[str, int]
    contract: tuple[Collective, ...]
    host_bytes: dict[str, int] = field(default_factory=dict)
    transfers: tuple[Transfer, ...] = ()
    offloaded: str = ""
    update: tuple[Collective, ...] = ()
    options: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    device: str = "each device"
    moves: str = "sent"

    @property
    def wire_bytes(self) -> int:
        """What each device sends in a step."""
        return sum(one.wire_bytes for one in (*self.contract, *self.update))

    def __str__(self) -> str:
        mesh = " x ".join(f"{axis}={size}" for axis, size in self.mesh.items())
        hosted = any(self.host_bytes.values())
        rows = [
            (
                row.leaf.path,
                f"{row.leaf.dtype}{list(row.leaf.shape)}",
                row.params,
                row.grads,
                row.opt,
                f"{row.bytes_per_device:,}",
                *([f"{row.host_bytes:,}"] if hosted else []),
                f"{row.leaf.whole_because} (+{row.whole_costs:,} B)" if row.whole_costs else "",
            )
            for row in self.leaves
        ]
        columns = ("B/device", "B/host") if hosted else ("B/device",)
        header = ("leaf", "shape", "params", "grads", "opt", *columns, "why whole")
        totals = [(name, f"{size:,} B") for name, size in self.bytes_per_device.items()]
        besides = sum(one.wire_bytes for one in self.update)
        parts = [
            f"{self.strategy} on {mesh}",
            table(header, rows),
            f"held by {self.device}:\n" + table((), totals),
            *(self._host() if hosted else []),
            f"{self.moves} by {self.device} in a step, {self.wire_bytes - besides:,} B:\n" + _sent(self.contract),
            f"the optimizer's update sends {besides:,} B more, because it is not elementwise; this compiler chose:\n"
            + _sent(self.update)
            if self.update
            else "the optimizer's update sends nothing",
        ]
        if self.options:
            parts.append("XLA options:\n" + table((), list(self.options.items())))
        if self.left_out:
            parts.append(
                "XLA options that this compiler does not know, left out:\n" + table((), list(self.left_out.items()))
            )
        return "\n\n".join(parts)

    def _host(self) -> list[str]:
        sizes = [(name, f"{size:,} B") for name, size in self.host_bytes.items() if size]
        over = link_bytes(self.transfers)
        rows = [
            (f"{one.count} x {one.state}", f"{one.bytes:,} B", one.direction.replace("_", " the "), one.leaf)
            for one in self.transfers
        ]
        return [
            f"held in host memory for {self.device}:\n" + table((), sizes),
            f"over the link in a step, {over['to_device']:,} B to the device and {over['to_host']:,} B to the host:\n"
            + table(("copies", "each", "direction", "of"), rows),
            self.offloaded,
        ]


def _sent(collectives: Iterable[Collective]) -> str:
    rows = [
        (
            f"{one.count} x {one.kind}",
            one.dtype,
            f"{one.bytes:,} B",
            " x ".join(one.axes),
            " > ".join(one.loops) or "-",
            f"{one.purpose} {one.leaf}".strip(),
            f"{one.wire_bytes:,} B",
        )
        for one in collectives
    ]
    return table(("collective", "dtype", "buffer", "over", "inside", "for", "on the wire"), rows)


def table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Rows in columns as wide as their widest cell."""
    if not rows:
        return "  (none)"
    lines = ([header] if header else []) + rows
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join("  " + "  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines)


def explain(made: Setup, contract: tuple[Collective, ...], left_out: Mapping[str, str]) -> Explanation:
    """Puts together what is known of a step. contract: what it sends. left_out: options its compiler does not know."""
    program = made.program
    options = options_for(program.strategy, platform_of(program.mesh), made.compiler_options)
    return Explanation(
        strategy=name_of(program.strategy),
        mesh=axis_sizes(program.mesh),
        leaves=tuple(_row(made, leaf) for leaf in jax.tree.leaves(program.layout)),
        bytes_per_device=held_bytes(made),
        contract=contract,
        host_bytes=host_bytes(made),
        transfers=transfers(made),
        offloaded=made.offloaded,
        update=update_collectives(made),
        options={name: value for name, value in options.items() if name not in left_out},
        left_out=dict(left_out),
        device="the first device" if program.strategy.params.devices == "first" else "each device",
        moves="sent and received" if program.strategy.params.devices == "first" else "sent",
    )


def _row(made: Setup, leaf: Leaf) -> LeafRow:
    program, strategy = made.program, made.program.strategy
    opt = [x for x in jax.tree.leaves(made.where.opt) if x.owner == leaf.path]
    waits = leaf.path in program.hosted_grads
    states = [(strategy.params, [leaf])] + (
        [(gradients(made), [] if waits else [_gradient(made, leaf)])] if leaf.trainable else []
    )
    states += [(strategy.opt, opt)]
    held = sum(bytes_per_device(leaves, placement, program.mesh) for placement, leaves in states)
    params, optimizer = hosted_leaves(made)
    hosted = bytes_per_device([x for x in opt if x.path in optimizer], strategy.opt, program.mesh)
    hosted += bytes_per_device([leaf] if leaf.path in params else [], strategy.params, program.mesh)
    pieces = program.pieces
    splits = [x.bytes for placement, leaves in states if placement.axes for x in leaves]
    return LeafRow(
        leaf=leaf,
        params=_where(leaf, strategy.params, leaf.path in params),
        grads=_where(leaf, gradients(made), waits) if leaf.trainable else "none",
        opt=_where(leaf, strategy.opt, any(x.path in optimizer for x in opt)) if opt else "none",
        bytes_per_device=held - hosted,
        host_bytes=hosted + bytes_per_device([gradient(made, leaf)] if waits else [], gradients(made), program.mesh),
        whole_costs=sum(size - size // pieces for size in splits) if leaf.dim is None else 0,
    )


def _gradient(made: Setup, leaf: Leaf) -> Leaf:
    """A leaf's gradient, in the dtype that microbatches are added up in."""
    is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
    return replace(leaf, dtype=jnp.dtype(made.program.precision.accumulate)) if is_float else leaf


def held_bytes(made: Setup) -> dict[str, int]:
    """What each device holds (for `dp` the first), in bytes by class; gradients as they are between the passes."""
    program, strategy = made.program, made.program.strategy
    here = [x for x in jax.tree.leaves(program.layout) if x.trainable and x.path not in program.hosted_grads]
    learning = [_gradient(made, leaf) for leaf in here]
    extra = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(made.extra))
    hosted = host_bytes(made)
    return {
        "params": bytes_per_device(jax.tree.leaves(program.layout), strategy.params, program.mesh) - hosted["params"],
        "grads": bytes_per_device(learning, gradients(made), program.mesh),
        "opt": bytes_per_device(jax.tree.leaves(made.where.opt), strategy.opt, program.mesh) - hosted["opt"],
        "extra": extra,
    }


def _where(leaf: Leaf, placement: Placement, hosted: bool = False) -> str:
    if leaf.dim is None or not placement.axes:
        place = str(Placement(devices=placement.devices))
    else:
        place = f"dim {leaf.dim} over {' x '.join(placement.axes)}"
    return f"{place}, host" if hosted else place
