"""Files that are there and wrong: named, and small ones kept, before they are replaced."""

from __future__ import annotations

if __name__ == "__main__":  # before the imports below, which this Python may lack
    from _standalone import main

    main(__file__)

import hashlib
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any, cast

import pytest
from settings_root import settings_of

from launcher.console import Console
from launcher.errors import LauncherError
from launcher.image.pipe import Ended
from launcher.nodes.endpoint import Endpoint
from launcher.nodes.local import LocalNode
from launcher.record import Unkept
from launcher.weights import aside, replaced
from launcher.weights.backend import Work
from launcher.weights.manifest import Entry, Manifest, Part
from launcher.weights.rsync import Rsync

FILES = {
    "added.json": b"{}",
    "config.json": b'{"model_type": "deepseek_v41"}',
    "empty.json": b"[]",
    "half.json": b"the first half of it, and the rest",
    "model.safetensors": b"large" * 50,
    "tokenizer.json": b'{"tok": 1}',
}


def entry(name: str, data: bytes) -> Entry:
    return Entry(name, len(data), sha256=hashlib.sha256(data).hexdigest())


def test_each_content_is_kept_once_and_none_is_written_over(tmp_path: Path) -> None:
    path, folder = tmp_path / "config.json", tmp_path / "replaced" / "model"
    said = []
    for text in ("mine", "mine, too", "mine", "at last"):
        path.write_text(text)
        said.append(aside.keep(str(path), str(folder)))
    assert {each.name: each.read_text() for each in folder.iterdir()} == {
        "config.json": "mine",
        "config.json.2": "mine, too",
        "config.json.3": "at last",
    }
    at = f"{folder}/config.json"
    assert said == [at, f"{at}.2", "", f"{at}.3"]
    link = tmp_path / "link"
    link.symlink_to(path)
    assert aside.keep(str(link), str(folder)) == ""


class Far(LocalNode):
    """A worker with files of its own."""

    endpoint = Endpoint("spark2")
    config = Path("/config")

    def destination(self) -> str:
        return "spark2"


@dataclass
class Pair:
    """A head with FILES, and a worker in another folder; cp is in rsync's place."""

    root: Path
    dotenv: str = ""
    said: StringIO = field(default_factory=StringIO)
    copied: list[str] = field(default_factory=list)

    @property
    def far(self) -> Path:
        return self.root / "far" / "model"

    @property
    def kept(self) -> dict[str, bytes]:
        folder = self.root / "far" / "cache" / "replaced" / "model"
        return {path.name: path.read_bytes() for path in folder.glob("*")}

    def put(self, name: str, data: bytes) -> Path:
        self.far.mkdir(parents=True, exist_ok=True)
        (self.far / name).write_bytes(data)
        return self.far / name

    def follow(self, argv: Sequence[str], line: Callable[[str], None]) -> Ended:
        for source in argv[argv.index("--") + 1 : -1]:
            self.copied.append(Path(source).name)
            shutil.copy2(source, self.far)
        return Ended((0,), ("",))

    def bring(self) -> str:
        """What was said."""
        source = self.root / "model"
        source.mkdir(exist_ok=True)
        for name, data in FILES.items():
            (source / name).write_bytes(data)
        entries = tuple(entry(name, data) for name, data in FILES.items())
        work = Work(
            settings=settings_of(self.root, self.dotenv),
            head=LocalNode("head"),
            worker=cast(Any, Far("worker")),
            manifest=Manifest((Part("model", "owner/it", "c" * 40, entries),)),
            sources={"model": str(source)},
            targets={"model": str(self.far)},
            address="10.0.0.1",
            prefix=24,
            owner="me",
            folder=self.root,
            cache_root=self.root / "cache",
            far_cache_root=str(self.root / "far" / "cache"),
            console=Console(self.said, self.said),
            record=Unkept(self.root),
        )
        Rsync(work, follow=self.follow).bring()
        there = {path.name: path.read_bytes() for path in self.far.iterdir()}
        assert there == FILES
        return self.said.getvalue()


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pair:
    monkeypatch.setattr("launcher.weights.rsync.LOOK", 0.01)
    monkeypatch.setattr(replaced, "SMALL", 100)  # a shard is larger
    return Pair(tmp_path)


def test_what_is_wrong_on_the_worker_is_named_and_what_is_small_and_not_ours_is_kept(
    pair: Pair,
) -> None:
    mine = {
        "added.json": b'{"longer": "than ours"}',
        "config.json": b"{}",
        "tokenizer.json": b'{"tok": 2}',
    }
    for name, data in mine.items():
        pair.put(name, data)
    pair.put("empty.json", b"")
    pair.put("half.json", FILES["half.json"][:9])  # by a copy that broke off
    pair.put("model.safetensors", bytes(len(FILES["model.safetensors"])))
    told = pair.bring()
    assert pair.kept == mine and sorted(pair.copied) == sorted(FILES)
    for name in mine:
        kept = f"{pair.root}/far/cache/replaced/model/{name}"
        assert f"what {name} was on the worker is kept in {kept}" in told
    for said in (
        "added.json is too long: 23 of 2 bytes; it is copied anew",
        "config.json is cut off: 2 of 30 bytes; the rest is sent",
        "half.json is cut off: 9 of 34 bytes; the rest is sent",
        "model.safetensors has the right size and other bytes",
        "tokenizer.json has the right size and other bytes",
    ):
        assert f"on the worker {said}" in told


def test_force_sync_keeps_what_differs_though_the_size_is_right(pair: Pair) -> None:
    for name, data in FILES.items():
        pair.put(name, data)
    mine = b'{"tok": 2}'
    pair.put("tokenizer.json", mine)
    pair.dotenv = "FORCE_SYNC=1\n"
    told = pair.bring()
    assert "tokenizer.json has the right size and other bytes" in told
    assert pair.kept == {"tokenizer.json": mine} and sorted(pair.copied) == sorted(FILES)


def test_what_cannot_be_read_or_kept_is_left_as_it_is(pair: Pair) -> None:
    folder = pair.far / "model.safetensors"
    folder.mkdir(parents=True)
    (folder / "notes").write_text("mine")
    with pytest.raises(LauncherError, match="cannot be read: not a regular file"):
        pair.bring()
    assert (folder / "notes").read_text() == "mine" and pair.copied == []
    shutil.rmtree(folder)
    mine = pair.put("config.json", b"mine")
    (pair.root / "far" / "cache").write_text("no directory")
    with pytest.raises(LauncherError, match=r"copies of config.json in .* could not be made"):
        pair.bring()
    assert mine.read_bytes() == b"mine" and pair.copied == []
