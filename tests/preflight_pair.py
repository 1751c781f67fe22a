"""Two healthy Sparks for the rules of the preflight, and what those find of a change."""

from __future__ import annotations

from typing import Any

from spark_facts import GIVEN, WANTED, docker, rank, survey

from launcher.findings import Finding
from launcher.link import find
from launcher.preflight import Given, check
from launcher.survey import Survey

HEAD, WORKER = survey("head"), survey("worker")
GIB = 1 << 30
UP = (
    survey("head", docker=docker(rank("head"))),
    survey("worker", docker=docker(rank("worker"))),
)


def checked(
    head: Survey = HEAD, worker: Survey = WORKER, given: Given = GIVEN, **more: Any
) -> list[Finding]:
    link, found = find(WANTED, head, worker)
    return check(given, head, worker, link, found, **more)


def only(
    head: Survey = HEAD, worker: Survey = WORKER, given: Given = GIVEN, level: str = "wrong"
) -> Finding:
    findings = checked(head, worker, given)
    assert len(findings) == 1 and findings[0].level == level, findings
    return findings[0]
