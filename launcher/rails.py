"""One node's end of the link: its interface, the HCA behind it, and the GID in use. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from launcher.facts.base import Missing
from launcher.facts.interfaces import Address, Interface
from launcher.facts.roce import V2, Device, Gid, Port
from launcher.findings import Finding

TOPIC = "link"


@dataclass(frozen=True)
class Side:
    """What the user asked of one node's end of the link; empty: to be found."""

    address: str
    interfaces: tuple[str, ...] = ()
    hcas: tuple[str, ...] = ()
    gid: int | None = None
    prefix: Literal["HEAD", "WORKER"] = "HEAD"  # of the names of its settings
    gid_key: str = ""  # the setting that `gid` comes from


@dataclass(frozen=True)
class Rail:
    """One end of one cable."""

    interface: str
    address: str
    prefix: int
    mtu: int
    hca: str
    port: int
    gid_index: int


class NodeFacts(Protocol):
    """A Survey, as far as the link needs it."""

    @property
    def name(self) -> str: ...

    @property
    def interfaces(self) -> tuple[Interface, ...] | Missing: ...

    @property
    def roce(self) -> tuple[Device, ...] | Missing: ...


def addresses(interfaces: tuple[Interface, ...]) -> str:
    """For a reader: which interface has which IPv4 addresses."""
    told = [
        f"{each.name} {', '.join(map(str, each.ipv4))}{'' if each.up else ' (down)'}"
        for each in interfaces
        if each.ipv4
    ]
    return "; ".join(told) or "none has an IPv4 address"


# ---- the interface ----


def carrier(
    side: Side, who: str, interfaces: tuple[Interface, ...] | Missing
) -> tuple[Interface, Address] | Finding:
    key = f"{side.prefix}_IP"
    if isinstance(interfaces, Missing):
        return finding(
            f"the network interfaces of {who} are not known: {interfaces.reason}",
            f"an answer of `ip -j addr`, to see where {key} is",
            "sudo apt install iproute2, then run the same command again",
        )
    for each in interfaces:
        address = each.with_ip(side.address)
        if address is None:
            continue
        if each.loopback:
            return finding(
                f"{key} {side.address} of {who} is an alias on {each.name}",
                "an address of the CX7 interface itself: NCCL cannot use a loopback alias and "
                "would hang",
                f"sudo ip addr del {address} dev {each.name}, and give an address of its own to "
                "the CX7 interface (ip -br addr lists them)",
            )
        return each, address
    wrong = (
        "run the launcher on the node that has it, or set HEAD_IP in .env to an address of this one"
        if side.prefix == "HEAD"
        else "set WORKER_IP in .env to its address on the CX7 link, or WORKER_SSH to the right host"
    )
    return finding(
        f"{key} {side.address} is no address of {who} ({addresses(interfaces)})",
        f"{key} on an interface of {who}",
        wrong,
    )


def main_interface(
    side: Side, facts: NodeFacts
) -> tuple[tuple[Interface, Address] | None, list[Finding]]:
    """The interface that carries the node's address, if it can be the link's."""
    found = carrier(side, f"the {facts.name}", facts.interfaces)
    if isinstance(found, Finding):
        return None, [found]
    interface, address = found
    findings = []
    assert not isinstance(facts.interfaces, Missing)
    if side.interfaces and interface.name not in side.interfaces:
        here = {each.name for each in facts.interfaces}
        absent = [name for name in side.interfaces if name not in here]
        named = ",".join(side.interfaces)
        why = f"{', '.join(absent)} does not exist there and " if absent else ""
        findings.append(
            finding(
                f"{side.prefix}_CX7_IF is {named}, but on the {facts.name} {why}"
                f"{side.prefix}_IP {side.address} is on {interface.name}",
                f"the interface that carries {side.prefix}_IP",
                f"leave {side.prefix}_CX7_IF empty (it is found at each start), or set it to "
                f"{interface.name}",
            )
        )
    if not interface.up:
        findings.append(
            finding(
                f"{interface.name} of the {facts.name}, which has {side.prefix}_IP, is down",
                "the CX7 interface up, with a carrier",
                f"check the cable at both ends; sudo ip link set {interface.name} up",
            )
        )
    return (None if findings else (interface, address)), findings


# ---- the HCA and its GID ----


def make_rail(
    side: Side, facts: NodeFacts, interface: Interface, address: Address
) -> tuple[Rail | None, list[Finding]]:
    chosen = _hca(side, facts, interface)
    if isinstance(chosen, Finding):
        return None, [chosen]
    device, port = chosen
    gid = _gid(side, facts, interface, address, device, port)
    if isinstance(gid, Finding):
        return None, [gid]
    return Rail(
        interface=interface.name,
        address=address.ip,
        prefix=address.prefix,
        mtu=interface.mtu,
        hca=device.name,
        port=port.number,
        gid_index=gid.index,
    ), []


def _hca(side: Side, facts: NodeFacts, interface: Interface) -> tuple[Device, Port] | Finding:
    key = f"{side.prefix}_CX7_IB"
    if isinstance(facts.roce, Missing):
        return finding(
            f"the RoCE devices of the {facts.name} are not known: {facts.roce.reason}",
            "a readable /sys/class/infiniband",
            f"ls /sys/class/infiniband on the {facts.name}",
        )
    if not facts.roce:
        return finding(
            f"the {facts.name} has no RoCE device in /sys/class/infiniband",
            "the HCA of its ConnectX-7",
            f"on the {facts.name}: sudo modprobe mlx5_ib, then ls /sys/class/infiniband",
        )
    behind = [(device, port) for device in facts.roce for port in device.ports_of(interface.name)]
    known = "; ".join(
        f"{device.name} of {', '.join(device.interfaces()) or 'no interface'}"
        for device in facts.roce
    )
    if side.hcas:
        absent = [name for name in side.hcas if name not in {d.name for d in facts.roce}]
        named = [each for each in behind if each[0].name in side.hcas]
        if absent or not named:
            what = (
                f"the {facts.name} has no {', '.join(absent)}"
                if absent
                else (f"none of them is behind {interface.name}, which has {side.prefix}_IP")
            )
            right = ", ".join(sorted({device.name for device, _ in behind}))
            return finding(
                f"{key} is {','.join(side.hcas)}, but {what} ({known})",
                f"the HCA behind {interface.name}",
                f"leave {key} empty (it is found at each start)"
                + (f", or set it to {right}" if right else ""),
            )
        behind = named
    if not behind:
        return finding(
            f"no RoCE device is behind {interface.name} of the {facts.name}, which has "
            f"{side.address} ({known})",
            f"{side.prefix}_IP on a ConnectX-7 interface",
            f"set {side.prefix}_IP in .env to an address of one of these interfaces, or give "
            "that address to one of them",
        )
    for device, port in behind:
        if port.active:
            return device, port
    device, port = behind[0]
    return finding(
        f"{device.name} port {port.number} of the {facts.name}, behind {interface.name}, is "
        f"{port.state or 'in an unknown state'}",
        "an ACTIVE port",
        f"check the cable at both ends; sudo ip link set {interface.name} up; rdma link show",
    )


def _gid(
    side: Side,
    facts: NodeFacts,
    interface: Interface,
    address: Address,
    device: Device,
    port: Port,
) -> Gid | Finding:
    right = [
        gid
        for gid in port.gids
        if gid.type == V2 and gid.ipv4 == address.ip and gid.ndev in ("", interface.name)
    ]
    where = f"{device.name} port {port.number} of the {facts.name}"
    table = f"its GID table:\n{port.table()}"
    needed = f'a GID of type "{V2}" with ::ffff:{address.ip} of {interface.name}'
    if not right:
        same = [gid for gid in port.gids if gid.ipv4 == address.ip]
        if same and all(gid.type and gid.type != V2 for gid in same):
            return finding(
                f"{where} has {address.ip} as RoCE v1 only; {table}",
                needed,
                "sudo modprobe -r mlx5_ib && sudo modprobe mlx5_ib brings the v2 slot back on a "
                "ConnectX-7; if not, update its firmware",
            )
        others = sorted({gid.ipv4 for gid in port.gids if gid.ipv4})
        why = f" (it has {', '.join(others)})" if others else ""
        return finding(
            f"{where} has no RoCE v2 GID for {address.ip}{why}; {table}",
            needed,
            f"on the {facts.name}: sudo ip addr del {address} dev {interface.name}; sudo ip addr "
            f"add {address} dev {interface.name}; wait a few seconds and run the same command "
            "again",
        )
    best = min(right, key=lambda gid: gid.index)
    if side.gid is None or any(gid.index == side.gid for gid in right):
        return best if side.gid is None else next(g for g in right if g.index == side.gid)
    slot = port.gid(side.gid)
    if slot is None:
        why = "is empty"
    elif slot.ipv4 == address.ip:
        why = f"is of type {slot.type or 'unknown'}"
    elif slot.ipv4:
        why = f"is for {slot.ipv4}"
    else:
        why = f"is IPv6 ({slot.address})"
    mend = (
        f"leave {side.gid_key or 'the GID index'} empty: the index is found at each start "
        f"(now {best.index})"
    )
    if best.index > 3 and interface.private_link_local:
        mend += f". To keep it from moving: {steady(interface.name)}"
    return finding(
        f"{side.gid_key or 'the GID index'} is {side.gid}, but that slot of {where} {why}; {table}",
        f"{needed}: it is at index {best.index}",
        mend,
    )


def steady(interface: str) -> str:
    """The command after which NetworkManager makes no second link-local address."""
    return (
        f'sudo nmcli connection modify "$(nmcli -g GENERAL.CONNECTION device show {interface})" '
        f"ipv6.addr-gen-mode eui64 && sudo nmcli device reapply {interface}"
    )


def finding(found: str, needed: str, mend: str) -> Finding:
    return Finding(found, needed, mend, topic=TOPIC)
