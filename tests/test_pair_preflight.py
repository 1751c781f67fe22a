"""The rules that a pair must meet: each node, its image, containers and ports; the link."""

from __future__ import annotations

if __name__ == "__main__":  # before the imports below, which this Python may lack
    from _standalone import main

    main(__file__)

from dataclasses import replace
from pathlib import Path

import pytest
from preflight_pair import GIB, HEAD, UP, WORKER, checked, only
from settings_root import settings_of
from spark_facts import GIVEN, OWNER, WANTED, docker, interfaces, rank, survey, text

from launcher.errors import LauncherError
from launcher.facts.base import Missing
from launcher.facts.docker import Container, Image
from launcher.facts.gpu import GpuApp
from launcher.facts.ports import Listening
from launcher.facts.probes import PingFact
from launcher.facts.trees import Tree
from launcher.findings import Finding, refuse, warning, warnings
from launcher.link import find
from launcher.preflight import Given, check, standing
from launcher.preflight import link as linking
from launcher.survey import Probe, Survey


def test_two_healthy_nodes() -> None:
    assert checked() == []


def test_all_is_told_at_once() -> None:
    head = survey("head", gpus=Missing("nvidia-smi is not installed"), devices=())
    worker = survey("worker", docker=Missing("Permission denied"), model=Tree(exists=False))
    findings = checked(head, worker)
    assert len(findings) == 5
    with pytest.raises(LauncherError) as refused:
        refuse(findings)
    assert "5 things are in the way" in refused.value.found
    assert "usermod -aG docker" in refused.value.do_next


def test_warnings_stop_nothing() -> None:
    told = warning("a", "b", "c")
    refuse([told])
    assert warnings([told, Finding("x", "y", "z")]) == [told]


def test_a_node_that_is_lost_is_one_finding() -> None:
    lost = Finding("worker: not reachable", "a worker", "switch it on")
    gone = replace(WORKER, lost=lost, docker=Missing("x"), memory=Missing("x"))
    assert checked(worker=gone) == [lost]


# ---- each node ----


@pytest.mark.parametrize(
    ("reason", "mend"),
    [
        ("Permission denied", "usermod -aG docker"),
        ("Connection refused", "systemctl start docker"),
    ],
)
def test_docker_that_does_not_answer(reason: str, mend: str) -> None:
    assert mend in only(survey("head", docker=Missing(reason))).mend


def test_docker_that_is_not_installed() -> None:
    identity = HEAD.identity
    assert not isinstance(identity, Missing)
    bare = replace(identity, tools=())
    finding = only(survey("head", docker=Missing("no such file"), identity=bare))
    assert "install Docker" in finding.mend


def test_docker_without_gpus_is_refused() -> None:
    identity = HEAD.identity
    assert not isinstance(identity, Missing)
    head = survey("head", docker=docker(runtimes=("runc",)), identity=replace(identity, tools=()))
    assert "nvidia-container-toolkit" in only(head, level="wrong").mend
    # A hook on the PATH serves `--gpus` without a runtime of its own.
    assert checked(survey("head", docker=docker(runtimes=("runc",)))) == []


def test_devices() -> None:
    names = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/infiniband/rdma_cm")
    assert "uverbs" in only(survey("head", devices=names)).found


def test_a_kernel_that_is_known_to_fail() -> None:
    identity = HEAD.identity
    assert not isinstance(identity, Missing)
    bad = replace(identity, kernel="7.0.0-1019-nvidia")
    findings = checked(survey("head", identity=bad), survey("worker", identity=bad))
    assert [each.level for each in findings] == ["warn", "warn"]
    assert "kho=off" in findings[0].mend
    mended = replace(bad, cmdline="quiet kho=off")
    assert checked(survey("head", identity=mended), survey("worker", identity=mended)) == []


def test_parity_is_told_and_stops_nothing() -> None:
    worker = survey("worker", docker=docker(version="27.0.3"))
    finding = only(worker=worker, level="warn")
    assert finding.found == "Docker is 28.3.3 on the head and 27.0.3 on the worker"


@pytest.mark.parametrize(
    ("off", "said"), [(0.3, ""), (8.0, "8 s ahead of"), (-60.0, "60 s behind")]
)
def test_clocks(off: float, said: str) -> None:
    findings = checked(worker=survey("worker", clock=1000.1 + off))
    assert [said in each.found for each in findings] == ([True] if said else [])


def test_a_slow_answer_is_no_wrong_clock() -> None:
    """The node's moment lies somewhere between the question and the answer."""
    assert checked(worker=survey("worker", clock=1008.0, asked=(1000.0, 1009.0))) == []


# ---- image ----


def layers(*names: str, architecture: str = "arm64") -> Image:
    return Image("sha256:other-store", names, architecture, "linux")


def test_the_image_is_compared_by_its_layers() -> None:
    same = layers("sha256:01", "sha256:02", "sha256:03")
    assert checked(worker=survey("worker", docker=docker(image=same))) == []
    swapped = layers("sha256:01", "sha256:03", "sha256:02")
    finding = only(worker=survey("worker", docker=docker(image=swapped)))
    assert "the first 1 are equal" in finding.found


def test_the_image_is_missing_or_of_another_machine() -> None:
    assert "has no image" in only(worker=survey("worker", docker=docker(image=None))).found
    head = survey("head", docker=docker(image=layers("x", architecture="amd64")))
    findings = checked(head)
    assert "is for amd64" in findings[0].found and "differs" in findings[1].found


def test_flags_that_nobody_set_are_not_blamed_for_a_missing_image(tmp_path: Path) -> None:
    """`pack` and `share` need an image on both nodes, whatever the flags say."""
    none = {name: survey(name, docker=docker(image=None)) for name in ("head", "worker")}
    swapped = survey("worker", docker=docker(image=layers("sha256:03")))
    both = ("head", "worker")
    plain = replace(GIVEN, image_needed=both, image_flags={})
    for head, worker in ((none["head"], none["worker"]), (HEAD, swapped)):
        for each in checked(head, worker, plain):
            assert "./start.sh brings it first" in each.mend and "SKIP_" not in str(each), each
    of = Given.of(settings_of(tmp_path, "SKIP_BUILD=1\nSKIP_PULL=1\nSKIP_SHIP=1\n"), OWNER)
    assert of.image_needed == both
    flagged = replace(GIVEN, image_needed=both, image_flags=of.image_flags)
    one, other = checked(none["head"], none["worker"], flagged)
    assert "without SKIP_BUILD=1 and SKIP_PULL=1" in one.mend and "SKIP_SHIP=1" in other.mend
    assert "SKIP_SHIP=1 keep" in other.needed
    assert Given.of(settings_of(tmp_path), OWNER).image_flags == {}


# ---- containers ----


@pytest.mark.parametrize(
    ("head", "worker", "state"),
    [
        ([], [], "absent"),
        ([rank("head")], [rank("worker")], "up"),
        ([rank("head")], [], "half-up"),
        ([rank("head", "exited")], [rank("worker")], "half-up"),
        ([rank("head")], [rank("worker", launch="other")], "mixed"),
        ([rank("head", "exited")], [rank("worker", "exited")], "ended"),
        ([rank("head", owner="spark-2c1f:/elsewhere")], [], "absent"),
    ],
)
def test_how_the_pair_stands(head: list[Container], worker: list[Container], state: str) -> None:
    nodes = survey("head", docker=docker(*head)), survey("worker", docker=docker(*worker))
    assert standing(OWNER, *nodes).state == state


def test_a_half_up_pair_is_told_or_refused() -> None:
    worker = survey("worker", docker=docker(rank("worker", "exited")))
    finding = only(UP[0], worker, level="warn")
    assert "half of the pair is up" in finding.found and "is exited" in finding.found
    assert checked(UP[0], worker, half_up="wrong")[0].level == "wrong"


def test_a_half_up_pair_is_not_guessed_where_docker_is_silent() -> None:
    findings = checked(UP[0], survey("worker", docker=Missing("timed out")))
    assert ["timed out" in each.found for each in findings] == [True]


def test_a_pair_of_another_checkout_is_never_removed() -> None:
    other = rank("head", owner="spark-2c1f:/home/spark/other kit")
    finding = only(survey("head", docker=docker(other)))
    assert "belongs to spark-2c1f:/home/spark/other kit" in finding.found
    assert "cd '/home/spark/other kit' && ./start.sh stop" in finding.mend
    named = replace(other, name="another")
    assert "a rank of another checkout" in only(survey("head", docker=docker(named))).found


def test_a_foreign_container_with_our_name() -> None:
    foreign = Container("f", "dsv41-exl3-worker", "img", "exited", {})
    finding = only(worker=survey("worker", docker=docker(foreign)))
    assert "is not of this launcher" in finding.found and "docker rm -f" in finding.mend
    assert "CONTAINER_WORKER" in finding.mend


def test_gpu_containers_of_others() -> None:
    other = Container("g", "ollama", "ollama:latest", "running", {}, gpu=True)
    assert "GPU container of others: ollama" in only(survey("head", docker=docker(other))).found
    idle = replace(other, state="exited")
    assert checked(survey("head", docker=docker(idle, replace(other, gpu=False)))) == []


def test_gpu_processes_outside_containers() -> None:
    large = GpuApp(77, "python3", 3 * GIB, "ann")
    assert "pid 77 of ann computes" in only(survey("head", apps=(large,))).found
    small = replace(large, memory=None)
    assert "pid 77" in only(survey("head", apps=(small,)), level="warn").found
    ours = replace(large, container="id-head")
    assert checked(survey("head", docker=docker(rank("head")), apps=(ours,)), UP[1]) == []


# ---- ports ----


def test_ports() -> None:
    taken = (Listening("127.0.0.1", 8888, 1000), Listening("10.0.0.1", 29521, 0))
    findings = checked(survey("head", listening=taken))
    assert [each.topic for each in findings] == ["ports", "ports"]
    assert "port 8888 of the head is taken (on 127.0.0.1 by uid 1000)" in findings[0].found
    assert "another MASTER_PORT" in findings[1].mend


def test_ports_that_our_own_rank_holds() -> None:
    taken = (Listening("127.0.0.1", 8888, 0), Listening("10.0.0.1", 29521, 0))
    head = survey("head", listening=taken, docker=docker(rank("head")))
    assert checked(head, UP[1]) == []
    # It serves on 8888: who holds 9999 is another.
    other = replace(GIVEN, port=9999)
    elsewhere = survey("head", listening=(Listening("0.0.0.0", 9999, 0),), docker=head.docker)
    assert "port 9999" in only(elsewhere, UP[1], other).found


def test_ports_do_not_matter_on_the_worker_nor_on_other_addresses() -> None:
    assert checked(worker=survey("worker", listening=(Listening("0.0.0.0", 8888, 0),))) == []
    assert checked(survey("head", listening=(Listening("10.9.9.9", 8888, 0),))) == []


# ---- the link ----


def probe(full: str, small: str | None = None) -> Probe:
    link, _ = find(WANTED, HEAD, WORKER)
    assert link is not None
    fact = PingFact("enp1s0f1np1", "10.0.0.2", 9000)
    answers = [None if name is None else fact.parse(text(name)) for name in (full, small)]
    assert answers[0] is not None
    return Probe(link.head.rails[0], link.worker.rails[0], answers[0], answers[1])


def test_unequal_mtus_are_told_once() -> None:
    worker = survey("worker", interfaces=interfaces("worker-mtu1500"))
    findings = checked(worker=worker, probes=[probe("ping-too-long.txt", "ping-ok.txt")])
    (finding,) = findings
    assert "has MTU 9000, enp1s0f0np0 of the worker 1500" in finding.found
    assert "sudo ip link set enp1s0f0np0 mtu 9000" in finding.mend


def test_small_mtus_are_a_warning() -> None:
    def small(name: str) -> Survey:
        found = tuple(replace(each, mtu=1500) for each in interfaces(name))
        return survey(name, interfaces=found)

    assert "MTU 9000" in only(small("head"), small("worker"), level="warn").needed


def test_packets_that_may_not_be_split() -> None:
    assert checked(probes=[probe("ping-ok.txt")]) == []
    (lost,) = checked(probes=[probe("ping-too-long.txt", "ping-ok.txt")])
    assert "those of 9000 bytes do not (a hop carries 1500)" in lost.found
    (silent,) = checked(probes=[probe("ping-lost.txt", "ping-lost.txt")])
    assert "no ping is answered from enp1s0f1np1 to 10.0.0.2" in silent.found
    untried = replace(probe("ping-ok.txt"), full=Missing("ping is not installed"))
    (told,) = linking.dont_fragment([untried])
    assert told.level == "warn" and "ping is not installed" in told.found


def test_given_from_settings(tmp_path: Path) -> None:
    given = Given.of(settings_of(tmp_path, "PORT=9000\n"), OWNER)
    assert (given.port, given.master_port, given.bind) == (9000, 29521, "127.0.0.1")
    assert given.margin == 12.0 and given.container("worker") == "dsv41-exl3-worker"
    assert given.wanted == WANTED


def test_a_rank_of_ours_that_nothing_names_any_more_is_told_before_a_second_pair_starts() -> None:
    old = replace(rank("head"), name="old-head")
    head = survey("head", docker=docker(old))
    found = [each.found for each in checked(head) if each.level == "wrong"]
    assert found == ["the head runs old-head, which this checkout started under that name"]
    link, findings = find(WANTED, head, WORKER)
    recorded = replace(GIVEN, kept=("old-head", "old-worker"))
    again = check(recorded, head, WORKER, link, findings, ())
    assert not [each for each in again if each.level == "wrong"]


@pytest.mark.parametrize(
    ("bind", "wrong"),
    [("0.0.0.0", False), ("127.0.0.1", False), ("127.0.1.1", False), ("10.0.0.1", False),
     ("10.0.0.2", True), ("192.0.2.7", True)],
)  # fmt: skip
def test_the_api_listens_on_an_address_of_the_head(bind: str, wrong: bool) -> None:
    link, findings = find(WANTED, HEAD, WORKER)
    found = check(replace(GIVEN, bind=bind), HEAD, WORKER, link, findings, ())
    assert [each.found.startswith(f"BIND is {bind}") for each in found] == [True] * wrong
