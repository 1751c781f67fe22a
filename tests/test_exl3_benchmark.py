"""The benchmark of EXL3's kernels, as far as it needs no GPU: bytes, the model of a step, bars."""

from __future__ import annotations

if __name__ == "__main__":
    from _standalone import main

    main(__file__)

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "overlay" / "benchmarks"
if str(BENCHMARKS) not in sys.path:
    sys.path.insert(0, str(BENCHMARKS))

import exl3_instructions  # noqa: E402
import exl3_peer  # noqa: E402
import exl3_peer_many  # noqa: E402
import exl3_prefill  # noqa: E402
import exl3_shapes as shapes  # noqa: E402

import exl3  # noqa: E402


@pytest.mark.parametrize(("tokens", "published"), [(1, 3.87), (2, 5.37), (4, 8.31), (8, 13.91)])
def test_a_steps_bytes_are_the_packs(tokens: int, published: float) -> None:
    assert sum(shapes.step_bytes(tokens).values()) / 1e9 == pytest.approx(published, rel=0.01)


def test_experts_asked_for_by_hand() -> None:
    assert shapes.distinct(1) == pytest.approx(6)
    assert shapes.distinct(2) == pytest.approx(12 - 36 / 384)
    assert shapes.distinct(10_000) == pytest.approx(384)


def test_the_step_is_its_parts_and_feels_each_assumption() -> None:
    given = shapes.Assumptions()
    whole = shapes.step_seconds(4, given)
    assert whole["step"] == pytest.approx(sum(whole.values()) - whole["step"])
    for name in ("launch_seconds", "packed_launches", "collective_seconds", "other_bytes"):
        more = replace(given, **{name: 2 * getattr(given, name)})
        assert shapes.step_seconds(4, more)["step"] > whole["step"], name
    faster = replace(given, bytes_per_second=2 * given.bytes_per_second)
    assert shapes.step_seconds(4, faster)["bytes"] == pytest.approx(whole["bytes"] / 2)


def test_the_model_names_what_it_assumes() -> None:
    argv = [sys.executable, str(BENCHMARKS / "exl3.py"), "--model"]
    said = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    assert "modelled, not measured" in said and "60 to 63" in said
    for name in shapes.Assumptions().named():
        assert f"  {name}: " in said


def test_bars_are_geometric_means_of_what_was_measured() -> None:
    def row(name: str, ratio: float | None) -> dict[str, object]:
        return {"name": name, "values": {} if ratio is None else {"ratio": ratio}}

    rows = [row("experts K=3, 1 tokens", 2.0), row("experts K=2, 8 tokens", 8.0)]
    rows += [row("experts K=3, 16 tokens", 100.0), row("wq_b, 4 rows", None)]
    found = exl3.bars(rows)
    assert found["experts at 1 to 8 tokens (bar 1.8)"] == 4.0
    assert found["dense at 1 to 16 rows (bar 2)"] is None


def test_without_the_peer_a_row_says_so_and_no_bar_is_judged() -> None:
    bench = exl3.Bench.__new__(exl3.Bench)
    bench.copy, bench.peer = 4e12, None
    values = bench.values([10.0, 12.0, 11.0], 4e6, 1e-4)
    assert values["peer"] == "not here" and "ratio" not in values and values["us"] == 11
    assert set(exl3.bars([{"name": "wq_b, 4 rows", "values": values}]).values()) == {None}


def test_a_row_is_compared_with_the_peers_fastest_way(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = exl3.Bench.__new__(exl3.Bench)
    bench.ways, modes = {}, []
    monkeypatch.setattr(bench, "peer", SimpleNamespace(int8=modes.append), raising=False)
    us = {"a": [30.0, 31.0, 29.0], "b": [20.0, 22.0, 21.0]}
    monkeypatch.setattr(bench, "timed", lambda calls: us[calls], raising=False)
    found = bench.beside("wq_b, 1 rows", {"us": 7.0}, {"gemm": "a", "mgemm": "b"}, True)
    assert found["peer_us"] == 21 and found["peer_way"] == bench.ways["wq_b, 1 rows"] == "mgemm"
    assert found["ratio"] == 3 and found["peer_int8_us"] == 30 and modes == [2, 0]


def test_another_file_than_the_peers_wheel_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "exllamav3-1.6.4-py3-none-any.whl"
    other.write_bytes(b"")
    with pytest.raises(exl3_peer.PeerError, match=r"pip download --no-deps exllamav3==1\.6\.5"):
        exl3_peer.built(other, tmp_path, "2.11.0", "90a", tmp_path)


def test_prefills_bars_are_the_worst_that_was_measured() -> None:
    def row(name: str, **values: float) -> dict[str, object]:
        return {"name": name, "values": values}

    rows = [row(f"experts K=3, {n} tokens", ratio=r) for n, r in ((512, 1.0), (1024, 4.0))]
    rows += [row("experts K=3, 4096 tokens", ratio=3.0), row("layer, 1024 tokens", ratio=1.0)]
    rows += [row("rotate [8, 128]", share_of_copy=0.9), row("finish [8, 128]", share_of_copy=0.7)]
    assert list(exl3_prefill.bars(rows).values()) == [3.0, None, None, 0.7]
    assert exl3_prefill.beside(2.0, None)["peer"] == "not here"
    assert exl3_prefill.beside(2.0, 5.0)["ratio"] == 2.5


def test_the_peers_tiles_hold_every_expert_once() -> None:
    counts = [0, 1, 16, 17, 32, 33, 256]
    tiles = exl3_peer_many.tiles(counts)
    assert [(rows, active) for _, _, rows, active in tiles] == [(64, 2), (32, 2), (16, 2)]
    for count in counts[1:]:
        assert sum(low <= count <= high for low, high, _, _ in tiles) == 1
    assert exl3_peer_many.tiles([5]) == [(1, 16, 16, 1)]
    with pytest.raises(ValueError, match="257 rows"):
        exl3_peer_many.tiles([257])


def test_instructions_a_weight_are_those_of_all_lanes_and_launches() -> None:
    text = """==PROF== Connected to process 1
"ID","Kernel Name","Metric Name","Metric Value"
"0","experts_a_kernel","smsp__inst_executed.sum","1,000"
"1","experts_b_kernel","smsp__inst_executed.sum","500"
"2","dense_kernel","smsp__inst_executed.sum","64"
==PROF== Disconnected from process 1
"""
    made = [
        {"name": "experts", "weights": 9600, "launches": 2},
        {"name": "dense", "weights": 1024, "launches": 1},
    ]
    launches = exl3_instructions.counted(text)
    found = exl3_instructions.per_weight(made, launches)
    assert [one["each"] for one in found] == [pytest.approx(5.0), pytest.approx(2.0)]
    with pytest.raises(ValueError, match="2 launches, expected 3"):
        exl3_instructions.per_weight(made, launches[:2])
