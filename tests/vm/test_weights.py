"""The weights by the kernel's own NFS between two guests: volumes, a server that goes, and returns.

First by the head's own nfs-server (HOST_NFS=1), then by the exporter of docker/nfs. Its image is
built by its own recipe; the base is the guest's own Debian under the name that the recipe has,
for no registry can be reached: apt finds nfs-kernel-server installed already.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator

import pytest
from guest import USER, Guest
from guests import Guests
from pair import WORKER_NAME
from rig import HEAD
from vm_clone import VmClone

pytestmark = pytest.mark.vm

START = 300.0
NFS = ("--set", "SKIP_SYNC=0", "WEIGHT_SYNC=nfs", "HOST_NFS=1")
VOLUMES = ("dsv41-exl3-weights", "dsv41-exl3-engram")
Saw = Callable[..., None]
SUDO = f"{USER} ALL=(ALL) NOPASSWD: ALL\n"


@pytest.fixture
def sharing(clone: VmClone, guests: Guests) -> Iterator[VmClone]:
    """The clone with no pair, its user allowed to change the head's exports, and no volume."""
    if clone.containers():
        assert clone.start("stop").status == 0
    head = guests.head
    head.run("sh", "-c", f"printf %s '{SUDO}' >/etc/sudoers.d/rig; chmod 440 /etc/sudoers.d/rig")
    # A squashed root reads what everyone may read.
    head.run("sh", "-c", f"chmod -R a+rX '/home/{USER}/a clean clone/model'"
             f" '/home/{USER}/a clean clone/engram-src'")  # fmt: skip
    yield clone
    clone.start("stop")
    server(head, "start")
    guests.worker.run("docker", "volume", "rm", *VOLUMES, check=False)


def server(guest: Guest, word: str) -> None:
    guest.run("systemctl", word, "nfs-server", check=False, timeout=120)


def mounted(worker: Guest) -> str:
    return worker.run("sh", "-c", "grep ' nfs4 ' /proc/mounts || true").out


def test_the_worker_serves_from_an_nfs_volume(sharing: VmClone, guests: Guests) -> None:
    ran = sharing.start("start", *NFS, timeout=START)
    assert ran.status == 0, ran.said
    told = json.loads(guests.worker.run("docker", "inspect", WORKER_NAME).out)[0]["Mounts"]
    found = {each["Destination"]: each for each in told}
    assert (found["/model"]["Type"], found["/model"]["Name"]) == ("volume", VOLUMES[0])
    assert (found["/engram-src"]["Type"], found["/engram-src"]["Name"]) == ("volume", VOLUMES[1])
    mounts = mounted(guests.worker)
    assert "vers=4.2" in mounts and "nconnect=8" in mounts and "hard" in mounts, mounts
    assert f"addr={HEAD.address}" in mounts


def test_a_server_that_is_gone_is_told_in_time_and_goes_on_when_it_is_back(
    sharing: VmClone, guests: Guests
) -> None:
    ran = sharing.start("start", *NFS, timeout=START)
    assert ran.status == 0, ran.said
    server(guests.head, "stop")
    began = time.monotonic()
    ran = sharing.start("start", "--set", "SKIP_SYNC=1", *NFS[2:], timeout=START)
    assert ran.status == 1 and "no NFS server answers the worker" in ran.err, ran.said
    assert "./start.sh share" in ran.err and time.monotonic() - began < 240
    ran = sharing.start("share", "--set", "HOST_NFS=1", timeout=START)
    assert ran.status == 0 and "reads the weights through NFS" in ran.out, ran.said
    ran = sharing.start("start", *NFS, timeout=START)
    assert ran.status == 0, ran.said


# ---- the exporter's container ----

EXPORTER = "dsv41-exl3-nfs"
BASE = "debian:bookworm-slim"
OWN = ("--set", "SKIP_SYNC=0", "WEIGHT_SYNC=nfs", "HOST_NFS=0")
# Of the guest's system what a shell, apt and an NFS server are made of.
IMPORT = (
    "tar -C / --one-file-system -cf - --exclude=./usr/lib/modules --exclude=./usr/share/doc"
    " --exclude=./usr/share/locale --exclude=./usr/share/man --exclude=./usr/lib/python3*"
    " --exclude='./usr/bin/*docker*' --exclude='./usr/bin/containerd*'"
    " --exclude='./usr/bin/ctr' --exclude='./usr/sbin/dockerd' --exclude='./etc/apt/sources.list*'"
    " --exclude=./var/lib/docker --exclude=./var/lib/containerd --exclude=./var/log"
    " --exclude=./var/lib/apt/lists --exclude=./usr/lib/udev --exclude='./etc/ssh/*_key'"
    f" ./bin ./sbin ./lib ./lib64 ./etc ./usr ./var | docker import - {BASE}"
)


@pytest.fixture
def exporting(sharing: VmClone, guests: Guests) -> Iterator[VmClone]:
    """The head has the base of the exporter's image, and no NFS server of its own."""
    head = guests.head
    if head.run("docker", "image", "inspect", BASE, check=False).status:
        head.run("sh", "-c", IMPORT, timeout=START)
    server(head, "stop")
    yield sharing
    for words in (("stop", EXPORTER), ("rm", EXPORTER), ("volume", "rm", f"{EXPORTER}-state")):
        head.run("docker", *words, check=False)


def through(worker: Guest, folder: str) -> str:
    """The sums of what the serving container sees, none of it from memory."""
    worker.run("sh", "-c", "sync; echo 3 >/proc/sys/vm/drop_caches")
    return worker.run("docker", "exec", WORKER_NAME, "python3", "-c", READ, folder, timeout=90).out


READ = (
    "import hashlib, os, sys\n"
    "for name in sorted(os.listdir(sys.argv[1])):\n"
    "    data = open(os.path.join(sys.argv[1], name), 'rb').read()\n"
    "    print(name, hashlib.sha256(data).hexdigest())\n"
)


def test_the_exporter_of_its_own_image_serves_and_what_is_mounted_outlives_it(
    exporting: VmClone, guests: Guests, saw: Saw
) -> None:
    head, worker = guests.head, guests.worker
    # One kernel has one server: its own is named and left alone.
    server(head, "start")
    ran = exporting.start("share", timeout=START)
    assert ran.status == 1 and "by its own nfs-server" in ran.err, ran.said
    assert head.run("cat", "/proc/fs/nfsd/threads").out.strip() != "0"
    server(head, "stop")

    ran = exporting.start("start", *OWN, timeout=START)
    assert ran.status == 0, ran.said
    assert "building the exporter's image" in ran.out, ran.said
    saw(start=f"{ran.seconds:.1f} s")
    attrs = json.loads(head.run("docker", "inspect", EXPORTER).out)[0]
    assert attrs["State"]["Running"] and attrs["RestartCount"] == 0
    shown = [m["RW"] for m in attrs["Mounts"] if m["Destination"].startswith("/export/")]
    assert shown == [False, False], attrs["Mounts"]
    threads = head.run("cat", "/proc/fs/nfsd/threads").out.strip()
    versions = head.run("cat", "/proc/fs/nfsd/versions").out.split()
    assert threads == "16" and "-3" in versions and "+4.2" in versions, (threads, versions)
    listening = head.run("ss", "-Hltn", "sport", "=", ":2049").out
    assert f"{HEAD.address}:2049" in listening and "0.0.0.0:2049" not in listening, listening
    mounts = mounted(worker)
    assert "vers=4.2" in mounts and f"addr={HEAD.address}" in mounts, mounts
    saw(mount=mounts.splitlines()[0])

    # Neither written to, nor read by root's right, nor shown more than the two directories.
    at = f"/home/{USER}/a clean clone/model"
    head.run("sh", "-c", 'echo secret >"$1/secret"; chmod 600 "$1/secret"', "sh", at)
    inside = ("docker", "exec", WORKER_NAME, "python3", "-c")
    shut = worker.run(*inside, "open('/model/secret').read()", check=False)
    head.run("rm", f"{at}/secret")
    assert "PermissionError" in shut.said, shut.said
    wrote = worker.run(*inside, "open('/model/new', 'w')", check=False)
    assert "Read-only file system" in wrote.said, wrote.said

    before = through(worker, "/model"), through(worker, "/engram-src")
    assert before[0].count(".safetensors ") == 3, before
    # Restarted: what is mounted goes on.
    head.run("docker", "restart", EXPORTER, timeout=90)
    began = time.monotonic()
    assert (through(worker, "/model"), through(worker, "/engram-src")) == before
    saw(after_a_restart=f"{time.monotonic() - began:.1f} s")
    # Killed and gone, which leaves the kernel's server: a reader waits, and `share` ends that one
    # and brings another.
    head.run("docker", "rm", "-f", EXPORTER, timeout=90)
    assert head.run("cat", "/proc/fs/nfsd/threads").out.strip() == "16"
    worker.run("sh", "-c", "sync; echo 3 >/proc/sys/vm/drop_caches")
    read = 'docker exec $1 python3 -c "$2" /model >/tmp/read 2>&1; echo $? >>/tmp/read'
    worker.run("sh", "-c", f"rm -f /tmp/read; ({read}) </dev/null >/dev/null 2>&1 &", "sh",
               WORKER_NAME, READ)  # fmt: skip
    time.sleep(5.0)
    assert "0" not in worker.run("sh", "-c", "tail -n1 /tmp/read").out.split()
    ran = exporting.start("share", timeout=START)
    assert ran.status == 0 and "reads the weights through NFS" in ran.out, ran.said
    assert "building" not in ran.out, ran.said
    said = head.run("docker", "logs", EXPORTER).said
    assert "ends the server that an earlier exporter left" in said, said
    end = time.monotonic() + 90
    while (told := worker.run("cat", "/tmp/read").out.splitlines())[-1:] != ["0"]:
        assert time.monotonic() < end, told
        time.sleep(1.0)
    assert told[:-1] == before[0].splitlines()
