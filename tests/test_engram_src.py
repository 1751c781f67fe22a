"""Finding the Engram tables in their directory, and saying what is missing."""

from __future__ import annotations

if __name__ == "__main__":  # before the imports that a bare Python lacks
    from _standalone import main

    main(__file__)

import errno
import json
import os
from pathlib import Path

import pytest
from _packs import write_index, write_safetensors
from _tables import SHARDS, small_config, small_layout, table, write_tables

from spark_overlay.engram.layout import EngramError
from spark_overlay.engram.slim import main as slim_main
from spark_overlay.engram.slim import make_slim
from spark_overlay.engram.source import locate_tables, read_layout
from spark_overlay.headers import INDEX_NAME, HeaderError, read_index


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_tables(tmp_path / "native", small_config())
    return tmp_path / "native"


def test_tables_are_found_at_their_absolute_offsets(root: Path) -> None:
    found = locate_tables(root, small_layout())
    assert list(found) == [1, 3]
    for layer_id, shard in zip(found, SHARDS, strict=True):
        source = found[layer_id]
        assert source.file == root / shard
        assert (source.dim, source.scale_dim) == (64, 2)
        content = source.file.read_bytes()
        weights, scales = table(layer_id, source.rows, 64)
        assert content[source.weight_begin :][: weights.size] == weights.tobytes()
        assert content[source.scale_begin :][: scales.size] == scales.tobytes()


def test_only_the_shards_of_the_tables_are_opened(root: Path) -> None:
    """A native directory's index names 48 shards of which two are enough."""
    index = dict(read_index(root) or {})
    write_index(root, index | {"layers.0.attn.wq_a.weight": "model-00001-of-00048.safetensors"})
    assert list(locate_tables(root)) == [1, 3]


def change_config(root: Path, **change: object) -> None:
    (root / "config.json").write_text(json.dumps(small_config() | change))


def drop_from_index(root: Path, name: str) -> None:
    index = dict(read_index(root) or {})
    del index[name]
    write_index(root, index)


def move_scale(root: Path) -> None:
    index = dict(read_index(root) or {})
    index["layers.1.engram.embed.scale"] = SHARDS[1]
    write_index(root, index)


def replace_shard(root: Path, **tensors: tuple[str, tuple[int, ...], bytes]) -> None:
    named = {f"layers.1.engram.embed.{leaf}": tensor for leaf, tensor in tensors.items()}
    write_safetensors(root / SHARDS[0], named)


ROWS = small_layout().num_embeddings[0]
WEIGHT = ("F8_E4M3", (ROWS, 64), bytes(64 * ROWS))
SCALE = ("F8_E8M0", (ROWS, 2), bytes(2 * ROWS))

FAULTS = [
    (lambda r: (r / "config.json").unlink(), r"config\.json: missing.*Copy it from the native"),
    (lambda r: (r / "config.json").write_text("{"), r"config\.json: cannot be read"),
    (lambda r: (r / "config.json").write_text("{}"), "names no engram_layer_ids"),
    (lambda r: change_config(r, engram_num_embeddings=[1, 2]), "primes sum to"),
    (lambda r: (r / INDEX_NAME).unlink(), "index.json: missing.*Copy it from the native"),
    (
        lambda r: drop_from_index(r, "layers.3.engram.embed.scale"),
        r"does not name layers\.3\.engram\.embed\.scale.*native checkpoint's index",
    ),
    (move_scale, r"embed\.weight is in .*00047.* but .*embed\.scale in .*00048.*one shard"),
    (lambda r: (r / SHARDS[1]).unlink(), r"00048\.safetensors: is missing"),
    (lambda r: (r / SHARDS[0]).write_bytes(b"\x80" + bytes(20)), r"00047.*: announces a header"),
    (lambda r: replace_shard(r, weight=WEIGHT), r"holds no layers\.1\.engram\.embed\.scale"),
    (
        lambda r: replace_shard(r, weight=("U8", *WEIGHT[1:]), scale=SCALE),
        rf"embed\.weight is U8 \[{ROWS}, 64\].*needs F8_E4M3",
    ),
    (
        lambda r: replace_shard(r, weight=WEIGHT, scale=("F8_E8M0", (2, ROWS), SCALE[2])),
        rf"embed\.scale is F8_E8M0 \[2, {ROWS}\].*needs .*\[{ROWS}, 2\]",
    ),
]


@pytest.mark.parametrize(("fault", "message"), FAULTS, ids=range(len(FAULTS)))
def test_a_fault_is_named_with_its_mend(root: Path, fault, message: str) -> None:
    fault(root)
    with pytest.raises((EngramError, HeaderError), match=message):
        locate_tables(root)


def test_tables_of_another_model_are_refused(root: Path) -> None:
    with pytest.raises(EngramError, match="other Engram tables than the model's own config"):
        locate_tables(root, small_layout(engram_vocab_size=90))
    with pytest.raises(EngramError, match="other Engram tables"):
        locate_tables(root, small_layout(engram_compressed_vocab_size=20))
    assert read_layout(root) == small_layout()


def test_a_slim_directory_has_the_tables_by_hard_link_and_nothing_else(root, tmp_path) -> None:
    native, out = root, tmp_path / "slim"
    index = dict(read_index(native) or {})
    write_index(native, index | {"layers.1.engram.q_weight": SHARDS[0], "embed.weight": "x-1"})
    links = make_slim(native, out)
    assert [(link.name, link.kind) for link in links] == [(name, "hard link") for name in SHARDS]
    assert sorted(p.name for p in out.iterdir()) == sorted([*SHARDS, "config.json", INDEX_NAME])
    assert all((out / name).samefile(native / name) for name in SHARDS)
    assert read_index(out) == index
    assert list(locate_tables(out, small_layout())) == [1, 3]
    assert {link.kind for link in make_slim(native, out)} == {"as it was"}


def test_a_tree_of_symlinks_is_linked_to_its_real_files(root, tmp_path) -> None:
    blobs, native = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    native.mkdir()
    for number, path in enumerate([root / name for name in (*SHARDS, "config.json", INDEX_NAME)]):
        path.rename(blobs / str(number))
        (native / path.name).symlink_to(f"../blobs/{number}")
    links = make_slim(native, tmp_path / "slim")
    assert [link.target for link in links] == [blobs / "0", blobs / "1"]
    assert not any((tmp_path / "slim" / name).is_symlink() for name in SHARDS)
    (blobs / "1").unlink()
    with pytest.raises((EngramError, HeaderError), match=r"00048\.safetensors: is missing"):
        make_slim(native, tmp_path / "again")


def test_another_file_system_is_refused_and_nothing_copied(root, tmp_path, monkeypatch) -> None:
    def refuse(source: Path, place: Path) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    out = tmp_path / "slim"
    with pytest.raises(EngramError, match=r"on another file system, and a table is never copied"):
        make_slim(root, out)
    assert list(out.iterdir()) == []
    links = make_slim(root, out, symlink=True)
    assert [link.kind for link in links] == ["symlink"] * 2
    assert (out / SHARDS[0]).readlink() == (root / SHARDS[0]).resolve()
    assert slim_main(["--native", str(root), "--out", str(tmp_path / "other")]) == 1


def test_another_shard_in_the_slim_directory_is_not_replaced(root, tmp_path) -> None:
    out = tmp_path / "slim"
    out.mkdir()
    (out / SHARDS[0]).write_bytes(b"mine")
    with pytest.raises(EngramError, match="is another file than"):
        make_slim(root, out)
    assert (out / SHARDS[0]).read_bytes() == b"mine"


def test_slim_says_what_it_linked(root, tmp_path, capsys) -> None:
    out = tmp_path / "slim"
    assert slim_main(["--native", str(root), "--out", str(out)]) == 0
    assert capsys.readouterr().out.splitlines()[0] == (
        f"{out / SHARDS[0]}: hard link of {(root / SHARDS[0]).resolve()}"
    )
    assert slim_main(["--native", str(root), "--out", str(root)]) == 1
    assert "is the native directory itself" in capsys.readouterr().err
    (root / INDEX_NAME).unlink()
    assert slim_main(["--native", str(root), "--out", str(out)]) == 1
    assert "index.json: missing" in capsys.readouterr().err
