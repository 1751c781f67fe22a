"""RoCE devices with their ports and GID tables, from sysfs.

A GID index is a place in a table that the kernel fills as addresses come and go: it differs from
node to node, from device to device, and moves. So it is read at each start and never assumed.
"""

from __future__ import annotations

import ipaddress
import re
from collections import defaultdict
from dataclasses import dataclass

from launcher.facts.base import shell

V2 = "RoCE v2"
ROOT = "/sys/class/infiniband"
_PORT = re.compile(rf"^{ROOT}/([^/]+)/ports/(\d+)/([^:]+):(.*)$")
_DEVICE = re.compile(rf"^{ROOT}/([^/]+)/([^:]+):(.*)$")
_NET = re.compile(rf"^{ROOT}/([^/]+)/device/net/([^/]+)$")


@dataclass(frozen=True)
class Gid:
    index: int
    value: str  # as sysfs has it: eight groups of four hex digits
    type: str  # "IB/RoCE v1", "RoCE v2", or "" if it could not be read
    ndev: str

    @property
    def address(self) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
        full = ipaddress.IPv6Address(self.value)
        return full.ipv4_mapped or full

    @property
    def ipv4(self) -> str:
        """The IPv4 address it is mapped from, or ""."""
        found = self.address
        return str(found) if found.version == 4 else ""

    def __str__(self) -> str:
        shown = f"::ffff:{self.ipv4}" if self.ipv4 else str(self.address)
        return f"{self.index:>3}  {self.type or '?':<10}  {shown:<40} {self.ndev or '?'}"


@dataclass(frozen=True)
class Port:
    number: int
    state: str  # "ACTIVE", "DOWN", …
    rate: str = ""
    link_layer: str = ""
    gids: tuple[Gid, ...] = ()  # filled slots only

    @property
    def active(self) -> bool:
        return self.state == "ACTIVE"

    def gid(self, index: int) -> Gid | None:
        return next((each for each in self.gids if each.index == index), None)

    def table(self) -> str:
        """For a reader: the table as far as it is filled."""
        if not self.gids:
            return "  (no slot is filled)"
        head = f"  {'idx':>3}  {'type':<10}  {'gid':<40} interface"
        return "\n".join([head, *(f"  {gid}" for gid in self.gids)])


@dataclass(frozen=True)
class Device:
    """An HCA. Speeds as sysfs words them, "" where it does not say."""

    name: str
    ports: tuple[Port, ...]
    netdevs: tuple[str, ...] = ()
    firmware: str = ""
    pcie_speed: str = ""
    pcie_width: str = ""

    def interfaces(self) -> tuple[str, ...]:
        named = {gid.ndev for port in self.ports for gid in port.gids if gid.ndev}
        return tuple(sorted(named | set(self.netdevs)))

    def ports_of(self, interface: str) -> tuple[Port, ...]:
        """The ports behind a network interface."""
        named = tuple(p for p in self.ports if any(g.ndev == interface for g in p.gids))
        if named:
            return named
        # A port without any address has no GID that names its interface.
        return self.ports if interface in self.netdevs and len(self.ports) == 1 else ()


@dataclass(frozen=True)
class RoceFact:
    key: str = "roce"
    # One grep over all files: hundreds of slots a device would be hundreds of processes.
    argv: tuple[str, ...] = shell(
        f"grep -sH '' {ROOT}/*/fw_ver {ROOT}/*/device/current_link_speed "
        f"{ROOT}/*/device/current_link_width {ROOT}/*/ports/*/state {ROOT}/*/ports/*/rate "
        f"{ROOT}/*/ports/*/link_layer {ROOT}/*/ports/*/gids/* {ROOT}/*/ports/*/gid_attrs/types/* "
        f"{ROOT}/*/ports/*/gid_attrs/ndevs/* | "
        "grep -v ':0000:0000:0000:0000:0000:0000:0000:0000$'; "
        f'for f in {ROOT}/*/device/net/*; do [ -e "$f" ] && printf \'%s\\n\' "$f"; done; true'
    )
    takes_paths: bool = False

    def parse(self, text: str) -> tuple[Device, ...]:
        ports: dict[str, dict[int, dict[str, str]]] = defaultdict(lambda: defaultdict(dict))
        own: dict[str, dict[str, str]] = defaultdict(dict)
        nets: dict[str, set[str]] = defaultdict(set)
        for row in text.splitlines():
            if match := _PORT.match(row):
                ports[match[1]][int(match[2])][match[3]] = match[4].strip()
            elif match := _DEVICE.match(row):
                own[match[1]][match[2]] = match[3].strip()
            elif match := _NET.match(row):
                nets[match[1]].add(match[2])
        return tuple(
            Device(
                name=name,
                ports=tuple(_port(n, files) for n, files in sorted(ports[name].items())),
                netdevs=tuple(sorted(nets[name])),
                firmware=own[name].get("fw_ver", ""),
                pcie_speed=own[name].get("device/current_link_speed", ""),
                pcie_width=own[name].get("device/current_link_width", ""),
            )
            for name in sorted({*ports, *own, *nets})
        )


def _port(number: int, files: dict[str, str]) -> Port:
    gids = []
    for path, value in files.items():
        kind, _, index = path.rpartition("/")
        if kind != "gids" or not index.isdigit():
            continue
        try:
            empty = int(ipaddress.IPv6Address(value)) == 0
        except ValueError:
            continue
        if not empty:
            of = (files.get(f"gid_attrs/{what}/{index}", "") for what in ("types", "ndevs"))
            gids.append(Gid(int(index), value, *of))
    return Port(
        number=number,
        state=files.get("state", "").rpartition(":")[2].strip(),
        rate=files.get("rate", ""),
        link_layer=files.get("link_layer", ""),
        gids=tuple(sorted(gids, key=lambda gid: gid.index)),
    )
