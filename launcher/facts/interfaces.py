"""Network interfaces with their addresses, from `ip -j addr`."""

from __future__ import annotations

import ipaddress
import json
from dataclasses import dataclass
from typing import Any

from launcher.facts.base import shell


@dataclass(frozen=True)
class Address:
    """An address of an interface; ``ip`` without the prefix."""

    ip: str
    prefix: int
    version: int
    scope: str = "global"

    @property
    def network(self) -> ipaddress.IPv4Network | ipaddress.IPv6Network:
        return ipaddress.ip_interface(f"{self.ip}/{self.prefix}").network

    def __str__(self) -> str:
        return f"{self.ip}/{self.prefix}"


@dataclass(frozen=True)
class Interface:
    name: str
    mtu: int
    flags: frozenset[str]
    state: str  # UP, DOWN, UNKNOWN
    mac: str
    addresses: tuple[Address, ...]

    @property
    def loopback(self) -> bool:
        return "LOOPBACK" in self.flags

    @property
    def up(self) -> bool:
        """Switched on and with a carrier."""
        return "UP" in self.flags and "LOWER_UP" in self.flags and self.state != "DOWN"

    @property
    def ipv4(self) -> tuple[Address, ...]:
        return tuple(each for each in self.addresses if each.version == 4)

    def with_ip(self, ip: str) -> Address | None:
        return next((each for each in self.addresses if each.ip == ip), None)

    @property
    def private_link_local(self) -> bool:
        """A link-local IPv6 address that is not made from the MAC (stable privacy).

        Beside the one that is, it takes GID slots and so shifts those of the IPv4 address.
        """
        made = eui64(self.mac)
        return made is not None and any(
            each.version == 6
            and ipaddress.IPv6Address(each.ip).is_link_local
            and ipaddress.IPv6Address(each.ip) != made
            for each in self.addresses
        )


@dataclass(frozen=True)
class InterfacesFact:
    key: str = "interfaces"
    argv: tuple[str, ...] = ("ip", "-j", "addr")
    takes_paths: bool = False

    def parse(self, text: str) -> tuple[Interface, ...]:
        found = json.loads(text)
        if not isinstance(found, list):
            raise ValueError("`ip -j addr` did not print a list")
        # Old versions of ip leave empty objects where a filter hides an interface.
        return tuple(_interface(each) for each in found if each)


@dataclass(frozen=True)
class SpeedsFact:
    """Mbit/s of each interface that knows it."""

    key: str = "speeds"
    argv: tuple[str, ...] = shell("grep -sH '' /sys/class/net/*/speed; true")
    takes_paths: bool = False

    def parse(self, text: str) -> dict[str, int]:
        found = {}
        for row in text.splitlines():
            path, _, value = row.partition(":")
            parts = path.split("/")
            if len(parts) == 6 and value.strip().isdigit():
                found[parts[4]] = int(value)
        return found


def eui64(mac: str) -> ipaddress.IPv6Address | None:
    """The link-local address made from a MAC."""
    try:
        raw = bytes.fromhex(mac.replace(":", ""))
    except ValueError:
        return None
    if len(raw) != 6:
        return None
    half = bytes([raw[0] ^ 2, raw[1], raw[2], 0xFF, 0xFE, *raw[3:]])
    return ipaddress.IPv6Address(bytes([0xFE, 0x80, 0, 0, 0, 0, 0, 0]) + half)


def _interface(raw: dict[str, Any]) -> Interface:
    try:
        return Interface(
            # A veth or VLAN is listed as name@peer by some versions.
            name=str(raw["ifname"]).partition("@")[0],
            mtu=int(raw["mtu"]),
            flags=frozenset(raw.get("flags", ())),
            state=str(raw.get("operstate", "UNKNOWN")),
            mac=str(raw.get("address", "")),
            addresses=tuple(
                Address(
                    str(each["local"]),
                    int(each["prefixlen"]),
                    4 if each["family"] == "inet" else 6,
                    str(each.get("scope", "global")),
                )
                for each in raw.get("addr_info", ())
                if each.get("local") and each.get("family") in ("inet", "inet6")
            ),
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"`ip -j addr` lacks {error}") from None
