"""The worker gets the weights: rsync cut and gone on with, ZFS, and what an NFS export shows.

This machine's kernel has neither an NFS server nor a client: the export's description is served by
nfs-ganesha and read by libnfs here; the kernel's own is in tests/vm/test_weights.py.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Iterator

import ganesha
import pytest
import stub_image
import weights
from head_clone import HeadClone
from machine import HERE, Node
from pair import Pair
from rig import HEAD, USER, WORKER, Rig

from launcher.commands import nfs
from launcher.settings.table import TABLE

pytestmark = pytest.mark.rig

START = 90.0
FAR = ".cache/of-the-sync"
LARGE = "tokenizer_large.bin"
SIZE = 48 << 20
ANOTHER, NOBODY = (f"{WORKER.address.rpartition('.')[0]}.{n}" for n in (12, 77))
SETTINGS: dict[str, str | None] = {
    "SKIP_SYNC": "0",
    "DSV41_BOOT_SHAPE_WARMUP": "0",
    "WORKER_MODEL_DIR": f"~/{FAR}/model",
    "WORKER_ENGRAM_DIR": f"~/{FAR}/engram",
    "CACHE_ROOT": "~/.cache/of-the-sync-cache",
}


def needs(*programs: str) -> None:
    """Skip the test, or fail it where nothing may be skipped."""
    path = "/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    missing = [each for each in programs if not shutil.which(each, path=path)]
    if missing:
        why = (
            f"needs {', '.join(missing)}: apt-get install zfs-fuse nfs-ganesha nfs-ganesha-vfs"
            " libnfs-utils"
        )
        if os.environ.get("SPARK_TEST_DEMAND"):
            pytest.fail(why, pytrace=False)
        pytest.skip(why)


@pytest.fixture
def syncing(clean: HeadClone) -> Iterator[HeadClone]:
    clean.env(SETTINGS)
    head, worker = clean.rig.head, clean.rig.worker
    head.write(f"{clean.at}/model/{LARGE}", os.urandom(SIZE), user=USER.name)
    yield clean
    clean.env()
    for node in (head, worker):
        node.remove_containers()
    head.run("rm", "-rf", f"{clean.at}/model/{LARGE}", f"{USER.home}/.cache/of-the-sync-cache")
    worker.run("rm", "-rf", f"{USER.home}/{FAR}", f"{USER.home}/.cache/of-the-sync-cache")
    for volume in worker.docker.volumes.list():
        volume.remove(force=True)


@pytest.fixture
def slow(rig: Rig) -> Iterator[None]:
    """Four megabytes a second to the worker."""
    port = rig.port(rig.worker)
    rate = ("rate", "32mbit", "burst", "256k", "latency", "50ms")
    rig.driver("tc", "qdisc", "add", "dev", port, "root", "tbf", *rate)
    yield
    rig.driver("tc", "qdisc", "del", "dev", port, "root", check=False)


def size(node: Node, path: str) -> int:
    told = node.run("stat", "-c", "%s", path, check=False).out.strip()
    return int(told) if told else 0


def sums(node: Node, folder: str) -> dict[str, str]:
    names = " ".join(name for name in [*weights.checkpoint(), LARGE])
    told = node.run("sh", "-c", f'cd "$1" && sha256sum {names}', "sh", folder).out
    return {name: digest for digest, name in (row.split("  ") for row in told.splitlines())}


def test_rsync_cut_by_the_cable_goes_on_and_wrong_bytes_are_found(
    syncing: HeadClone, slow: None
) -> None:
    rig, model = syncing.rig, f"{USER.home}/{FAR}/model"
    large = f"{model}/{LARGE}"
    rig.worker.write(f"{model}/config.json", '{"of": "the user"}', user=USER.name)
    command = syncing.begin("start")
    end = time.monotonic() + 40
    while size(rig.worker, large) < 6 << 20:
        assert time.monotonic() < end and command.process.poll() is None, command.said()
        time.sleep(0.1)
    rig.cable(False)
    ran = command.wait(80)
    assert ran.status == 1, ran.said
    assert "rsync to" in ran.err and "./start.sh again goes on" in ran.err, ran.said
    kept = f"{USER.home}/.cache/of-the-sync-cache/replaced/model/config.json"
    assert f"what config.json was on the worker is kept in {kept}" in ran.out, ran.said
    assert rig.worker.read(kept) == '{"of": "the user"}'
    assert syncing.containers() == {}
    rig.cable(True)
    rig.driver("tc", "qdisc", "del", "dev", rig.port(rig.worker), "root")
    there = size(rig.worker, large)
    assert 6 << 20 <= there < SIZE

    ran = syncing.start("start", timeout=START)
    assert ran.status == 0, ran.said
    told = re.search(r"1 files, ([0-9.]+) MB to copy", ran.out)
    assert told, ran.said
    # Some more came while the cable was back and rsync there not yet at its end.
    assert SIZE / 2e6 < float(told[1]) <= (SIZE - there) / 1e6 + 0.1, (there, told[0])
    assert sums(rig.worker, model) == sums(rig.head, f"{syncing.at}/model")
    served = Pair.of(syncing)
    mounts = {m["Destination"]: m["Source"] for m in served.inspect("worker")["Mounts"]}
    assert (mounts["/model"], mounts["/engram-src"]) == (model, f"{USER.home}/{FAR}/engram")

    again = syncing.start("start", timeout=START)
    assert again.status == 0 and "weights (on the worker" in again.out, again.said
    assert Pair.of(syncing).launch_id == served.launch_id

    damage = "import os; f = open(os.sys.argv[1], 'r+b'); f.seek(20 << 20); f.write(b'wrong')"
    rig.worker.run("/usr/bin/python3", "-c", damage, large)
    kept = syncing.start("start", "--set", "SKIP_SYNC=1", timeout=START)
    assert kept.status == 1 and f"{LARGE} has the right size and other bytes" in kept.err, kept.said
    ran = syncing.start("start", timeout=START)
    assert ran.status == 0, ran.said
    assert f"{LARGE} has the right size and other bytes" in ran.err, ran.said
    assert sums(rig.worker, model) == sums(rig.head, f"{syncing.at}/model")
    assert Pair.of(syncing).launch_id != served.launch_id

    # Other bytes of the same size and time are found by nobody who remembers; FORCE_SYNC compares.
    silent = damage + "; f.close(); os.utime(os.sys.argv[1], ns=tuple(map(int, os.sys.argv[2:])))"
    when = rig.worker.path(large).stat().st_mtime_ns
    rig.worker.run("/usr/bin/python3", "-c", silent, large, str(when), str(when))
    again = syncing.start("start", timeout=START)
    assert again.status == 0 and "weights (on the worker" in again.out, again.said
    assert sums(rig.worker, model) != sums(rig.head, f"{syncing.at}/model")
    ran = syncing.start("start", "--set", "FORCE_SYNC=1", timeout=START)
    assert ran.status == 0 and "copied, every checksum is right" in ran.out, ran.said
    assert sums(rig.worker, model) == sums(rig.head, f"{syncing.at}/model")


def test_a_disk_of_the_worker_that_fills_amid_the_copy_is_told_and_gone_on_with(
    syncing: HeadClone, slow: None
) -> None:
    rig, far = syncing.rig, f"{USER.home}/{FAR}"
    rig.worker.run("mkdir", "-p", far)
    rig.worker.run("mount", "-t", "tmpfs", "-o", "size=2g,mode=1777", "far", far)
    large = f"{far}/model/{LARGE}"
    try:
        command = syncing.begin("start")
        end = time.monotonic() + 40
        while size(rig.worker, large) < 2 << 20:
            assert time.monotonic() < end and command.process.poll() is None, command.said()
            time.sleep(0.1)
        rig.worker.run("mount", "-o", "remount,size=8m", far)  # somebody else's files, as it were
        ran = command.wait(80)
        assert ran.status == 1 and "No space left on device" in ran.err, ran.said
        assert f"free some space on the worker: df -h {far}/model" in ran.err, ran.said
        assert "./start.sh again goes on with what is there" in ran.err, ran.said
        assert syncing.containers() == {}
        ran = syncing.start("start", timeout=START)  # before it is tried again
        assert ran.status == 1 and "needed:" in ran.err and "do next: free some" in ran.err, (
            ran.said
        )
        rig.worker.run("mount", "-o", "remount,size=2g", far)
        rig.driver("tc", "qdisc", "del", "dev", rig.port(rig.worker), "root")
        there = size(rig.worker, large)
        assert 2 << 20 <= there < SIZE
        ran = syncing.start("start", timeout=START)
        assert ran.status == 0, ran.said
        told = re.search(r"([0-9.]+) MB to copy", ran.out)
        assert told and float(told[1]) <= (SIZE - there) / 1e6 + 0.1, (there, ran.said)
        assert sums(rig.worker, f"{far}/model") == sums(rig.head, f"{syncing.at}/model")
    finally:
        rig.worker.remove_containers()
        rig.worker.run("umount", "-l", far)


def listening(node: Node, name: str) -> str:
    """A container on port 2049, as of another project's exporter; its id."""
    serve = (
        "import socket, time; s = socket.create_server(('', 2049)); print('up', flush=True);"
        " time.sleep(600)"
    )
    node.run(
        "docker", "run", "-d", "--name", name, "--network", "host", stub_image.NAME,
        "python3", "-c", serve,
    )  # fmt: skip
    end = time.monotonic() + 10
    while ":2049 " not in node.run("ss", "-Hltn").out:
        assert time.monotonic() < end, node.run("docker", "logs", name).said
        time.sleep(0.05)
    found: str = node.docker.containers.get(name).id
    return found


def test_a_foreign_exporter_is_named_and_left_alone_and_auto_passes_it_over(
    syncing: HeadClone,
) -> None:
    rig = syncing.rig
    was = listening(rig.head, "vllm-fn-nfs")
    ran = syncing.start("share", timeout=START)
    assert ran.status == 1, ran.said
    for told in ("port 2049 of the head is held", "vllm-fn-nfs", "do next:", "log:"):
        assert told in ran.err, ran.said
    assert rig.worker.docker.volumes.list() == []
    ran = syncing.start("start", "--set", "WEIGHT_SYNC=auto", timeout=START)
    assert ran.status == 0, ran.said
    assert "nfs is passed over: port 2049" in ran.err and "zfs is passed over:" in ran.err, ran.said
    foreign = rig.head.docker.containers.get("vllm-fn-nfs")
    assert (foreign.id, foreign.status) == (was, "running")
    foreign.remove(force=True)


def test_volumes_are_made_as_asked_and_one_in_use_is_named(syncing: HeadClone) -> None:
    """HOST_NFS=1 without rights: what to run is told. With something on the port, the volumes come,
    and a kernel without NFS is told by the worker's reading, in time."""
    rig = syncing.rig
    host = ("--set", "HOST_NFS=1")
    ran = syncing.start("share", *host, timeout=START)
    assert ran.status == 1 and "sudo exportfs -ra" in ran.err, ran.said
    assert f"{HEAD.address.rpartition('.')[0]}.0/24(" in ran.err and "(ro" not in ran.err.split(
        "*"
    ), ran.said
    listening(rig.head, "server")
    ran = syncing.start("share", *host, timeout=START)
    assert ran.status == 1 and "could not read the checkpoint through the volume" in ran.err, (
        ran.said
    )
    found = {each.name: each.attrs["Options"] for each in rig.worker.docker.volumes.list()}
    assert set(found) == {"dsv41-exl3-weights", "dsv41-exl3-engram"}
    model = found["dsv41-exl3-weights"]
    assert (model["type"], model["device"]) == ("nfs", ":/dsv41-exl3")
    assert model["o"].startswith(f"addr={HEAD.address},nfsvers=4.2,ro,nconnect=8")
    assert "hard" in model["o"].split(",")
    assert not [name for name in rig.worker.containers() if name.startswith("dsv41-reader")]

    mount = "type=volume,source=dsv41-exl3-weights,target=/x,readonly,volume-nocopy"
    rig.worker.run("docker", "create", "--name", "user", "--mount", mount, stub_image.NAME, "true")
    other = ("HOST_NFS=1", "NFS_OPTS_CLIENT=nfsvers=4.2,ro,hard,nconnect=4")
    ran = syncing.start("share", "--set", *other, timeout=START)
    assert ran.status == 1 and "is used by user" in ran.err, ran.said
    rig.worker.run("docker", "rm", "user")
    ran = syncing.start("share", "--set", *other, timeout=START)
    assert ran.status == 1, ran.said
    found = {each.name: each.attrs["Options"] for each in rig.worker.docker.volumes.list()}
    assert found["dsv41-exl3-weights"]["o"] == f"addr={HEAD.address},{other[1].partition('=')[2]}"
    rig.head.docker.containers.get("server").remove(force=True)


def test_the_export_is_read_from_the_other_node_and_shows_no_more(syncing: HeadClone) -> None:
    needs("ganesha.nfsd", "nfs-cat", "nfs-ls")
    rig, at = syncing.rig, "/var/lib/docker/nfs-rig"  # a file system that has file handles
    head, worker = rig.head, rig.worker
    files = {"dsv41-exl3": weights.checkpoint(), "dsv41-engram": weights.engram()}
    try:
        for folder, content in files.items():
            for name, data in content.items():
                head.write(f"{at}/{folder}/{name}", data)
        head.write(f"{at}/dsv41-exl3/secret", "not for others", 0o600)
        head.write(f"{at}/beside/secret", "not exported")
        export = nfs.Export(
            root="/srv/nfs-export",
            directories={name: f"{at}/{name}" for name in files},
            address=HEAD.address,
            clients=nfs.clients(WORKER.address, HEAD.address, 24),
            options=TABLE["NFS_OPTS"].default,
        )
        for name, source in export.directories.items():
            head.run("mkdir", "-p", f"{export.root}/{name}")
            head.run("mount", "--bind", source, f"{export.root}/{name}")
        head.run("mkdir", "-p", "/run/ganesha", "/var/lib/docker/nfs-recovery")
        head.write(
            "/etc/rig-ganesha.conf", ganesha.configuration(export, "/var/lib/docker/nfs-recovery")
        )
        server = (
            "ganesha.nfsd", "-F", "-f", "/etc/rig-ganesha.conf", "-L", "/var/log/rig-ganesha.log",
            "-p", "/run/rig-ganesha.pid",
        )  # fmt: skip

        def url(path: str) -> str:
            return f"nfs://{HEAD.address}{path}?version=4&nfsport={ganesha.PORT}"

        with head.background(*server, listens=ganesha.PORT):
            for folder, content in files.items():
                for name, data in content.items():
                    hashed = 'nfs-cat "$1" | sha256sum'
                    got = worker.run("bash", "-c", "set -o pipefail; " + hashed, "sh",
                                     url(f"/{folder}/{name}"))  # fmt: skip
                    assert got.out.split()[0] == hashlib.sha256(data).hexdigest(), got.said
            for shut in ("/dsv41-exl3/secret", "/beside/secret", f"{at}/beside/secret"):
                assert worker.run("nfs-cat", url(shut), check=False).status != 0, shut
            into = url("/dsv41-exl3/config.json").replace("config", "new")
            assert worker.run("nfs-cp", "/etc/hostname", into, check=False).status != 0
            stranger = rig.driver("nfs-cat", url("/dsv41-exl3/config.json"), check=False)
            assert "architectures" not in stranger
    finally:
        head.run("sh", "-c", "umount /srv/nfs-export/*; rm -rf /srv/nfs-export", check=False)
        head.run("rm", "-rf", at, "/var/lib/docker/nfs-recovery")


@pytest.fixture
def pools(syncing: HeadClone) -> Iterator[HeadClone]:
    """A pool named models on each node, of zfs-fuse; root of the head may log in to the worker."""
    needs("zfs-fuse", "zfs", "zpool")
    rig = syncing.rig
    key = rig.head.read(f"{USER.home}/.ssh/id_ed25519")
    public = rig.worker.read(f"{USER.home}/.ssh/authorized_keys")
    rig.head.write("/root/.ssh/id_ed25519", key, 0o600)
    rig.head.write("/root/.ssh/known_hosts", f"{WORKER.address} {rig.worker.host_key}\n", 0o600)
    rig.worker.write("/root/.ssh/authorized_keys", public, 0o600)
    for node in (rig.head, rig.worker):
        node.run("sh", "-c", "[ -e /dev/fuse ] || mknod -m 666 /dev/fuse c 10 229")
        node.run("sh", "-c", "mkdir -p /run/zfs /run/lock/zfs; rm -f /var/lib/zfs/zpool.cache")
        node.run("sh", "-c", "setsid zfs-fuse -n </dev/null >/var/log/zfs-fuse.log 2>&1 &")
        node.run("truncate", "-s", "300M", "/var/lib/docker/pool.img")
        ready = (
            "for n in $(seq 100); do zpool list >/dev/null 2>&1 && exit; sleep 0.1; done; exit 1"
        )
        node.run("sh", "-c", ready)
        node.run("zpool", "create", "models", "/var/lib/docker/pool.img")
    rig.worker.ip("addr", "add", f"{ANOTHER}/24", "dev", WORKER.interface)
    yield syncing
    rig.worker.ip("addr", "del", f"{ANOTHER}/24", "dev", WORKER.interface)
    for node in (rig.head, rig.worker):
        node.run("zpool", "destroy", "models", check=False)
        node.end(node.called("zfs-fuse"))
        node.run("rm", "-f", "/var/lib/docker/pool.img")


def test_zfs_sends_all_then_what_changed_and_takes_back_what_was_touched(pools: HeadClone) -> None:
    rig = pools.rig
    head, worker = rig.head, rig.worker
    sources = {"model": "/tank/model", "engram": "/tank/engram"}
    targets = {"model": "/far/model", "engram": "/far/engram"}
    told = {
        "folder": "/tmp/zfs-job",
        "set": [],
        "sources": sources,
        "targets": targets,
        "worker": WORKER.address,
        "address": HEAD.address,
    }
    for role, files in (("model", weights.checkpoint()), ("engram", weights.engram())):
        dataset = {"model": "models/dsv41-exl3", "engram": "models/dsv41-engram"}[role]
        head.run("zfs", "create", "-o", f"mountpoint={sources[role]}", dataset)
        for name, data in files.items():
            head.write(f"{sources[role]}/{name}", data)
    head.write(f"{sources['model']}/{LARGE}", os.urandom(8 << 20))

    def job(*settings: str) -> tuple[int, str]:
        python = str(HERE.parents[1] / ".venv" / "bin" / "python")
        asked = json.dumps({**told, "set": settings})
        words = [python, str(HERE / "zfs_job.py"), str(HERE.parents[1]), asked]
        done = head.run(*words, check=False, timeout=180)
        return done.status, done.said

    def snapshots(node: Node) -> list[str]:
        return node.run("zfs", "list", "-H", "-t", "snapshot", "-o", "name").out.split()

    # By the worker's second address: it is still the worker, whose host key is known.
    status, said = job(f"ZFS_WORKER_IP={NOBODY}")
    assert status == 1 and f"connect to host {NOBODY} port 22" in said, said
    assert snapshots(head) == []  # of a send that failed nothing stays
    status, said = job(f"ZFS_WORKER_IP={ANOTHER}")
    assert status == 0 and said.count("all of it") == 2, said
    assert sums(worker, targets["model"]) == sums(head, sources["model"])

    head.write(f"{sources['model']}/{LARGE}", os.urandom(9 << 20))
    worker.run("zfs", "set", "readonly=off", "models/dsv41-exl3")
    worker.run("sh", "-c", f"echo touched >>{targets['model']}/config.json")
    # By a destination of its own, which must be known by its own name.
    status, said = job(f"ZFS_SSH=root@{ANOTHER}")
    assert status == 1 and "Host key verification failed" in said, said
    known = head.read("/root/.ssh/known_hosts")
    head.write("/root/.ssh/known_hosts", known + f"{ANOTHER} {worker.host_key}\n", 0o600)
    status, said = job(f"ZFS_SSH=root@{ANOTHER}", f"ZFS_WORKER_IP={NOBODY}")
    assert status == 0 and said.count("what changed since dsv41-sync-") == 2, said
    assert sums(worker, targets["model"]) == sums(head, sources["model"])
    assert len(snapshots(worker)) == 2, snapshots(worker)  # one of each dataset

    for node in (head, worker):  # a dataset with nothing in common is not written over
        snapshot = node.run("zfs", "list", "-H", "-r", "-t", "snapshot", "-o", "name",
                            "models/dsv41-exl3").out.split()[0]  # fmt: skip
        if node is worker:
            node.run("zfs", "destroy", snapshot)
    status, said = job()
    assert status == 1 and "shares no snapshot with the head's" in said, said
