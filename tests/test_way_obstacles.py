"""What keeps a way of the weights to the worker from being taken, and what is then advised."""

from __future__ import annotations

if __name__ == "__main__":  # before the imports below, which this Python may lack
    from _standalone import main

    main(__file__)

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from settings_root import settings_of

from launcher.console import Console
from launcher.nodes.base import Done
from launcher.nodes.local import LocalNode
from launcher.steps import weights
from launcher.weights.backend import Work
from launcher.weights.nfs import Nfs
from launcher.weights.rsync import Rsync
from launcher.weights.zfs import Zfs


@dataclass
class Head:
    """A head whose Docker has a container of these labels under every name (None: has none)."""

    labels: dict[str, str] | None = None
    name: str = "head"
    asked: list[Sequence[str]] = field(default_factory=list)

    def run(self, argv: Sequence[str], **_: Any) -> Done:
        self.asked.append(argv)
        if "inspect" not in argv:
            return Done(tuple(argv), 0, b"", b"")
        if self.labels is None:
            kind = "volume" if "volume" in argv else "container"
            return Done(tuple(argv), 1, b"", f"Error: No such {kind}: x".encode())
        told = {"State": {"Status": "running"}, "Config": {"Labels": self.labels}, "Image": "i"}
        return Done(tuple(argv), 0, json.dumps([told]).encode(), b"")


class Far(LocalNode):
    """This machine, with an rsync whatever it has."""

    def run(self, argv: Sequence[str], **more: Any) -> Done:
        if "command -v rsync" in argv:
            return Done(tuple(argv), 0, b"", b"")
        return super().run(argv, **more)


def found(tmp_path: Path, head: Head, dotenv: str = "") -> list[str]:
    (tmp_path / "checkout").mkdir(exist_ok=True)
    work = SimpleNamespace(
        settings=settings_of(tmp_path / "checkout", dotenv),
        head=head,
        worker=Head(None, "worker"),
        manifest=SimpleNamespace(parts=()),
        sources={"model": "/srv/model", "engram": "/srv/engram"},
        address="10.0.0.1",
        prefix=24,
        owner="spark:/kit",
        folder=Path(__file__).resolve().parents[1],
        cache_root=tmp_path / "cache",
        console=Console(StringIO(), StringIO()),
    )
    way = Nfs(cast(Work, work), shut=lambda name: "")
    return [f"{each.found}; {each.mend}" for each in way.obstacles()]


def test_a_rank_under_the_exporter_s_name_is_never_to_be_removed(tmp_path: Path) -> None:
    (rank,) = found(tmp_path, Head({"dsv41.owner": "spark:/kit"}))
    assert "of spark:/kit: no exporter" in rank and "set another NFS_CONTAINER" in rank
    assert "docker rm" not in rank


def test_a_stranger_s_container_may_be(tmp_path: Path) -> None:
    (stranger,) = found(tmp_path, Head({}))
    assert "of no launcher" in stranger and "docker rm -f dsv41-exl3-nfs" in stranger


def test_a_root_with_more_than_the_two_directories_is_not_exported(tmp_path: Path) -> None:
    root = tmp_path / "home"
    dotenv = f"NFS_EXPORT_ROOT={root}\n"
    assert found(tmp_path, Head(), dotenv) == []  # to be made
    for name in ("dsv41-exl3", "dsv41-engram/of the mount", "an old name"):
        (root / name).mkdir(parents=True)
    assert found(tmp_path, Head(), dotenv) == []
    (root / "an old name" / "secrets").touch()
    (root / ".ssh").symlink_to(tmp_path)
    for host in ("0", "1"):
        (wrong,) = found(tmp_path, Head(), dotenv + f"HOST_NFS={host}\n")
        assert f"{root}" in wrong and ".ssh, an old name" in wrong and "NFS_EXPORT_ROOT" in wrong
    (wrong,) = found(tmp_path, Head(), f"NFS_EXPORT_ROOT={root}/an old name/secrets\n")
    assert "Not a directory" in wrong


def test_another_root_is_another_export(tmp_path: Path) -> None:
    assert "NFS_EXPORT_ROOT" in weights.KEYS


def test_a_file_where_the_worker_s_directory_should_be_is_told_with_its_key(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    node = Far("worker")
    targets = {"model": f"{tmp_path}/to be made", "engram": f"{tmp_path}/file/engram"}
    work = SimpleNamespace(head=node, worker=node, targets=targets)
    (wrong,) = Rsync(cast(Work, work)).obstacles()
    assert f"WORKER_ENGRAM_DIR is {tmp_path}/file/engram, and {tmp_path}/file of" in wrong.found
    assert "mkdir" not in wrong.mend


@pytest.mark.parametrize(
    ("said", "mend"),
    [
        (
            "The ZFS modules are not loaded.\nTry running '/sbin/modprobe zfs' as root.",
            "apt install",
        ),
        (
            "Please make sure that the zfs-fuse daemon is running.\ninternal error: no",
            "apt install",
        ),
        ("cannot open 'models/x': permission denied", "zfs allow"),
    ],
)
def test_zfs_that_does_not_run_is_no_matter_of_rights(said: str, mend: str) -> None:
    class Node:
        name = "head"

        def run(self, argv: Sequence[str], **_: Any) -> Done:
            return Done(tuple(argv), int("zfs" in argv and "sh" not in argv), b"", said.encode())

    parts = (SimpleNamespace(role="model", size=1),)
    work = SimpleNamespace(
        head=Node(), worker=Node(), manifest=SimpleNamespace(parts=parts),
        sources={"model": "/m"}, targets={"model": "/m"},
        settings=SimpleNamespace(text=lambda key: "models/x"),
    )  # fmt: skip
    (wrong,) = Zfs(cast(Work, work)).obstacles()
    assert mend in wrong.mend and ("zfs allow" in wrong.mend) == (mend == "zfs allow")
