"""The doctor's report: a line a fact, findings with their mends, and nothing changed."""

from __future__ import annotations

if __name__ == "__main__":  # before the imports below, which this Python may lack
    from _standalone import main

    main(__file__)

from collections.abc import Sequence
from dataclasses import replace

import pytest
from spark_facts import GIVEN, WANTED, docker, interfaces, rank, roce, survey, text

from launcher.doctor import Checks, Report, kernel_signs, report
from launcher.facts import batch
from launcher.facts.base import Missing
from launcher.facts.care import Care, CareFact
from launcher.facts.kernel import KernelLog, KernelLogFact
from launcher.facts.probes import PingFact, ReadSpeed
from launcher.findings import Finding
from launcher.link import Link, find
from launcher.nodes.local import LocalNode
from launcher.preflight import check
from launcher.survey import Probe, Survey

LOG = KernelLogFact().parse(text("kernel-log.txt"))
CALM = KernelLog("journal", ())


def ping(link: Link) -> list[Probe]:
    said = PingFact("enp1s0f1np1", "10.0.0.2", 9000).parse(text("ping-ok.txt"))
    return [
        Probe(head, worker, said)
        for head, worker in zip(link.head.rails, link.worker.rails, strict=True)
    ]


GOOD = Checks(ping, lambda node: CALM, lambda node: ReadSpeed(1 << 30, 0.2))


def told(
    head: Survey | None = None,
    worker: Survey | None = None,
    checks: Checks = GOOD,
    extra: Sequence[Finding] = (),
) -> Report:
    head, worker = head or survey("head"), worker or survey("worker")
    link, findings = find(WANTED, head, worker)

    def findings_of(probes: Sequence[Probe]) -> list[Finding]:
        return [*extra, *check(GIVEN, head, worker, link, findings, probes)]

    return report(GIVEN, head, worker, link, findings_of, checks)


def test_two_healthy_nodes() -> None:
    found = told()
    assert found.code == 0 and found.verdict == "nothing would stop a start"
    assert {line.kind for line in found.lines} == {"ok"}
    rows = "\n".join(found.rows())
    for part in (
        "head: Ubuntu 24.04.3 LTS, DGX OS 7.2.3, kernel 6.14.0-1013-nvidia, aarch64",
        "worker: NVIDIA GB10, driver 580.95.05",
        "head: 28.3.3 (overlay2), 0 containers run",
        "116.0 GiB of 121.7 GiB available",
        "enp1s0f1np1 10.0.0.1/24, MTU 9000, 200 Gbit/s, rocep1s0f1 port 1, RoCE v2 GID index 3",
        "9000 bytes unsplit from enp1s0f1np1 to 10.0.0.2 in 0.391 ms",
        "5.4 GB/s past the page cache",
        "no sign of trouble",
        "none is there",
        "a rank needs 110.1 GiB available",
    ):
        assert part in rows, part


def test_what_would_stop_a_start_makes_the_exit_status() -> None:
    found = told(survey("head", roce=roce("head-ipv6-at-3")))
    assert found.code == 1 and found.verdict == "1 thing would stop a start"
    rows = found.rows()
    at = next(n for n, row in enumerate(rows) if row.startswith("wrong  link"))
    assert "no RoCE v2 GID for 10.0.0.1" in rows[at]
    assert rows[at + 1].startswith(" " * 18 + "needed: ")
    assert rows[at + 2].startswith(" " * 18 + "mend: ")


def test_warnings_do_not() -> None:
    found = told(worker=survey("worker", docker=docker(version="27.0.3")))
    assert found.code == 0
    assert found.verdict == "nothing would stop a start, and 1 worth a look"


def test_a_shifted_index_is_a_hint() -> None:
    head = survey("head", roce=roce("head-privacy-5"), interfaces=interfaces("head-privacy"))
    (line,) = told(head).of("warn")
    assert "a stable-privacy IPv6 address shifts it" in line.text
    assert "ipv6.addr-gen-mode eui64" in line.more[1]


def test_a_narrow_link() -> None:
    devices = tuple(replace(each, pcie_width="1") for each in roce("head"))
    head = survey("head", speeds={"enp1s0f1np1": 25000}, roce=devices)
    lines = [line.text for line in told(head).of("warn")]
    assert any("has come up at 25 Gbit/s" in line for line in lines)
    assert any("has 1 PCIe lanes" in line for line in lines)


def test_rails_whose_indices_differ() -> None:
    head = survey("head", interfaces=interfaces("head-two-rails"), roce=roce("head-two-rails"))
    worker = survey(
        "worker", interfaces=interfaces("worker-two-rails"), roce=roce("worker-two-rails")
    )
    rows = "\n".join(told(head, worker).rows())
    assert "NCCL finds each by its address" in rows
    assert "roceP2p1s0f0 port 1, RoCE v2 GID index 5" in rows


def test_a_pair_that_serves() -> None:
    found = told(
        survey("head", docker=docker(rank("head"))), survey("worker", docker=docker(rank("worker")))
    )
    assert found.code == 0
    assert any("both ranks run, launch ab12" in line.text for line in found.lines)


def test_signs_in_the_kernel_log() -> None:
    found = kernel_signs("head", LOG)
    assert all(each.level == "warn" for each in found)
    rows = [each.found for each in found]
    assert any(
        "NV_ERR_NO_MEMORY), 2× since this boot; the last: 2026-11-20T09:14" in r for r in rows
    )
    assert any("a fatal PCIe error, 2× in the boot before this" in row for row in rows)
    assert any("ConnectX-7's driver reported errors, 1×" in row for row in rows)
    # A link goes down once while the other node boots, and AER corrects what it can.
    assert not any("went down" in row or "corrected" in row for row in rows)


def test_a_kernel_log_that_may_not_be_read() -> None:
    for log in (Missing("no answer"), KernelLog("", ())):
        (finding,) = kernel_signs("worker", log)
        assert finding.level == "warn" and "adm,systemd-journal" in finding.mend


def test_a_slow_disk_and_one_that_was_not_measured() -> None:
    slow = replace(GOOD, reads=lambda node: ReadSpeed(1 << 30, 4.0))
    assert len(told(checks=slow).of("warn")) == 2
    none = replace(GOOD, reads=lambda node: Missing("Permission denied"))
    assert "Permission denied" in told(checks=none).of("warn")[0].text
    assert told(checks=Checks()).code == 0


def test_a_lost_node_is_reported_with_the_other() -> None:
    lost = Finding("worker: connection refused", "ssh", "start sshd", topic="node")
    gone = {
        name: Missing("connection refused")
        for name in ("identity", "clock", "memory", "interfaces", "speeds", "roce", "listening",
                     "devices", "disks", "model", "engram", "gpus", "apps", "docker")
    }  # fmt: skip
    asked: list[str] = []

    def log(node: str) -> KernelLog:
        asked.append(node)
        return CALM

    worker = survey("worker", lost=lost, **gone)
    found = told(worker=worker, checks=replace(GOOD, log=log))
    assert found.code == 1 and [line.text for line in found.of("wrong")] == [lost.found]
    assert asked == ["head"]
    assert any(line.text.startswith("head: NVIDIA GB10") for line in found.lines)


def test_findings_of_others_are_part_of_it() -> None:
    extra = Finding("rsync over ssh failed", "rsync on the worker", "sudo apt install rsync")
    found = told(extra=[extra])
    assert found.code == 1 and "rsync over ssh failed" in found.of("wrong")[0].text


# ---- memory care ----

CARE = Care(True, False, True, True, "3.12.3", "core", 0)


def cared(care: Care | Missing, guard: bool = False) -> Report:
    return told(checks=replace(GOOD, care=lambda node: care, guard=guard))


def test_how_a_job_beside_the_pair_is_bounded_is_told() -> None:
    rows = "\n".join(cared(CARE).rows())
    assert "head: a heavy job beside the pair" in rows and "worker: a heavy job" in rows
    assert "sudo systemd-run --scope -p MemoryMax=2G <job>" in rows
    assert cared(CARE).verdict == "nothing would stop a start"
    user = "\n".join(cared(replace(CARE, scope_user=True)).rows())
    assert "systemd-run --user --scope -p MemoryMax=2G <job>" in user
    none = "\n".join(cared(replace(CARE, scope=False)).rows())
    assert "ulimit -v" in none and "there is no systemd-run" in none


@pytest.mark.parametrize(
    ("care", "guard", "said"),
    [
        (replace(CARE, sudo=False), False, "sudo asks for a password"),
        (replace(CARE, pressure=False), False, "psi=1"),
        (replace(CARE, shm=3 << 30), False, "3.0 GiB lie in /dev/shm"),
        (replace(CARE, python="3.10.12"), True, "python3 is 3.10.12"),
        (replace(CARE, python=""), True, "python3 is not there"),
        (replace(CARE, killers=("earlyoom",)), False, "earlyoom may end a rank"),
        (Missing("no answer within 10 s"), False, "no answer within 10 s"),
    ],
)
def test_what_memory_care_lacks_is_a_warning(care: Care | Missing, guard: bool, said: str) -> None:
    found = cared(care, guard)
    assert found.code == 0 and said in "\n".join(found.rows())
    assert {line.topic for line in found.of("warn")} == {"memory"}


def test_an_old_python_is_no_matter_without_the_guard() -> None:
    assert not cared(replace(CARE, python="")).of("warn")


SAID = """scope
pressure
python 3.12.3
core |/usr/share/apport/apport %p
shm 1048576
killer systemd-oomd
"""


def test_memory_care_is_read() -> None:
    found = CareFact().parse(SAID)
    assert found == Care(
        True, False, False, True, "3.12.3", "|/usr/share/apport/apport %p", 1 << 30,
        ("systemd-oomd",),
    )  # fmt: skip
    assert CareFact().parse("python \ncore core\nshm \n").python == ""
    with pytest.raises(ValueError, match="core_pattern"):
        CareFact().parse("")
    here = batch.one(LocalNode(), CareFact())
    assert isinstance(here, Care) and here.core
