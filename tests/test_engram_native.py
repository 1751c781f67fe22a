"""The native row store: what plain reads give, by either backend, or an error that says where."""

from __future__ import annotations

if __name__ == "__main__":  # before the imports that a bare Python lacks
    from _standalone import main

    main(__file__)

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from _native import OVERLAY, library
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_overlay.engram import native, packed, synthetic
from spark_overlay.engram.layout import EngramError
from spark_overlay.engram.native import NativeOptions, NativeRowStore
from spark_overlay.engram.packed import PackedFile, PackedHeader
from spark_overlay.engram.source import TableSource
from spark_overlay.engram.store import EngramReadError, FileRowStore, RowStore

ROWS, DIM, LAYER, SEED = 3001, 256, 14, 5
LO, HI = 700, 2600
WEIGHTS, SCALES = synthetic.rows(LAYER, 0, ROWS, DIM, SEED)
BACKENDS = ("uring", "pool")

Make = Callable[..., NativeRowStore]


def write_shard(path: Path, begin: int) -> TableSource:
    """Weights from byte ``begin``, scales behind them and 8 bytes of something else."""
    scale_begin = begin + WEIGHTS.size + 8
    path.write_bytes(b"\xee" * begin + WEIGHTS.tobytes() + b"\xee" * 8 + SCALES.tobytes())
    return TableSource(LAYER, path, ROWS, DIM, begin, scale_begin)


def write_packed(path: Path) -> PackedFile:
    header = PackedHeader(LAYER, 1, 2, DIM, LO, HI, ROWS, bytes(32), bytes(32))
    body = packed.interleave(WEIGHTS[LO:HI], SCALES[LO:HI])
    path.write_bytes(header.to_bytes() + body.tobytes())
    return packed.read_packed(path)


def open_store(
    source: TableSource, file: PackedFile | None = None, lo: int = LO, hi: int = HI, **options
) -> NativeRowStore:
    made = NativeOptions(**({"depth": 8} | options))
    try:
        return NativeRowStore(source, lo, hi, file, made, library())
    except EngramError as error:
        if "io_uring" in str(error) and options.get("backend") == "uring":
            pytest.xfail(str(error))  # this machine's kernel refuses it
        raise


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("native")


@pytest.fixture(scope="module", params=[8, 1016, 4088, 8192])
def source(request: pytest.FixtureRequest, folder: Path) -> TableSource:
    """Offsets of a safetensors file are aligned to 8 bytes and no more."""
    return write_shard(folder / f"shard-{request.param}", request.param)


@pytest.fixture(scope="module")
def plain(folder: Path) -> TableSource:
    return write_shard(folder / "shard", 1016)


@pytest.fixture(params=["shard", "packed"])
def layout(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[TableSource, PackedFile | None]:
    """Files of the test's own, to be damaged."""
    source = write_shard(tmp_path / "shard", 1016)
    return source, write_packed(tmp_path / "packed") if request.param == "packed" else None


def expected(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    owned = (ids >= LO) & (ids < HI)
    at = np.where(owned, ids, 0)
    return WEIGHTS[at] * owned[:, None], SCALES[at] * owned[:, None]


def check(store: RowStore, ids: np.ndarray) -> None:
    found = store.lookup(ids)
    weights, scales = expected(ids)
    assert np.array_equal(found.weights, weights) and np.array_equal(found.scales, scales)
    assert np.array_equal(found.owned, (ids >= LO) & (ids < HI))


ids_lists = st.lists(
    st.one_of(
        st.integers(-3, ROWS - 1),
        st.sampled_from([-1, 0, LO - 1, LO, LO + 1, HI - 1, HI, ROWS - 1]),
        st.integers(LO, LO + 40),  # neighbours
    ),
    max_size=80,
)


@pytest.mark.parametrize("backend", BACKENDS)
@given(ids=ids_lists)
@settings(max_examples=60)
def test_a_shard_gives_what_plain_reads_give(source, backend, ids) -> None:
    ids = np.array(ids, np.int64)
    with open_store(source, backend=backend) as store, FileRowStore(source, LO, HI) as oracle:
        check(store, ids)
        for mine, theirs in zip(store.lookup(ids), oracle.lookup(ids), strict=True):
            assert np.array_equal(mine, theirs)


@pytest.mark.parametrize("cache_bytes", [0, 40_000, 1 << 24])
@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_packed_rows_are_the_same(folder, plain, backend, direct, cache_bytes) -> None:
    file = write_packed(folder / f"packed-{backend}-{direct}-{cache_bytes}")
    options = {"backend": backend, "direct": direct, "cache_bytes": cache_bytes}
    with open_store(plain, file, **options) as store:

        @given(ids=ids_lists)
        @settings(max_examples=40)
        def same(ids: list[int]) -> None:
            check(store, np.array(ids, np.int64))

        same()
        check(store, np.arange(-1, ROWS))
        stats = store.stats()
    assert stats.direct == direct and stats.depth == 8
    assert (stats.hits > 0) == (cache_bytes > 0) and stats.cache_bytes <= cache_bytes
    assert stats.cache_bytes > 0 or not cache_bytes


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_that_lie_across_a_page(plain, tmp_path, backend) -> None:
    """Each 15th or 16th row of a packed file does; one read of two pages gives it."""
    file = write_packed(tmp_path / "packed")
    begins = packed.HEADER_BYTES + np.arange(HI - LO) * 264
    across = LO + np.flatnonzero(begins // 4096 != (begins + 263) // 4096)
    assert len(across) > 100
    with open_store(plain, file, backend=backend) as store:
        check(store, across)
        stats = store.stats()
        assert stats.reads <= len(across)
        before = stats.bytes
        check(store, across[:1])
        assert store.stats().bytes - before == 8192
    with open_store(plain, backend=backend) as store:
        begins = plain.weight_begin + np.arange(ROWS) * DIM
        check(store, np.flatnonzero(begins // 4096 != (begins + DIM - 1) // 4096))


def test_equal_ids_and_neighbours_share_a_read(plain, tmp_path) -> None:
    with open_store(plain, write_packed(tmp_path / "packed")) as store:
        check(store, np.array([LO, LO, LO + 1, -1, LO + 2, LO, ROWS - 1, HI]))
        stats = store.stats()
    assert (stats.lookups, stats.ids, stats.owned, stats.rows) == (1, 8, 5, 3)
    assert (stats.reads, stats.bytes, stats.continued) == (1, 4096, 0)
    with open_store(plain) as store:
        store.lookup(np.array([LO, LO + 1]))
        assert store.stats().reads == 2


@pytest.mark.parametrize("cache_bytes", [0, 100_000])
@pytest.mark.parametrize("backend", BACKENDS)
def test_eight_threads_look_up_at_once(layout, backend, cache_bytes) -> None:
    with open_store(*layout, backend=backend, cache_bytes=cache_bytes) as store:

        def look(seed: int) -> None:
            check(store, np.random.default_rng(seed).integers(-1, ROWS, 300))

        with ThreadPoolExecutor(8) as pool:
            for done in [pool.submit(look, seed) for seed in range(64)]:
                done.result()
        stats = store.stats()
    assert (stats.lookups, stats.ids) == (64, 64 * 300)
    assert 0 < stats.longest <= stats.seconds


def test_buffers_of_the_caller_are_filled(plain) -> None:
    ids = np.array([LO, -1, HI - 1])
    weights, scales = np.full((3, DIM), 9, np.uint8), np.full((3, 8), 9, np.uint8)
    with open_store(plain) as store:
        store.lookup_into(ids, weights, scales)
        assert np.array_equal(weights, expected(ids)[0])
        assert np.array_equal(scales, expected(ids)[1])
        for wrong in (weights[:2], weights.astype(np.int8), weights[:, ::-1], scales):
            with pytest.raises(EngramError, match=r"weights are .*expected writable"):
                store.lookup_into(ids, wrong, scales)
        with pytest.raises(EngramError, match="scales are"):
            store.lookup_into(ids, weights, weights)
        for bad in (ids.astype(np.int32), ids[None], np.arange(6)[::2]):
            with pytest.raises(EngramError, match="expected int64"):
                store.lookup_into(bad, weights, scales)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_id_beyond_the_table_is_named(layout, backend) -> None:
    text = rf"row {ROWS + 4} asked of layer 14's table of {ROWS} rows \(2 such ids\)"
    with open_store(*layout, backend=backend) as store:
        with pytest.raises(EngramError, match=text):
            store.lookup(np.array([0, ROWS + 4, ROWS]))
        check(store, np.array([LO]))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_file_that_shrinks_while_serving_is_an_error_never_a_row(layout, backend) -> None:
    source, file = layout
    with open_store(source, file, backend=backend) as store:
        path, last = store.path, HI - 1
        at = source.weight_begin + last * DIM if file is None else path.stat().st_size - 264
        os.truncate(path, at + 100)
        mend = "download this shard again" if file is None else "pack this file again"
        parts = "256 bytes" if file is None else "264 bytes"
        with pytest.raises(EngramReadError, match=rf"row {last} of layer 14's.*{mend}") as caught:
            store.lookup(np.array([last]))
        assert f"gave 100 of {parts} at byte {at}" in str(caught.value) or file is None
        os.truncate(path, 0)
        with pytest.raises(EngramReadError, match=f"row {LO} of .* gave 0 of"):
            store.lookup(np.array([LO]))


def test_a_truncated_file_is_refused_when_it_is_opened(layout) -> None:
    source, file = layout
    path = source.file if file is None else file.path
    needed = source.scale_begin + HI * 8 if file is None else path.stat().st_size
    os.truncate(path, needed - 1)
    with pytest.raises(
        EngramReadError, match=rf"is {needed - 1} bytes long.*{needed}: it is trunc"
    ):
        open_store(source, file)
    if file is not None:
        os.truncate(path, needed + 1)
        with pytest.raises(EngramReadError, match="it is another file"):
            open_store(source, file)


def _descriptor(path: Path) -> int:
    links = Path("/proc/self/fd")
    return next(int(n.name) for n in links.iterdir() if os.path.realpath(n) == str(path.resolve()))


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize(
    ("stand_in", "flags", "error"),
    [
        ("/proc/self/mem", os.O_RDONLY, "Input/output error"),  # nothing is mapped so low
        ("/dev/null", os.O_WRONLY, "Bad file descriptor"),
    ],
)
def test_an_error_of_the_drive_names_file_row_and_offset(
    plain: TableSource, tmp_path: Path, stand_in: str, flags: int, error: str, direct: bool
) -> None:
    source = write_shard(tmp_path / "shard", 1016)
    with open_store(source, backend="pool", direct=direct) as store:
        other = os.open(stand_in, flags)
        os.dup2(other, _descriptor(source.file))
        os.close(other)
        at = source.weight_begin + LO * DIM
        text = rf"shard: (scales of )?row {LO} of layer 14's table at byte \d+ .*{error}"
        with pytest.raises(EngramReadError, match=text) as caught:
            store.lookup(np.array([LO, LO]))
        assert f"at byte {at} " in str(caught.value) or "scales" in str(caught.value)


def test_what_is_no_file_with_a_table_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    source = TableSource(LAYER, tmp_path / "pipe", ROWS, DIM, 0, ROWS * DIM)
    with pytest.raises(EngramReadError, match="pipe: is no regular file"):
        open_store(source)
    with pytest.raises(EngramReadError, match=r"gone: cannot be opened \(No such file"):
        open_store(replace(source, file=tmp_path / "gone"))
    with pytest.raises(EngramReadError, match="is no regular file"):
        open_store(replace(source, file=tmp_path))


@pytest.mark.parametrize(("lo", "hi"), [(-1, 4), (5, 4), (0, 1 << 40)])
def test_a_range_outside_the_table_is_refused(plain, lo, hi) -> None:
    with pytest.raises(EngramError, match=r"use EngramLayout\.rank_range"):
        open_store(plain, lo=lo, hi=hi)


def test_a_packed_file_of_other_rows_is_refused(plain, tmp_path) -> None:
    file = write_packed(tmp_path / "packed")
    with pytest.raises(EngramError, match=rf"holds rows {LO}\.\.{HI} of layer 14, not 0\.\.{LO}"):
        open_store(plain, file, lo=0, hi=LO)
    with pytest.raises(EngramError, match=r"of layer 14, not .* of layer 1"):
        open_store(replace(plain, layer_id=1), file)


def test_a_depth_of_nothing_is_refused(plain) -> None:
    with pytest.raises(EngramError, match="queue depth is 0, expected 1"):
        open_store(plain, depth=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_close_waits_for_lookups_and_ends_them(plain, backend) -> None:
    store = open_store(plain, backend=backend)
    ended = threading.Event()

    def look() -> None:
        with pytest.raises(EngramError, match="after close"):
            while True:
                check(store, np.random.default_rng().integers(0, ROWS, 2000))
        ended.set()

    thread = threading.Thread(target=look)
    thread.start()
    time.sleep(0.1)
    store.close()
    thread.join(20)
    assert ended.is_set()
    store.close()
    with pytest.raises(EngramError, match="after close"):
        store.stats()


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
    for backend in BACKENDS:
        with open_store(source, lo=rows - 10, hi=rows, backend=backend) as store:
            found = store.lookup(np.array([rows - 1, rows - 2]))
        assert found.weights[0].tolist() == list(range(256)) and not found.weights[1].any()
        assert found.scales[0].tolist() == list(range(8))


HOST = """
import ctypes, sys
import numpy as np
from pathlib import Path
from spark_overlay.engram.native import NativeOptions, NativeRowStore, Work
from spark_overlay.engram.source import TableSource
source = TableSource(14, Path(sys.argv[1]), {rows}, 256, 1016, 1016 + {rows} * 256 + 8)
store = NativeRowStore(source, 0, {rows}, None, NativeOptions(), Path(sys.argv[2]))
ids = np.array([3, int(sys.argv[3])])
weights, scales = np.zeros((2, 256), np.uint8), np.zeros((2, 8), np.uint8)
work = Work(store.handle, ids.ctypes.data, 2, weights.ctypes.data, scales.ctypes.data)
ctypes.CFUNCTYPE(None, ctypes.c_void_p)(store.host_function)(ctypes.addressof(work))
print(weights[1].tobytes().hex())
"""


@pytest.mark.parametrize("row", [7, ROWS])
def test_the_host_function_fills_rows_or_ends_the_process(plain: TableSource, row: int) -> None:
    argv = [sys.executable, "-c", HOST.format(rows=ROWS), str(plain.file), str(library()), str(row)]
    environ = os.environ | {"PYTHONPATH": str(OVERLAY)}
    ran = subprocess.run(argv, capture_output=True, text=True, env=environ, timeout=60)
    if row < ROWS:
        assert ran.stdout.strip() == WEIGHTS[row].tobytes().hex(), ran.stderr
        return
    assert ran.returncode == -signal.SIGABRT and ran.stdout == ""
    assert f"row {ROWS} asked of layer 14's table" in ran.stderr
    assert "This rank ends: rows are never made up." in ran.stderr


def test_a_missing_or_foreign_library_says_what_to_install(plain, tmp_path) -> None:
    gone = tmp_path / "_native.so"
    with pytest.raises(EngramError, match=r"missing.*Install g\+\+.*ENGRAM_STORE=plain"):
        NativeRowStore(plain, LO, HI, library=gone)
    gone.write_bytes(b"no library")
    with pytest.raises(EngramError, match="cannot be loaded"):
        NativeRowStore(plain, LO, HI, library=gone)


def test_another_way_of_reading_is_told_once(plain, caplog, monkeypatch) -> None:
    monkeypatch.setattr(native, "_told", set())
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            native._tell(plain.file, "pool, buffered; O_DIRECT refused (Invalid argument)")
            native._tell(plain.file, "io_uring, direct")
    assert len(caplog.records) == 1 and "page cache" in caplog.text
