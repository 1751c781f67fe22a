"""TCP ports that are listened on, from /proc/net/tcp and tcp6."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from launcher.facts.base import shell
from launcher.ports import LISTEN


@dataclass(frozen=True)
class Listening:
    address: str
    port: int
    uid: int

    @property
    def everywhere(self) -> bool:
        return ipaddress.ip_address(self.address).is_unspecified

    def blocks(self, host: str, port: int) -> bool:
        """Whether a server could not listen on host:port beside it."""
        if self.port != port:
            return False
        wide = self.everywhere or ipaddress.ip_address(host).is_unspecified
        return wide or self.address == host


@dataclass(frozen=True)
class PortsFact:
    key: str = "ports"
    argv: tuple[str, ...] = shell("cat /proc/net/tcp; cat /proc/net/tcp6 2>/dev/null; true")
    takes_paths: bool = False

    def parse(self, text: str) -> tuple[Listening, ...]:
        if "local_address" not in text:
            raise ValueError("/proc/net/tcp could not be read")
        found = set()
        for row in text.splitlines():
            fields = row.split()
            if len(fields) > 7 and fields[3] == LISTEN:
                host, _, port = fields[1].rpartition(":")
                found.add(Listening(_address(host), int(port, 16), int(fields[7])))
        return tuple(sorted(found, key=lambda each: (each.port, each.address)))


def _address(hexed: str) -> str:
    """The kernel prints the address as 32-bit words, here of little-endian machines."""
    words = [hexed[at : at + 8] for at in range(0, len(hexed), 8)]
    raw = b"".join(bytes.fromhex(word)[::-1] for word in words)
    full = ipaddress.ip_address(raw)
    if isinstance(full, ipaddress.IPv6Address) and full.ipv4_mapped is not None:
        return str(full.ipv4_mapped)
    return str(full)
