"""Two small tests that change nothing: a ping of full size, and a read past the page cache."""

from __future__ import annotations

import re
from dataclasses import dataclass

HEADERS = 28  # IPv4 and ICMP, in bytes


@dataclass(frozen=True)
class Pinged:
    size: int  # of the whole packet
    sent: int
    received: int
    rtt: float | None  # milliseconds, the least
    mtu: int | None  # what a hop said it can carry
    said: str  # its complaint

    @property
    def ok(self) -> bool:
        return self.sent > 0 and self.received > 0


@dataclass(frozen=True)
class PingFact:
    """A few packets that may not be split, out of one interface."""

    interface: str
    address: str
    mtu: int
    count: int = 2
    key: str = "ping"
    takes_paths: bool = False

    @property
    def argv(self) -> tuple[str, ...]:
        return (
            "ping", "-n", "-q", "-c", str(self.count), "-i", "0.2", "-W", "1", "-M", "do",
            "-s", str(self.mtu - HEADERS), "-I", self.interface, self.address,
        )  # fmt: skip

    def parse(self, text: str) -> Pinged:
        counts = re.search(r"(\d+) packets transmitted, (\d+) (?:packets )?received", text)
        if counts is None:
            said = [row for row in text.splitlines() if row.strip()]
            raise ValueError(said[-1] if said else "ping said nothing")
        rtt = re.search(r"= ([0-9.]+)/", text)
        hop = re.search(r"mtu ?= ?(\d+)", text)
        complaint = next(
            (
                row.strip()
                for row in text.splitlines()
                if re.search(r"[Mm]essage too long|Frag needed|[Uu]nreachable|error", row)
                and "packets transmitted" not in row
            ),
            "",
        )
        return Pinged(
            size=self.mtu,
            sent=int(counts[1]),
            received=int(counts[2]),
            rtt=float(rtt[1]) if rtt else None,
            mtu=int(hop[1]) if hop else None,
            said=complaint,
        )


@dataclass(frozen=True)
class ReadSpeed:
    bytes: int
    seconds: float

    @property
    def rate(self) -> float:
        return self.bytes / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class ReadSpeedFact:
    """Reads the begin of a file that is there anyway; its path is one word of the argv."""

    path: str
    blocks: int = 64  # of 16 MiB
    key: str = "read_speed"
    takes_paths: bool = False

    @property
    def argv(self) -> tuple[str, ...]:
        return (
            "env", "LC_ALL=C", "dd", f"if={self.path}", "of=/dev/null", "bs=16M",
            f"count={self.blocks}", "iflag=direct",
        )  # fmt: skip

    def parse(self, text: str) -> ReadSpeed:
        match = re.search(r"(\d+) bytes.*copied, ([0-9.e+-]+) s", text)
        if match is None:
            said = [row for row in text.splitlines() if row.strip()]
            raise ValueError(said[0] if said else "dd said nothing")
        return ReadSpeed(int(match[1]), float(match[2]))
