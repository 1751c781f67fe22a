"""``./start.sh pack`` on two nodes: containers, space, broken off, gone on with, served from.

The packer in the stub image is a stand-in with the real one's command line, files and words; the
real one is proven in tests/test_engram_pack.py and tests/story/test_3_ends.py.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
from clone import Command
from head_clone import CACHE, HeadClone
from machine import Node
from pair import Pair
from rig import USER

pytestmark = pytest.mark.rig

START = 90.0
WHERE = f"{USER.home}/dsv41-engram"  # HEAD_PACKED_DIR as shipped
PACKERS = ("dsv41-exl3-head-pack", "dsv41-exl3-worker-pack")
SLOW, NEVER = {"mib": 4, "seconds": 12.0}, {"mib": 4, "seconds": 90.0}


@pytest.fixture
def packing(clean: HeadClone) -> Iterator[HeadClone]:
    """A clone without packed files, before and after."""
    clean.tables()
    yield clean
    clean.tables()
    for node in nodes(clean):
        node.remove_containers()
        node.run("sh", "-c", f"umount {WHERE} 2>/dev/null; rm -rf {WHERE}")


def nodes(clone: HeadClone) -> tuple[Node, Node]:
    return clone.rig.head, clone.rig.worker


def packed(node: Node) -> list[str]:
    return node.run("sh", "-c", f"ls {WHERE} 2>/dev/null || true").out.split()


def names(rank: int) -> list[str]:
    return [f"engram-l{layer}-r{rank}of2.bin" for layer in (1, 14)]


def at_work(clone: HeadClone, command: Command) -> list[dict[str, Any]]:
    """Docker's words on both packers, once each has put some of a file on its drive."""
    end = time.monotonic() + 40
    while time.monotonic() < end and command.process.poll() is None:
        if all(any(name.endswith(".progress") for name in packed(node)) for node in nodes(clone)):
            return [
                node.docker.containers.get(name).attrs
                for node, name in zip(nodes(clone), PACKERS, strict=True)
            ]
        time.sleep(0.1)
    raise AssertionError(f"no packer at work:\n{command.said()}")


def test_both_nodes_pack_at_the_same_time_and_the_pair_then_serves_from_it(
    packing: HeadClone,
) -> None:
    packing.tables(r0=SLOW, r1=SLOW)
    command = packing.begin("pack")
    for rank, attrs in enumerate(at_work(packing, command)):
        argv = [attrs["Path"], *attrs["Args"]]
        assert argv == [
            "python3", "-m", "spark_overlay.engram.pack", "--source", "/engram-src",
            "--out", "/engram-packed", "--rank", str(rank), "--tp", "2",
        ]  # fmt: skip
        host = attrs["HostConfig"]
        mounts = {m["Destination"]: (m["Source"], m["RW"]) for m in attrs["Mounts"]}
        source = f"{packing.at}/engram-src" if rank == 0 else f"{USER.home}/{CACHE}/engram-src"
        assert mounts == {"/engram-src": (source, False), "/engram-packed": (WHERE, True)}
        assert (host["NetworkMode"], host["Devices"] or [], host["CapAdd"]) == ("none", [], None)
        assert not host["DeviceRequests"] and host["OomScoreAdj"] == 1000
    # A pair may be started meanwhile: of files that are not whole it knows nothing.
    started = packing.start("start", timeout=START)
    assert started.status == 0, started.said
    ran = command.wait(90)
    assert ran.status == 0, ran.said
    assert "all packed files are whole" in ran.out
    assert f"head: {WHERE}: 8.4 MB to write" in ran.out
    for rank, node in enumerate(nodes(packing)):
        assert packed(node) == names(rank)
        assert PACKERS[rank] not in node.containers()
    served = Pair.of(packing)
    assert served.completes() and "engram_packed_dir" not in " ".join(served.argv("head"))
    checked = packing.start("pack", "--verify")
    assert checked.status == 0 and "equal to the shards" in checked.out, checked.said
    ran = packing.start("start", timeout=START)
    assert ran.status == 0, ran.said
    assert f"head: Engram rows from {WHERE} (engram-l1-r0of2.bin" in ran.out
    now = Pair.of(packing)
    assert now.launch_id != served.launch_id
    for role in ("head", "worker"):
        argv = now.argv(role)
        told = json.loads(argv[argv.index("--additional-config") + 1])["spark_overlay"]
        assert told["engram_packed_dir"] == "/engram-packed"
        mounts = {m["Destination"]: (m["Source"], m["RW"]) for m in now.inspect(role)["Mounts"]}
        assert mounts["/engram-packed"] == (WHERE, False)


def test_broken_off_or_killed_the_next_one_goes_on(packing: HeadClone) -> None:
    packing.tables(r0=NEVER, r1=NEVER)
    command = packing.begin("pack")
    at_work(packing, command)
    second = packing.start("pack")
    assert second.status == 1 and "verb pack" in second.err, second.said
    command.ctrl_c()
    ran = command.wait(90)
    assert ran.status == 130, ran.said
    assert "what is packed is kept. Next: ./start.sh pack goes on" in ran.err
    assert packing.containers() == {}
    before = rows(packing)
    assert len(before) == 2 and all(before.values())

    killed = packing.begin("pack")
    end = time.monotonic() + 60
    while time.monotonic() < end:
        now = rows(packing)
        if all(now.get(name, 0) > count for name, count in before.items()):
            break
        time.sleep(0.1)
    killed.kill()
    assert len(packing.running()) == 2  # the daemons keep them, the next one ends them
    packing.tables(r0={"mib": 4}, r1={"mib": 4})
    ran = packing.start("pack")
    assert ran.status == 0, ran.said
    assert ran.out.count("of 8.4 MB, the rest is there") == 2, ran.said
    assert ran.run is not None
    log = (ran.run / "log.txt").read_text()
    for rank in range(2):
        went_on = re.search(rf"{names(rank)[0]}: goes on after (\d+) rows", log)
        assert went_on and int(went_on[1]) >= before[names(rank)[0]]
    assert [packed(node) for node in nodes(packing)] == [names(0), names(1)]
    assert packing.containers() == {}


def rows(clone: HeadClone) -> dict[str, int]:
    """What the packers have written, by file."""
    found = {}
    for node in nodes(clone):
        told = node.run("sh", "-c", f"cd {WHERE} && grep -H rows *.progress || true").out
        for line in told.splitlines():
            name, _, text = line.partition(".progress:")
            found[name] = int(json.loads(text)["rows"])
    return found


def test_what_stands_in_the_way_is_told_before_either_writes(packing: HeadClone) -> None:
    worker = packing.rig.worker
    worker.run("mkdir", "-p", WHERE)
    worker.run("mount", "-t", "tmpfs", "-o", "size=3m,mode=1777", "small", WHERE)
    packing.tables(r0={"mib": 4}, r1={"mib": 4})
    ran = packing.start("pack")
    assert ran.status == 1, ran.said
    assert f"the worker has 3.1 MB free for {WHERE}" in ran.err
    assert "9.4 MB there, for engram-l1-r1of2.bin, engram-l14-r1of2.bin" in ran.err
    for told in ("needed:", "do next: free some space, or set WORKER_PACKED_DIR", "log:"):
        assert told in ran.err, ran.said

    packing.tables(r0={"stale": "/engram-packed/engram-l1-r0of2.bin: does not belong to it"})
    ran = packing.start("pack")
    assert ran.status == 1, ran.said
    assert f"{WHERE}/engram-l1-r0of2.bin: does not belong to it" in ran.err

    config = f"{USER.home}/{CACHE}/engram-src/config.json"
    text = worker.read(config)
    worker.path(config).unlink()
    try:
        ran = packing.start("pack")
        assert ran.status == 1 and "lacks config.json" in ran.err, ran.said
    finally:
        worker.write(config, text, user=USER.name)
    ran = packing.start("pack", "--set", "HEAD_IP=10.99.0.77")
    assert ran.status == 1 and "./start.sh pack --rehearsal" in ran.err, ran.said
    assert [packed(node) for node in nodes(packing)] == [[], []]
    assert packing.containers() == {}


def test_one_node_fails_and_the_others_work_is_kept(packing: HeadClone) -> None:
    broken = "/engram-src/model-00047-of-00048.safetensors: cannot be read at byte 4711"
    packing.tables(r1={"fails": broken, "after": 0.5})
    ran = packing.start("pack")
    assert ran.status == 1, ran.said
    told = f"{USER.home}/{CACHE}{broken}"  # as the node has it
    assert f"the worker's packer ended with exit code 1: {told}" in ran.err, ran.said
    assert "./start.sh pack: it goes on where it stopped" in ran.err and "log:" in ran.err
    assert packed(packing.rig.head) == names(0)
    assert broken in (packing.logs / "pack" / "worker.log").read_text()
    packing.tables()
    ran = packing.start("pack")
    assert ran.status == 0, ran.said
    assert "whole: nothing to do" in ran.out and "the rest is there" in ran.out, ran.said
    assert packed(packing.rig.worker) == names(1)
