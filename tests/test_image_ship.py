"""The image on its way: what the worker has after a copy or a load that did not end well."""

from __future__ import annotations

if __name__ == "__main__":  # before the imports that a bare Python lacks
    from _standalone import main

    main(__file__)

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any, cast

import pytest

from launcher.console import Console
from launcher.errors import LauncherError
from launcher.facts.docker import Image
from launcher.image import identity, ship, staged
from launcher.image.pipe import Ended
from launcher.image.store import ImageStore
from launcher.nodes.base import Done, Node
from launcher.nodes.endpoint import Endpoint
from launcher.nodes.ssh import SshNode
from launcher.record import Record

NAME, LAYERS = "kit:1", ("sha256:a", "sha256:b")
IMAGE = Image("i", LAYERS, "arm64", "linux", "stamp", 100)
OTHER = Image("o", ("sha256:a", "sha256:c"), "arm64", "linux", "stamp", 100)
SIZE = 64 << 20
TRAVELLING = f"dsv41-ship:{identity.key(LAYERS)}"


class Store:
    """A daemon's names. ``loads`` gets the travelling name by a load."""

    def __init__(self, **names: Image) -> None:
        self.names = {NAME if key == "kit" else key: image for key, image in names.items()}

    def find(self, name: str) -> Image | None:
        return self.names.get(name)

    def root(self) -> str:
        return "/var/lib/docker"

    def tag(self, source: str, target: str) -> None:
        self.names[target] = self.names[source]

    def untag(self, name: str) -> None:
        self.names.pop(name, None)


class Machine:
    """A node with room, whose Docker loads ``brings`` or says ``fails``."""

    name = "worker"
    endpoint = Endpoint("spark2")
    config = Path("/config")

    def __init__(self, store: Store, brings: Image | None = None, fails: str = "") -> None:
        self.store, self.brings, self.fails = store, brings, fails
        self.files: dict[Path, int] = {}
        self.others = False  # the folder for the tar is another account's

    def run(self, argv: Sequence[str], **_: Any) -> Done:
        if argv[:2] == ["docker", "load"]:
            if self.fails:
                return Done(tuple(argv), 1, b"", self.fails.encode())
            if self.brings:
                self.store.names[TRAVELLING] = self.brings
        return Done(tuple(argv), int("-O" in " ".join(argv) and self.others), b"", b"")

    def free_bytes(self, path: Path) -> int:
        return 1 << 40

    def size(self, path: Path) -> int | None:
        return self.files.get(path)

    def remove(self, path: Path) -> None:
        self.files.pop(path, None)


class Way:
    """A ship with everything it needs made up; ``copied``: how rsync ends and what it leaves."""

    def __init__(self, tmp: Path, monkeypatch: pytest.MonkeyPatch, **worker: Any) -> None:
        self.here, self.there = Store(kit=IMAGE), Store(kit=OTHER)
        self.worker = Machine(self.there, **worker)
        self.tar = Path("/tmp/dsv41-ship/kit_1.tar")
        self.ended, self.left = Ended((0,), ("",)), SIZE
        monkeypatch.setattr(staged, "save", lambda *_: SIZE)
        monkeypatch.setattr(ship.pipe, "follow", self.follow)
        self.ship = ship.Ship(
            head=cast(Node, Machine(self.here)),
            worker=cast(SshNode, self.worker),
            here=cast(ImageStore, self.here),
            there=cast(ImageStore, self.there),
            name=NAME,
            platform="linux/arm64",
            folder=tmp / "ship",
            far=PurePosixPath("/tmp"),
            keep=False,
            record=Record(tmp),
            console=Console(),
        )

    def follow(self, argv: Sequence[str], line: Any) -> Ended:
        assert argv[0] == "rsync" and "aes128-gcm@openssh.com" in " ".join(argv)
        line("     33,554,432  50%   99.00MB/s    0:00:00")
        self.worker.files[self.tar] = self.left
        return self.ended

    def refused(self) -> str:
        with pytest.raises(LauncherError) as told:
            self.ship.ship("rsync", IMAGE)
        # Whatever went wrong: no name of the journey stays, and the worker's image is what it was.
        assert self.here.names == {NAME: IMAGE} and self.there.names == {NAME: OTHER}
        return str(told.value)


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    return lambda **worker: Way(tmp_path, monkeypatch, **worker)


def test_a_whole_image_gets_the_name_and_leaves_nothing_behind(made: Any) -> None:
    way = made(brings=IMAGE)
    way.ship.ship("rsync", IMAGE)
    assert way.there.names == {NAME: IMAGE} and way.here.names == {NAME: IMAGE}
    assert way.worker.files == {}


@pytest.mark.parametrize("keep", [False, True])
def test_a_stream_takes_away_what_a_broken_off_copy_left(
    made: Any, monkeypatch: pytest.MonkeyPatch, keep: bool
) -> None:
    way = made(brings=IMAGE)
    way.worker.files[way.tar] = SIZE // 2
    left = staged_files(way)

    def through(*_: Any) -> Ended:
        way.there.names[TRAVELLING] = IMAGE
        return Ended((0, 0), ("", ""))

    monkeypatch.setattr(ship.pipe, "through", through)
    replace(way.ship, keep=keep).ship("stream", IMAGE)
    assert way.there.names == {NAME: IMAGE} and way.worker.files == {}
    assert [path.exists() for path in left] == [keep] * 3


def staged_files(way: Way) -> list[Path]:
    """The head's tar with its note, and what a save that was killed left."""
    way.ship.folder.mkdir()
    made = [way.ship.folder / f"kit_1.tar{end}" for end in ("", ".json", ".part")]
    for path in made:
        path.touch()
    return made


def test_only_what_is_ours_is_taken_away_once_the_worker_has_the_image(made: Any) -> None:
    way = made()
    left = staged_files(way)
    others = [way.ship.folder / name for name in ("kit_2.tar", "kit_1.tar.gz")]
    for path in others:
        path.touch()
    way.worker.files = {way.tar: SIZE // 2, Path("/tmp/dsv41-ship/kit_2.tar"): SIZE}
    way.ship.clean()
    assert not any(path.exists() for path in left) and all(path.exists() for path in others)
    assert list(way.worker.files) == [Path("/tmp/dsv41-ship/kit_2.tar")]
    # A tar without our note, and a folder of the worker that is another's, are left.
    left[0].touch()
    way.worker.files = {way.tar: SIZE}
    way.worker.others = True
    way.ship.clean()
    assert left[0].exists() and way.worker.files == {way.tar: SIZE}


@pytest.mark.parametrize("where", ["worker", "head"])
def test_what_cannot_be_taken_away_stops_no_start_whose_image_is_there(
    made: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], where: str
) -> None:
    way = made()

    def gone(*_: Any, **__: Any) -> Done:
        raise LauncherError("sh did not end within 30 s", "an answer", "again")

    def shut(tar: Path) -> None:
        raise PermissionError(13, "Permission denied", str(tar))

    if where == "worker":
        monkeypatch.setattr(way.worker, "run", gone)
    else:
        monkeypatch.setattr(staged, "discard", shut)
    way.ship.clean()
    told = capsys.readouterr()
    why = {"worker": "did not end within 30 s", "head": "Permission denied"}[where]
    assert "left of the image stays" in told.out + told.err and why in told.out + told.err


def test_other_layers_never_get_the_name_and_are_copied_anew(made: Any) -> None:
    """A tar of the right size and time with other bytes would be kept by rsync for ever."""
    way = made(brings=OTHER)
    told = way.refused()
    assert "of 2 and 2 layers the first 1 are equal" in told
    assert "the worker's name was not moved" in told
    assert way.worker.files == {}


def test_a_load_without_room_keeps_the_tar_and_any_other_failure_does_not(made: Any) -> None:
    way = made(fails="write /layer.tar: no space left on device")
    told = way.refused()
    assert "no room for the image" in told and "docker image prune" in told
    assert way.worker.files == {way.tar: SIZE}
    way = made(fails="invalid tar header")
    assert "invalid tar header" in way.refused()
    assert way.worker.files == {}


@pytest.mark.parametrize(
    ("status", "said", "told"),
    [
        (11, "rsync: write failed: No space left on device (28)", "/tmp/dsv41-ship is full"),
        (12, "connection unexpectedly closed", "it goes on where it broke off"),
        (255, "Connection timed out", "it goes on where it broke off"),
        (23, "mkstemp failed: Permission denied (13)", "rights to write there"),
    ],
)
def test_a_copy_that_ends_badly_keeps_what_came(
    made: Any, status: int, said: str, told: str
) -> None:
    way = made(brings=IMAGE)
    way.ended, way.left = Ended((status,), (said,)), SIZE // 2
    assert told in way.refused()
    assert way.worker.files == {way.tar: SIZE // 2}


def test_a_copy_of_another_length_is_none(made: Any) -> None:
    way = made(brings=IMAGE)
    way.left = SIZE - 1
    assert f"has {SIZE - 1} bytes" in way.refused()


def test_a_stream_that_fails_tells_the_load_s_words(
    made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    way = made(brings=OTHER)
    seen: list[Sequence[str]] = []

    def through(source: Sequence[str], sink: Sequence[str], tick: Any) -> Ended:
        seen.append(sink)
        return Ended((1, 1), ("broken pipe", "no space left on device"))

    monkeypatch.setattr(ship.pipe, "through", through)
    with pytest.raises(LauncherError, match="no room for the image: no space left"):
        way.ship.ship("stream", IMAGE)
    assert seen[0][-2:] == ("spark2", "docker load --quiet") and "-c" in seen[0]
    assert way.there.names == {NAME: OTHER}
