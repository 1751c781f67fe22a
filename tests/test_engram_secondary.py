"""Tables are read by row: no loader may take them for parameters, whatever their name."""

from __future__ import annotations

if __name__ == "__main__":  # before the imports that a bare Python lacks
    from _standalone import main

    main(__file__)

from pathlib import Path

import pytest
from _packs import packed
from _tables import SHARDS, small_config, small_layout, write_tables

from spark_overlay.engram.names import is_table_tensor
from spark_overlay.engram.source import locate_tables
from spark_overlay.exl3.modules import scan_modules
from spark_overlay.exl3.names import Exl3NameError, checkpoint_keys, parse
from spark_overlay.headers import CheckpointHeaders

TABLES = [
    "layers.1.engram.embed.weight",
    "layers.14.engram.embed.scale",
    "language_model.model.layers.1.engram.embed_tokens.weight",
    "model.layers.14.engram.embed_tokens.weight_scale_inv",
]


@pytest.mark.parametrize("name", TABLES)
def test_tables_are_known_under_the_names_of_both_worlds(name: str) -> None:
    assert is_table_tensor(name)


@pytest.mark.parametrize(
    "name",
    [
        "embed.weight",
        "language_model.model.embed_tokens.weight",
        "layers.1.engram.wkv.trellis",
        "layers.1.engram.q_weight",
        "layers.1.engram.embed.weight.more",
        "mtp.2.markov_head.embed.weight",
    ],
)
def test_other_tensors_are_none(name: str) -> None:
    assert not is_table_tensor(name)


@pytest.mark.parametrize("key", ["layers.1.engram.embed", "layers.14.engram.embed_tokens"])
def test_a_table_is_never_the_target_of_a_packed_linear(key: str) -> None:
    with pytest.raises(Exl3NameError):
        parse(key)
    assert checkpoint_keys(key) == []
    with pytest.raises(Exl3NameError):
        [parse(k) for k in scan_modules(packed(key, 3))]


def test_of_a_shard_with_tables_only_the_other_tensors_are_loadable(tmp_path: Path) -> None:
    write_tables(tmp_path, small_config())
    headers = CheckpointHeaders.scan(tmp_path).tensors
    assert sorted(n for n in headers if not is_table_tensor(n)) == [
        "layers.1.engram.q_weight",
        "layers.3.engram.q_weight",
    ]
    assert scan_modules(headers) == {}


def test_the_ranks_ranges_lie_inside_the_tables_that_were_found(tmp_path: Path) -> None:
    write_tables(tmp_path, small_config())
    layout = small_layout()
    for layer_id, source in locate_tables(tmp_path, layout).items():
        ends = [layout.rank_range(layer_id, rank, 2).rows for rank in range(2)]
        assert ends[0][0] == 0 and ends[0][1] == ends[1][0] and ends[1][1] == source.rows
        assert source.file.name == SHARDS[layout.index_of(layer_id)]
