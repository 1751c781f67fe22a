"""All rules at once."""

from __future__ import annotations

from collections.abc import Sequence

from launcher.findings import Finding, Level
from launcher.link import Link
from launcher.preflight import link as linking
from launcher.preflight.given import Given
from launcher.preflight.memory import memory
from launcher.preflight.nodes import abilities, image, parity
from launcher.preflight.pair import containers, standing
from launcher.preflight.places import disks, ports
from launcher.preflight.tuned import tuned
from launcher.preflight.weights import packs, weights
from launcher.survey import Probe, Survey


def check(
    given: Given,
    head: Survey,
    worker: Survey,
    link: Link | None,
    link_findings: Sequence[Finding],
    probes: Sequence[Probe] = (),
    *,
    half_up: Level = "warn",
) -> list[Finding]:
    """Everything that stands in the way of a start, or should be known before it.

    ``link`` and ``link_findings`` are what `link.find` returned. A node that could not be asked is
    one finding, not one for each of its facts.
    """
    lost = [each.lost for each in (head, worker) if each.lost is not None]
    asked = [each for each in (head, worker) if each.lost is None]
    findings: list[Finding] = list(lost)
    for survey in asked:
        findings += abilities(survey)
    if lost:
        for survey in asked:
            findings += disks(given, survey)
        return findings
    pair = standing(given.owner, head, worker)
    findings += link_findings
    if link is not None:
        found = linking.mtu(link)
        findings += found
        # Unequal MTUs are told already: the ping can only say so again.
        if not any(each.level == "wrong" for each in found):
            findings += linking.dont_fragment(probes)
    findings += parity(head, worker)
    findings += image(given, head, worker)
    findings += weights(head, worker, given.weights_needed)
    findings += [*packs(head), *packs(worker)]
    findings += tuned(head, worker)
    findings += containers(given, head, worker, half_up)
    findings += ports(given, pair, head)
    findings += memory(given, pair, head, worker)
    for survey in asked:
        findings += disks(given, survey)
    return findings
