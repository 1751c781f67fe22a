"""The download against a hub on this machine, by the real huggingface_hub: what comes, and why."""

from __future__ import annotations

if __name__ == "__main__":  # before the imports below, which this Python may lack
    from _standalone import main

    main(__file__, "huggingface_hub")

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from download_head import INDEX, LAST, MODEL, NEEDED, Head, one_head

from launcher.errors import LauncherError, UsageError
from launcher.nodes.local import LocalNode
from launcher.weights import download, manifest
from launcher.weights.download import bring


@pytest.fixture
def head(tmp_path: Path) -> Iterator[Head]:
    with one_head(tmp_path) as made:
        yield made


def test_an_empty_head_gets_the_files_that_are_needed_and_no_other(head: Head) -> None:
    made = bring(head.job())
    assert head.differs() == []
    assert sorted(head.hub.got()) == sorted(
        [*NEEDED["model"], *NEEDED["engram"], INDEX, INDEX]  # the indices were read before
    )
    part = made.part("model")
    assert (part.repo, part.revision) == (MODEL, head.hub.commit(MODEL))
    assert [entry.name for entry in part.entries] == NEEDED["model"]
    assert all(e.sha256 for e in part.entries if e.name.endswith(".safetensors"))
    assert manifest.load(head.root / "cache" / "manifest.json") == made
    assert not list(head.model.glob(".cache/huggingface/download/*.incomplete"))


def test_a_whole_head_is_not_asked_of_the_hub_again(head: Head) -> None:
    first = head.settle()
    head.hub.repos[MODEL]["tokenizer.json"] = b"a newer commit"
    assert bring(head.job()) == first
    assert head.hub.asked == []
    updated = bring(head.job(), update=True)
    assert updated.part("model").revision == head.hub.commit(MODEL) != first.part("model").revision
    assert updated.key() != first.key()
    assert sorted(head.hub.got()) == [INDEX, INDEX, "tokenizer.json"]
    assert (head.model / "tokenizer.json").read_bytes() == b"a newer commit"
    assert not (head.root / "cache" / "replaced").exists()  # it was the hub's before


def break_files(head: Head) -> list[str]:
    """Right size and other bytes, cut off, missing, empty; their names."""
    shards = sorted(head.model.glob("*.safetensors"))
    data = bytearray(shards[0].read_bytes())
    data[-7] ^= 1
    shards[0].write_bytes(data)
    shards[1].write_bytes(shards[1].read_bytes()[:-1000])
    shards[2].unlink()
    (head.model / "tokenizer.json").write_bytes(b'{"tok": 2}')
    table = sorted(head.engram.glob("*.safetensors"))[1]
    table.write_bytes(b"")
    return [*(p.name for p in shards[:3]), "tokenizer.json", table.name]


def test_what_is_bad_is_named_and_only_that_is_fetched_again(head: Head) -> None:
    head.settle()
    bad = break_files(head)
    head.hub.forget()
    head.out.truncate(0)
    bring(head.job())
    assert head.differs() == []
    assert sorted(head.hub.got()) == sorted(bad)
    told = head.said
    assert f"{bad[0]} has the right size and other bytes" in told
    assert f"{bad[1]} is cut off" in told
    assert f"missing: {bad[2]}" in told
    assert (head.root / "cache/replaced/model/tokenizer.json").read_bytes() == b'{"tok": 2}'


def test_a_flipped_bit_that_kept_its_time_is_found_when_all_is_summed_anew(head: Head) -> None:
    head.settle()
    bring(head.job())
    shard = head.model / LAST
    before = shard.stat()
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns))
    bring(head.job())
    assert head.differs() == [shard.name]
    bring(head.job(fresh=True))
    assert head.differs() == []


def test_sums_are_made_once_per_file(head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    head.settle()
    read: list[dict[str, Any]] = []
    ask = download.proof.ask

    def spy(directory: str, entries: Any, level: Any, known: Any = None, threads: int = 1) -> bytes:
        entries = list(entries)
        if level == "sums":
            read.append({e.name: (known or {}).get(e.name) for e in entries})
        return ask(directory, entries, level, known, threads)

    monkeypatch.setattr(download.proof, "ask", spy)
    bring(head.job())
    assert not any(any(each.values()) for each in read)
    read.clear()
    bring(head.job())
    assert len(read) == 2 and all(all(each.values()) for each in read)


def test_auto_download_0_only_verifies(head: Head) -> None:
    with pytest.raises(LauncherError, match="does not exist"):
        bring(head.job(fetch=False))
    head.fill()
    made = bring(head.job(fetch=False))
    assert {part.revision for part in made.parts} == {""}
    shard = head.model / LAST
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(LauncherError, match=f"{shard.name} is cut off"):
        bring(head.job(fetch=False))
    assert head.hub.asked == []


def test_auto_download_0_measures_by_what_was_downloaded(head: Head) -> None:
    head.settle()
    bad = break_files(head)
    head.hub.forget()
    with pytest.raises(LauncherError) as caught:
        bring(head.job(fetch=False))
    assert all(name in caught.value.found for name in bad)
    assert "missing or wrong: " in head.said and "to be fetched" not in head.said
    assert head.hub.asked == []


@pytest.mark.parametrize("how", ["update", "another repository"])
def test_auto_download_0_never_forgets_the_hub_s_checksums(head: Head, how: str) -> None:
    """A tree in their place would be its own measure, and wrong bytes right."""
    settled = head.settle()
    break_files(head)
    job = head.job(fetch=False)
    if how == "another repository":
        job = replace(job, repos={**job.repos, "model": "owner/other"})
    with pytest.raises(UsageError, match=r"AUTO_DOWNLOAD=0|owner/other"):
        bring(job, update=how == "update")
    assert manifest.load(job.manifest) == settled
    assert head.hub.asked == []


def test_a_cache_s_links_are_followed_and_never_written_through(head: Head) -> None:
    head.settle()
    blobs = head.root / "blobs"
    blobs.mkdir()
    for n, path in enumerate(sorted(head.model.iterdir())):
        path.rename(blobs / str(n))
        path.symlink_to(blobs / str(n))
    bring(head.job())
    assert head.hub.asked == []
    blob = (head.model / "tokenizer.json").resolve()
    blob.write_bytes(b"altered")
    bring(head.job())
    assert not (head.model / "tokenizer.json").is_symlink()
    assert blob.read_bytes() == b"altered"
    assert head.differs() == []


@pytest.mark.parametrize("fetch", [True, False])
def test_a_file_where_a_directory_should_be_is_told_before_the_hub_is_asked(
    head: Head, fetch: bool
) -> None:
    head.model.touch()
    with pytest.raises(LauncherError, match=r"MODEL_HOST is .*, and .*/model is no directory"):
        bring(head.job(fetch=fetch))
    assert head.hub.asked == []


class Narrow(LocalNode):
    """A node with so much room."""

    room = 0

    def free_bytes(self, path: Path) -> int:
        return self.room


def test_room_is_counted_before_a_file_is_touched_with_what_is_there(head: Head) -> None:
    head.settle()
    shard = head.model / LAST
    shard.write_bytes(shard.read_bytes()[:-5000])
    node = Narrow("head")
    node.room = download.SPARE - 1
    head.hub.forget()
    with pytest.raises(LauncherError, match="free for"):
        bring(replace(head.job(), node=node))
    assert head.hub.got() == [] and shard.exists()
    node.room = download.SPARE + 12_000  # for what is to come beyond the blocks that come free
    bring(replace(head.job(), node=node))
    assert head.differs() == []
