"""What the image's and the weights' steps see before a pair that serves is ended for them."""

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

from launcher.commands.nfs import recipe
from launcher.console import Console
from launcher.errors import LauncherError
from launcher.facts.docker import Image
from launcher.findings import Finding, warning
from launcher.image import bring, registry
from launcher.image.bring import Bring
from launcher.image.registry import OutOfReach, Remote
from launcher.nodes.base import Done
from launcher.record import Unkept
from launcher.steps.image import ImageStep
from launcher.steps.weights import Weights
from launcher.weights.backend import Mounts
from launcher.weights.nfs import Nfs

CHECKOUT = Path(__file__).resolve().parents[1]
NAME, BASE = "r.io/a/kit:1", "r.io/a/base:1"
RECIPE = "s1"
GB = 10**9


def image(stamp: str = RECIPE, *layers: str) -> Image:
    return Image("i", layers or ("sha256:a", "sha256:b"), "arm64", "linux", stamp, GB)


@dataclass
class Store:
    """A daemon's images; ``shut``: why it can pull none."""

    names: dict[str, Image]
    shut: str = ""
    pull: Any = None

    def find(self, name: str) -> Image | None:
        return self.names.get(name)

    def out_of_reach(self, name: str) -> str:
        return self.shut

    def root(self) -> str:
        return "/var/lib/docker"


@dataclass
class Made:
    """A `Bring` of two nodes, its step, and what both said."""

    head: Store
    worker: Store
    tmp: Path
    free: int = 99 * GB
    asked: list[str] = field(default_factory=list)
    shipped: list[str] = field(default_factory=list)
    answers: dict[str, Remote] = field(default_factory=dict)

    def step(self, dotenv: str = "") -> tuple[ImageStep, Any]:
        settings = settings_of(self.tmp, f"IMAGE={NAME}\nBASE_IMAGE={BASE}\n{dotenv}")
        said = StringIO()
        console = Console(said, said)
        way = SimpleNamespace(
            look_ahead=lambda how, image: self.shipped.append(how),
            clean=lambda: self.shipped.append("cleaned"),
        )
        made = Bring(
            root=self.tmp,
            settings=settings,
            head=cast(Any, SimpleNamespace(free_bytes=lambda path: self.free)),
            here=cast(Any, self.head),
            there=cast(Any, self.worker),
            logs=self.tmp,
            record=Unkept(self.tmp),
            console=console,
            machine="aarch64",
            ship=lambda platform: cast(Any, way),
        )
        ctx = SimpleNamespace(settings=settings, console=console, said=said)
        return ImageStep(bring=lambda ctx: made), ctx

    def registry(self, wanted: Any, platform: str, login: Any = None) -> Remote:
        name = f"{wanted.host}/{wanted.repository}:{wanted.tag}"
        self.asked.append(name)
        if name not in self.answers:
            raise OutOfReach("r.io: cannot be connected to")
        return self.answers[name]


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Made:
    """Both nodes have one image of the recipe; no registry answers."""
    made = Made(Store({NAME: image()}), Store({NAME: image()}), tmp_path)
    monkeypatch.setattr(bring, "stamp", lambda root, base: RECIPE)
    monkeypatch.setattr(registry, "ask", made.registry)
    return made


@pytest.mark.parametrize(
    ("recipe", "flags", "said"),
    [
        ("s1", "", "already done"),
        ("old", "SKIP_BUILD=1", "kept"),
        ("s1", "PULL=1", "already done"),  # the registry does not answer
        ("old", "SKIP_BUILD=1\nPULL=1", "kept"),
    ],
)
def test_an_image_that_is_kept_undoes_nothing(
    pair: Made, recipe: str, flags: str, said: str
) -> None:
    pair.head.names[NAME] = pair.worker.names[NAME] = image(recipe)
    was, ctx = pair.step()
    step, now = pair.step(flags)
    assert step.inputs(now) == was.inputs(ctx) and step.done(now)
    assert step.found(now) == said
    # That its recipe is another is said each time, and the registry asked once.
    assert ("not of this recipe; SKIP_BUILD=1 keeps it" in now.said.getvalue()) == (said == "kept")
    assert len(pair.asked) <= 1


def test_a_pull_of_what_is_here_undoes_nothing(pair: Made) -> None:
    pair.answers[NAME] = Remote(RECIPE, image().layers, "sha256:d", GB)
    step, ctx = pair.step("PULL=1")
    assert step.done(ctx)
    pair.answers[NAME] = Remote(RECIPE, ("sha256:a", "sha256:new"), "sha256:d", GB)
    step, ctx = pair.step("PULL=1")
    assert not step.done(ctx)


@pytest.mark.parametrize("flags", ["BUILD=1", ""])
def test_what_is_to_be_built_or_copied_is_not_done(pair: Made, flags: str) -> None:
    other = image("old") if not flags else image()
    pair.head.names[NAME] = pair.worker.names[NAME] = other
    step, ctx = pair.step(flags)
    assert not step.done(ctx)
    pair.head.names[NAME], pair.worker.names[NAME] = image(), image(RECIPE, "sha256:x")
    step, ctx = pair.step(flags)
    assert not step.done(ctx)


def refused(step: ImageStep | Weights, ctx: Any) -> str:
    with pytest.raises(LauncherError) as told:
        step.look_ahead(ctx)
    return str(told.value)


def test_a_build_needs_a_base_that_is_there_or_can_be_pulled_with_room(pair: Made) -> None:
    pair.head.shut = "manifest unknown"
    step, ctx = pair.step("BUILD=1")
    told = refused(step, ctx)
    assert f"the base {BASE} is not on the head" in told and "manifest unknown" in told
    assert f"docker pull {BASE}" in told
    pair.head.shut = ""
    step.look_ahead(ctx)  # whose size is not known
    pair.answers[BASE] = Remote("", ("sha256:base",), "sha256:d", 10 * GB)
    pair.free = 19 * GB
    assert f"17.7 GiB free in {pair.head.root()}" in refused(step, ctx)
    pair.free = 20 * GB
    step.look_ahead(ctx)
    # Its layers are here already, under what was built on it.
    pair.free, pair.answers[BASE] = 0, Remote("", image().layers[:1], "sha256:d", 10 * GB)
    step.look_ahead(ctx)
    pair.head.shut, pair.head.names[BASE] = "no network", image("")
    step.look_ahead(ctx)


def test_a_pull_needs_room_and_an_image_that_is_forbidden_is_none(pair: Made) -> None:
    pair.answers[NAME] = Remote(RECIPE, ("sha256:new",), "sha256:d", 10 * GB)
    pair.head.names[NAME] = image("old")
    pair.free = GB
    step, ctx = pair.step()
    assert f"for {NAME}" in refused(step, ctx)
    pair.free = 99 * GB
    step.look_ahead(ctx)
    del pair.head.names[NAME], pair.answers[NAME]
    step, ctx = pair.step("SKIP_BUILD=1")
    assert "SKIP_BUILD=1 forbids to build it" in refused(step, ctx)


def test_what_is_to_be_copied_needs_room(pair: Made) -> None:
    pair.step()[0].look_ahead(pair.step()[1])
    assert pair.shipped == []
    pair.worker.names[NAME] = image("old", "sha256:x")
    step, ctx = pair.step("IMAGE_SHIP=auto")
    step.look_ahead(ctx)
    assert pair.shipped == ["auto"]


@pytest.mark.parametrize(
    ("flags", "worker", "pulls", "done"),
    [
        ("", RECIPE, "", ["cleaned"]),  # it has it
        ("", "old", RECIPE, ["pulled", "cleaned"]),
        ("SKIP_SHIP=1", RECIPE, "", []),
    ],
)
def test_what_a_broken_off_copy_left_goes_however_the_worker_got_the_image(
    pair: Made, flags: str, worker: str, pulls: str, done: list[str]
) -> None:
    images = {RECIPE: image(), "old": image("old", "sha256:x")}
    pair.worker.names[NAME] = images[worker]
    pair.answers[NAME] = Remote(RECIPE, image().layers, "sha256:d", GB)

    def pull(name: str, *_: Any) -> None:
        pair.shipped.append("pulled")
        pair.worker.names[name] = images[pulls]

    pair.worker.pull = pull
    step, ctx = pair.step(flags)
    step.do(ctx)
    assert pair.shipped == done


# ---- the weights ----


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
