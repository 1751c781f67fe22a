"""The image on two nodes: built from the real recipe, copied, broken off, gone on with, checked.

The base of the build is the rig's serving image, whose pip and self-check are stand-ins; Docker,
ssh, rsync, the recipe and its stamp are real. No registry can be reached but one on loopback.
"""

from __future__ import annotations

import contextlib
import io
import json
import tarfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import docker
import pytest
import registry
import stub_image
from clone import Command, Ran
from head_clone import CACHE, HeadClone
from machine import Node
from pair import Pair
from rig import USER

from launcher.image import stamp

pytestmark = pytest.mark.rig

START = 90.0
REGISTRY = "127.0.0.1:5999"  # nothing listens there
NAME = f"{REGISTRY}/spark-rig/kit:1"
LABEL = "dsv41.recipe.stamp"
#: As shipped: nothing is skipped.
ASKED: dict[str, str | None] = {
    "IMAGE": NAME,
    "BASE_IMAGE": stub_image.NAME,
    "SKIP_BUILD": None,
    "SKIP_PULL": None,
    "SKIP_SHIP": None,
    "SKIP_OVERLAY_VERIFY": None,
    "DSV41_BOOT_SHAPE_WARMUP": "0",
}
KEPT = "spark-rig/kept:1"
STAGED = ".cache/vllm-dsv41-flash-exl3/image-ship"
INDEX = "model/model.safetensors.index.json"
SHIPPED = f"/tmp/dsv41-ship/{REGISTRY.replace(':', '_')}_spark-rig_kit_1.tar"


@pytest.fixture(scope="module", autouse=True)
def afterwards(one_clone: HeadClone) -> Iterator[None]:
    yield
    checks(one_clone)
    remove(one_clone, *nodes(one_clone))


@pytest.fixture
def kit(clean: HeadClone) -> HeadClone:
    """A clone that asks for an image which no node has, or which an earlier test has left."""
    clean.env(ASKED)
    checks(clean)
    return clean


def nodes(clone: HeadClone) -> tuple[Node, Node]:
    return clone.rig.head, clone.rig.worker


def remove(clone: HeadClone, *where: Node) -> None:
    for node in where:
        node.remove_containers()
        for tag in tags(node) - {stub_image.NAME}:
            node.docker.images.remove(tag, force=True)
        node.run("rm", "-rf", "/tmp/dsv41-ship", f"{USER.home}/{STAGED}")


def image(node: Node, name: str = NAME) -> Mapping[str, Any] | None:
    with contextlib.suppress(docker.errors.ImageNotFound):
        found: Mapping[str, Any] = node.docker.images.get(name).attrs
        return found
    return None


def layers(node: Node) -> list[str]:
    found = image(node)
    return [] if found is None else list(found["RootFS"]["Layers"])


def tags(node: Node) -> set[str]:
    return {tag for each in node.docker.images.list() for tag in each.tags}


def checks(clone: HeadClone, **roles: Mapping[str, Any]) -> None:
    """How the next self-checks behave: ``head={…}, worker={…}`` of the stand-in's verify.json."""
    for role, node, folder in (
        ("head", clone.rig.head, f"{clone.at}/model"),
        ("worker", clone.rig.worker, f"{USER.home}/{CACHE}/model"),
    ):
        node.write(f"{folder}/verify.json", json.dumps(roles.get(role, {})), user=USER.name)


def image_only(clone: HeadClone, **settings: str | None) -> Ran:
    """A start that ends behind the image's step: the self-check fails."""
    checks(clone, head={"dies": 3})
    clone.env({**ASKED, **settings})
    ran = clone.start("start", timeout=START)
    assert ran.status == 1, ran.said
    return ran


def test_an_ordinary_first_start_builds_copies_checks_and_serves(kit: HeadClone) -> None:
    # What tools leave in a checkout is neither stamped nor copied.
    for junk in ("spark_overlay/__pycache__/x.cpython-311.pyc", "csrc/old.so", "build/lib/x.py",
                 "spark_overlay/notes.txt"):  # fmt: skip
        kit.rig.head.write(f"{kit.at}/overlay/{junk}", "junk", user=USER.name)
    remove(kit, *nodes(kit))
    where = f'{USER.home}/it\'s "a" $(touch /tmp/pwned) folder'
    kit.env({**ASKED, "IMAGE_SHIP_DIR": f"{where}/here", "WORKER_IMAGE_SHIP_DIR": f"{where}/there"})
    ran = kit.start("start", timeout=START)
    assert ran.status == 0, ran.said
    assert "the registry is out of reach" in ran.err
    assert f"{NAME} is built here: there is none" in ran.said
    wanted = stamp.stamp(kit.root, stub_image.NAME)
    for node in nodes(kit):
        found = image(node)
        assert found is not None and found["Config"]["Labels"][LABEL] == wanted
        assert tags(node) == {stub_image.NAME, NAME}
        assert node.path(where).is_dir() and not node.path("/tmp/pwned").exists()
        assert node.run("find", where, "-type", "f").out == ""
    assert layers(kit.rig.head) == layers(kit.rig.worker)
    assert len(layers(kit.rig.head)) > 3
    pair = Pair.of(kit)
    assert pair.completes() and pair.inspect("worker")["Config"]["Image"] == NAME
    # What the build was given, as the stand-in wrote it down.
    told = json.loads(kit.rig.head.image_file(NAME, "/opt/installed/overlay.json"))
    files = [name.removeprefix("overlay/") for name in stamp.files(kit.root) if "overlay/" in name]
    assert told == {"files": sorted(files), "arch": "121a"}
    verified = (kit.logs / "overlay-verify.log").read_text()
    for role in ("head", "worker"):
        assert f'{role}: {{"check": "exl3 matrices", "on": "NVIDIA GB10", "ok": true' in verified
        assert f"{role}: 5 checks passed (NVIDIA GB10)" in ran.out
    # Nothing changed: nothing is done again, and the pair is the same.
    ran = kit.start("start", timeout=START)
    assert ran.status == 0, ran.said
    assert "image (the same layers on both nodes): already done" in ran.out
    assert "self-check of the image and the checkpoint on both nodes: already done" in ran.out
    assert Pair.of(kit) == pair
    # Checked once, it is checked again when the checkpoint is another.
    places = ((kit.rig.head, f"{kit.at}/{INDEX}"), (kit.rig.worker, f"{USER.home}/{CACHE}/{INDEX}"))
    texts = [node.read(path) for node, path in places]
    try:
        for (node, path), text in zip(places, texts, strict=True):
            node.write(path, text + "\n", user=USER.name)
        checks(kit, worker={"index": "f00f"})
        ran = kit.start("start", timeout=START)
        assert ran.status == 1, ran.said
        assert "the checkpoint's index differs" in ran.err and "f00f on the worker" in ran.err
        assert kit.containers() == {}
    finally:
        for (node, path), text in zip(places, texts, strict=True):
            node.write(path, text, user=USER.name)


def test_a_registry_is_asked_for_the_stamp_before_anything_large(kit: HeadClone) -> None:
    head, port = kit.rig.head, REGISTRY.partition(":")[2]
    folder = f"{USER.home}/registry"
    asked = head.path(folder) / "asked"
    registry.furnish(head.path(folder), kit.rig.image, {LABEL: "0" * 64})
    if image(head) is not None:  # Docker forgets a build's steps with its last name
        head.docker.images.get(NAME).tag(*KEPT.split(":"))
    for node in nodes(kit):
        with contextlib.suppress(docker.errors.ImageNotFound):
            node.docker.images.remove(NAME)
    script = str(Path(registry.__file__))
    with head.background("python3", script, port, folder, listens=int(port)):
        ran = image_only(kit)
        assert f"{NAME} in the registry is of another recipe (000000000000)" in ran.out, ran.said
        assert "built here: there is none; the registry's is of recipe 000000000000" in ran.out
        small = asked.read_text()
        assert small.count("/blobs/") == 1 and small.count("/manifests/") == 1, small
        # Published by this recipe, it is pulled. The worker cannot reach that registry.
        wanted = stamp.stamp(kit.root, stub_image.NAME)
        registry.furnish(head.path(folder), kit.rig.image, {LABEL: wanted})
        built = layers(head)
        ran = image_only(kit, PULL="1")
        assert f"{NAME} is pulled: PULL=1" in ran.out and "GB" in ran.out, ran.said
        assert "the worker could not pull it" in ran.err and "is copied" in ran.err
        stub = head.docker.images.get(stub_image.NAME).attrs["RootFS"]["Layers"]
        assert layers(head) == layers(kit.rig.worker) == stub != built
        found = image(kit.rig.worker)
        assert found is not None and found["Config"]["Labels"][LABEL] == wanted


def test_a_copy_that_is_cut_is_gone_on_with(kit: HeadClone) -> None:
    rig = kit.rig
    remove(kit, rig.worker)
    with slowly(kit):
        checks(kit, head={"dies": 3})
        command = kit.begin("start")
        there = arriving(kit, command)
        rig.worker.sshd_stop()  # its connections too
        ran = command.wait(60)
    assert ran.status == 1, ran.said
    assert "the copy to the worker broke off" in ran.err and "goes on where" in ran.err, ran.said
    assert tags(rig.worker) == {stub_image.NAME}
    rig.worker.sshd_start()
    kept = rig.worker.path(SHIPPED).stat().st_size
    assert kept >= there > 0
    before = sent(rig.head)
    ran = kit.start("start", timeout=START)
    assert "of it is there" in ran.out and "built here" not in ran.out, ran.said
    assert "saving the image" not in ran.out
    assert layers(rig.worker) == layers(rig.head)
    assert "the self-check of the image failed" in ran.err
    (size,) = [event["size"] for event in events(ran) if event["event"] == "copying"]
    assert sent(rig.head) - before < size - kept / 2, (size, kept)


@contextlib.contextmanager
def slowly(kit: HeadClone) -> Iterator[None]:
    """Ten megabytes a second to the worker."""
    rig = kit.rig
    port = rig.port(rig.worker)
    slow = ("root", "tbf", "rate", "80mbit", "burst", "256k", "latency", "100ms")
    rig.driver("tc", "qdisc", "add", "dev", port, *slow)
    try:
        yield
    finally:
        rig.driver("tc", "qdisc", "del", "dev", port, "root")


def arriving(kit: HeadClone, command: Command, at: str = SHIPPED) -> int:
    """Bytes on the worker, once some megabytes are."""
    end = time.monotonic() + 60
    while time.monotonic() < end and command.process.poll() is None:
        with contextlib.suppress(OSError):
            size = kit.rig.worker.path(at).stat().st_size
            if size > 4 << 20:
                return size
        time.sleep(0.05)
    raise AssertionError(f"nothing arrives:\n{command.said()}")


def sent(node: Node) -> int:
    """Bytes that its card has sent so far."""
    return int(node.run("cat", f"/sys/class/net/{node.card.interface}/statistics/tx_bytes").out)


def events(ran: Ran) -> list[dict[str, Any]]:
    assert ran.run is not None
    return [json.loads(line) for line in (ran.run / "events.jsonl").read_text().splitlines()]


def test_a_disk_that_is_full_on_either_side_and_a_stream_without_one(kit: HeadClone) -> None:
    remove(kit, kit.rig.worker)
    with small(kit.rig.head, "/home/dgx/little"), small(kit.rig.worker, "/home/dgx/little"):
        little = "/home/dgx/little"
        ran = image_only(kit, IMAGE_SHIP_DIR=little, WORKER_IMAGE_SHIP_DIR=little)
        for node, key in (("head", "IMAGE_SHIP_DIR"), ("worker", "WORKER_IMAGE_SHIP_DIR")):
            assert f"the {node} has 0.0 GiB free in {little}" in ran.err, ran.said
            assert f"set {key} in .env to another disk; IMAGE_SHIP=stream" in ran.err, ran.said
        assert image(kit.rig.worker) is None
        # Room that somebody else takes while the image is on its way.
        kit.rig.worker.run("mount", "-o", "remount,size=2g", little)
        with slowly(kit):
            checks(kit, head={"dies": 3})
            kit.env({**ASKED, "WORKER_IMAGE_SHIP_DIR": little})
            command = kit.begin("start")
            arriving(kit, command, f"{little}/dsv41-ship/{SHIPPED.rpartition('/')[2]}")
            kit.rig.worker.run("mount", "-o", "remount,size=8m", little)
            ran = command.wait(60)
        assert ran.status == 1, ran.said
        assert f"the worker's {little}/dsv41-ship is full" in ran.err, ran.said
        assert "WORKER_IMAGE_SHIP_DIR in .env to another disk" in ran.err, ran.said
        assert image(kit.rig.worker) is None and tags(kit.rig.worker) == {stub_image.NAME}
        ran = image_only(kit, WORKER_IMAGE_SHIP_DIR=little, IMAGE_SHIP="auto")
        assert "it is streamed" in ran.err and "streaming the image" in ran.out, ran.said
        assert layers(kit.rig.worker) == layers(kit.rig.head) != []
        assert tags(kit.rig.worker) == {stub_image.NAME, NAME}


@contextlib.contextmanager
def small(node: Node, where: str) -> Iterator[None]:
    node.run("mkdir", "-p", where)
    node.run("mount", "-t", "tmpfs", "-o", "size=2m,mode=1777", "small", where)
    try:
        yield
    finally:
        node.run("umount", where)


def test_a_build_that_fails_says_so_and_the_old_image_stays(kit: HeadClone) -> None:
    if layers(kit.rig.head) != layers(kit.rig.worker) or not layers(kit.rig.head):
        image_only(kit)
    old = layers(kit.rig.head)
    run = kit.rig.head.read(f"{kit.at}/docker/run.txt")
    kit.rig.head.write(f"{kit.at}/docker/run.txt", run + "nowhere==1\n", user=USER.name)
    try:
        ran = image_only(kit)
        assert "could not be built" in ran.err, ran.said
        assert "No matching distribution found for nowhere==1" in ran.err
        assert f"log:     {kit.at}/logs/build-image.log" in ran.err
        assert "nowhere==1" in (kit.logs / "build-image.log").read_text()
        assert layers(kit.rig.head) == layers(kit.rig.worker) == old
        # Kept though the recipe is another, when that is asked for.
        ran = image_only(kit, SKIP_BUILD="1")
        assert "not of this recipe; SKIP_BUILD=1 keeps it" in ran.err, ran.said
        assert "the self-check of the image failed" in ran.err
    finally:
        kit.rig.head.write(f"{kit.at}/docker/run.txt", run, user=USER.name)
    # Another base is another recipe; and with SKIP_SHIP=1 two images are refused.
    head = kit.rig.head.docker
    made = head.containers.create(stub_image.NAME, ["true"])
    made.put_archive("/", tar("note", b"another base"))
    made.commit("spark-rig/other", "base")
    made.remove()
    ran = image_only(kit, BASE_IMAGE="spark-rig/other:base", SKIP_SHIP="1", BUILD="1")
    assert f"the worker has another {NAME}" in ran.err and "SKIP_SHIP=1" in ran.err, ran.said
    assert layers(kit.rig.worker) == old != layers(kit.rig.head)


def tar(name: str, data: bytes) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as out:
        info = tarfile.TarInfo(name)
        info.size = len(data)
        out.addfile(info, io.BytesIO(data))
    return made.getvalue()


def test_a_failed_self_check_stops_the_start_and_skipping_it_is_said_aloud(
    kit: HeadClone,
) -> None:
    checks(kit, worker={"fails": "exl3 matrices"}, head={"dies": 3})
    ran = kit.start("start", timeout=START)
    assert ran.status == 1, ran.said
    assert "worker: exl3 matrices (NVIDIA GB10): 0.31, limit 0.001" in ran.err
    assert "head: the self-check ended with exit code 3, after 1 checks" in ran.err, ran.said
    assert "Segmentation fault, or so" in ran.err
    assert f"log:     {kit.at}/logs/overlay-verify.log" in ran.err
    assert kit.containers() == {}
    kit.env({**ASKED, "SKIP_OVERLAY_VERIFY": "1"})
    ran = kit.start("start", timeout=START)
    assert ran.status == 0, ran.said
    assert "SKIP_OVERLAY_VERIFY=1: NOT checked on either node: EXL3's kernels" in ran.err
    assert Pair.of(kit).completes()
