"""What the weights' step sees before a pair that serves is ended for it."""

from __future__ import annotations

if __name__ == "__main__":  # before the imports that a bare Python lacks
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
from test_look_ahead import NAME, refused

from launcher.commands.nfs import recipe
from launcher.console import Console
from launcher.errors import LauncherError
from launcher.findings import Finding, warning
from launcher.nodes.base import Done
from launcher.record import Unkept
from launcher.steps.weights import Weights
from launcher.weights.backend import Mounts
from launcher.weights.nfs import Nfs

CHECKOUT = Path(__file__).resolve().parents[1]


@dataclass
class Way:
    name: str
    blocked: Sequence[Finding] = ()
    faults: Sequence[Finding] = ()
    calls: list[str] = field(default_factory=list)

    def obstacles(self) -> list[Finding]:
        self.calls.append("obstacles")
        return list(self.blocked)

    def bring(self) -> None:
        raise AssertionError("looking brings nothing")

    def wrong(self) -> list[Finding]:
        self.calls.append("wrong")
        return list(self.faults)

    def amiss(self) -> list[Finding]:
        self.calls.append("amiss")
        return list(self.faults)

    def mounts(self) -> Mounts:
        return Mounts()


def weights(tmp: Path, *ways: Way, dotenv: str = "") -> tuple[Weights, Any]:
    step = Weights(work=lambda ctx: cast(Any, None), ways=lambda work: ways)
    return step, SimpleNamespace(settings=settings_of(tmp, dotenv))


BLOCKED = Finding("the head has no zfs", "ZFS on both nodes", "install it")
LACKING = Finding("the worker lacks a file", "all", "bring it")


def test_weights_without_a_way_are_refused_though_all_may_be_there(tmp_path: Path) -> None:
    told = refused(*weights(tmp_path, Way("zfs", [BLOCKED], [LACKING])))
    assert BLOCKED.found in told and LACKING.found not in told
    both = Way("nfs", [BLOCKED], [LACKING]), Way("zfs", [BLOCKED], [LACKING])
    assert "2 things are in the way" in refused(*weights(tmp_path, *both))
    for free in (
        (Way("nfs", [BLOCKED], [LACKING]), Way("rsync", (), [LACKING])),
        (Way("nfs", [warning("w", "n", "m")], [LACKING]),),
    ):
        step, ctx = weights(tmp_path, *free)
        step.look_ahead(ctx)
    # Found there by a way that cannot be taken, it would be brought by it all the same.
    refused(*weights(tmp_path, Way("zfs", [BLOCKED])))


def test_what_skip_sync_would_mount_is_proven_before(tmp_path: Path) -> None:
    way = Way("nfs", [BLOCKED], [LACKING])
    told = refused(*weights(tmp_path, way, dotenv="SKIP_SYNC=1\n"))
    assert LACKING.found in told and way.calls == ["amiss"]
    whole = Way("nfs", [BLOCKED])
    step, ctx = weights(tmp_path, whole, dotenv="SKIP_SYNC=1\n")
    step.look_ahead(ctx)
    assert whole.calls == ["amiss"]


# ---- the export and the volumes ----


@dataclass
class Machine:
    """A node that answers a command by the first of its words that is known; ``ran``: all."""

    name: str
    answers: dict[str, tuple[int, str]]
    ran: list[str] = field(default_factory=list)

    def run(self, argv: Sequence[str], **_: Any) -> Done:
        words = " ".join(argv)
        self.ran.append(words)
        for known, (status, text) in self.answers.items():
            if known in words:
                return Done(tuple(argv), status, text.encode(), b"")
        return Done(tuple(argv), 0, b"", b"")


def nfs(tmp: Path, head: Machine, worker: Machine, dotenv: str = "", shut: str = "") -> Nfs:
    """``shut``: why no image can be pulled."""
    work = SimpleNamespace(
        settings=settings_of(tmp, f"{dotenv}\nIMAGE={NAME}\n"),
        head=head,
        worker=worker,
        manifest=SimpleNamespace(parts=()),
        sources={"model": "/srv/model", "engram": "/srv/engram"},
        address="10.0.0.1",
        prefix=24,
        owner="me",
        folder=CHECKOUT,
        cache_root=tmp / "cache",
        console=Console(StringIO(), StringIO()),
        record=Unkept(tmp),
    )
    return Nfs(cast(Any, work), shut=lambda name: shut)


ABSENT = (1, "Error: No such container")
NO_VOLUME = (1, "Error: no such volume")


def test_an_exporter_that_serves_is_ended_only_when_the_next_one_can_be_run(
    tmp_path: Path,
) -> None:
    old = {
        "State": {"Status": "running"},
        "Config": {"Labels": {"dsv41.exporter": "me", "dsv41.export": "of other directories"}},
        "Image": "sha256:old",
    }
    head = Machine(
        "head",
        {
            "container inspect": (0, json.dumps([old])),
            "docker build": (1, "no network"),
            "exportfs": (0, ""),
        },
    )
    worker = Machine("worker", {"volume inspect": NO_VOLUME})
    with pytest.raises(LauncherError, match="could not be built"):
        nfs(tmp_path, head, worker).bring()
    assert not [words for words in head.ran if words.startswith(("docker stop", "docker rm"))]


EXPORTER_BASE = "debian:bookworm-slim"
NONE = (1, "Error: No such image")


def test_an_exporter_that_is_to_be_built_needs_a_base_that_is_there_or_can_be_pulled(
    tmp_path: Path,
) -> None:
    worker = Machine("worker", {"volume inspect": NO_VOLUME})
    head = Machine("head", {"container inspect": ABSENT, "image inspect": NONE})
    shut = "no such host"
    (found,) = nfs(tmp_path, head, worker, shut=shut).obstacles()
    assert f"its base {EXPORTER_BASE} is not on the head" in found.found and shut in found.found
    assert f"docker pull {EXPORTER_BASE}" in found.mend and "HOST_NFS=1" in found.mend
    # The step refuses before anything is ended, and where another way is free it is taken.
    step = Weights(work=lambda ctx: cast(Any, None), ways=lambda work: [nfs_way])
    nfs_way = nfs(tmp_path, head, worker, shut=shut)
    ctx = SimpleNamespace(settings=settings_of(tmp_path, ""))
    assert EXPORTER_BASE in refused(step, ctx)
    assert not [words for words in head.ran if words.startswith(("docker build", "docker run"))]
    # It can be pulled; it is there; the image is of this recipe; the head's own server exports.
    assert nfs(tmp_path, head, worker).obstacles() == []
    known = {f"{{{{.Id}}}} {EXPORTER_BASE}": (0, "sha256:base"), **head.answers}
    assert nfs(tmp_path, Machine("head", known), worker, shut=shut).obstacles() == []
    folder = CHECKOUT / "docker" / "nfs"
    stamp = recipe({name: (folder / name).read_bytes() for name in ("Dockerfile", "entrypoint.sh")})
    known = {"dsv41.nfs.recipe": (0, stamp), **head.answers}
    assert nfs(tmp_path, Machine("head", known), worker, shut=shut).obstacles() == []
    assert nfs(tmp_path, head, worker, "HOST_NFS=1", shut).obstacles() == []


def test_an_exporter_that_serves_as_it_is_to_be_needs_no_base(tmp_path: Path) -> None:
    head = Machine("head", {"dsv41.nfs.recipe": NONE, "image inspect": (0, "sha256:old")})
    worker = Machine("worker", {"volume inspect": NO_VOLUME})
    way = nfs(tmp_path, head, worker, shut="no such host")
    serves = {
        "State": {"Status": "running"},
        "Config": {"Labels": {"dsv41.exporter": "me", "dsv41.export": way.export.mark()}},
        "Image": "sha256:old",
    }
    head.answers["container inspect"] = (0, json.dumps([serves]))
    assert way.obstacles() == []
    way.bring()
    assert not [words for words in head.ran if words.startswith(("docker build", "docker stop"))]
    head.answers["image inspect"] = NONE  # its image is gone: it would be made anew
    assert EXPORTER_BASE in way.obstacles()[0].found


def test_host_nfs_without_rights_or_a_server_is_seen_before(tmp_path: Path) -> None:
    worker = Machine("worker", {"volume inspect": NO_VOLUME, "create_connection": (1, "refused")})
    shut = Machine("head", {"sudo -n": (1, ""), "container inspect": ABSENT})
    (found,) = nfs(tmp_path, shut, worker, "HOST_NFS=1").obstacles()
    assert "may not change the head's exports" in found.found
    assert "sudo exportfs -ra" in found.needed
    worker.answers["create_connection"] = (0, "")  # done by hand earlier
    assert nfs(tmp_path, shut, worker, "HOST_NFS=1").obstacles() == []
    bare = Machine("head", {"command -v exportfs": (127, ""), "container inspect": ABSENT})
    (found,) = nfs(tmp_path, bare, worker, "HOST_NFS=1").obstacles()
    assert "has no exportfs" in found.found and "nfs-kernel-server" in found.mend


@pytest.mark.parametrize(
    ("kind", "users", "said"),
    [
        ("nfs", "our-worker", ""),  # which has ended by then
        ("nfs", "our-worker\nother", "is used by other"),
        ("none", "", "is no NFS mount"),
    ],
)
def test_a_volume_that_cannot_give_way_is_seen_before(
    tmp_path: Path, kind: str, users: str, said: str
) -> None:
    there = {"Driver": "local", "Options": {"type": kind, "o": "addr=10.9.9.9"}}
    head = Machine("head", {"container inspect": ABSENT})
    worker = Machine(
        "worker",
        {
            "volume inspect": (0, json.dumps(there)),
            "label=dsv41.owner=me": (0, "our-worker"),
            "docker ps": (0, users),
        },
    )
    found = nfs(tmp_path, head, worker).obstacles()
    assert len(found) == (2 if said else 0)
    assert all(said in each.found for each in found)


def test_a_mount_is_read_through_ahead_where_the_image_is_there(tmp_path: Path) -> None:
    head = Machine("head", {})
    worker = Machine("worker", {"image inspect": (1, ""), "volume inspect": NO_VOLUME})
    way = nfs(tmp_path, head, worker)
    assert "is not there" in way.amiss()[0].found
    volumes = way.mounts().volumes
    there = {
        f"{{{{json .}}}} {each.name}": (
            0,
            json.dumps({"Driver": "local", "Options": dict(each.options)}),
        )
        for each in volumes.values()
    }
    worker.answers = {**there, **worker.answers}
    assert way.amiss() == []  # nothing to read through yet
    worker.answers["create_connection"] = (1, "refused")
    assert "no NFS server answers" in way.amiss()[0].found
