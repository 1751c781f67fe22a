"""The ConnectX-7 link between the nodes, found from the facts of both. Pure.

Nothing is assumed: the interface is the one that carries the node's address, the HCA the one whose
GIDs name that interface, the GID index the slot of type "RoCE v2" that holds ::ffff:<address>. What
the user set is verified against the same facts, not trusted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from launcher.facts.base import Missing
from launcher.facts.interfaces import Address, Interface
from launcher.findings import Finding
from launcher.rails import (
    NodeFacts,
    Rail,
    Side,
    addresses,
    finding,
    main_interface,
    make_rail,
)
from launcher.settings.values import Settings

__all__ = ["Link", "NodeFacts", "NodeLink", "Rail", "Side", "Wanted", "find"]


@dataclass(frozen=True)
class Wanted:
    head: Side
    worker: Side
    rails: str = "auto"  # auto, 1, 2

    @classmethod
    def of(cls, settings: Settings) -> Wanted:
        def side(prefix: Literal["HEAD", "WORKER"]) -> Side:
            gid, key = settings.maybe_int(f"{prefix}_GID"), f"{prefix}_GID"
            if gid is None:
                gid, key = settings.maybe_int("NCCL_IB_GID_INDEX"), "NCCL_IB_GID_INDEX"
            return Side(
                address=settings.text(f"{prefix}_IP"),
                interfaces=_names(settings.text(f"{prefix}_CX7_IF")),
                hcas=_names(settings.text(f"{prefix}_CX7_IB")),
                gid=gid,
                prefix=prefix,
                gid_key="" if gid is None else key,
            )

        return cls(side("HEAD"), side("WORKER"), settings.text("CX7_RAILS"))


@dataclass(frozen=True)
class NodeLink:
    """A node's ends; the first rail carries HEAD_IP or WORKER_IP."""

    rails: tuple[Rail, ...]

    @property
    def interface(self) -> str:
        return self.rails[0].interface

    @property
    def address(self) -> str:
        return self.rails[0].address

    @property
    def prefix(self) -> int:
        return self.rails[0].prefix

    @property
    def mtu(self) -> int:
        return self.rails[0].mtu

    @property
    def interfaces(self) -> tuple[str, ...]:
        return tuple(rail.interface for rail in self.rails)

    @property
    def hcas(self) -> tuple[str, ...]:
        return tuple(rail.hca for rail in self.rails)

    @property
    def gid_index(self) -> int | None:
        """None where the rails' differ: NCCL has one index for all HCAs, and then finds its own."""
        indices = {rail.gid_index for rail in self.rails}
        return indices.pop() if len(indices) == 1 else None


@dataclass(frozen=True)
class Link:
    head: NodeLink
    worker: NodeLink


def find(wanted: Wanted, head: NodeFacts, worker: NodeFacts) -> tuple[Link | None, list[Finding]]:
    """The link, or None with all that stands in its way."""
    findings: list[Finding] = []
    if wanted.head.address == wanted.worker.address:
        findings.append(
            finding(
                f"HEAD_IP and WORKER_IP are both {wanted.head.address}",
                "two addresses, one of each node",
                "set WORKER_IP in .env to the worker's address on the CX7 link",
            )
        )
        return None, findings
    ends = []
    rails = []
    for side, facts in ((wanted.head, head), (wanted.worker, worker)):
        end, found = main_interface(side, facts)
        findings += found
        ends.append(end)
        rail = None
        if end is not None:
            rail, found = make_rail(side, facts, *end)
            findings += found
        rails.append(rail)
    if ends[0] and ends[1] and not _together(ends[0][1], ends[1][1]):
        (head_if, head_at), (worker_if, worker_at) = ends[0], ends[1]
        findings.append(
            finding(
                f"HEAD_IP is {head_at} on {head_if.name} and WORKER_IP is {worker_at} on "
                f"{worker_if.name}: they are not in one network",
                "both addresses in the same IPv4 network, with the same prefix length",
                "give both interfaces addresses of one network, as 10.0.0.1/24 and 10.0.0.2/24",
            )
        )
    if rails[0] is None or rails[1] is None or findings:
        return None, findings
    second, found = _second(wanted, head, worker, (rails[0], rails[1]))
    if found:
        return None, found
    more = () if second is None else (second,)
    return Link(
        NodeLink((rails[0], *(pair[0] for pair in more))),
        NodeLink((rails[1], *(pair[1] for pair in more))),
    ), []


def _second(
    wanted: Wanted, head: NodeFacts, worker: NodeFacts, first: tuple[Rail, Rail]
) -> tuple[tuple[Rail, Rail] | None, list[Finding]]:
    named = max(len(wanted.head.interfaces), len(wanted.worker.interfaces))
    asked = named > 1 or len(wanted.head.hcas) > 1 or len(wanted.worker.hcas) > 1
    if asked and wanted.rails == "1":
        return None, [
            finding(
                "CX7_RAILS is 1, but two interfaces or two HCAs are set for the link",
                "one rail, or two",
                "set CX7_RAILS=2, or name one interface and one HCA a node, or none",
            )
        ]
    # A single name that somebody set is a choice of one rail.
    chosen = any((wanted.head.interfaces, wanted.worker.interfaces, wanted.head.hcas,
                  wanted.worker.hcas))  # fmt: skip
    if wanted.rails == "1" or (wanted.rails == "auto" and chosen and not asked):
        return None, []
    reasons: list[str] = []
    pairs = []
    for head_end in _ends(wanted.head, head, first[0], reasons):
        for worker_end in _ends(wanted.worker, worker, first[1], reasons):
            if not _together(head_end[1], worker_end[1]):
                continue
            if head_end[0].mtu != worker_end[0].mtu:
                reasons.append(
                    f"{head_end[0].name} has MTU {head_end[0].mtu}, {worker_end[0].name} of the "
                    f"worker {worker_end[0].mtu}"
                )
                continue
            rails = []
            for side, facts, end in (
                (wanted.head, head, head_end),
                (wanted.worker, worker, worker_end),
            ):
                rail, found = make_rail(side, facts, *end)
                reasons += [each.found for each in found]
                rails.append(rail)
            if rails[0] is not None and rails[1] is not None:
                pairs.append((rails[0], rails[1]))
    if pairs:
        return min(pairs, key=lambda pair: _likeness(first, pair)), []
    if wanted.rails == "auto" and not asked:
        return None, []
    interfaces = "\n".join(
        f"  {facts.name}: {addresses(facts.interfaces)}"
        for facts in (head, worker)
        if not isinstance(facts.interfaces, Missing)
    )
    why = "".join(f"\n  {reason}" for reason in dict.fromkeys(reasons))
    return None, [
        finding(
            f"two rails are asked for, but there is one:\n{interfaces}{why}",
            "on both nodes a second CX7 interface with an active HCA, an RoCE v2 GID and the same "
            "MTU, its addresses in an IPv4 network of their own",
            "give the second ports addresses, such as 10.0.1.1/24 and 10.0.1.2/24, or set "
            "CX7_RAILS=1",
        )
    ]


def _ends(
    side: Side, facts: NodeFacts, first: Rail, reasons: list[str]
) -> Iterator[tuple[Interface, Address]]:
    """Interfaces and addresses that could be the second rail's end."""
    if isinstance(facts.interfaces, Missing) or isinstance(facts.roce, Missing):
        return
    taken = Address(first.address, first.prefix, 4).network
    for each in facts.interfaces:
        if each.loopback or each.name == first.interface:
            continue
        if side.interfaces and len(side.interfaces) > 1 and each.name not in side.interfaces:
            continue
        behind = [device for device in facts.roce if device.ports_of(each.name)]
        if not behind:
            continue
        if not each.up:
            reasons.append(f"{each.name} of the {facts.name} is down")
            continue
        for address in each.ipv4:
            if address.network.overlaps(taken):
                # Two ports in one network: the kernel would answer for both from either.
                reasons.append(
                    f"{each.name} {address} of the {facts.name} is in the network of "
                    f"{first.interface}"
                )
                continue
            yield each, address


def _likeness(first: tuple[Rail, Rail], pair: tuple[Rail, Rail]) -> tuple[int, str, str]:
    """Smaller is likelier: the two halves of one cage are f1np1 of one and of the other PCIe."""

    def tail(name: str) -> str:
        return name[name.rfind("s0f") :] if "s0f" in name else name

    same = sum(tail(a.interface) == tail(b.interface) for a, b in zip(first, pair, strict=True))
    return -same, pair[0].interface, pair[1].interface


def _together(one: Address, other: Address) -> bool:
    return one.network == other.network and one.ip != other.ip and one.prefix < 32


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())
