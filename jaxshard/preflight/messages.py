"""The messages of a compiled program: what each collective sends at once, between whom, and how long that takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from jaxshard.compiled.groups import Groups
from jaxshard.compiled.hlo import Computation, Instruction, Module
from jaxshard.compiled.traffic import collectives_of, members_of
from jaxshard.contract import Collective
from jaxshard.preflight.device import Device


@dataclass(frozen=True, kw_only=True)
class Message:
    """What one collective sends each time it runs.

    sent: kind, axes, leaves and the bytes of all buffers together, whatever their dtypes. groups: the devices, by
    number in the mesh, that send to each other; (source, target) pairs of a permute.
    """

    sent: Collective
    groups: Groups


def message_of(computation: Computation, one: Instruction, mesh: Mapping[str, int]) -> Message | None:
    """The message of an instruction, or of its start; None if it is no collective, or one within groups of one device.

    mesh: size by axis name.
    """
    found = collectives_of(one, computation, mesh)
    if not found:
        return None
    largest = max(found, key=lambda each: each.bytes)
    sent = replace(largest, purpose="", bytes=sum(each.bytes for each in found), count=1)
    return Message(sent=sent, groups=members_of(one, mesh))


def messages_in(module: Module, computation: Computation, one: Instruction, mesh: Mapping[str, int]) -> list[Message]:
    """The messages that start with an instruction: its own, or of what it wraps; a small one can be inside a fusion."""
    wraps = one.opcode in ("fusion", "fusion-start", "async-start")
    places = [(inner, x) for inner in module.called(one) for x in inner.instructions.values()] if wraps else []
    found = (message_of(inner, x, mesh) for inner, x in places or [(computation, one)])
    return [message for message in found if message]


def seconds(message: Message, device: Device, per_node: int) -> float:
    """How long a message takes that has its links to itself.

    per_node: so many consecutive devices make a node. Where a group spans nodes the work is done on two levels at once:
    inside each node among its members, and between nodes, over a network that the groups of a node share. The slower
    level counts.
    """
    nodes = [Counter(member // per_node for member in group) for group in message.groups]
    if message.sent.kind == "permute":
        return _permute_seconds(message, nodes, device, per_node)
    sharing: Counter[int] = Counter()
    for group in nodes:
        sharing.update(group.keys() if len(group) > 1 else ())
    whole, local, spanned = message.sent, max(max(group.values()) for group in nodes), max(map(len, nodes))
    inside, between = replace(whole, devices=local).wire_bytes, replace(whole, devices=spanned).wire_bytes
    if whole.kind == "all_to_all":
        # Each device sends every other its own piece: nothing is gained by members that share a node.
        inside = whole.bytes * (local - 1) // whole.devices
        between = whole.bytes * local * (whole.devices - local) // whole.devices
    slowest = inside / device.inside.bus_bandwidth(whole.kind, whole.bytes) if local > 1 else 0.0
    if spanned > 1:
        # Messages of several groups fill the network as one larger message does.
        together = max(sharing.values())
        network = device.between.bus_bandwidth(whole.kind, whole.bytes * together)
        slowest = max(slowest, between * together / network)
    return slowest


def _permute_seconds(message: Message, nodes: list[Counter[int]], device: Device, per_node: int) -> float:
    size = message.sent.bytes
    leaving = Counter(pair[0] // per_node for pair, both in zip(message.groups, nodes, strict=True) if len(both) > 1)
    inside = any(len(both) == 1 for both in nodes) * size / device.inside.bus_bandwidth("permute", size)
    most = size * max(leaving.values(), default=0)
    return max(inside, most / device.between.bus_bandwidth("permute", most)) if most else inside
