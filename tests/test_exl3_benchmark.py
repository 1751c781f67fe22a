"""The benchmark of EXL3's kernels, as far as it needs no GPU: bytes, the model of a step, bars."""

from __future__ import annotations

if __name__ == "__main__":
    from _standalone import main

    main(__file__)

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "overlay" / "benchmarks"
if str(BENCHMARKS) not in sys.path:
    sys.path.insert(0, str(BENCHMARKS))

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


def test_the_earlier_figures_are_of_rows_that_exist() -> None:
    earlier = json.loads(exl3.EARLIER.read_text())
    names = {f"{g}, {n} rows" for g in (*shapes.GROUPS, "head") for n in exl3.ROWS}
    names |= {f"experts K={k}, {n} tokens" for k in (2, 3) for n in exl3.TOKENS}
    names |= {"layer, 4 rows: linears", "layer, 4 rows: with experts"}
    assert earlier["us"].keys() <= names
    assert earlier["date"] and "Not in the same run" in earlier["how"]
