"""Row stores: the right row or an error, whatever ids come, from a file or from memory."""

from __future__ import annotations

if __name__ == "__main__":  # before the imports that a bare Python lacks
    from _standalone import main

    main(__file__)

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from _tables import small_config, small_layout, table, write_tables
from hypothesis import given
from hypothesis import strategies as st

from spark_overlay.engram.layout import EngramError
from spark_overlay.engram.source import TableSource, locate_tables
from spark_overlay.engram.store import EngramReadError, FileRowStore, MemoryRowStore, RowStore

KINDS = [FileRowStore, MemoryRowStore]
LAYOUT = small_layout()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> TableSource:
    root = tmp_path_factory.mktemp("tables")
    write_tables(root, small_config())
    return locate_tables(root)[3]


@pytest.fixture(scope="module", params=KINDS)
def store(request: pytest.FixtureRequest, source: TableSource) -> Iterator[RowStore]:
    """The second rank's part of two."""
    opened = request.param(source, *LAYOUT.rank_range(3, 1, 2).rows)
    yield opened
    opened.close()


def ids_of(*ids: int) -> np.ndarray:
    return np.array(ids, np.int64)


@given(data=st.data())
def test_owned_rows_are_exact_and_all_others_zero(store, source, data) -> None:
    ids = data.draw(st.lists(st.integers(-3, source.rows - 1), max_size=40))
    found = store.lookup(ids_of(*ids))
    weights, scales = table(3, source.rows, source.dim)
    lo, hi = LAYOUT.rank_range(3, 1, 2).rows
    assert found.weights.dtype == found.scales.dtype == np.uint8
    assert found.weights.shape == (len(ids), 64) and found.scales.shape == (len(ids), 2)
    for i, row in enumerate(ids):
        assert found.owned[i] == (lo <= row < hi)
        expected = (weights[row], scales[row]) if found.owned[i] else (0, 0)
        assert (found.weights[i] == expected[0]).all() and (found.scales[i] == expected[1]).all()


def test_first_last_and_neighbouring_rows(store, source) -> None:
    lo, hi = LAYOUT.rank_range(3, 1, 2).rows
    found = store.lookup(ids_of(lo - 1, lo, hi - 1, -1, 0))
    assert found.owned.tolist() == [False, True, True, False, False]
    weights, _ = table(3, source.rows, source.dim)
    assert np.array_equal(found.weights[1:3], weights[[lo, hi - 1]])


@pytest.mark.parametrize("kind", KINDS)
def test_the_ranks_answers_sum_to_the_whole(kind, source: TableSource) -> None:
    ids = np.random.default_rng(0).integers(-1, source.rows, 200)
    whole = kind(source, 0, source.rows).lookup(ids)
    parts = [kind(source, *LAYOUT.rank_range(3, rank, 3).rows).lookup(ids) for rank in range(3)]
    assert np.array_equal(sum(part.weights.astype(int) for part in parts), whole.weights)
    assert (sum(part.owned.astype(int) for part in parts) == (ids >= 0)).all()


def test_an_id_beyond_the_table_is_an_error_that_names_it(store, source) -> None:
    with pytest.raises(EngramError, match=rf"row {source.rows + 4} .*layer 3's.*2 such ids"):
        store.lookup(ids_of(0, source.rows + 4, source.rows))


@pytest.mark.parametrize("ids", [np.zeros(2, np.int32), np.zeros((2, 1), np.int64)])
def test_ids_of_another_type_or_shape_are_refused(store, ids) -> None:
    with pytest.raises(EngramError, match="expected int64"):
        store.lookup(ids)


def test_no_ids_give_no_rows(store) -> None:
    found = store.lookup(ids_of())
    assert found.weights.shape == (0, 64) and found.owned.shape == (0,)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("lo", "hi"), [(-1, 4), (5, 4), (0, 1 << 40)])
def test_a_range_outside_the_table_is_refused(kind, source, lo, hi) -> None:
    with pytest.raises(EngramError, match="use EngramLayout"):
        kind(source, lo, hi)


def test_each_distinct_owned_row_is_read_once(source: TableSource) -> None:
    ticks = iter(range(100))
    with FileRowStore(source, 0, 100, clock=lambda: float(next(ticks))) as store:
        store.lookup(ids_of(5, 7, 5, -1, 5, 200))
        store.lookup(ids_of(5))
        stats = store.stats()
    assert (stats.lookups, stats.ids, stats.rows) == (2, 7, 3)
    assert (stats.reads, stats.bytes) == (6, 3 * 66)
    assert stats.seconds == 2.0


def test_memory_reads_its_part_once(source: TableSource) -> None:
    store = MemoryRowStore(source, 10, 30)
    store.lookup(ids_of(10, 29, 10))
    stats = store.stats()
    assert (stats.reads, stats.bytes, stats.rows) == (2, 20 * 66, 2)


def test_a_file_that_shrinks_while_serving_is_an_error_never_a_row(tmp_path: Path) -> None:
    write_tables(tmp_path, small_config())
    source = locate_tables(tmp_path)[1]
    with FileRowStore(source, 0, source.rows) as store:
        store.lookup(ids_of(source.rows - 1))
        os.truncate(source.file, source.weight_begin + source.rows * source.dim - 1)
        store.lookup(ids_of(source.rows - 2))
        with pytest.raises(EngramReadError, match=rf"row {source.rows - 1} of layer 1's.*63 of 64"):
            store.lookup(ids_of(0, source.rows - 1))
    with pytest.raises(EngramReadError, match="shorter than its header says"):
        MemoryRowStore(source, 0, source.rows)


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_file_is_named(kind, tmp_path: Path) -> None:
    source = TableSource(1, tmp_path / "gone.safetensors", 4, 64, 0, 256)
    with pytest.raises(EngramReadError, match=r"gone\.safetensors: cannot be opened"):
        kind(source, 0, 4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_closed_store_answers_nothing(kind, source: TableSource) -> None:
    store = kind(source, 0, source.rows)
    store.close()
    store.close()
    with pytest.raises(EngramError, match="after close"):
        store.lookup(ids_of(0))


def test_rows_beyond_four_gigabytes(tmp_path: Path) -> None:
    """A sparse file of the real row width: offsets do not fit 32 bits."""
    rows = 20_000_000
    source = TableSource(14, tmp_path / "sparse", rows, 256, 1003, 1003 + rows * 256)
    with source.file.open("wb") as file:
        file.truncate(source.scale_begin + rows * 8)
        file.seek(source.weight_begin + (rows - 1) * 256)
        file.write(bytes(range(256)))
        file.seek(source.scale_begin + (rows - 1) * 8)
        file.write(bytes(range(8)))
    with FileRowStore(source, rows - 10, rows) as store:
        found = store.lookup(ids_of(rows - 1, rows - 2))
    assert found.weights[0].tolist() == list(range(256)) and not found.weights[1].any()
    assert found.scales[0].tolist() == list(range(8))


def test_threads_may_look_up_at_the_same_time(store, source) -> None:
    weights, _ = table(3, source.rows, source.dim)
    lo, hi = LAYOUT.rank_range(3, 1, 2).rows
    before = store.stats().ids

    def look(seed: int) -> bool:
        ids = np.random.default_rng(seed).integers(lo, hi, 50)
        return np.array_equal(store.lookup(ids).weights, weights[ids])

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(look, range(20)))
    assert store.stats().ids - before == 1000
