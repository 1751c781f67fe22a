"""``./start.sh prepare`` on two nodes: the real writer in containers, gone on with, refused."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import weights
from head_clone import CACHE, HeadClone
from machine import Node
from rig import USER

from spark_overlay.headers import INDEX_NAME
from spark_overlay.loading import prepare

pytestmark = pytest.mark.rig

WHERE = f"{USER.home}/dsv41-engram"  # HEAD_PACKED_DIR as shipped


@pytest.fixture
def preparing(clean: HeadClone) -> Iterator[HeadClone]:
    """A clone with an EXL3 pack on both nodes and nothing prepared; afterwards as it was."""
    put(clean, weights.packed())
    forget(clean)
    yield clean
    put(clean, weights.checkpoint())
    forget(clean)
    for node, _ in ranks(clean):
        node.remove_containers()
        node.run("rm", "-rf", WHERE)


def ranks(clone: HeadClone) -> tuple[tuple[Node, str], tuple[Node, str]]:
    """Each rank's node, and where its checkpoint is there."""
    worker = f"{USER.home}/{CACHE}/model"
    return (clone.rig.head, f"{clone.at}/model"), (clone.rig.worker, worker)


def put(clone: HeadClone, files: dict[str, bytes]) -> None:
    for node, where in ranks(clone):
        for name, data in files.items():
            node.write(f"{where}/{name}", data, user=USER.name)


def forget(clone: HeadClone) -> None:
    """The head's manifest, which an earlier start made of the other checkpoint."""
    made = ("find", f"{USER.home}/.cache", "-name", "manifest.json", "-delete")
    clone.rig.head.run(*made, check=False)


def name(rank: int) -> str:
    return f"weights-r{rank}of2.safetensors"


def right(rank: int, folder: Path) -> bytes:
    """What a rank's file must be, made by the same code in this process."""
    model = folder / "model"
    model.mkdir(exist_ok=True)
    for path, data in weights.packed().items():
        (model / path).write_bytes(data)
    job = prepare.task(model, folder, rank, 2)
    prepare.prepare(job, lambda line: None)
    return job.path.read_bytes()


def half_written(node: Node, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a packer leaves that was killed after two shards: its process ends amid a write."""
    job = prepare.task(node.path(model), node.path(WHERE), 0, 2)
    child = os.fork()
    if child == 0:
        plain, two = prepare._write, job.blocks(prepare.BLOCK)[2].tensors[0].into

        def write(out: int, data: bytes | bytearray, at: int) -> None:
            if at >= two:
                os._exit(9)
            plain(out, data, at)

        monkeypatch.setattr(prepare, "SYNC", 1)
        monkeypatch.setattr(prepare, "_write", write)
        prepare.prepare(job, lambda line: None)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


def test_shares_are_written_gone_on_with_and_refused(
    preparing: HeadClone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head, model = ranks(preparing)[0]
    head.run("mkdir", "-p", WHERE, user=USER.name)
    half_written(head, model, monkeypatch)
    assert head.run("ls", WHERE).out.split() == [f"{name(0)}.progress", f"{name(0)}.tmp"]
    ran = preparing.start("prepare")
    assert ran.status == 0 and ran.run is not None, ran.said
    assert "all prepared files are whole" in ran.out, ran.said
    assert re.search(rf"{name(0)}: goes on after", (ran.run / "log.txt").read_text())
    assert preparing.containers() == {}
    for rank, (node, where) in enumerate(ranks(preparing)):
        assert node.run("ls", WHERE).out.split() == [name(rank)]
        assert node.path(f"{WHERE}/{name(rank)}").read_bytes() == right(rank, tmp_path)
        index = f"{where}/{INDEX_NAME}"
        node.write(index, node.read(index) + "\n", user=USER.name)
    ran = preparing.start("prepare")
    assert ran.status == 1, ran.said
    assert f"{WHERE}/{name(0)} was made of another checkpoint" in ran.err, ran.said
    assert "Remove it and make it again: ./start.sh prepare" in ran.err, ran.said
    for rank, (node, _) in enumerate(ranks(preparing)):
        assert node.path(f"{WHERE}/{name(rank)}").read_bytes() == right(rank, tmp_path)
