"""Made tables: any row alone is the row of the whole table, and the bytes never change."""

from __future__ import annotations

if __name__ == "__main__":  # before the imports that a bare Python lacks
    from _standalone import main

    main(__file__)

import hashlib

import numpy as np
import pytest
from _tables import small_config, small_layout
from hypothesis import given
from hypothesis import strategies as st

from spark_overlay.engram import synthetic
from spark_overlay.engram.source import locate_tables
from spark_overlay.engram.store import FileRowStore

WHOLE = {dim: synthetic.rows(3, 0, 200, dim, 5) for dim in (32, 64, 256)}


@given(st.sampled_from(sorted(WHOLE)), st.integers(0, 200), st.integers(0, 200))
def test_a_row_is_a_function_of_its_number(dim: int, a: int, b: int) -> None:
    lo, hi = min(a, b), max(a, b)
    weights, scales = synthetic.rows(3, lo, hi, dim, 5)
    assert np.array_equal(weights, WHOLE[dim][0][lo:hi])
    assert np.array_equal(scales, WHOLE[dim][1][lo:hi])


@pytest.mark.parametrize("dim", sorted(WHOLE))
def test_rows_tell_themselves_apart_and_are_numbers(dim: int) -> None:
    weights, scales = WHOLE[dim]
    assert len(np.unique(weights, axis=0)) == len(weights)
    assert not np.isin(weights, [0x7F, 0xFF]).any()
    assert set(np.unique(scales)) == {119, 120, 121}
    assert scales.shape == (200, dim // 32)


def test_another_seed_or_layer_is_another_table() -> None:
    tables = [synthetic.rows(*asked) for asked in ((1, 0, 9, 64, 0), (1, 0, 9, 64, 1))]
    tables.append(synthetic.rows(3, 0, 9, 64, 0))
    assert len({weights.tobytes() for weights, _ in tables}) == 3


def test_the_bytes_of_a_seed_never_change() -> None:
    """The rehearsal's checkpoint is made of them."""
    weights, scales = synthetic.rows(1, 0, 50, 256, 0)
    found = hashlib.sha256(weights.tobytes() + scales.tobytes()).hexdigest()
    assert found == "303790a8d484c15ba2e6f7448174e9802ba8514e8470246b0daa559d25cbcf9d"


def test_a_written_directory_is_found_and_read(tmp_path) -> None:
    config, layout = small_config(), small_layout()
    layers, counts = config["engram_layer_ids"], config["engram_num_embeddings"]
    synthetic.write_tables(tmp_path, layers, counts, 64, {"text_config": config}, 7)
    for layer, source in locate_tables(tmp_path, layout).items():
        with FileRowStore(source, 0, source.rows) as store:
            found = store.lookup(np.array([source.rows - 1, 5]))
        last, fifth = (synthetic.rows(layer, i, i + 1, 64, 7) for i in (source.rows - 1, 5))
        assert np.array_equal(found.weights, np.concatenate([last[0], fifth[0]]))
        assert np.array_equal(found.scales, np.concatenate([last[1], fifth[1]]))
