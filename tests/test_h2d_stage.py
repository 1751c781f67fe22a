"""The way of weights from the drive to the memory they are staged in: what is read, how it is cut.

Which bytes a rank wants, in which blocks they are read, and what of a block goes where; the copies
to a GPU are tests/gpu's.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the imports that a bare Python lacks
    from _standalone import main

    main(__file__)

import itertools
import json
import math
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from _packs import write_safetensors
from hypothesis import given, settings
from hypothesis import strategies as st
from page_cache import resident

from spark_overlay.exl3.modules import Exl3Facts, scan_modules
from spark_overlay.exl3.shares import share
from spark_overlay.headers import INDEX_NAME, CheckpointHeaders, TensorHeader, read_header
from spark_overlay.loading import cuts, formats
from spark_overlay.loading.cuts import Cut
from spark_overlay.loading.plan import PAGE, Wanted, blocks
from spark_overlay.loading.progress import GIB, Progress
from spark_overlay.loading.reader import LoadError, Reader, ring

ROOT = Path("/none")


@pytest.fixture(scope="module")
def scratch() -> Iterator[Path]:
    root = Path(tempfile.mkdtemp())
    yield root
    shutil.rmtree(root)


def reference(data: bytes, cut: Cut) -> bytes:
    runs = (cut.first + cut.stride * i for i in range(cut.count))
    return b"".join(data[at : at + cut.run] for at in runs)


def placed(cut: Cut, lo: int, block: bytes | memoryview, into: bytearray) -> int:
    count = 0
    for piece in cut.pieces(lo, lo + len(block)):
        for row in range(piece.rows):
            source, target = piece.source + row * piece.stride, piece.target + row * piece.width
            assert into[target : target + piece.width] == bytes(piece.width), "no byte comes twice"
            into[target : target + piece.width] = block[source : source + piece.width]
        count += piece.width * piece.rows
    return count


# ---- cuts ----


@given(
    first=st.integers(0, 50),
    run=st.integers(1, 20),
    apart=st.integers(0, 20),
    count=st.integers(1, 8),
    step=st.integers(1, 90),
)
def test_blocks_of_any_size_bring_every_byte_once(
    first: int, run: int, apart: int, count: int, step: int
) -> None:
    cut = Cut(first, run, run + apart, count)
    data = bytes(1 + i % 255 for i in range(cut.end + 7))
    into, came = bytearray(cut.nbytes), 0
    for lo in range(0, len(data), step):
        block = data[lo : lo + step]
        assert len(list(cut.pieces(lo, lo + len(block)))) <= 3
        came += placed(cut, lo, block, into)
    assert came == cut.nbytes and into == reference(data, cut)


PARTS = [
    ("layers.0.ffn.experts.1.w1", 512, 256, 3),
    ("layers.0.ffn.experts.1.w2", 256, 512, 2),
    ("layers.0.attn.wq_a", 256, 128, 5),
    ("layers.0.attn.wo_a.slice.1", 256, 128, 5),
    ("head", 128, 512, 6),
]


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(("key", "rows", "columns", "bits"), PARTS)
def test_a_rank_s_bytes_are_its_slice_of_the_array(
    key: str, rows: int, columns: int, bits: int, tp: int
) -> None:
    facts = Exl3Facts(key, rows, columns, 2 * bits, "mul1")
    random = np.random.default_rng(1)
    arrays = {
        "trellis": random.integers(0, 999, facts.trellis_shape).astype(np.int16),
        "suh": random.random(rows).astype(np.float16),
        "svh": random.random(columns).astype(np.float16),
    }
    for rank in range(tp):
        part = share(facts, rank, tp, groups=2)
        if part is None:
            assert "slice" in key
            continue
        for leaf, array in arrays.items():
            dtype = "I16" if leaf == "trellis" else "F16"
            header = TensorHeader(dtype, array.shape, 24, 24 + array.nbytes, ROOT)
            cut = cuts.packed(header, leaf, part)
            assert (
                reference(bytes(24) + array.tobytes(), cut) == array[getattr(part, leaf)].tobytes()
            )
            by_columns = leaf == "trellis" and tp == 2 and key.endswith(("w1", "head"))
            assert (cut.count == 1) is not by_columns


# ---- blocks ----


def tensors(file: Path, sizes: list[tuple[int, int, int, int]]) -> list[Wanted]:
    """Of (bytes before it, run, bytes between runs, runs)."""
    found: list[Wanted] = []
    at = 0
    for before, run, apart, count in sizes:
        cut = Cut(at + before, run, run + apart, count)
        at = cut.end
        header = TensorHeader("U8", (at - cut.first,), cut.first, at, file)
        found.append(Wanted(str(len(found)), header, cut))
    return found


LAYOUT = st.lists(
    st.tuples(
        st.integers(0, 40_000), st.integers(1, 30_000), st.integers(0, 20_000), st.integers(1, 4)
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=60, deadline=None)
@given(layout=LAYOUT, pages=st.integers(1, 9), gap=st.integers(2 * PAGE, 6 * PAGE))
@pytest.mark.parametrize("direct", [True, False])
def test_what_is_read_is_what_is_wanted(
    scratch: Path, layout: list[tuple[int, int, int, int]], pages: int, gap: int, direct: bool
) -> None:
    """Through the reader, into slots that are written again and again."""
    file = scratch / "file"
    wanted = tensors(file, layout)
    data = np.random.default_rng(len(layout)).integers(1, 256, wanted[-1].cut.end, np.uint8)
    file.write_bytes(data.tobytes())
    plan = list(blocks(wanted, pages * PAGE, gap))
    for before, block in itertools.pairwise(plan):
        assert before.end <= block.begin
    _, slots = ring(3, pages * PAGE)
    into = {one.name: bytearray(one.cut.nbytes) for one in wanted}
    reader = Reader(plan, slots, threads=2, direct=direct, told=lambda text: None)
    for block, slot in reader:
        assert block.begin % PAGE == 0 and 0 < block.length <= pages * PAGE
        held = slots[slot][: block.needed]
        for one in block.tensors:
            placed(one.cut, block.begin, held, into[one.name])
        reader.release(slot)
    for one in wanted:
        assert into[one.name] == reference(data.tobytes(), one.cut)


def test_what_lies_far_from_anything_wanted_is_not_read() -> None:
    near = list(blocks(tensors(ROOT, [(0, 100, 0, 1), (9_000, 100, 0, 1)]), 1 << 20, 16_384))
    assert [(block.begin, block.end) for block in near] == [(0, 3 * PAGE)]
    far = list(blocks(tensors(ROOT, [(0, 100, 0, 1), (99_000, 100, 0, 1)]), 1 << 20, 16_384))
    assert [(block.begin, block.end) for block in far] == [(0, PAGE), (98_304, 102_400)]
    runs = list(blocks(tensors(ROOT, [(5, 50_000, 50_000, 3)]), 1 << 20, 16_384))
    assert sum(block.length for block in runs) < 3 * (50_000 + 2 * PAGE)


@pytest.mark.parametrize(("size", "gap"), [(0, 8192), (5000, 8192), (4096, 4096)])
def test_blocks_that_no_drive_reads_directly_are_refused(size: int, gap: int) -> None:
    with pytest.raises(ValueError, match="needed multiples of 4096"):
        list(blocks([], size, gap))


# ---- the reader ----


def one_file(path: Path, size: int) -> list[Wanted]:
    path.write_bytes(os.urandom(size))
    with path.open("rb") as file:
        os.fsync(file.fileno())  # a dirty page cannot be dropped
    header = TensorHeader("U8", (size,), 0, size, path)
    return [Wanted("x", header, cuts.whole(header))]


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("keep", [True, False])
def test_the_page_cache_of_what_was_read(tmp_path: Path, direct: bool, keep: bool) -> None:
    path = tmp_path / "file"
    plan = list(blocks(one_file(path, 8 << 20), 1 << 20))
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)
    _, slots = ring(4, 1 << 20)
    reader = Reader(plan, slots, threads=2, direct=direct, keep=keep, told=lambda text: None)
    for _, slot in reader:
        reader.release(slot)
    pages = resident(path)
    assert pages == (8 << 20) // PAGE if keep else pages <= (1 << 20) // PAGE


def test_no_more_is_read_ahead_than_there_are_slots(tmp_path: Path) -> None:
    plan = list(blocks(one_file(tmp_path / "file", 64 * PAGE), PAGE))
    _, slots = ring(3, PAGE)
    reader = Reader(plan, slots, threads=2)
    handed = iter(reader)
    held = [next(handed)[1] for _ in range(3)]
    assert sorted(held) == [0, 1, 2]
    reader.release(held[1])
    assert next(handed)[1] == held[1]
    handed.close()


def test_a_file_that_became_shorter_is_named(tmp_path: Path) -> None:
    path = tmp_path / "file"
    plan = list(blocks(one_file(path, 5 * PAGE), 2 * PAGE))
    os.truncate(path, 3 * PAGE + 7)
    _, slots = ring(8, 2 * PAGE)
    with pytest.raises(
        LoadError, match=rf"{path}: ended at byte {3 * PAGE + 7}, needed {4 * PAGE}"
    ):
        list(Reader(plan, slots, threads=2))


def test_a_file_that_is_gone_is_named(tmp_path: Path) -> None:
    wanted = one_file(tmp_path / "file", PAGE)
    (tmp_path / "file").unlink()
    _, slots = ring(1, PAGE)
    with pytest.raises(LoadError, match="No such file"):
        list(Reader(blocks(wanted, PAGE), slots, threads=1))


def test_direct_reads_that_are_refused_are_told_and_done_otherwise(tmp_path: Path) -> None:
    """/proc refuses O_DIRECT, as some file systems of users' machines do."""
    path = Path("/proc/version")
    header = TensorHeader("U8", (8,), 0, 8, path)
    _, slots = ring(1, PAGE)
    said: list[str] = []
    reader = Reader(
        blocks([Wanted("x", header, cuts.whole(header))], PAGE), slots, threads=1, told=said.append
    )
    for _, slot in reader:
        assert bytes(slots[slot][:8]) == path.read_bytes()[:8]
    assert len(said) == 1 and "refuses direct reads" in said[0]


# ---- lines ----


def test_lines_come_with_the_bytes() -> None:
    now, lines = [0.0], list[str]()
    progress = Progress("rank 1", 400 * GIB, 300 * GIB, lines.append, lambda: now[0])
    for at, gib in ((9.0, 9), (10.0, 1), (12.0, 2), (30.0, 28), (31.0, 360)):
        now[0] = at
        progress.add(gib * GIB)
    progress.end()
    assert lines == [
        "[load] rank 1: 400.00 GiB to read, 300.00 GiB of them to keep",
        "[load] rank 1: 10.00 of 400.00 GiB (2 %), 1.00 GiB/s, 6 min 30 s left",
        "[load] rank 1: 40.00 of 400.00 GiB (10 %), 1.50 GiB/s, 4 min 0 s left",
        "[load] rank 1: 400.00 GiB read in 31.0 s, 12.90 GiB/s; 300.00 GiB kept",
    ]


# ---- what is refused ----


@pytest.mark.parametrize(
    ("load_format", "extra", "strategy", "found"),
    [
        ("fastsafetensors", {}, None, "--load-format fastsafetensors"),
        ("instanttensor", {}, None, "--load-format instanttensor"),
        ("sharded_state", {}, None, "--load-format sharded_state"),
        ("auto", {"enable_multithread_load": True}, None, "enable_multithread_load"),
        ("auto", {}, "eager", "--safetensors-load-strategy eager"),
    ],
)
def test_other_readers_are_refused_by_name(
    load_format: str, extra: dict[str, bool], strategy: str | None, found: str
) -> None:
    with pytest.raises(ValueError, match=f"found .*{found}.*leave the option out"):
        formats.check(load_format, extra, strategy)


@pytest.mark.parametrize("load_format", formats.FORMATS)
def test_vllm_s_ordinary_ways_are_ours(load_format: str) -> None:
    formats.check(load_format, {"enable_multithread_load": False}, "lazy")


# ---- a checkpoint of the published size ----

EXPERTS, LAYERS, FILES = 384, 41, 39
MATRICES = (("w1", 5120, 2304), ("w2", 2304, 5120), ("w3", 5120, 2304))


def published(root: Path) -> int:
    """Headers and index as many and as long as the real ones; the data is holes."""
    weight_map: dict[str, str] = {}
    for number in range(LAYERS):
        file = f"model-{number:05}-of-{LAYERS:05}.safetensors"
        header: dict[str, object] = {}
        at = 0
        for expert in range(EXPERTS):
            for name, n_in, n_out in MATRICES:
                key = f"layers.{number}.ffn.experts.{expert}.{name}"
                for leaf, dtype, shape, size in (
                    ("trellis", "I16", [n_in // 16, n_out // 16, 48], 2),
                    ("suh", "F16", [n_in], 2),
                    ("svh", "F16", [n_out], 2),
                    ("mul1", "I32", [], 4),
                ):
                    end = at + size * math.prod(shape)
                    header[f"{key}.{leaf}"] = {
                        "dtype": dtype,
                        "shape": shape,
                        "data_offsets": [at, end],
                    }
                    weight_map[f"{key}.{leaf}"] = file
                    at = end
        text = json.dumps(header).encode()
        with (root / file).open("wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            out.truncate(8 + len(text) + at)
    (root / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
    return len(weight_map)


def test_the_names_of_a_whole_checkpoint_take_seconds(tmp_path: Path) -> None:
    """Headers, matrices, shares and blocks of one rank: under 10 s of processor time."""
    count = published(tmp_path)
    began = time.process_time()
    headers = CheckpointHeaders.scan(tmp_path, whole=True).tensors
    modules = scan_modules(headers)
    parts = {key: share(facts, 1, 2) for key, facts in modules.items()}
    wanted = []
    for name, header in headers.items():
        key, _, leaf = name.rpartition(".")
        part = parts[key]
        assert part is not None
        cut = cuts.whole(header) if leaf == "mul1" else cuts.packed(header, leaf, part)
        wanted.append(Wanted(name, header, cut))
    plan = list(blocks(wanted))
    took = time.process_time() - began
    assert count == len(wanted) == 188_928 and len(plan) > 10_000
    assert took < 10.0, f"{took:.1f} s"


def test_the_plan_of_a_real_file(tmp_path: Path) -> None:
    """From a header on the drive to bytes, by what the launcher and the loader both use."""
    data = {"k.suh": ("F16", (256,), os.urandom(512)), "z": ("U8", (3,), b"abc")}
    write_safetensors(tmp_path / "x.safetensors", data)
    headers = read_header(tmp_path / "x.safetensors")
    cut = cuts.rows(headers["k.suh"], 128, 256)
    raw = (tmp_path / "x.safetensors").read_bytes()
    assert reference(raw, cut) == data["k.suh"][2][256:]
