"""Downloads that were broken off go on with what is there."""

from __future__ import annotations

if __name__ == "__main__":  # before the imports below, which this Python may lack
    from _standalone import main

    main(__file__, "huggingface_hub")

import hashlib
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from download_head import (
    ENGRAM,
    INDEX,
    MODEL,
    Head,
    fetchers,
    model,
    native,
    one_head,
)
from local_hub import LocalHub

from launcher.weights import download
from launcher.weights.download import bring
from launcher.weights.hub import HubError
from launcher.weights.manifest import Entry, Part


@pytest.fixture
def head(tmp_path: Path) -> Iterator[Head]:
    with one_head(tmp_path) as made:
        yield made


def test_a_download_killed_at_ten_points_goes_on_with_what_is_not_whole(tmp_path: Path) -> None:
    repo = model(shards=12, size=150_000)
    with LocalHub({MODEL: repo, ENGRAM: native()}) as running:
        head = Head(tmp_path, running)
        head.settle(files=False)

        def kill() -> None:
            for process in fetchers():
                process.send_signal(signal.SIGKILL)

        running.then = kill
        whole: set[str] = set()
        broken = 0
        for point in range(10):
            running.forget()
            running.at = 30_000 + 37_000 * point
            try:
                bring(head.job())
            except HubError as error:
                assert "run this again" in error.do_next
                broken += 1
            assert not whole & set(running.got()) - {INDEX}, "a whole file was fetched again"
            now = {p.name for p in head.model.iterdir() if p.is_file()}
            now |= {p.name for p in head.engram.iterdir()} if head.engram.is_dir() else set()
            for name in now - {INDEX}:
                data = (head.model / name) if (head.model / name).exists() else head.engram / name
                assert data.read_bytes() in (repo.get(name), running.repos[ENGRAM].get(name))
            whole = now - {INDEX, "config.json"}  # these two are in both
        assert broken >= 6
        running.at = -1
        bring(head.job())
        for name in sorted(set(repo) - {"README.md", "measurement.json"}):
            assert (head.model / name).read_bytes() == repo[name], name
        assert not list(head.model.glob(".cache/huggingface/download/*.incomplete"))


def big(size: int, **more: Any) -> LocalHub:
    return LocalHub({MODEL: model(shards=2, size=size), ENGRAM: native()}, **more)


def test_a_large_file_of_a_killed_download_is_taken_up_where_it_was(tmp_path: Path) -> None:
    with big(40_000_000) as running:
        head = Head(tmp_path, running, large=1_000_000)
        head.settle(files=False)
        running.then = lambda: [each.kill() for each in fetchers()]  # type: ignore[assignment]
        for point in range(3):
            running.at = running.sent + 26_000_000 + point  # written by 10 MiB
            with pytest.raises(HubError):
                bring(head.job())
        running.at = -1
        bring(head.job())
        name = "model-00002-of-00002.safetensors"
        for shard in ("model-00001-of-00002.safetensors", name):
            assert (head.model / shard).read_bytes() == running.repos[MODEL][shard]
        starts = [start for _, start in running.begun if start]
        assert starts and all(start % 1_000_000 == 0 for start in starts)
        assert list((head.model / download.PARTIAL).iterdir()) == []
        # A token that the hub's own address needs goes with a range, too.
        running.token = head.environ["HF_TOKEN"] = "hf_right"
        (head.model / name).write_bytes(b"cut")
        bring(head.job())
        assert (head.model / name).read_bytes() == running.repos[MODEL][name]


@pytest.mark.parametrize("large", [1_000_000, 1_000_000_000])
def test_hf_xet_brings_large_files_and_takes_them_up(tmp_path: Path, large: int) -> None:
    """By its real client from a store of its own in a folder, by both ways."""
    with big(6_000_000, xet=tmp_path / "store") as running:
        head = Head(tmp_path, running, large=large)
        head.settle(files=False)
        name = "model-00001-of-00002.safetensors"
        digest = hashlib.sha256(running.repos[MODEL][name]).hexdigest()
        begun = head.model / download.PARTIAL / f"{digest}.part"
        begun.parent.mkdir(parents=True)
        begun.write_bytes(bytes(2_345_678))  # it is gone on with, and the sums see what it was
        bring(head.job())
        for shard in (name, "model-00002-of-00002.safetensors"):
            assert (head.model / shard).read_bytes() == running.repos[MODEL][shard]
        assert not [shard for shard, _ in running.begun if "-of-00002" in shard]
        # What was there was gone on with, and the sums saw it; hf-xet's own way begins anew.
        log = (head.root / "record" / "log.txt").read_text()
        assert ("round role=model  came=6  left=1" in log) == (large == 1_000_000)
        begun.write_bytes(running.repos[MODEL][name][:2_345_678])
        (head.model / name).unlink()
        bring(head.job())
        assert (head.model / name).read_bytes() == running.repos[MODEL][name]
        assert "left=1" not in (head.root / "record" / "log.txt").read_text()[len(log) :]


def test_a_lost_connection_is_taken_up_again_within_a_run(head: Head) -> None:
    head.settle(files=False)
    calls = 0

    def drop() -> None:
        nonlocal calls
        calls += 1
        raise ConnectionResetError

    head.hub.at, head.hub.then = 40_000, drop
    bring(head.job())
    assert calls == 1
    assert head.differs() == []


def test_half_files_of_a_killed_download_go_unless_somebody_writes_them(tmp_path: Path) -> None:
    folder = tmp_path / ".cache" / "huggingface" / "download"
    folder.mkdir(parents=True)
    ours = tmp_path / download.PARTIAL
    ours.mkdir(parents=True)
    kept, old = ours / f"{'a' * 64}.part", ours / f"{'b' * 64}.part"
    part = Part("model", "", "", (Entry("x", 9, sha256="a" * 64),))
    dead, alive = folder / "a.1.incomplete", folder / "b.2.incomplete"
    for path in (dead, kept, old):
        path.write_bytes(b"x")
    with alive.open("wb"):
        assert download.clean(tmp_path, part) == 2
        assert [p.exists() for p in (dead, alive, kept, old)] == [False, True, True, False]
    assert download.clean(tmp_path, part) == 1
