"""RoCE devices as sysfs tells of them: the tree a node shows under /sys/class/infiniband. Pure.

As the kernel does it: class/infiniband holds links only, a GID slot is a line of eight groups, an
empty slot is all zeros, and its type cannot be read (EINVAL).
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

V1, V2 = "IB/RoCE v1", "RoCE v2"
SLOTS = 12  # a ConnectX-7 has 255; the empty ones teach nothing more
EMPTY = ":".join(["0000"] * 8)


@dataclass(frozen=True)
class Gid:
    gid: str
    type: str
    ndev: str

    @classmethod
    def of(cls, address: str, ndev: str, kind: str = V2) -> Gid:
        """The GID of an address: an IPv4 one is mapped into IPv6."""
        parsed = ipaddress.ip_address(address)
        if isinstance(parsed, ipaddress.IPv4Address):
            parsed = ipaddress.IPv6Address(f"::ffff:{address}")
        return cls(parsed.exploded, kind, ndev)


# A table for an address, an interface and its MAC; several follow below.
Table = Callable[[str, str, str], dict[int, Gid]]


@dataclass(frozen=True)
class Device:
    name: str
    ndev: str
    pci: str
    gids: Mapping[int, Gid] = field(default_factory=dict)
    state: str = "4: ACTIVE"

    def files(self) -> Iterator[tuple[str, str]]:
        """Path below the device and content, of all that can be read."""
        port = "ports/1"
        yield "node_type", "1: CA"
        yield "fw_ver", "28.45.4028"
        yield f"{port}/state", self.state
        yield f"{port}/phys_state", "5: LinkUp" if self.state[0] == "4" else "3: Disabled"
        yield f"{port}/link_layer", "Ethernet"
        yield f"{port}/rate", "200 Gb/sec (4X HDR)" if self.state[0] == "4" else "10 Gb/sec (1X)"
        for slot in range(SLOTS):
            entry = self.gids.get(slot)
            yield f"{port}/gids/{slot}", entry.gid if entry else EMPTY
            if entry:
                yield f"{port}/gid_attrs/types/{slot}", entry.type
                yield f"{port}/gid_attrs/ndevs/{slot}", entry.ndev

    def unreadable(self) -> Iterator[str]:
        """Paths of files that are there, but that answer EINVAL."""
        for slot in set(range(SLOTS)) - set(self.gids):
            for name in ("types", "ndevs"):
                yield f"ports/1/gid_attrs/{name}/{slot}"


def table(address: str, ndev: str, mac: str) -> dict[int, Gid]:
    """What a freshly started ConnectX-7 with one IPv4 address has: index 3 is the wanted one."""
    local = link_local(mac)
    return {
        0: Gid.of(local, ndev, V1),
        1: Gid.of(local, ndev, V2),
        2: Gid.of(address, ndev, V1),
        3: Gid.of(address, ndev, V2),
    }


def drifted(address: str, ndev: str, mac: str) -> dict[int, Gid]:
    """After interface events: slot 2 and 3 were given up, the address came back two later."""
    fresh = table(address, ndev, mac)
    return {0: fresh[0], 1: fresh[1], 4: fresh[2], 5: fresh[3]}


def private(address: str, ndev: str, mac: str) -> dict[int, Gid]:
    """With an IPv6 stable-privacy address, as NetworkManager adds: it has taken 2 and 3."""
    fresh, extra = table(address, ndev, mac), "fe80::5aa2:e1ff:fe01:203"
    return {
        0: fresh[0],
        1: fresh[1],
        2: Gid.of(extra, ndev, V1),
        3: Gid.of(extra, ndev, V2),
        4: fresh[2],
        5: fresh[3],
    }


def without_ipv4(address: str, ndev: str, mac: str) -> dict[int, Gid]:
    """The address is not there yet: slots 2 and 3 are empty."""
    fresh = table(address, ndev, mac)
    return {0: fresh[0], 1: fresh[1]}


def first_version(address: str, ndev: str, mac: str) -> dict[int, Gid]:
    """The address has a GID, but of RoCE v1 only."""
    fresh = table(address, ndev, mac)
    return {0: fresh[0], 1: fresh[1], 2: fresh[2]}


def link_local(mac: str) -> str:
    octets = [int(part, 16) for part in mac.split(":")]
    octets[0] ^= 2
    whole = [*octets[:3], 0xFF, 0xFE, *octets[3:]]
    groups = [f"{whole[i]:02x}{whole[i + 1]:02x}" for i in range(0, 8, 2)]
    return "fe80::" + ":".join(groups)
