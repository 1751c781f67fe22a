"""A pair on two guests, in order: what of the link, the limits and the reboots is the kernel's own.

What needs no real kernel of a node is in tests/rig. Each test can also be run by itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from guest import USER, Guest, Slot
from guests import Guests
from head_clone import KEY
from pair import HEAD_NAME, MODEL, WORKER_NAME
from rig import HEAD, MTU, WORKER
from vm_clone import VmClone

from launcher.facts.roce import V2

pytestmark = pytest.mark.vm

START = 300.0  # seconds for a start on emulated, shared cores
NAMES = {"head": HEAD_NAME, "worker": WORKER_NAME}
Saw = Callable[..., None]


@pytest.fixture
def head(guests: Guests) -> Guest:
    return guests.head


@pytest.fixture
def worker(guests: Guests) -> Guest:
    return guests.worker


@pytest.fixture
def down(clone: VmClone) -> VmClone:
    """The clone with no pair."""
    if clone.containers():
        ran = clone.start("stop")
        assert ran.status == 0, ran.said
    return clone


@pytest.fixture
def serving(clone: VmClone) -> VmClone:
    """The clone with a pair that serves."""
    if clone.start("status").status != 0:
        ran = clone.start("start", timeout=START)
        assert ran.status == 0, ran.said
    return clone


def mapped(address: str) -> str:
    """The GID of an IPv4 address as sysfs writes it."""
    high, low = (int.from_bytes(bytes(map(int, address.split(".")[n : n + 2]))) for n in (0, 2))
    return f"0000:0000:0000:0000:0000:ffff:{high:04x}:{low:04x}"


def slot_of(table: list[Slot], address: str) -> int:
    (found,) = (slot.index for slot in table if slot.gid == mapped(address))
    return found


def inspect(guest: Guest, role: str) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(guest.run("docker", "inspect", NAMES[role]).out)[0]
    return told


def environ(guest: Guest, role: str) -> dict[str, str]:
    return dict(word.split("=", 1) for word in inspect(guest, role)["Config"]["Env"])


def completes(head: Guest) -> bool:
    """A completion by both ranks, asked for on the head."""
    asked = json.dumps({"model": MODEL, "prompt": "17*19", "max_tokens": 4})
    words = ["curl", "-sS", "-m", "30", "-H", "Content-Type: application/json"]
    words += ["-H", f"Authorization: Bearer {KEY}", "-d", asked]
    said = head.run(*words, "http://127.0.0.1:8888/v1/completions", user=USER).out
    used: int = json.loads(said)["usage"]["completion_tokens"]
    return used == 4


# ---- what the link is ----


def test_the_kernel_puts_the_ipv4_gid_at_index_1_and_leaves_3_empty(
    head: Guest, worker: Guest, saw: Saw
) -> None:
    """The table of a Spark without a link-local address that moves; not what scripts assume."""
    for guest in (head, worker):
        table = guest.table()
        saw(**{guest.card.hca: [f"{slot.index} {slot.gid} {slot.kind}" for slot in table]})
        assert table[0].gid.startswith("fe80:") and table[0].kind == V2, table
        assert table[1] == Slot(1, mapped(guest.card.address), V2), table
        assert table[3].empty and table[3].kind == "", table


def test_rdma_works_over_that_index_and_over_no_empty_one(head: Guest, worker: Guest) -> None:
    def pingpong(index: int) -> bool:
        words = ["timeout", "20", "ibv_rc_pingpong", "-g", str(index), "-n", "20", "-s", "65536"]
        listen = " ".join([*words, "-d", worker.card.hca])
        worker.run("sh", "-c", f"{listen} >/tmp/pingpong 2>&1 </dev/null &")
        until = 'for n in $(seq 50); do ss -Hltn | grep -q ":18515 " && exit; sleep 0.1; done'
        worker.run("sh", "-c", until)
        return head.run(*words, "-d", head.card.hca, WORKER.address, check=False).status == 0

    assert pingpong(1)
    assert not pingpong(3)


def test_doctor_tells_the_link(down: VmClone, head: Guest, worker: Guest, saw: Saw) -> None:
    ran = down.start("doctor")
    assert ran.status == 0, ran.said
    told = [row.split("link", 1)[1].strip() for row in ran.out.splitlines() if " link " in row]
    saw(doctor=told)
    for name, guest in (("head", head), ("worker", worker)):
        (row,) = (row for row in told if row.startswith(f"{name}: "))
        card = guest.card
        assert f"{card.interface} {card.address}/24, MTU {MTU}, 200 Gbit/s" in row
        assert f"{card.hca} port 1, RoCE v2 GID index 1" in row
    assert any(f"{MTU} bytes unsplit from {HEAD.interface} to {WORKER.address}" in r for r in told)
    assert head.ping(WORKER.address, MTU - 28) and not head.ping(WORKER.address, MTU - 27)
    assert down.containers() == {}


def test_an_index_of_3_set_by_hand_is_refused(down: VmClone) -> None:
    ran = down.start("start", "--set", "NCCL_IB_GID_INDEX=3", timeout=START)
    assert ran.status == 1, ran.said
    for told in ("NCCL_IB_GID_INDEX is 3", "is empty", "it is at index 1", "do next:"):
        assert told in ran.err, ran.said
    assert down.containers() == {}


def test_an_mtu_lowered_on_the_worker_is_refused(down: VmClone, worker: Guest) -> None:
    worker.mtu(1500)
    try:
        ran = down.start("start", timeout=START)
    finally:
        worker.mtu(MTU)
    assert ran.status == 1, ran.said
    mend = f"ip link set {WORKER.interface} mtu {MTU}"
    for told in (f"MTU {MTU}", "of the worker 1500", "found:", "needed:", "do next:", mend):
        assert told in ran.err, ran.said
    assert down.containers() == {}


# ---- the pair ----


def test_a_pair_with_the_shipped_limits_serves(
    down: VmClone, head: Guest, worker: Guest, saw: Saw
) -> None:
    ran = down.start("start", timeout=START)
    assert ran.status == 0, ran.said
    saw(start=f"{ran.seconds:.1f} s")
    assert completes(head)
    down.until(0)
    for role, guest in (("head", head), ("worker", worker)):
        attrs = inspect(guest, role)
        host, pid = attrs["HostConfig"], attrs["State"]["Pid"]
        assert {"Name": "memlock", "Soft": -1, "Hard": -1} in host["Ulimits"]
        assert host["OomScoreAdj"] == 1000
        # What the kernel has, of the rank itself and of a shell beside it.
        limits = guest.run("cat", f"/proc/{pid}/limits").out
        locked = next(row for row in limits.splitlines() if row.startswith("Max locked memory"))
        assert locked.split()[3:5] == ["unlimited", "unlimited"], limits
        inside = ("docker", "exec", NAMES[role])
        assert guest.run(*inside, "sh", "-c", "ulimit -l; ulimit -c").out.split() == [
            "unlimited",
            "0",
        ]
        assert guest.run("cat", f"/proc/{pid}/oom_score_adj").out.strip() == "1000"
        # The RoCE device's own node, and it may be opened there.
        verbs = "import os; fd = os.open('/dev/infiniband/uverbs0', os.O_RDWR)"
        verbs += "; at = os.fstat(fd).st_rdev; print(os.major(at), os.minor(at))"
        device = guest.run("stat", "-c", "%Hr %Lr", "/dev/infiniband/uverbs0").out
        assert guest.run(*inside, "python3", "-c", verbs).out == device
        env = environ(guest, role)
        assert env["NCCL_IB_HCA"].lstrip("=").startswith(guest.card.hca)
        assert env["NCCL_IB_GID_INDEX"] == "1"
        assert env["NCCL_SOCKET_IFNAME"].lstrip("=") == guest.card.interface


def test_stop_takes_both_down(serving: VmClone) -> None:
    ran = serving.start("stop")
    assert ran.status == 0, ran.said
    assert serving.containers() == {}
    serving.until(1)


@pytest.fixture
def drifted(down: VmClone, worker: Guest) -> Iterator[None]:
    """The worker's IPv4 address comes after a second IPv6 one, as when NetworkManager is late."""
    card, other = worker.card, "fd99::2/64"

    def again(word: str) -> None:
        for address in (f"{card.address}/24", other):
            worker.run("ip", "addr", "del", address, "dev", card.interface, check=False)
        if word == "drift":
            worker.run("ip", "addr", "add", other, "dev", card.interface, "nodad")
        worker.run("ip", "addr", "add", f"{card.address}/24", "dev", card.interface)

    again("drift")
    yield
    again("back")


def test_a_gid_that_has_drifted_is_found_again(
    drifted: None, down: VmClone, head: Guest, worker: Guest, saw: Saw
) -> None:
    table = worker.table()
    index = slot_of(table, WORKER.address)
    assert index != 1 and table[1].gid.startswith("fd99:"), table
    saw(worker=[f"{slot.index} {slot.gid} {slot.kind}" for slot in table])
    ran = down.start("start", timeout=START)
    assert ran.status == 0, ran.said
    assert environ(worker, "worker")["NCCL_IB_GID_INDEX"] == str(index)
    assert environ(head, "head")["NCCL_IB_GID_INDEX"] == "1"
    assert completes(head)


def test_a_reboot_of_the_worker(serving: VmClone, head: Guest, worker: Guest, saw: Saw) -> None:
    old = inspect(head, "head")["Config"]["Labels"]["dsv41.launch"]
    worker.reboot()
    assert list(worker.containers()) == [WORKER_NAME]  # ended with the boot before, and is told so
    half = serving.until(3, "the pair is half up: the worker ended")
    saw(status=half.out.splitlines()[0])
    ran = serving.start("start", timeout=START)
    assert ran.status == 0, ran.said
    launches = {
        inspect(guest, role)["Config"]["Labels"]["dsv41.launch"]
        for role, guest in (("head", head), ("worker", worker))
    }
    assert len(launches) == 1 and launches != {old}
    assert completes(head)
    serving.until(0)
    assert slot_of(worker.table(), WORKER.address) == 1
    assert serving.start("stop").status == 0
