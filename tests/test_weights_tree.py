"""The tree check, the manifest of a tree, hard links for a mount, how far a reading has come."""

from __future__ import annotations

if __name__ == "__main__":  # before the imports below, which this Python may lack
    from _standalone import main

    main(__file__)

import errno
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.errors import LauncherError
from launcher.nodes.base import Done
from launcher.nodes.local import LocalNode
from launcher.weights import choice, proof
from launcher.weights.manifest import Entry, Part
from launcher.weights.pace import Pace, size
from launcher.weights.proof import Memory, look, prove
from launcher.weights.solid import solid
from launcher.weights.tree import length, of_tree

INDEX = "model.safetensors.index.json"
NODE = LocalNode("head")


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def of(folder: Path, **more: str) -> Part:
    entries = [
        Entry(path.name, path.stat().st_size, sha256=sha256(path.read_bytes()))
        for path in folder.iterdir()
    ]
    return Part("model", "", "", tuple(entries))


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    folder = tmp_path / "tree"
    folder.mkdir()
    for name, data in (("a", b"x" * 100_000), ("b", b""), ("c", b"tail" * 3)):
        (folder / name).write_bytes(data)
    return folder


def test_each_kind_of_damage_is_told_apart(tree: Path) -> None:
    part = of(tree)
    assert [prove(NODE, str(tree), part, level) for level in ("sizes", "ends", "sums")] == [[]] * 3  # type: ignore[arg-type]
    (tree / "a").write_bytes(b"x" * 99_999 + b"y")
    (tree / "b").unlink()
    (tree / "b").symlink_to("nowhere")
    (tree / "c").write_bytes(b"tail" * 2)
    found = {fault.name: str(fault) for fault in prove(NODE, str(tree), part, "sums")}
    assert "right size and other bytes" in found["a"]
    assert found["b"] == "b is missing (a link to nothing)"
    assert found["c"] == "c is cut off: 8 of 12 bytes"
    assert [f.name for f in prove(NODE, str(tree), part, "sizes")] == ["b", "c"]
    (tree / "c").unlink()
    (tree / "c").mkdir()
    (fault,) = (f for f in prove(NODE, str(tree), part, "sizes") if f.name == "c")
    assert "not a regular file" in str(fault)


def test_ends_differ_where_the_first_or_the_last_bytes_do(tree: Path) -> None:
    part = of(tree)

    def ends() -> list[str]:
        return [row.ends for row in look(NODE, str(tree), part.entries, "ends")]

    before = ends()
    assert all(each.startswith("sha256:") for each in before)
    for at in (0, 99_999):
        data = bytearray(b"x" * 100_000)
        data[at] = 0
        (tree / "a").write_bytes(data)
        assert ends()[0] != before[0] and ends()[1:] == before[1:]


def test_a_git_id_is_checked_as_git_makes_it(tree: Path) -> None:
    made = subprocess.run(["git", "hash-object", str(tree / "c")], capture_output=True, text=True)
    entry = Entry("c", 12, git=made.stdout.strip())
    assert prove(NODE, str(tree), Part("model", "", "", (entry,)), "sums") == []
    (tree / "c").write_bytes(b"liat" * 3)
    assert len(prove(NODE, str(tree), Part("model", "", "", (entry,)), "sums")) == 1


def test_a_missing_directory_is_missing_files(tmp_path: Path) -> None:
    part = Part("model", "", "", (Entry("a", 1), Entry("b", 2)))
    found = prove(NODE, str(tmp_path / "none"), part, "sums")
    assert [fault.state for fault in found] == ["missing"] * 2


def test_a_sum_is_remembered_until_size_or_time_change(tree: Path, tmp_path: Path) -> None:
    memory, part = Memory(tmp_path / "sums.json"), of(tree)
    assert prove(NODE, str(tree), part, "sums", memory) == []
    known = memory.known(f"head:{tree}")
    assert {name: row[2] for name, row in known.items()} == {e.name: e.digest for e in part.entries}
    before = (tree / "a").stat()
    (tree / "a").write_bytes(b"y" * 100_000)
    assert len(prove(NODE, str(tree), part, "sums", memory)) == 1  # its time is another
    os.utime(tree / "a", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert len(prove(NODE, str(tree), part, "sums", memory)) == 1  # the new sum had the new time
    assert len(prove(NODE, str(tree), part, "sums", Memory(memory.path, fresh=True))) == 1
    # The same files under another name, or on another node, are not known.
    assert memory.known("worker:/x") == {}


@pytest.mark.parametrize("text", ["", "[]", "{", '{"head:/t": 3}', '{"head:/t": {"a": [1, "x"]}}'])
def test_a_broken_memory_is_an_empty_one(tmp_path: Path, text: str) -> None:
    path = tmp_path / "sums.json"
    path.write_text(text)
    assert dict(Memory(path).known("head:/t")) == {}


def test_a_sum_told_of_another_kind_is_not_taken(tree: Path) -> None:
    row = [100_000, (tree / "a").stat().st_mtime_ns, "git:" + "0" * 40]
    asked = proof.ask(str(tree), [Entry("a", 100_000, sha256="0" * 64)], "sums", {"a": row})
    done = subprocess.run(proof.argv(sys.executable), input=asked, capture_output=True, check=True)
    rows = [proof.row_of(line) for line in done.stdout.decode().splitlines()]
    assert [row.state for row in rows if row] == ["bytes"]


def test_a_node_that_cannot_check_is_told(tree: Path) -> None:
    class Without(LocalNode):
        def run(self, argv: Any, **more: Any) -> Done:
            return Done(tuple(argv), 127, b"", b"")

    with pytest.raises(LauncherError, match=r"could not be checked \(status 127\)"):
        prove(Without("worker"), str(tree), of(tree), "sizes")


# The manifest of a tree.


def safetensors(size: int) -> bytes:
    header = json.dumps({"t": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(size)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    names = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    tensors = {f"layers.{n}.w": name for n, name in enumerate(names)}
    tensors["layers.1.engram.embed.weight"] = names[1]
    files = {
        INDEX: json.dumps({"weight_map": tensors}).encode(),
        "config.json": b"{}",
        "tokenizer.json": b"{}",
        "stub.json": b"not of the weights",
        **{name: safetensors(500) for name in names},
    }
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


def test_a_tree_s_manifest_has_what_is_needed(checkpoint: Path) -> None:
    part = of_tree("model", checkpoint)
    assert (part.revision, part.repo) == ("", "")
    names = {entry.name for entry in part.entries}
    assert names == {path.name for path in checkpoint.iterdir()} - {"stub.json"}
    tables = of_tree("engram", checkpoint)
    assert [entry.name for entry in tables.entries] == [
        "config.json",
        "model-00002-of-00002.safetensors",
        INDEX,
    ]


def cut(folder: Path) -> None:
    shard = folder / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (cut, "model-00002-of-00002.safetensors is cut off"),
        (lambda d: (d / "model-00001-of-00002.safetensors").unlink(), "lacks model-00001"),
        (lambda d: (d / "model-00001-of-00002.safetensors").write_bytes(b""), "no safetensors"),
        (lambda d: (d / "config.json").unlink(), "lacks config.json"),
        (lambda d: (d / INDEX).unlink(), f"lacks {INDEX}"),
        (lambda d: (d / INDEX).write_text("{}"), "weight_map"),
        (lambda d: (d / INDEX).write_text('{"weight_map": {}}'), "does not name a shard"),
        (lambda d: (d / INDEX).write_text('{"weight_map": {"a": "../x"}}'), "'../x'"),
    ],
)
def test_what_a_tree_lacks_is_told(
    checkpoint: Path, damage: Callable[[Path], None], told: str
) -> None:
    damage(checkpoint)
    with pytest.raises(LauncherError) as caught:
        of_tree("model", checkpoint)
    assert told in str(caught.value)


def test_a_damaged_header_is_no_length(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    for header in (b"[]", b'{"t": 1}', b'{"t": {"data_offsets": []}}', b"{"):
        path.write_bytes(len(header).to_bytes(8, "little") + header)
        with pytest.raises(ValueError):
            length(path)


def test_of_the_original_only_the_shards_with_tables_are_chosen() -> None:
    tensors = {
        "embed.weight": "model-00001-of-00048.safetensors",
        "layers.1.engram.wkv.weight": "model-00046-of-00048.safetensors",
        "layers.1.engram.embed.weight": "model-00047-of-00048.safetensors",
        "layers.1.engram.embed.scale": "model-00047-of-00048.safetensors",
        "model.layers.14.engram.embed.weight": "model-00048-of-00048.safetensors",
    }
    index = json.dumps({"weight_map": tensors})
    assert choice.shards("engram", index, "i") == (
        "model-00047-of-00048.safetensors",
        "model-00048-of-00048.safetensors",
    )
    assert len(choice.shards("model", index, "i")) == 4
    listing = [*set(tensors.values()), "config.json", INDEX, "README.md", "tokenizer.json"]
    names, missing = choice.chosen("engram", index, listing[1:], "i")
    assert "README.md" not in names and "tokenizer.json" not in names
    assert set(missing) == {listing[0]} & set(choice.shards("engram", index, "i"))


# A directory that can be mounted.


def test_real_files_are_used_in_place(checkpoint: Path, tmp_path: Path) -> None:
    part = of_tree("model", checkpoint)
    found = solid(checkpoint, part, tmp_path / "at", key="CACHE_ROOT")
    assert found.path == checkpoint and not (tmp_path / "at").exists()


def test_a_cache_s_links_become_hard_links_and_follow_a_change(
    checkpoint: Path, tmp_path: Path
) -> None:
    blobs, at = tmp_path / "blobs", tmp_path / "at"
    blobs.mkdir()
    part = of_tree("model", checkpoint)
    for path in list(checkpoint.iterdir()):
        path.rename(blobs / path.name)
        path.symlink_to(blobs / path.name)
    for _ in range(2):
        found = solid(checkpoint, part, at, key="CACHE_ROOT")
        assert found.path == at
        for entry in part.entries:
            assert not (at / entry.name).is_symlink()
            assert (at / entry.name).samefile(blobs / entry.name)
    # A file that was fetched anew takes the place of its old link; one no longer named goes.
    shard = checkpoint / "model-00001-of-00002.safetensors"
    shard.unlink()
    shard.write_bytes(safetensors(500))
    (at / "the user's own").write_bytes(b"")
    fewer = Part("model", "", "", tuple(e for e in part.entries if e.name != "tokenizer.json"))
    solid(checkpoint, fewer, at, key="CACHE_ROOT")
    assert (at / shard.name).samefile(shard)
    assert not (at / "tokenizer.json").exists() and (at / "the user's own").exists()


def test_a_whole_original_shows_the_tables_only(checkpoint: Path, tmp_path: Path) -> None:
    part = of_tree("engram", checkpoint)
    found = solid(checkpoint, part, tmp_path / "at", key="ENGRAM_SRC")
    assert found.path == tmp_path / "at" and "1 more shards" in found.note
    shards = [path.name for path in found.path.glob("*.safetensors")]
    assert shards == ["model-00002-of-00002.safetensors"]


def test_nothing_is_copied_over_a_border_of_file_systems(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(source: Any, target: Any, **more: Any) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link", source, None, target)

    monkeypatch.setattr(os, "link", refuse)
    part, at = of_tree("engram", checkpoint), tmp_path / "at"
    found = solid(checkpoint, part, at, key="ENGRAM_SRC")  # as it is: real files, only more
    assert found.path == checkpoint and "as it is" in found.note
    with pytest.raises(LauncherError, match="cannot have hard links") as caught:
        solid(checkpoint, part, at, always=True, key="ENGRAM_SRC")
    assert "never copied" in caught.value.needed and "ENGRAM_SRC" in caught.value.do_next
    (checkpoint / "config.json").rename(tmp_path / "elsewhere")
    (checkpoint / "config.json").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(LauncherError, match="cannot have hard links"):
        solid(checkpoint, part, at, key="ENGRAM_SRC")
    assert not list(at.glob("*.safetensors"))


def test_another_file_in_the_links_place_is_not_replaced(checkpoint: Path, tmp_path: Path) -> None:
    at = tmp_path / "at"
    at.mkdir()
    (at / "config.json").write_text("the user's")
    with pytest.raises(LauncherError, match="not made by the launcher"):
        solid(checkpoint, of_tree("model", checkpoint), at, always=True, key="ENGRAM_SRC")
    assert (at / "config.json").read_text() == "the user's"


# How far it has come.


def test_a_pace_tells_rate_and_end() -> None:
    pace = Pace(100_000_000_000)
    assert pace.told(0, 0.0) == "0 bytes of 100.0 GB"
    assert pace.told(10_000_000_000, 10.0) == "10.0 GB of 100.0 GB, 1.0 GB/s, 1 min 30 s left"
    # Of the last half minute, not of all that went before.
    told = [pace.told(10_000_000_000 + n * 100_000_000, 10.0 + n) for n in range(1, 100)][-1]
    assert ", 100.0 MB/s, " in told
    assert "left" not in pace.told(5_000_000_000, 110.0)  # a file began anew


@given(st.integers(0, 10**12), st.lists(st.integers(0, 2 * 10**12), max_size=30))
def test_a_pace_never_tells_more_than_all_or_time_that_is_over(total: int, seen: list[int]) -> None:
    pace = Pace(total)
    for second, done in enumerate(seen):
        told = pace.told(done, float(second))
        assert f" of {size(total)}" in told and "-" not in told
