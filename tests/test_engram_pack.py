"""Packed files: whole or absent, whatever stops the packer; never used for other tables."""

from __future__ import annotations

if __name__ == "__main__":  # before the imports that a bare Python lacks
    from _standalone import main

    main(__file__)

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import zlib
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
from _native import OVERLAY, library
from _tables import SHARDS, small_config, small_layout, table, write_tables

from spark_overlay.engram import pack, packed, synthetic
from spark_overlay.engram.layout import EngramError
from spark_overlay.engram.native import NativeOptions, NativeRowStore
from spark_overlay.engram.slim import make_slim
from spark_overlay.engram.source import TableSource, locate_tables

LAYOUT = small_layout()
DIM, ROW = 64, 66


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("source")
    write_tables(root, small_config())
    return root


@pytest.fixture
def source(root: Path) -> TableSource:
    return locate_tables(root)[3]


def packed_by(root: Path, out: Path, rank: int = 1) -> list[str]:
    lines: list[str] = []
    pack.pack(pack.plan(root, out, rank, 2), lines.append)
    return lines


def test_the_file_is_a_header_and_the_ranks_rows_side_by_side(root, source, tmp_path) -> None:
    packed_by(root, tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "engram-l1-r1of2.bin",
        "engram-l3-r1of2.bin",
    ]
    raw = (tmp_path / "engram-l3-r1of2.bin").read_bytes()
    lo, hi = LAYOUT.rank_range(3, 1, 2).rows
    weights, scales = table(3, source.rows, DIM)
    body = np.frombuffer(raw[4096:], np.uint8).reshape(hi - lo, ROW)
    assert np.array_equal(body[:, :DIM], weights[lo:hi])
    assert np.array_equal(body[:, DIM:], scales[lo:hi])
    assert raw[:8] == b"SPKENGRM"
    assert np.frombuffer(raw[8:32], "<u4").tolist() == [1, 3, 1, 2, DIM, ROW]
    assert np.frombuffer(raw[32:56], "<u8").tolist() == [lo, hi, source.rows]
    assert raw[120:184].rstrip(b"\0") == b"layers.3.engram.embed.weight"
    assert int.from_bytes(raw[4092:4096], "little") == zlib.crc32(raw[:4092])


@pytest.mark.parametrize("rank", [0, 1])
def test_a_packed_file_is_attached_and_read_as_the_shard(root, source, tmp_path, rank) -> None:
    assert packed.attach(tmp_path, source, LAYOUT, rank, 2) is None
    packed_by(root, tmp_path, rank)
    file = packed.attach(tmp_path, source, LAYOUT, rank, 2)
    assert file is not None
    lo, hi = LAYOUT.rank_range(3, rank, 2).rows
    weights, scales = table(3, source.rows, DIM)
    with NativeRowStore(source, lo, hi, file, NativeOptions(), library()) as store:
        found = store.lookup(np.arange(source.rows))
    assert np.array_equal(found.weights[lo:hi], weights[lo:hi])
    assert np.array_equal(found.scales[lo:hi], scales[lo:hi])
    assert found.owned.sum() == hi - lo and not found.weights[~found.owned].any()


def test_real_sizes_of_the_headers(tmp_path) -> None:
    """kit.md §4.2: the packed files of two ranks, to the byte."""
    source = TableSource(1, tmp_path / SHARDS[0], 384006168, 256, 8, 8)
    parts = [(0, 192001740), (192001740, 384006168)]
    sizes = [
        packed.PackedHeader(1, rank, 2, 256, lo, hi, source.rows, bytes(32), bytes(32)).file_bytes
        for rank, (lo, hi) in enumerate(parts)
    ]
    assert sizes == [50_688_463_456, 50_689_173_088]


def test_what_is_there_stays_and_is_not_written_again(root, tmp_path) -> None:
    assert any("whole" in line for line in packed_by(root, tmp_path))
    before = {p: p.stat().st_mtime_ns for p in tmp_path.iterdir()}
    assert all("present" in line for line in packed_by(root, tmp_path))
    assert before == {p: p.stat().st_mtime_ns for p in tmp_path.iterdir()}


def test_a_slim_directory_packs_and_serves_the_same(root, tmp_path) -> None:
    """Its index is another file, but says the same of the tables."""
    make_slim(root, tmp_path / "slim")
    packed_by(tmp_path / "slim", tmp_path / "out")
    source = locate_tables(root)[3]
    assert packed.attach(tmp_path / "out", source, LAYOUT, 1, 2) is not None


def change(path: Path, at: int, value: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(value)


def recrc(path: Path) -> None:
    raw = path.read_bytes()[:4092]
    change(path, 4092, zlib.crc32(raw).to_bytes(4, "little"))


def foreign_rank(path: Path) -> None:
    change(path, 16, (0).to_bytes(4, "little"))
    recrc(path)


def foreign_index(path: Path) -> None:
    change(path, 56, b"\1" * 32)
    recrc(path)


FAULTS = [
    (lambda p: change(p, 0, b"DSV1EN41"), "is no packed Engram file of this kit"),
    (lambda p: p.write_bytes(b""), "is no packed Engram file"),
    (lambda p: os.truncate(p, 100), "ends after 100 of 4096 header bytes"),
    (lambda p: change(p, 8, b"\x07"), "has format 7, this kit reads 1"),
    (lambda p: change(p, 40, b"\x07"), r"header is damaged \(CRC\)"),
    (lambda p: os.truncate(p, p.stat().st_size - 1), "is truncated"),
    (lambda p: os.truncate(p, p.stat().st_size + 1), "another file"),
    (foreign_rank, r"of another rank or layer: rank 0, expected 1"),
    (foreign_index, r"packed from another source \(index hash\)"),
]


@pytest.mark.parametrize(("fault", "message"), FAULTS, ids=range(len(FAULTS)))
def test_a_bad_file_is_refused_by_name_and_never_overwritten(
    root, source, tmp_path, fault, message
) -> None:
    packed_by(root, tmp_path)
    path = tmp_path / "engram-l3-r1of2.bin"
    fault(path)
    content = path.read_bytes()
    for call in (
        lambda: packed.attach(tmp_path, source, LAYOUT, 1, 2),
        lambda: packed_by(root, tmp_path),
        lambda: pack.verify(pack.plan(root, tmp_path, 1, 2)),
    ):
        with pytest.raises(EngramError, match=rf"engram-l3-r1of2\.bin: .*{message}") as caught:
            call()
        assert "pack again" in str(caught.value)
    assert path.read_bytes() == content


def served(root: Path, packs: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """Rank 1 as the launcher starts it, by a Python that has no vLLM."""
    told = {"engram_dir": str(root), "engram_packed_dir": str(packs), **more}
    argv = [sys.executable, "-m", "spark_overlay.serving.serve", "serve", "/model"]
    argv += ["--tensor-parallel-size", "2", "--nnodes", "2", "--node-rank", "1"]
    argv += ["--additional-config", json.dumps({"spark_overlay": told})]
    environ = os.environ | {"PYTHONPATH": str(OVERLAY), "VLLM_PLUGINS": "spark_overlay"}
    return subprocess.run(argv, capture_output=True, text=True, env=environ, timeout=60)


def test_a_rank_with_a_wrong_file_ends_before_vllm_is_loaded_and_says_why_last(
    root, tmp_path
) -> None:
    packed_by(root, tmp_path)
    assert "No module named 'vllm" in served(root, tmp_path).stderr  # so far it came
    file = tmp_path / "engram-l3-r1of2.bin"
    os.truncate(file, file.stat().st_size - 1)
    ran = served(root, tmp_path)
    assert ran.returncode == 1
    assert re.fullmatch(rf"{re.escape(str(file))}: is .* truncated\. .*pack again\n", ran.stderr)
    assert "No module named 'vllm" in served(root, tmp_path, engram_store="plain").stderr
    file.rename(file.with_name("engram-l3-r1of4.bin"))  # of no rank that is here
    assert "No module named 'vllm" in served(root, tmp_path).stderr


def synthetic_tables(root: Path, seed: int) -> Path:
    config = small_config()
    layers, counts = config["engram_layer_ids"], config["engram_num_embeddings"]
    synthetic.write_tables(root, layers, counts, DIM, {"text_config": config}, seed)
    return root


def test_a_pack_of_tables_of_another_training_is_stale(tmp_path) -> None:
    """Same names, same sizes, same offsets: only the rows tell."""
    old, new = (synthetic_tables(tmp_path / f"seed-{seed}", seed) for seed in (1, 2))
    packed_by(old, tmp_path / "out")
    assert packed.attach(tmp_path / "out", locate_tables(old)[1], LAYOUT, 1, 2) is not None
    with pytest.raises(EngramError, match="its rows are not those of the shard"):
        packed.attach(tmp_path / "out", locate_tables(new)[1], LAYOUT, 1, 2)
    with pytest.raises(EngramError, match=r"engram-l1-r1of2\.bin: does not belong to"):
        packed_by(new, tmp_path / "out")


def test_another_index_makes_a_pack_stale(root, source, tmp_path) -> None:
    packed_by(root, tmp_path / "out")
    other = tmp_path / "other"
    write_tables(other, small_config(), pad=9)  # the same rows at other offsets
    with pytest.raises(EngramError, match="index hash"):
        packed.attach(tmp_path / "out", locate_tables(other)[3], LAYOUT, 1, 2)


@pytest.mark.parametrize("bit", [0, 7])
def test_verify_finds_a_flipped_bit_and_its_row(root, source, tmp_path, bit) -> None:
    packed_by(root, tmp_path)
    tasks = pack.plan(root, tmp_path, 1, 2)
    lines: list[str] = []
    pack.verify(tasks, lines.append)
    assert sum("equal to" in line for line in lines) == 2
    lo, hi = LAYOUT.rank_range(3, 1, 2).rows
    row, path = random.randrange(hi - lo), tmp_path / "engram-l3-r1of2.bin"
    at = 4096 + row * ROW + random.randrange(ROW)
    change(path, at, bytes([path.read_bytes()[at] ^ 1 << bit]))
    with pytest.raises(
        EngramError, match=rf"r1of2\.bin: row {lo + row} at byte {4096 + row * ROW}"
    ):
        pack.verify(tasks, lines.append)


def test_verify_needs_the_files(root, tmp_path) -> None:
    with pytest.raises(EngramError, match="missing; run without --verify first"):
        pack.verify(pack.plan(root, tmp_path, 0, 2))


Space = namedtuple("Space", "f_bavail f_frsize")


def test_space_is_asked_for_before_anything_is_written(root, tmp_path, monkeypatch) -> None:
    tasks = pack.plan(root, tmp_path / "new", 0, 2)
    needed = sum(task.header.file_bytes for task in tasks) + pack.SPARE_BYTES
    monkeypatch.setattr(os, "statvfs", lambda path: Space(needed - 1, 1))
    with pytest.raises(EngramError, match=r"0\.3 GB free, 0\.3 GB needed for engram-l1-r0of2\.bin"):
        pack.pack(tasks)
    assert list((tmp_path / "new").iterdir()) == []
    monkeypatch.setattr(os, "statvfs", lambda path: Space(needed, 1))
    pack.pack(tasks, lambda line: None)


def test_a_drive_that_fills_up_is_told_and_the_work_kept(root, tmp_path, monkeypatch) -> None:
    tasks = pack.plan(root, tmp_path, 0, 2, [1])
    written = os.pwrite
    calls = iter(range(100))

    def full(fd: int, data: bytes, at: int) -> int:
        if next(calls) == 5:
            raise OSError(28, "No space left on device")
        return written(fd, data, at)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(EngramError, match=r"No space left.*Free some space and run it again"):
        pack.pack(tasks, lambda line: None, chunk_bytes=ROW * 10)
    assert not tasks[0].path.exists()
    lines: list[str] = []
    pack.pack(tasks, lines.append, chunk_bytes=ROW * 10)
    assert lines[0].endswith("goes on after 40 rows")
    pack.verify(tasks, lines.append)


def test_a_drive_that_has_no_room_for_the_progress_either(root, tmp_path, monkeypatch) -> None:
    tasks = pack.plan(root, tmp_path, 0, 2, [1])
    renamed = os.replace

    def full(source: Path, target: Path) -> None:
        if str(target).endswith(".progress"):
            raise OSError(28, "No space left on device")
        renamed(source, target)

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(EngramError, match=r"No space left.*Free some space and run it again"):
        pack.pack(tasks, lambda line: None, chunk_bytes=ROW * 10)
    monkeypatch.setattr(os, "replace", renamed)
    pack.pack(tasks, lambda line: None)
    pack.verify(tasks, lambda line: None)


def test_a_plan_tells_what_is_left_and_writes_nothing(root, tmp_path) -> None:
    out = tmp_path / "not" / "there"
    tasks = pack.plan(root, out, 0, 2)
    total = sum(task.header.file_bytes for task in tasks)
    first = pack.look(tasks)
    assert (first.total, first.left, first.needed) == (total, total, total + pack.SPARE_BYTES)
    assert first.free > 0 and not out.exists()
    pack.pack(tasks[:1], lambda line: None)
    half = pack.look(tasks)
    assert (half.left, half.absent) == (tasks[1].header.file_bytes, (tasks[1].path.name,))
    pack.pack(tasks, lambda line: None)
    assert (pack.look(tasks).needed, pack.look(tasks).absent) == (0, ())


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_ends_it_in_order_and_the_next_goes_on(tmp_path, name) -> None:
    config = small_config(engram_vocab_size=40000)
    layers, counts = config["engram_layer_ids"], config["engram_num_embeddings"]
    root, out = tmp_path / "source", tmp_path / "out"
    synthetic.write_tables(root, layers, counts, DIM, {"text_config": config}, 3)
    argv = [sys.executable, "-c", SIGNALLED, "--source", str(root), "--out", str(out)]
    argv += ["--rank", "0", "--tp", "1"]
    environ = os.environ | {"PYTHONPATH": str(OVERLAY)}
    with subprocess.Popen(argv, stderr=subprocess.PIPE, text=True, env=environ) as process:
        assert process.stderr is not None
        while not list(out.glob("*.progress")) and process.poll() is None:
            time.sleep(0.005)
        process.send_signal(getattr(signal, name))
        said = process.stderr.read()
    assert process.returncode == 128 + getattr(signal, name), said
    assert said == f"stopped by {name}; the next run goes on from here\n"
    tasks = pack.plan(root, out, 0, 1)
    lines: list[str] = []
    pack.pack(tasks, lines.append)
    assert any("goes on after" in line for line in lines)
    pack.verify(tasks, lines.append)


SIGNALLED = """
import os, runpy, time
rename = os.replace

def slowly(source, target):
    rename(source, target)
    if str(target).endswith(".progress"):
        time.sleep(20)  # the signal comes here

os.replace = slowly
runpy.run_module("spark_overlay.engram.pack", run_name="__main__")
"""


@pytest.mark.parametrize("progress", ['{"rows": 1000000}', "{", '{"rows": -3}', '{"rows": 300}'])
def test_progress_that_does_not_fit_the_file_begins_anew(root, tmp_path, progress) -> None:
    tasks = pack.plan(root, tmp_path, 0, 2, [1])
    tasks[0].temporary.write_bytes(tasks[0].header.to_bytes() + bytes(ROW * 100))
    tasks[0].progress.write_text(progress)
    pack.pack(tasks, lambda line: None)
    pack.verify(tasks, lambda line: None)


def test_work_of_another_source_is_not_gone_on_with(root, tmp_path) -> None:
    old, new = (synthetic_tables(tmp_path / f"seed-{seed}", seed) for seed in (1, 2))
    task = pack.plan(old, tmp_path / "out", 0, 2, [1])[0]
    (tmp_path / "out").mkdir()
    task.temporary.write_bytes(task.header.to_bytes() + bytes(ROW * 100))
    task.progress.write_text('{"rows": 100}')
    lines: list[str] = []
    tasks = pack.plan(new, tmp_path / "out", 0, 2, [1])
    pack.pack(tasks, lines.append)
    assert not any("goes on" in line for line in lines)
    pack.verify(tasks, lines.append)


def test_two_packers_of_one_file_do_not_mix(root, tmp_path) -> None:
    task = pack.plan(root, tmp_path, 0, 2, [1])[0]
    with (
        pack._opened(task),
        pytest.raises(EngramError, match="another process packs this file"),
    ):
        pack.pack([task], lambda line: None)


def test_a_shard_that_ends_too_early_is_named(root, tmp_path) -> None:
    shutil.copytree(root, tmp_path / "source")
    tasks = pack.plan(tmp_path / "source", tmp_path / "out", 0, 2, [1])
    os.truncate(tasks[0].source.file, tasks[0].source.weight_begin + 100 * DIM)
    with pytest.raises(EngramError, match=r"00047.*ends at byte \d+, \d+ bytes too early"):
        pack.pack(tasks, lambda line: None)
    assert not tasks[0].path.exists()


KILLED = """
import os, sys, time
from pathlib import Path
from spark_overlay.engram import pack
sync = os.fdatasync
os.fdatasync = lambda fd: (time.sleep(0.002), sync(fd))  # as a slower drive has it
pack.SPARE_BYTES = 0
tasks = pack.plan(Path(sys.argv[1]), Path(sys.argv[2]), 0, 1, [1])
print("begins", flush=True)
pack.pack(tasks, lambda line: print(line, flush=True), chunk_bytes=1 << 16)
"""


def test_killed_at_any_moment_it_goes_on_and_ends_with_the_right_file(tmp_path) -> None:
    config = small_config(engram_vocab_size=40000)  # 240 000 rows, 15 MB
    layers, counts = config["engram_layer_ids"], config["engram_num_embeddings"]
    root, out = tmp_path / "source", tmp_path / "out"
    synthetic.write_tables(root, layers, counts, DIM, {"text_config": config}, 3)
    argv = [sys.executable, "-c", KILLED, str(root), str(out)]
    environ = os.environ | {"PYTHONPATH": str(OVERLAY)}
    final = out / "engram-l1-r0of1.bin"
    dice = random.Random(11)
    ran = reached = 0
    while not final.exists():
        assert ran < 60, "it makes no headway"
        ran += 1
        with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=environ) as process:
            assert process.stdout is not None
            process.stdout.readline()  # "begins"
            time.sleep(dice.uniform(0.0, 0.15 + ran / 50))  # a busy machine needs longer
            process.send_signal(signal.SIGKILL)
            process.stdout.read()
        progress = out / (final.name + ".progress")
        if progress.exists():
            rows = json.loads(progress.read_text())["rows"]
            assert rows >= reached, "work that was on the drive is lost"
            reached = rows
    assert ran > 1 and reached > 0
    tasks = pack.plan(root, out, 0, 1, [1])
    pack.verify(tasks, lambda line: None)
    assert not tasks[0].temporary.exists() or final.exists()


def test_the_command_says_what_it_does_and_fails_with_one_line(root, tmp_path, capsys) -> None:
    asked = ["--source", str(root), "--out", str(tmp_path), "--rank", "1", "--tp", "2"]
    assert pack.main([*asked, "--layers", "3"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[0].startswith("packed 0.00 of 0.00 GB, ")
    assert told[-1] == f"{tmp_path / 'engram-l3-r1of2.bin'}: whole"
    assert pack.main([*asked, "--verify", "--layers", "3"]) == 0
    assert pack.main([*asked, "--verify"]) == 1
    assert capsys.readouterr().err.count("\n") == 1
    assert pack.main([*asked[:-1], "40"]) == 1
    assert "leave a rank without any" in capsys.readouterr().err
    assert pack.main([*asked, "--layers", "2"]) == 1
    assert "layer 2 has no Engram table" in capsys.readouterr().err
