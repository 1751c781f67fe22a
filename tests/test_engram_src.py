"""Finding the Engram tables in their directory, and saying what is missing."""

from __future__ import annotations

if __name__ == "__main__":  # before the imports that a bare Python lacks
    from _standalone import main

    main(__file__)

import json
from pathlib import Path

import pytest
from _packs import write_index, write_safetensors
from _tables import SHARDS, small_config, small_layout, table, write_tables

from spark_overlay.engram.layout import EngramError
from spark_overlay.engram.source import locate_tables, read_layout
from spark_overlay.headers import INDEX_NAME, HeaderError, read_index


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_tables(tmp_path, small_config())
    return tmp_path


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
