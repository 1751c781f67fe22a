"""The doctor's report: the preflight and what else is worth knowing of both nodes. Pure.

It changes nothing. What has to be tried comes in as functions, so that this only tells.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from launcher import doctor_memory
from launcher.clock import span
from launcher.facts.base import Missing, gib
from launcher.facts.care import Care
from launcher.facts.docker import Image
from launcher.facts.kernel import KernelLog
from launcher.facts.probes import ReadSpeed
from launcher.findings import Finding, warning
from launcher.link import Link
from launcher.preflight.given import Given
from launcher.preflight.memory import needed, per_rank
from launcher.preflight.pair import standing
from launcher.rails import Rail, addresses, steady
from launcher.survey import Probe, Survey

Kind = Literal["ok", "warn", "wrong"]
SLOW_DISK = 1.0e9  # bytes a second; the NVMe of a Spark reads several times that
LANES = 4
NARROW = 100_000  # Mbit/s of a CX7 port


@dataclass(frozen=True)
class Checks:
    """What is tried on the machines; each is asked once and changes nothing.

    reads  (node's name, bytes read past the page cache there) of a file that is there anyway.
    """

    probes: Callable[[Link], Sequence[Probe]] = lambda link: ()
    log: Callable[[str], KernelLog | Missing | None] = lambda node: None
    reads: Callable[[str], ReadSpeed | Missing | None] = lambda node: None
    care: Callable[[str], Care | Missing | None] = lambda node: None
    guard: bool = False  # DSV41_MEM_GUARD=1


@dataclass(frozen=True)
class Line:
    kind: Kind
    topic: str
    text: str
    more: tuple[str, ...] = ()  # what was needed, and how to mend it


@dataclass(frozen=True)
class Report:
    lines: tuple[Line, ...] = field(default=())

    def of(self, kind: Kind) -> tuple[Line, ...]:
        return tuple(line for line in self.lines if line.kind == kind)

    @property
    def code(self) -> int:
        """Exit status: 1 when something would stop a start."""
        return 1 if self.of("wrong") else 0

    @property
    def verdict(self) -> str:
        wrong, warn = len(self.of("wrong")), len(self.of("warn"))
        also = f", and {warn} worth a look" if warn else ""
        if wrong:
            return f"{wrong} thing{'s' if wrong > 1 else ''} would stop a start{also}"
        return f"nothing would stop a start{also}"

    def rows(self) -> list[str]:
        """Plain text, a line a fact; a finding has its mend below it."""
        rows = []
        for line in self.lines:
            text = line.text.replace("\n", "\n" + " " * 18)
            rows.append(f"{line.kind:<5}  {line.topic:<10} {text}")
            rows += [f"{'':<18}{each.replace(chr(10), chr(10) + ' ' * 18)}" for each in line.more]
        return rows


def report(
    given: Given,
    head: Survey,
    worker: Survey,
    link: Link | None,
    findings_of: Callable[[Sequence[Probe]], list[Finding]],
    checks: Checks,
) -> Report:
    """``findings_of``: all findings, given what the link's probes said."""
    probes = checks.probes(link) if link is not None else ()
    findings = [*findings_of(probes)]
    lines = [line for survey in (head, worker) for line in node(survey)]
    if link is not None:
        lines += _link(link, head, worker, probes)
        findings += _link_hints(link, head, worker)
    lines += _pair(given, head, worker)
    for survey in (head, worker):
        if survey.lost is not None:
            continue
        speed = checks.reads(survey.name)
        if speed is not None:
            lines.append(_disk_speed(survey.name, speed))
        care = checks.care(survey.name)
        if care is not None:
            findings += doctor_memory.found(survey.name, care, checks.guard)
            if isinstance(care, Missing):
                lines.append(Line("warn", "memory", f"{survey.name}: not asked: {care.reason}"))
            else:
                lines.append(Line("ok", "memory", doctor_memory.advice(survey.name, care)))
        log = checks.log(survey.name)
        if log is not None:
            found = kernel_signs(survey.name, log)
            findings += found
            if not found:
                lines.append(Line("ok", "kernel log", f"{survey.name}: no sign of trouble"))
    lines += [of(finding) for finding in findings]
    return Report(tuple(lines))


def of(finding: Finding) -> Line:
    return Line(
        finding.level,
        finding.topic or "preflight",
        finding.found,
        (f"needed: {finding.needed}", f"mend: {finding.mend}"),
    )


def node(survey: Survey) -> list[Line]:
    """What a node is. Facts that could not be had are left to the rules that need them."""
    who = survey.name
    lines: list[Line] = []

    def say(topic: str, text: str) -> None:
        lines.append(Line("ok", topic, f"{who}: {text}"))

    identity = survey.identity
    if not isinstance(identity, Missing):
        system = identity.system + (f", DGX OS {identity.dgx}" if identity.dgx else "")
        say("node", f"{identity.hostname}, user {identity.user}, up {span(identity.uptime)}")
        say("system", f"{system or 'unknown'}, kernel {identity.kernel}, {identity.machine}")
    if not isinstance(survey.gpus, Missing):
        for gpu in survey.gpus:
            say("gpu", f"{gpu.name}, driver {gpu.driver}")
    if not isinstance(survey.docker, Missing):
        docker = survey.docker
        running = sum(each.running for each in docker.containers)
        say("docker", f"{docker.version} ({docker.store}), {running} containers run")
        if isinstance(docker.image, Image):
            layers = len(docker.image.layers)
            stamp = f", recipe {docker.image.stamp[:12]}" if docker.image.stamp else ""
            platform = f"{docker.image.os}/{docker.image.architecture}"
            say("image", f"{platform}, {layers} layers{stamp}")
        elif docker.image is None:
            say("image", "none of that name")
    if not isinstance(survey.memory, Missing):
        memory = survey.memory
        say(
            "memory",
            f"{gib(memory.available)} of {gib(memory.total)} available, {gib(memory.free)} free",
        )
    if not isinstance(survey.disks, Missing):
        mounts = {disk.mount: disk for disk in survey.disks}
        for mount, disk in mounts.items():
            say("disk", f"{gib(disk.free)} of {gib(disk.size)} free on {mount} ({disk.fstype})")
    if not isinstance(survey.interfaces, Missing):
        say("addresses", addresses(survey.interfaces))
    return lines


def _link(link: Link, head: Survey, worker: Survey, probes: Sequence[Probe]) -> list[Line]:
    lines = []
    for survey, end in ((head, link.head), (worker, link.worker)):
        for rail in end.rails:
            lines.append(Line("ok", "link", f"{survey.name}: {_rail(rail, survey)}"))
    if len(link.head.rails) > 1 and None in (link.head.gid_index, link.worker.gid_index):
        lines.append(
            Line("ok", "link", "the rails' GID indices differ: NCCL finds each by its address")
        )
    for probe in probes:
        if not isinstance(probe.full, Missing) and probe.full.ok:
            rtt = "" if probe.full.rtt is None else f" in {probe.full.rtt:g} ms"
            lines.append(
                Line(
                    "ok",
                    "link",
                    f"{probe.full.size} bytes unsplit from {probe.head.interface} to "
                    f"{probe.worker.address}{rtt}",
                )
            )
    return lines


def _rail(rail: Rail, survey: Survey) -> str:
    speed = "" if isinstance(survey.speeds, Missing) else survey.speeds.get(rail.interface, "")
    told = f"{rail.interface} {rail.address}/{rail.prefix}, MTU {rail.mtu}"
    if speed:
        told += f", {int(speed) // 1000} Gbit/s"
    told += f", {rail.hca} port {rail.port}, RoCE v2 GID index {rail.gid_index}"
    if not isinstance(survey.roce, Missing):
        device = next(each for each in survey.roce if each.name == rail.hca)
        if device.firmware:
            told += f", firmware {device.firmware}"
        if device.pcie_speed:
            told += f", {device.pcie_speed} x{device.pcie_width}"
    return told


def _link_hints(link: Link, head: Survey, worker: Survey) -> list[Finding]:
    """What works, but less well or less steadily than it could."""
    found = []
    for survey, end in ((head, link.head), (worker, link.worker)):
        if isinstance(survey.interfaces, Missing) or isinstance(survey.roce, Missing):
            continue
        for rail in end.rails:
            interface = next(each for each in survey.interfaces if each.name == rail.interface)
            if interface.private_link_local and rail.gid_index != 3:
                found.append(
                    warning(
                        f"the IPv4 GID of {rail.hca} on the {survey.name} is at index "
                        f"{rail.gid_index}: a stable-privacy IPv6 address shifts it",
                        "nothing for the pair: the index is found at each start",
                        f"so that it does not move, on the {survey.name}: {steady(rail.interface)}",
                        "link",
                    )
                )
            device = next(each for each in survey.roce if each.name == rail.hca)
            if device.pcie_width.isdigit() and int(device.pcie_width) < LANES:
                found.append(
                    warning(
                        f"{rail.hca} of the {survey.name} has {device.pcie_width} PCIe lanes",
                        f"{LANES} lanes, as a Spark gives each half of its ConnectX-7",
                        "shut both nodes down, unplug power and cable for a minute, start again",
                        "link",
                    )
                )
            speeds = {} if isinstance(survey.speeds, Missing) else survey.speeds
            if 0 < speeds.get(rail.interface, 0) < NARROW:
                found.append(
                    warning(
                        f"{rail.interface} of the {survey.name} has come up at "
                        f"{speeds[rail.interface] // 1000} Gbit/s",
                        "a cable for 200 Gbit/s (QSFP56 or QSFP112)",
                        "try another cable, or the other port",
                        "link",
                    )
                )
    return found


def _pair(given: Given, head: Survey, worker: Survey) -> list[Line]:
    if head.lost is not None or worker.lost is not None:
        return []
    pair = standing(given.owner, head, worker)
    told = {
        "absent": "none is there",
        "up": f"both ranks run, launch {pair.launch}",
        "ended": "its containers have ended",
    }
    lines = [Line("ok", "pair", told[pair.state])] if pair.state in told else []
    need = needed(given.margin, per_rank(head))
    lines.append(Line("ok", "memory", f"a rank needs {gib(need)} available before it starts"))
    return lines


def _disk_speed(who: str, speed: ReadSpeed | Missing) -> Line:
    if isinstance(speed, Missing):
        return Line("warn", "disk speed", f"{who}: not measured: {speed.reason}")
    told = f"{who}: {speed.rate / 1e9:.1f} GB/s past the page cache"
    if speed.rate < SLOW_DISK:
        return Line("warn", "disk speed", told, (f"needed: {SLOW_DISK / 1e9:g} GB/s or more",))
    return Line("ok", "disk speed", told)


# ---- the kernel's log ----

# Kind of sign -> what it means, what is needed, what to do.
_MEANINGS: dict[str, tuple[str, str, str]] = {
    "no-memory": (
        "the GPU's driver ran out of memory (NVRM NV_ERR_NO_MEMORY)",
        "a margin of memory: without it the whole node may freeze, and nothing is killed",
        "raise DSV41_BOOT_MARGIN_GIB, or lower KV_CACHE_MEMORY_BYTES or MAX_NUM_BATCHED_TOKENS; "
        "reboot the node if it was since this boot",
    ),
    "xid": (
        "the GPU's driver reported an error (Xid)",
        "no Xid",
        "nvidia-smi -q; look the number up in NVIDIA's list of Xid errors; reboot the node",
    ),
    "aer-fatal": (
        "a fatal PCIe error",
        "none: the ConnectX-7 behind it may be gone, and the node may hang",
        "shut the node down, unplug its power for a minute, update firmware: sudo fwupdmgr update",
    ),
    "aer": (
        "an uncorrected PCIe error",
        "none",
        "if it comes back: update firmware (sudo fwupdmgr update), reseat the cable",
    ),
    "mlx5": (
        "the ConnectX-7's driver reported errors",
        "none",
        "reseat the cable; update firmware; shut the node down and unplug its power for a minute",
    ),
    "link-down": (
        "the CX7 link went down and up",
        "a link that stays: its GIDs move when it does not",
        "reseat the cable at both ends",
    ),
    "lockup": (
        "processors or tasks were stuck",
        "none",
        "see the lines around it: sudo journalctl -k -b",
    ),
    "oom-kill": (
        "the kernel ended a process for want of memory",
        "memory beyond the pair's own",
        "see which it was: sudo journalctl -k | grep -i 'out of memory'",
    ),
}
_FLAPS = 5  # a link goes down a few times while both nodes boot
_CORRECTED = 100


def kernel_signs(who: str, log: KernelLog | Missing) -> list[Finding]:
    """Warnings: they tell of trouble that was, and stop no start."""
    if isinstance(log, Missing) or not log.source:
        why = f" ({log.reason})" if isinstance(log, Missing) else ""
        return [
            warning(
                f"the kernel log of the {who} may not be read{why}",
                "to look there for signs of trouble",
                f"on the {who}: sudo usermod -aG adm,systemd-journal $USER, then log in anew; or "
                "sudo dmesg | grep -E 'NVRM|AER|mlx5'",
                "kernel log",
            )
        ]
    found = []
    for kind, (what, needed_, mend) in _MEANINGS.items():
        for previous in (False, True):
            signs = log.of(kind, previous)
            if not signs or (kind == "link-down" and len(signs) <= _FLAPS):
                continue
            when = "in the boot before this" if previous else "since this boot"
            found.append(
                warning(
                    f"{who}: {what}, {len(signs)}× {when}; the last: {signs[-1].line[:200]}",
                    needed_,
                    mend,
                    "kernel log",
                )
            )
    if len(corrected := log.of("aer-corrected")) > _CORRECTED:
        found.append(
            warning(
                f"{who}: {len(corrected)} or more corrected PCIe errors since this boot",
                "a few",
                "reseat the cable; update firmware: sudo fwupdmgr update",
                "kernel log",
            )
        )
    return found
