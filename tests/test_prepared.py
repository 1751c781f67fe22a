"""A rank's prepared file: it is this rank's share to the byte, and none is taken for another."""

from __future__ import annotations

if __name__ == "__main__":  # before the imports that a bare Python lacks
    from _standalone import main

    main(__file__)

import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from _packs import write_index, write_safetensors

from spark_overlay.exl3.layout import MARKERS
from spark_overlay.exl3.modules import Exl3Facts
from spark_overlay.exl3.shares import share
from spark_overlay.headers import INDEX_NAME, read_header
from spark_overlay.loading import prepare, prepared
from spark_overlay.loading.plan import Block
from spark_overlay.loading.prepared import PreparedError

GROUPS = 2
LINEARS = [
    ("layers.0.ffn.experts.0.w1", 256, 512, 6),
    ("layers.0.ffn.experts.0.w2", 512, 256, 6),
    ("layers.0.attn.wq_a", 256, 128, 10),
    ("layers.0.attn.wo_a.slice.0", 256, 128, 10),
    ("layers.0.attn.wo_a.slice.1", 256, 128, 10),
    ("mtp.0.main_proj", 256, 128, 8),
    ("head", 128, 256, 12),
]
Arrays = dict[str, np.ndarray]
DTYPES = {"<i2": "I16", "<f2": "F16", "<i4": "I32", "<f4": "F32"}


@pytest.fixture(scope="module")
def arrays() -> Arrays:
    random = np.random.default_rng(5)
    found: Arrays = {}
    for key, rows, columns, k2 in LINEARS:
        shape = Exl3Facts(key, rows, columns, k2, "mul1").trellis_shape
        found[f"{key}.trellis"] = random.integers(-999, 999, shape).astype("<i2")
        found[f"{key}.suh"] = random.random(rows).astype("<f2")
        found[f"{key}.svh"] = random.random(columns).astype("<f2")
        found[f"{key}.mul1"] = np.array(MARKERS["mul1"], "<i4")
    found["embed.weight"] = random.random((200, 8)).astype("<f2")  # of 256 rows on two ranks
    found["norm.weight"] = random.random(7).astype("<f4")
    found["layers.1.engram.embed.weight"] = random.random((4, 4)).astype("<f4")
    return found


@pytest.fixture
def model(tmp_path: Path, arrays: Arrays) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    names = sorted(arrays)
    for number in (0, 1):
        file = folder / f"model-{number}.safetensors"
        mine = {
            name: (DTYPES[arrays[name].dtype.str], arrays[name].shape, arrays[name].tobytes())
            for name in names[number::2]
        }
        write_safetensors(file, mine, pad=number)
    write_index(folder, {name: f"model-{i % 2}.safetensors" for i, name in enumerate(names)})
    (folder / "config.json").write_text(json.dumps({"text_config": {"o_groups": GROUPS}}))
    return folder


def expected(arrays: Arrays, rank: int) -> Arrays:
    found = {"norm.weight": arrays["norm.weight"]}
    found["embed.weight"] = arrays["embed.weight"][128 * rank : 128 * (rank + 1)]
    for key, rows, columns, k2 in LINEARS:
        part = share(Exl3Facts(key, rows, columns, k2, "mul1"), rank, 2, GROUPS)
        if part is not None:
            found[f"{key}.mul1"] = arrays[f"{key}.mul1"]
            for leaf in ("trellis", "suh", "svh"):
                found[f"{key}.{leaf}"] = arrays[f"{key}.{leaf}"][getattr(part, leaf)]
    return found


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("block", [4096, 1 << 20])
def test_it_holds_this_rank_s_share(
    model: Path, arrays: Arrays, tmp_path: Path, rank: int, block: int
) -> None:
    job = prepare.task(model, tmp_path / "out", rank, 2)
    said: list[str] = []
    prepare.prepare(job, said.append, block)
    assert job.path.name == f"weights-r{rank}of2.safetensors" and said[-1].endswith(": whole")
    assert [path.name for path in job.path.parent.iterdir()] == [job.path.name]
    headers = prepared.find(job.path.parent, job.origin)
    mine = expected(arrays, rank)
    assert headers is not None and headers == read_header(job.path)
    assert headers.keys() == mine.keys()
    raw = job.path.read_bytes()
    for name, header in headers.items():
        assert header.shape == mine[name].shape, name
        assert raw[header.begin : header.end] == mine[name].tobytes(), name
    assert min(header.begin for header in headers.values()) % 4096 == 0
    prepare.verify(job, said.append, block)
    assert said[-1].endswith(f"equal to {model}")
    prepare.prepare(job, said.append, block)
    assert said[-1].endswith("present")


def made(model: Path, out: Path, rank: int = 0) -> prepare.Task:
    job = prepare.task(model, out, rank, 2)
    prepare.prepare(job, lambda line: None)
    return job


def test_a_file_of_another_index_is_refused_by_name(model: Path, tmp_path: Path) -> None:
    job = made(model, tmp_path / "out")
    index = model / INDEX_NAME
    index.write_text(index.read_text() + "\n")
    now = prepared.origin(model, 0, 2)
    with pytest.raises(PreparedError, match=rf"{job.path} was made of another checkpoint.*prepare"):
        prepared.find(job.path.parent, now)


def test_a_file_of_another_rank_or_version_is_refused(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = made(model, tmp_path / "out")
    other = prepared.origin(model, 1, 2)
    job.path.rename(job.path.with_name(other.file_name))
    with pytest.raises(PreparedError, match="is of another rank: found spark_rank = 0, needed 1"):
        prepared.find(job.path.parent, other)
    alone = prepared.origin(model, 0, 1)
    job.path.with_name(other.file_name).rename(job.path.with_name(alone.file_name))
    with pytest.raises(PreparedError, match="is of another rank: found spark_ranks = 2"):
        prepared.find(job.path.parent, alone)
    job.path.with_name(alone.file_name).rename(job.path)
    monkeypatch.setattr(prepared, "FORMAT", "2")
    with pytest.raises(PreparedError, match="another version of the overlay: found spark_f"):
        prepared.find(job.path.parent, job.origin)


def test_no_file_is_none(model: Path, tmp_path: Path) -> None:
    assert prepared.find(tmp_path, prepared.origin(model, 0, 2)) is None


def test_a_safetensors_file_of_others_is_none_of_ours(model: Path, tmp_path: Path) -> None:
    of = prepared.origin(model, 0, 2)
    (tmp_path / of.file_name).write_bytes((model / "model-0.safetensors").read_bytes())
    with pytest.raises(PreparedError, match="found spark_format = nothing, needed 1"):
        prepared.find(tmp_path, of)


def test_a_wrong_byte_is_named(model: Path, tmp_path: Path) -> None:
    job = made(model, tmp_path / "out")
    header = read_header(job.path)["layers.0.attn.wq_a.suh"]
    with job.path.open("r+b") as file:
        file.seek(header.end - 1)
        file.write(b"\xff")
    with pytest.raises(PreparedError, match=r"layers\.0\.attn\.wq_a\.suh is not the checkpoint's"):
        prepare.verify(job, lambda line: None)


def test_two_at_once_are_refused_and_what_others_left_counts_for_nothing(
    model: Path, tmp_path: Path
) -> None:
    job = prepare.task(model, tmp_path, 0, 2)
    with job.temporary.open("wb") as file:
        file.write(b"x" * 100)
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(PreparedError, match="another process writes this file"):
            prepare.prepare(job, lambda line: None)
    prepare.prepare(job, lambda line: None)
    prepare.verify(job, lambda line: None)


def killed(job: prepare.Task, block: int, after: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """A process that writes the file and is gone, as by SIGKILL, before write ``after``: how many
    of the plan's blocks it left on record."""
    child = os.fork()
    if child == 0:
        count = iter(range(after))
        plain = prepare._write

        def write(out: int, data: bytes | bytearray, at: int) -> None:
            if next(count, None) is None:
                os._exit(9)
            plain(out, data, at)

        monkeypatch.setattr(prepare, "_write", write)
        prepare.prepare(job, lambda line: None, block)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    return job.journal(job.blocks(block)).read()[0]


@pytest.mark.parametrize("after", [0, 1, 2, 9, 25, 40])
def test_a_killed_one_goes_on_and_is_never_taken(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    block = 4096
    monkeypatch.setattr(prepare, "SYNC", 3 * block)
    right = made(model, tmp_path / "right").path.read_bytes()
    job = prepare.task(model, tmp_path, 0, 2)
    plan = job.blocks(block)
    left = killed(job, block, after, monkeypatch)
    assert (left > 0) == (after > 2) and left < len(plan)
    assert job.temporary.exists() and prepared.find(tmp_path, job.origin) is None
    # What was not said to be on the drive may be lost with the machine's power.
    with job.temporary.open("r+b") as file:
        for late in plan[left:]:
            for one in late.tensors:
                for target, data in prepared.gathered(one, late.begin, bytearray(late.length)):
                    os.pwrite(file.fileno(), b"?" * len(data), one.into + target)
    looked = prepare.look(job, block)
    assert (looked.left < looked.total) == (left > 0) and looked.absent == (job.path.name,)
    said: list[str] = []
    reads: list[int] = []
    whole = prepare._cut

    def cut(plan: list[Block], size: int, first: int) -> Iterator[tuple[int, int, bytearray]]:
        reads.append(first)
        return whole(plan, size, first)

    monkeypatch.setattr(prepare, "_cut", cut)
    prepare.prepare(job, said.append, block)
    assert reads == [left] and any("goes on after" in line for line in said) == (left > 0)
    assert job.path.read_bytes() == right
    assert [path.name for path in tmp_path.glob("weights-*")] == [job.path.name]


@pytest.mark.parametrize("what", ["shard", "index", "journal", "length"])
def test_what_was_stopped_is_of_no_use_for_another_checkpoint(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(prepare, "SYNC", 4096)
    job = prepare.task(model, tmp_path, 0, 2)
    assert killed(job, 4096, 9, monkeypatch)
    if what == "shard":  # downloaded again
        os.utime(model / "model-0.safetensors", (1, 1))
    elif what == "index":
        index = model / INDEX_NAME
        index.write_text(index.read_text() + "\n")
    elif what == "journal":
        job.journal([]).path.write_text("{")
    else:
        os.truncate(job.temporary, job.size - 1)
    said: list[str] = []
    job = prepare.task(model, tmp_path, 0, 2)
    prepare.prepare(job, said.append, 4096)
    assert not any("goes on" in line for line in said)
    prepare.verify(job, lambda line: None)


def test_what_there_is_to_do(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--source", str(model), "--out", str(tmp_path), "--rank", "1", "--tp", "2"]
    assert prepare.main([*argv, "--plan"]) == 0
    plan = json.loads(capsys.readouterr().out)
    job = prepare.task(model, tmp_path, 1, 2)
    assert (plan["total"], plan["left"], plan["absent"]) == (job.size, job.size, [job.path.name])
    assert plan["needed"] > job.size and plan["free"] > 0
    assert prepare.main(argv) == 0
    assert prepare.main([*argv, "--plan"]) == 0
    plan = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (plan["left"], plan["needed"], plan["absent"]) == (0, 0, [])
    assert job.path.stat().st_size == job.size


def test_a_full_drive_is_said_before(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare, "free_bytes", lambda folder: 1000)
    with pytest.raises(PreparedError, match=r"0\.0 GB free, 0\.3 GB needed for weights-r0of2"):
        prepare.prepare(prepare.task(model, tmp_path, 0, 2))


def test_errors_are_one_line(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (model / INDEX_NAME).unlink()
    argv = ["--source", str(model), "--out", str(model), "--rank", "0", "--tp", "2"]
    assert prepare.main(argv) == 1
    assert capsys.readouterr().err.startswith(f"{model / INDEX_NAME}: cannot be read")
    assert prepare.main([*argv[:5], "2", "--tp", "2"]) == 1
    assert "found rank 2 of 2" in capsys.readouterr().err
