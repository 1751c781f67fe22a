"""Ports of the head and disks of both nodes."""

from __future__ import annotations

import shlex
from collections import defaultdict

from launcher.facts.base import Missing, gib
from launcher.facts.disks import Disk
from launcher.findings import Finding, warning
from launcher.preflight.given import Given, Need
from launcher.preflight.pair import Standing
from launcher.rails import addresses
from launcher.survey import Survey

VOLATILE = ("tmpfs", "ramfs")


def ports(given: Given, pair: Standing, head: Survey) -> list[Finding]:
    """The API's and the rendezvous' port, unless our own rank has them."""
    if isinstance(head.listening, Missing):
        return [
            Finding(
                f"the ports of the head are not known: {head.listening.reason}",
                f"ports {given.port} and {given.master_port} free",
                "on the head: ss -ltn",
                topic="ports",
            )
        ]
    findings = _bind(given, head)
    ours = pair.head if pair.head is not None and pair.head.running else None
    for key, option, host, port, what in (
        ("PORT", "--port", given.bind, given.port, "the API"),
        ("MASTER_PORT", "--master-port", "0.0.0.0", given.master_port, "the ranks' rendezvous"),
    ):
        if ours is not None and ours.option(option) == str(port):
            continue
        holders = [each for each in head.listening if each.blocks(host, port)]
        if holders:
            where = ", ".join(f"{each.address} by uid {each.uid}" for each in holders)
            findings.append(
                Finding(
                    f"port {port} of the head is taken (on {where})",
                    f"port {port} free for {what}",
                    f"sudo ss -ltnp 'sport = :{port}' shows who has it; end it, or set another "
                    f"{key} in .env",
                    topic="ports",
                )
            )
    return findings


def _bind(given: Given, head: Survey) -> list[Finding]:
    """The API's address must be the head's, or every one."""
    if given.bind == "0.0.0.0" or given.bind.startswith("127."):
        return []
    if isinstance(head.interfaces, Missing):
        return []
    if any(str(address.ip) == given.bind for each in head.interfaces for address in each.ipv4):
        return []
    return [
        Finding(
            f"BIND is {given.bind}, no address of the head ({addresses(head.interfaces)})",
            "127.0.0.1, 0.0.0.0 or an address of the head",
            "set BIND in .env",
            topic="ports",
        )
    ]


def disks(given: Given, survey: Survey) -> list[Finding]:
    """Room for what is still to be written; what is there already counts."""
    needs = given.needs(survey.name)
    if isinstance(survey.disks, Missing):
        if not needs:
            return []
        return [
            Finding(
                f"the disks of the {survey.name} are not known: {survey.disks.reason}",
                f"room at {', '.join(need.path for need in needs)}",
                f"on the {survey.name}: df -h",
                topic="disk",
            )
        ]
    findings = []
    shared: dict[str, list[tuple[Need, Disk]]] = defaultdict(list)
    for need in needs:
        disk = survey.disk(need.path)
        if isinstance(disk, Missing):
            findings.append(
                Finding(
                    f"the disk of {need.path} on the {survey.name} is not known: {disk.reason}",
                    f"room there for {need.what}",
                    f"on the {survey.name}: df -h {shlex.quote(need.path)}",
                    topic="disk",
                )
            )
            continue
        findings += _place(survey, need, disk)
        shared[disk.mount].append((need, disk))
    for mount, group in shared.items():
        missing = sum(need.missing for need, _ in group)
        free = group[0][1].free
        if free < missing:
            what = ", ".join(
                f"{gib(need.missing)} {need.what}" for need, _ in group if need.missing
            )
            findings.append(
                Finding(
                    f"the {survey.name} has {gib(free)} free on {mount}",
                    f"{gib(missing)} there: {what}",
                    f"free some space (docker system df; du -xh {shlex.quote(mount)} | sort -h | "
                    "tail), or set these paths to another disk",
                    topic="disk",
                )
            )
    return findings


def _place(survey: Survey, need: Need, disk: Disk) -> list[Finding]:
    findings = []
    if not disk.writable:
        identity = survey.identity
        user = "$USER" if isinstance(identity, Missing) else identity.user
        path = shlex.quote(need.path)
        findings.append(
            Finding(
                f"{user} may not write to {need.path} on the {survey.name}",
                f"a place for {need.what} that belongs to {user}",
                f"on the {survey.name}: sudo mkdir -p {path} && sudo chown {user} {path}",
                topic="disk",
            )
        )
    if disk.fstype in VOLATILE:
        findings.append(
            warning(
                f"{need.path} on the {survey.name} is on {disk.fstype}: it is memory, and gone "
                "after a reboot",
                f"a disk for {need.what}",
                "set that path to a disk",
                "disk",
            )
        )
    return findings
