"""The link found from both nodes' interfaces and GID tables, and what is said when it is not."""

from __future__ import annotations

if __name__ == "__main__":  # before the imports below, which this Python may lack
    from _standalone import main

    main(__file__)

from dataclasses import replace
from pathlib import Path

import pytest
from settings_root import settings_of
from spark_facts import WANTED, interfaces, roce, survey

from launcher.facts.base import Missing
from launcher.facts.interfaces import Address, Interface
from launcher.findings import Finding
from launcher.here import head_ip
from launcher.link import Link, Side, Wanted, find
from launcher.survey import Survey

HEAD, WORKER = survey("head"), survey("worker")
TWO = (
    survey("head", interfaces=interfaces("head-two-rails"), roce=roce("head-two-rails")),
    survey("worker", interfaces=interfaces("worker-two-rails"), roce=roce("worker-two-rails")),
)


def wanted(rails: str = "auto", worker: Side | None = None, **head: object) -> Wanted:
    return Wanted(replace(WANTED.head, **head), worker or WANTED.worker, rails)


def found(head: Survey, worker: Survey, asked: Wanted = WANTED) -> Link:
    link, findings = find(asked, head, worker)
    assert findings == [] and link is not None
    return link


def refused(head: Survey, worker: Survey, asked: Wanted = WANTED) -> Finding:
    link, findings = find(asked, head, worker)
    assert link is None and len(findings) == 1, findings
    return findings[0]


def with_roce(variant: str, **more: object) -> Survey:
    return survey("head", roce=roce(variant), **more)


# ---- what is found ----


def test_each_node_has_its_own_names() -> None:
    link = found(HEAD, WORKER)
    assert (link.head.interface, link.head.hcas, link.head.gid_index) == (
        "enp1s0f1np1",
        ("rocep1s0f1",),
        3,
    )
    assert (link.worker.interface, link.worker.hcas) == ("enp1s0f0np0", ("rocep1s0f0",))
    assert (link.head.address, link.head.prefix, link.head.mtu) == ("10.0.0.1", 24, 9000)


@pytest.mark.parametrize(
    ("variant", "index"),
    [
        ("head", 3),
        ("head-drifted-4", 4),
        ("head-rxe", 1),
        ("head-privacy-5", 5),
        ("head-privacy-6", 6),
    ],
)
def test_the_index_is_where_the_address_is(variant: str, index: int) -> None:
    link = found(with_roce(variant), WORKER)
    assert (link.head.gid_index, link.worker.gid_index) == (index, 3)


@pytest.mark.parametrize(
    ("variant", "said"),
    [
        ("head-empty-3", "has no RoCE v2 GID for 10.0.0.1; its GID table:"),
        ("head-ipv6-at-3", "has no RoCE v2 GID for 10.0.0.1; its GID table:"),
        ("head-v1-only", "has 10.0.0.1 as RoCE v1 only"),
        ("head-other-address", "(it has 10.0.0.9)"),
        ("head-down", "is DOWN"),
    ],
)
def test_no_index_that_would_do(variant: str, said: str) -> None:
    finding = refused(with_roce(variant), WORKER)
    assert said in finding.found and "of the head" in finding.found


def test_the_table_and_the_mend_are_told() -> None:
    finding = refused(with_roce("head-ipv6-at-3"), WORKER)
    assert "3  RoCE v2     fe80::8c1f:5ad3:77c2:1e04" in finding.found
    assert "sudo ip addr add 10.0.0.1/24 dev enp1s0f1np1" in finding.mend


def test_both_nodes_faults_are_told_at_once() -> None:
    worker = survey("worker", roce=())
    link, findings = find(WANTED, with_roce("head-empty-3"), worker)
    assert link is None and len(findings) == 2
    assert "the worker has no RoCE device" in findings[1].found


# ---- explicit settings are verified ----


def test_explicit_settings_that_are_right() -> None:
    asked = wanted(interfaces=("enp1s0f1np1",), hcas=("rocep1s0f1",), gid=3, gid_key="HEAD_GID")
    assert found(HEAD, WORKER, asked).head.gid_index == 3


@pytest.mark.parametrize(
    ("variant", "gid", "why"),
    [
        ("head-drifted-4", 3, "HEAD_GID is 3, but that slot of rocep1s0f1 port 1 of the head is"),
        ("head-privacy-5", 3, "is IPv6 (fe80::8c1f:5ad3:77c2:1e04)"),
        ("head", 2, "is of type IB/RoCE v1"),
        ("head", 0, "is IPv6 (fe80::4ebb:47ff:fe2c:1032)"),
        ("head-rxe", 3, "is empty"),
    ],
)
def test_an_explicit_index_that_is_wrong(variant: str, gid: int, why: str) -> None:
    finding = refused(with_roce(variant), WORKER, wanted(gid=gid, gid_key="HEAD_GID"))
    assert why in finding.found and "leave HEAD_GID empty" in finding.mend
    assert "it is at index" in finding.needed


def test_how_an_index_is_kept_from_moving() -> None:
    head = with_roce("head-privacy-5", interfaces=interfaces("head-privacy"))
    finding = refused(head, WORKER, wanted(gid=3, gid_key="NCCL_IB_GID_INDEX"))
    assert "ipv6.addr-gen-mode eui64" in finding.mend
    assert finding.found.startswith("NCCL_IB_GID_INDEX is 3")


def test_an_explicit_interface_that_is_wrong() -> None:
    finding = refused(HEAD, WORKER, wanted(interfaces=("enp1s0f0np0",)))
    assert "HEAD_CX7_IF is enp1s0f0np0" in finding.found and "enp1s0f1np1" in finding.mend
    finding = refused(HEAD, WORKER, wanted(interfaces=("eth9",)))
    assert "eth9 does not exist there" in finding.found


def test_an_explicit_hca_that_is_wrong() -> None:
    finding = refused(HEAD, WORKER, wanted(hcas=("rocep1s0f0",)))
    assert "none of them is behind enp1s0f1np1" in finding.found
    assert "set it to rocep1s0f1" in finding.mend
    finding = refused(HEAD, WORKER, wanted(hcas=("mlx5_0",)))
    assert "the head has no mlx5_0" in finding.found


# ---- addresses ----


def test_head_ip_is_asked_of_this_machine_alone() -> None:
    assert head_ip("10.0.0.1", interfaces("head")) == []
    (finding,) = head_ip("10.0.0.1", interfaces("worker"))
    assert "HEAD_IP 10.0.0.1 is no address of this machine" in finding.found
    assert "10.0.0.2/24" in finding.found  # what it has
    (finding,) = head_ip("10.0.0.1", Missing("ip is not installed"))
    assert "ip is not installed" in finding.found


def test_a_loopback_alias_is_refused() -> None:
    (finding,) = head_ip("10.0.0.1", interfaces("head-loopback"))
    assert "is an alias on lo" in finding.found
    assert "sudo ip addr del 10.0.0.1/32 dev lo" in finding.mend


def test_a_worker_reached_at_another_host() -> None:
    finding = refused(HEAD, survey("worker", interfaces=interfaces("head-two-rails")))
    assert "WORKER_IP 10.0.0.2 is no address of the worker" in finding.found


def test_one_address_for_both() -> None:
    finding = refused(HEAD, WORKER, Wanted(Side("10.0.0.1"), Side("10.0.0.1")))
    assert "both 10.0.0.1" in finding.found


def test_addresses_of_two_networks() -> None:
    other = tuple(
        replace(each, addresses=(Address("10.0.0.2", 30, 4),)) if each.ipv4 and "enp1" in each.name
        else each
        for each in interfaces("worker")
    )  # fmt: skip
    assert "not in one network" in refused(HEAD, survey("worker", interfaces=other)).found


def test_an_address_on_the_management_port() -> None:
    link, findings = find(wanted(address="192.168.20.31"), HEAD, WORKER)
    assert link is None and len(findings) == 2
    assert "no RoCE device is behind enP7s7" in findings[0].found
    assert "not in one network" in findings[1].found


def test_an_interface_without_a_carrier() -> None:
    def unplugged(each: Interface) -> Interface:
        gone = each.flags - {"LOWER_UP"}
        return replace(each, flags=gone) if each.name == "enp1s0f1np1" else each

    head = survey("head", interfaces=tuple(map(unplugged, interfaces("head"))))
    assert "enp1s0f1np1 of the head, which has HEAD_IP, is down" in refused(head, WORKER).found


def test_facts_that_could_not_be_had() -> None:
    finding = refused(survey("head", roce=Missing("no answer within 5 s")), WORKER)
    assert "no answer within 5 s" in finding.found
    finding = refused(HEAD, survey("worker", interfaces=Missing("ip is not installed")))
    assert "ip is not installed" in finding.found


# ---- two rails ----


def test_two_rails_whose_indices_differ_give_none() -> None:
    link = found(*TWO)
    assert link.head.interfaces == ("enp1s0f1np1", "enP2p1s0f1np1")
    assert link.head.hcas == ("rocep1s0f1", "roceP2p1s0f1")
    assert link.worker.hcas == ("rocep1s0f0", "roceP2p1s0f0")
    assert link.head.gid_index == 3
    assert [rail.gid_index for rail in link.worker.rails] == [3, 5]
    assert link.worker.gid_index is None


def test_one_rail_by_choice() -> None:
    assert len(found(*TWO, wanted("1")).head.rails) == 1
    named = wanted(interfaces=("enp1s0f1np1",))
    assert len(found(*TWO, named).head.rails) == 1


def test_two_rails_by_name() -> None:
    both = wanted("2", interfaces=("enp1s0f1np1", "enP2p1s0f1np1"))
    assert len(found(*TWO, both).head.rails) == 2
    finding = refused(*TWO, wanted("1", hcas=("rocep1s0f1", "roceP2p1s0f1")))
    assert "CX7_RAILS is 1" in finding.found


def test_two_rails_where_there_is_one() -> None:
    finding = refused(HEAD, WORKER, wanted("2"))
    assert "two rails are asked for, but there is one" in finding.found
    assert "CX7_RAILS=1" in finding.mend


def test_a_second_rail_of_another_mtu_is_left_out_or_told() -> None:
    narrow = tuple(
        replace(each, mtu=1500) if each.name == "enP2p1s0f0np0" else each
        for each in interfaces("worker-two-rails")
    )
    worker = survey("worker", interfaces=narrow, roce=roce("worker-two-rails"))
    assert len(found(TWO[0], worker).head.rails) == 1
    assert (
        "MTU 9000, enP2p1s0f0np0 of the worker 1500" in refused(TWO[0], worker, wanted("2")).found
    )


def test_a_second_port_in_the_same_network_is_no_rail() -> None:
    same = tuple(
        replace(each, addresses=(Address("10.0.0.11", 24, 4),)) if each.name == "enP2p1s0f1np1"
        else each
        for each in interfaces("head-two-rails")
    )  # fmt: skip
    head = survey("head", interfaces=same, roce=roce("head-two-rails"))
    assert len(found(head, TWO[1]).head.rails) == 1
    assert "is in the network of enp1s0f1np1" in refused(head, TWO[1], wanted("2")).found


# ---- settings ----


def test_what_the_settings_ask(tmp_path: Path) -> None:
    asked = Wanted.of(settings_of(tmp_path))
    assert asked == Wanted(
        Side("10.0.0.1", prefix="HEAD"), Side("10.0.0.2", prefix="WORKER"), "auto"
    )
    text = (
        "HEAD_CX7_IF=enp1s0f1np1, enP2p1s0f1np1\nHEAD_CX7_IB=a,b\nNCCL_IB_GID_INDEX=3\n"
        "WORKER_GID=0\nCX7_RAILS=2\n"
    )
    asked = Wanted.of(settings_of(tmp_path, text))
    assert asked.head.interfaces == ("enp1s0f1np1", "enP2p1s0f1np1")
    assert asked.head.hcas == ("a", "b") and asked.rails == "2"
    assert (asked.head.gid, asked.head.gid_key) == (3, "NCCL_IB_GID_INDEX")
    assert (asked.worker.gid, asked.worker.gid_key) == (0, "WORKER_GID")
