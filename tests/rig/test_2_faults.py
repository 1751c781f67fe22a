"""What stops a start, each with its words and the command that mends it; and nothing is lost.

Here: ssh, the link, ports, memory, images and what belongs to others. Faults of running ranks are
in test_2_ranks.py, hostile values in test_2_values.py.
"""

from __future__ import annotations

import io
import re
import tarfile
from pathlib import Path

import pytest
import roce
import stub_image
from head_clone import CACHE, HeadClone
from pair import WORKER_NAME, Pair
from rig import HEAD, MTU, USER, WORKER

pytestmark = pytest.mark.rig

START = 90.0
KNOWN_HOSTS = f"{USER.home}/.ssh/known_hosts"


def refused(clone: HeadClone, *told: str, words: tuple[str, ...] = ("start",)) -> str:
    """The start is refused with these words, and no container has come or gone."""
    before = clone.containers()
    ran = clone.start(*words, timeout=START)
    assert ran.status == 1, ran.said
    for each in (*told, "found:", "needed:", "do next:"):
        assert each in ran.err, f"no {each!r} in:\n{ran.said}"
    assert "Traceback" not in ran.said, ran.said
    assert clone.containers() == before
    return ran.err


# ---- ssh ----


def test_the_workers_sshd_is_down(clean: HeadClone) -> None:
    clean.rig.worker.sshd_stop()
    refused(clean, f"the worker {WORKER.address} refuses connections to port 22",
            "systemctl enable --now ssh")  # fmt: skip
    clean.rig.worker.sshd_start()
    assert clean.start("start", timeout=START).status == 0


def test_an_unknown_host_key_is_shown_and_never_accepted(clean: HeadClone) -> None:
    known = clean.rig.head.path(KNOWN_HOSTS)
    known.unlink()
    said = refused(clean, "shows an ssh host key that this machine does not know")
    shown = clean.rig.worker.run("ssh-keygen", "-lf", "/etc/ssh/ssh_host_ed25519_key.pub").out
    assert shown.split()[1] in said  # SHA256:…
    assert "StrictHostKeyChecking=ask" in said
    assert not known.exists()


@pytest.mark.parametrize("how", ["changed", "another machine's"])
def test_a_changed_host_key(clean: HeadClone, how: str) -> None:
    if how == "changed":
        clean.rig.worker.new_host_keys()
    else:
        wrong = f"{WORKER.address} {clean.rig.head.host_key}\n"
        clean.rig.head.write(KNOWN_HOSTS, wrong, 0o600, USER.name)
    known = clean.rig.head.read(KNOWN_HOSTS)
    refused(clean, "has CHANGED", f"{KNOWN_HOSTS} line 1", f"ssh-keygen -f {KNOWN_HOSTS} -R")
    assert clean.rig.head.read(KNOWN_HOSTS) == known


def test_no_key_is_accepted(clean: HeadClone) -> None:
    accepted = clean.rig.worker.path(f"{USER.home}/.ssh/authorized_keys")
    text = accepted.read_text()
    accepted.write_text("")
    try:
        refused(clean, "accepts no ssh key of ours", "id_ed25519", "ssh-copy-id")
    finally:
        accepted.write_text(text)


def test_a_wrong_user(clean: HeadClone) -> None:
    words = ("start", "--set", "WORKER_USER=nobody-there")
    refused(clean, "nobody-there", "WORKER_USER", words=words)


def test_the_worker_is_not_there(clean: HeadClone) -> None:
    clean.rig.unplug(clean.rig.worker)
    said = refused(clean, f"{WORKER.address}")
    assert re.search(r"no answer from the worker|no way to the worker", said), said


def test_a_name_that_is_none(clean: HeadClone) -> None:
    words = ("start", "--set", "WORKER_SSH=no-such-host")
    refused(clean, "'no-such-host' is not known here", "WORKER_SSH", words=words)


def test_all_three_ways_are_proven(clean: HeadClone) -> None:
    """A login works, yet Docker refuses the user, or rsync is missing there."""
    worker = clean.rig.worker
    groups = worker.read("/etc/group")
    kept = [row for row in groups.splitlines() if not row.startswith("docker:")]
    worker.write("/etc/group", "\n".join([*kept, "docker:x:2999:"]) + "\n")
    worker.run("mv", "/usr/bin/rsync", "/usr/bin/rsync.away")
    try:
        refused(clean, "Docker", "usermod -aG docker", "rsync")
    finally:
        worker.run("mv", "/usr/bin/rsync.away", "/usr/bin/rsync")
        worker.write("/etc/group", groups)


# ---- the head's own address ----


def test_head_ip_is_asked_before_the_worker_is(clean: HeadClone) -> None:
    before = clean.rig.worker.callers()
    words = ("start", "--set", "HEAD_IP=10.99.0.77")
    refused(clean, "HEAD_IP 10.99.0.77 is no address of this machine", HEAD.address, words=words)
    assert clean.rig.worker.callers() == before


def test_a_loopback_alias_is_refused(clean: HeadClone) -> None:
    clean.rig.head.ip("addr", "add", "10.99.0.9/32", "dev", "lo")
    before = clean.rig.worker.callers()
    try:
        refused(clean, "is an alias on lo", words=("start", "--set", "HEAD_IP=10.99.0.9"))
    finally:
        clean.rig.head.ip("addr", "del", "10.99.0.9/32", "dev", "lo")
    assert clean.rig.worker.callers() == before


# ---- GIDs ----


def _gid_of(clone: HeadClone, role: str) -> str | None:
    env = Pair.of(clone).inspect(role)["Config"]["Env"]
    return dict(word.split("=", 1) for word in env).get("NCCL_IB_GID_INDEX")


@pytest.mark.parametrize("table", [roce.drifted, roce.private])
def test_a_drifted_gid_is_found_where_it_is(clean: HeadClone, table: roce.Table) -> None:
    clean.rig.gids(clean.rig.worker, table)
    ran = clean.start("start", timeout=START)
    assert ran.status == 0, ran.said
    there = max(table(WORKER.address, WORKER.interface, WORKER.mac))
    assert (_gid_of(clean, "head"), _gid_of(clean, "worker")) == ("3", str(there))


def test_a_gid_that_drifts_between_two_starts(serving: HeadClone) -> None:
    """What serves goes on; what is started anew has the index of now."""
    pair = Pair.of(serving)
    serving.rig.gids(serving.rig.head, roce.drifted)
    assert serving.standing()["code"] == 0 and pair.completes()
    ran = serving.start("restart", timeout=START)
    assert ran.status == 0, ran.said
    assert (_gid_of(serving, "head"), _gid_of(serving, "worker")) == ("5", "3")


@pytest.mark.parametrize(
    ("table", "told"),
    [
        (roce.drifted, "is empty"),
        (roce.private, "is IPv6"),
    ],
)
def test_an_explicit_gid_is_verified(clean: HeadClone, table: roce.Table, told: str) -> None:
    clean.rig.gids(clean.rig.worker, table)
    words = ("start", "--set", "WORKER_GID=3")
    said = refused(clean, "WORKER_GID is 3", told, WORKER.hca, words=words)
    assert "RoCE v2" in said and "it is at index 5" in said


@pytest.mark.parametrize(
    ("table", "told"),
    [
        (roce.without_ipv4, f"no RoCE v2 GID for {WORKER.address}"),
        (roce.first_version, f"has {WORKER.address} as RoCE v1 only"),
    ],
)
def test_no_gid_of_the_address(clean: HeadClone, table: roce.Table, told: str) -> None:
    clean.rig.gids(clean.rig.worker, table)
    refused(clean, told, "its GID table", "fe80:")


def test_an_adapter_that_is_down(clean: HeadClone) -> None:
    clean.rig.gids(clean.rig.worker, state="1: DOWN")
    refused(clean, WORKER.hca, "an ACTIVE port", "check the cable")


def test_wrong_interface_and_device_are_told_together(clean: HeadClone) -> None:
    words = ("start", "--set", "WORKER_CX7_IF=enP7s7", f"HEAD_CX7_IB={WORKER.hca}")
    refused(clean, "WORKER_CX7_IF is enP7s7", f"HEAD_CX7_IB is {WORKER.hca}", words=words)


# ---- the link ----


def test_mtus_that_differ(clean: HeadClone) -> None:
    clean.rig.worker.mtu(1500)
    refused(clean, f"MTU {MTU}", "of the worker 1500", f"ip link set {WORKER.interface} mtu {MTU}")


def test_a_switch_that_carries_less(clean: HeadClone) -> None:
    """Both ends say 9000, and whole packets do not arrive."""
    clean.rig.driver("ip", "link", "set", "rigbr", "mtu", "1500")
    for node in (clean.rig.head, clean.rig.worker):
        clean.rig.driver("ip", "link", "set", clean.rig.port(node), "mtu", "1500")
    refused(clean, "small packets arrive", "those of 9000 bytes do not")


# ---- ports, memory, disks ----


@pytest.mark.parametrize("port", [8888, 29521])
def test_a_taken_port(clean: HeadClone, port: int) -> None:
    serve = ["python3", "-m", "http.server", str(port)]
    if port == 8888:
        serve += ["--bind", "127.0.0.1"]
    with clean.rig.head.background(*serve, listens=port):
        refused(clean, f"port {port} of the head is taken")


def test_too_little_memory_on_either_node(clean: HeadClone) -> None:
    clean.rig.worker.memory(available=9.5)
    refused(clean, "the worker has 9.5 GiB of memory available", "DSV41_BOOT_MARGIN_GIB")
    clean.rig.worker.memory(available=118.0)
    clean.rig.head.memory(available=0.5)
    refused(clean, "the head has 0.5 GiB of memory available")


def test_everything_wrong_is_told_at_once(clean: HeadClone) -> None:
    clean.rig.worker.memory(available=9.5)
    clean.rig.worker.mtu(1500)
    clean.rig.worker.docker.images.remove(stub_image.NAME, force=True)
    shard = clean.rig.worker.path(f"{USER.home}/{CACHE}/model/model-00002-of-00003.safetensors")
    whole = shard.read_bytes()
    shard.unlink()
    try:
        with clean.rig.head.background("python3", "-m", "http.server", "8888", listens=8888):
            told = ("of memory available", "MTU 9000", "has no image", "port 8888",
                    "model-00002-of-00003.safetensors")  # fmt: skip
            refused(clean, "5 things are in the way", *told)
            doctor = clean.start("doctor")
            assert doctor.status == 1
            assert all(each in doctor.said for each in told), doctor.said
    finally:
        clean.rig.worker.write(
            f"{USER.home}/{CACHE}/model/{shard.name}", whole, user=USER.name)  # fmt: skip
        clean.rig.load(clean.rig.worker)


def test_an_image_that_differs(clean: HeadClone, tmp_path: Path) -> None:
    worker = clean.rig.worker
    made = worker.docker.containers.create(stub_image.NAME, ["true"])
    made.put_archive("/", _tar("note", b"another build"))
    name, _, tag = stub_image.NAME.partition(":")
    made.commit(name, tag)
    made.remove()
    try:
        refused(clean, "differs between the nodes", "the first 1 are equal")
    finally:
        worker.docker.images.remove(stub_image.NAME, force=True)
        clean.rig.load(worker)


def _tar(name: str, data: bytes) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        info = tarfile.TarInfo(name)
        info.size = len(data)
        tar.addfile(info, io.BytesIO(data))
    return made.getvalue()


# ---- what belongs to others ----


def test_a_foreign_container_with_our_name_is_refused_and_kept(clean: HeadClone) -> None:
    worker = clean.rig.worker
    run = {"network_mode": "host", "detach": True}
    foreign = worker.docker.containers.run(
        stub_image.NAME, ["sleep", "999"], name=WORKER_NAME, **run
    )
    refused(clean, WORKER_NAME, "is not of this launcher", f"docker rm -f {WORKER_NAME}")
    assert clean.start("stop").status == 0
    foreign.reload()
    assert foreign.status == "running"


def test_the_pair_of_another_checkout_is_refused_and_kept(serving: HeadClone) -> None:
    pair = Pair.of(serving)
    other = HeadClone.make(serving.rig, "another clone")
    refused(other, "belongs to", serving.at)
    assert other.start("stop").status == 0
    assert Pair.of(serving) == pair and pair.completes()


def test_a_foreign_program_on_the_gpu(clean: HeadClone) -> None:
    clean.rig.worker.gpu_processes("4711, ollama, 30000 MiB")
    refused(clean, "ollama", "computes on the GPU of the worker")


def test_a_foreign_gpu_container(clean: HeadClone) -> None:
    run = ["docker", "run", "-d", "--name", "comfy", "--gpus", "all", "--network", "host"]
    clean.rig.head.run(*run, stub_image.NAME, "sleep", "999")
    refused(clean, "a GPU container of others", "comfy")


@pytest.mark.parametrize("gone", ["head", "worker"])
def test_a_half_up_pair_is_never_taken_for_one(serving: HeadClone, gone: str) -> None:
    old = Pair.of(serving)
    old.container(gone).remove(force=True)
    told = serving.standing()
    assert told["code"] == 3 and told["state"] == "half-up", told
    ran = serving.start("start", timeout=START)
    assert ran.status == 0, ran.said
    assert "already" not in ran.out.split("launch")[-1]
    now = Pair.of(serving)
    assert now.launch_id != old.launch_id and now.completes()


def test_ranks_of_two_launches_are_no_pair(serving: HeadClone) -> None:
    """The state is lost and one rank is of an older launch: both are ended, both come anew."""
    old = Pair.of(serving)
    (serving.logs / "state.json").unlink()
    old.container("head").remove(force=True)
    told = serving.standing()
    assert told["code"] in (1, 3), told
    ran = serving.start("start", timeout=START)
    assert ran.status == 0, ran.said
    assert Pair.of(serving).launch_id != old.launch_id


def test_two_launchers_at_once(clean: HeadClone) -> None:
    clean.stub(head={"boot": 10.0})  # a start and a status on a machine that does other things too
    first = clean.begin("start")
    first.reaches("health", timeout=START)
    second = clean.start("start")
    assert second.status == 1
    assert "another launcher is at work: pid " in second.err and "verb start" in second.err
    assert clean.start("status").status == 4  # looking is allowed
    ran = first.wait(START)
    assert ran.status == 0, ran.said
    assert Pair.of(clean).completes()


def test_containers_are_named_as_set(clean: HeadClone) -> None:
    names = ("CONTAINER_HEAD=my-head", "CONTAINER_WORKER=my-worker")
    assert clean.start("start", "--set", *names, timeout=START).status == 0
    assert set(clean.containers()) == {"spark-1 my-head", "spark-2 my-worker"}
    # stop finds what was started, whatever .env says now.
    assert clean.start("stop").status == 0
    assert clean.containers() == {}
