"""The weights by the kernel's own NFS between two guests: volumes, a server that goes, and returns.

The head exports by its own nfs-server (HOST_NFS=1): the exporter's image needs a registry.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest
from guests import USER, Guest, Guests, VmClone
from pair import WORKER_NAME
from rig import HEAD

pytestmark = pytest.mark.vm

START = 300.0
NFS = ("--set", "SKIP_SYNC=0", "WEIGHT_SYNC=nfs", "HOST_NFS=1")
VOLUMES = ("dsv41-exl3-weights", "dsv41-exl3-engram")
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
    ran = sharing.start("start", *NFS, "SKIP_SYNC=1", timeout=START)
    assert ran.status == 1 and "no NFS server answers the worker" in ran.err, ran.said
    assert "./start.sh share" in ran.err and time.monotonic() - began < 120
    ran = sharing.start("share", "--set", "HOST_NFS=1", timeout=START)
    assert ran.status == 0 and "reads the weights through NFS" in ran.out, ran.said
    ran = sharing.start("start", *NFS, timeout=START)
    assert ran.status == 0, ran.said
