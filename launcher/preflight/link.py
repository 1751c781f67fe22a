"""The link's rules beyond finding it: equal MTUs, and packets of that size that arrive."""

from __future__ import annotations

from collections.abc import Sequence

from launcher.facts.base import Missing
from launcher.findings import Finding, warning
from launcher.link import Link
from launcher.survey import Probe

TOPIC = "link"
JUMBO = 9000


def mtu(link: Link) -> list[Finding]:
    findings = []
    for head, worker in zip(link.head.rails, link.worker.rails, strict=True):
        if head.mtu != worker.mtu:
            low = ("head", head) if head.mtu < worker.mtu else ("worker", worker)
            high = max(head.mtu, worker.mtu)
            findings.append(
                Finding(
                    f"{head.interface} of the head has MTU {head.mtu}, {worker.interface} of the "
                    f"worker {worker.mtu}",
                    "the same MTU at both ends of the cable",
                    f"on the {low[0]}: sudo ip link set {low[1].interface} mtu {high}, and in its "
                    "netplan or NetworkManager profile so that it stays",
                    topic=TOPIC,
                )
            )
        elif head.mtu < JUMBO:
            findings.append(
                warning(
                    f"{head.interface} and {worker.interface} have MTU {head.mtu}",
                    f"MTU {JUMBO}: the link is slower with smaller packets",
                    f"on both nodes: sudo ip link set INTERFACE mtu {JUMBO}, and in its netplan or "
                    "NetworkManager profile so that it stays",
                    TOPIC,
                )
            )
    return findings


def dont_fragment(probes: Sequence[Probe]) -> list[Finding]:
    """What the pings of full size said."""
    findings = []
    for probe in probes:
        head, worker, full = probe.head, probe.worker, probe.full
        way = f"from {head.interface} to {worker.address}"
        if isinstance(full, Missing):
            findings.append(
                warning(
                    f"the link could not be tried {way}: {full.reason}",
                    "an answered ping",
                    f"on the head: ping -c 2 -I {head.interface} {worker.address}",
                    TOPIC,
                )
            )
            continue
        if full.ok:
            continue
        small = probe.small
        if small is not None and not isinstance(small, Missing) and small.ok:
            hop = f" (a hop carries {full.mtu})" if full.mtu else ""
            said = f": {full.said}" if full.said else ""
            findings.append(
                Finding(
                    f"small packets arrive {way}, those of {full.size} bytes do not{hop}{said}",
                    f"packets of the whole MTU of {full.size}, unsplit",
                    "set the same MTU at both ends and on the switch between them; then: ping -M "
                    f"do -s {full.size - 28} -I {head.interface} {worker.address}",
                    topic=TOPIC,
                )
            )
        else:
            said = f" ({full.said})" if full.said else ""
            findings.append(
                Finding(
                    f"no ping is answered {way}{said}",
                    "a link on which both nodes reach each other",
                    f"check the cable and both addresses: ip -br addr; ping -I {head.interface} "
                    f"{worker.address}",
                    topic=TOPIC,
                )
            )
    return findings
