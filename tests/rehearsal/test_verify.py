"""The overlay's self-check: it passes here, by its command line, and sees what is damaged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from spark_overlay.attention import reference as attention_reference
from spark_overlay.engram import dequant
from spark_overlay.engram import reference as engram_reference
from spark_overlay.exl3 import reference as exl3_reference
from spark_overlay.exl3.cuda import ops
from spark_overlay.verify import attention, built, checkpoint, engram, exl3
from spark_overlay.verify.report import Check, Outcome, report, within

pytestmark = pytest.mark.rehearsal

CPU = torch.device("cpu")


def test_the_command_passes_and_says_a_line_of_json_for_each_check(tmp_path: Path) -> None:
    (tmp_path / checkpoint.INDEX).write_text("{}")
    argv = [sys.executable, "-m", "spark_overlay.verify", "--model", str(tmp_path)]
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(argv, capture_output=True, text=True, env=env)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, done.stdout + done.stderr
    *checks, last = lines
    assert last == {"done": len(checks), "failed": 0}
    assert all(line["ok"] and line["on"] for line in checks)
    names = [line["check"] for line in checks]
    assert len(set(names)) == len(names) == 9
    index = "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"
    assert checks[0]["check"] == checkpoint.NAME and checks[0]["found"] == index


def test_a_check_that_raises_is_one_that_failed_and_the_others_are_made() -> None:
    def broken() -> Outcome:
        raise RuntimeError("no kernel image")

    said: list[dict[str, Any]] = []
    checks = [Check("a", "gpu", broken), Check("b", "gpu", lambda: within(float("nan"), 1.0)),
              Check("c", "gpu", lambda: within(0.5, 1.0))]  # fmt: skip
    assert report(checks, lambda line: said.append(json.loads(line))) == 1
    assert [line.get("ok") for line in said] == [False, False, True, None]
    assert said[0]["error"] == "RuntimeError: no kernel image"
    assert said[-1] == {"done": 3, "failed": 2}
    assert report([], lambda line: None) == 1


# ---- each check sees the damage that it is there for ----


@pytest.fixture
def table() -> Iterator[Tensor]:
    """One value of the codebook off by a bit, where op and reference both read it."""
    values = exl3_reference._table("mul1", CPU)
    place = int(trellis_state())
    before = values[place].item()
    values.view(torch.int16)[place] ^= 1
    yield values
    values[place] = before


def trellis_state() -> int:
    """A state that occurs in the pattern."""
    ring = exl3.pattern(128, 128, 6)[0, 0].int() & 0xFFFF
    first, second, shift = exl3_reference._windows(6, CPU)
    return int((((ring[first] << (16 - shift)) | (ring[second] >> shift)) & 0xFFFF)[0])


def test_a_bit_of_the_codebook(table: Tensor) -> None:
    outcome = exl3.decoded(CPU)
    assert not outcome.ok and "op mul1 3 bits" in outcome.found


def test_a_matrix_kernel_that_loses_a_row_of_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    assert exl3.dense(CPU, 256, 128, exl3.PLAIN).ok
    right = ops.group

    def wrong(xs: list[Tensor], *more: Any) -> Tensor:
        return right([x.index_fill(1, torch.arange(16), 0.0) for x in xs], *more)

    monkeypatch.setattr(ops, "group", wrong)
    assert not exl3.dense(CPU, 256, 128, exl3.DENSE).ok


def test_an_expert_kernel_that_takes_the_neighbour(monkeypatch: pytest.MonkeyPatch) -> None:
    assert exl3.moe(CPU, 256, 128, exl3.PLAIN).ok
    right = ops.experts

    def wrong(x: Tensor, ids: Tensor, *more: Any, **named: Any) -> Tensor:
        ids = ids.clone()
        ids[0, 0] ^= 1
        return right(x, ids, *more, **named)

    monkeypatch.setattr(ops, "experts", wrong)
    assert not exl3.moe(CPU, 256, 128, exl3.EXPERTS).ok


def test_bytes_taken_for_integers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The field's fault: fluent text, and wrong."""

    def integers(weights: Tensor, scales: Tensor, out: Tensor) -> None:
        scale = torch.exp2(scales.float() - 127).repeat_interleave(32, -1)
        out.copy_(weights.view(torch.uint8).float() * scale)

    assert engram.kernel(CPU).ok and engram.reference(CPU).ok
    monkeypatch.setattr(dequant, "dequantize_into", integers)
    assert not engram.kernel(CPU).ok


def test_one_scale_off_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    right = engram_reference.dequantize_rows

    def wrong(weights: Tensor, scales: Tensor) -> Tensor:
        scales = scales.clone()
        scales[3, 7] += 1
        return right(weights, scales)

    monkeypatch.setattr(engram, "dequantize_rows", wrong)
    outcome = engram.reference(CPU)
    assert not outcome.ok and int(outcome.found.split()[0]) <= 32


def test_a_row_store_that_reads_one_row_further(monkeypatch: pytest.MonkeyPatch) -> None:
    assert engram.store().ok
    right = engram.TableSource

    def shifted(layer: int, path: Path, rows: int, dim: int, begin: int, scales: int) -> Any:
        return right(layer, path, rows, dim, begin + 1, scales)

    monkeypatch.setattr(engram, "TableSource", shifted)
    assert not engram.store().ok


def test_records_with_a_coarser_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    assert attention.records(CPU).ok
    right = attention_reference.e4m3_exponent
    monkeypatch.setattr(attention_reference, "e4m3_exponent", lambda amax: right(amax) + 9)
    assert not attention.records(CPU).ok


def test_rope_turned_the_other_way(monkeypatch: pytest.MonkeyPatch) -> None:
    right = attention_reference.rotate
    monkeypatch.setattr(
        attention_reference, "rotate", lambda *given, **more: right(*given, inverse=True)
    )
    assert not attention.records(CPU).ok


def test_attention_without_its_sink(monkeypatch: pytest.MonkeyPatch) -> None:
    assert attention.attention(CPU).ok
    right = attention_reference.sparse_attention

    def wrong(q: Tensor, kv: Tensor, valid: Tensor, sink: Tensor, scale: float) -> Tensor:
        return right(q, kv, valid, torch.full_like(sink, -1e30), scale)

    monkeypatch.setattr(attention_reference, "sparse_attention", wrong)
    assert not attention.attention(CPU).ok


def test_a_library_without_code_for_the_gpu(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(built.library, "load", lambda path: None)
    path = tmp_path / "_cuda.so"
    path.write_bytes(b"ELF - sm_90a -")
    assert built.exl3(("90a",), path).ok
    outcome = built.exl3(("90a", "121a"), path)
    assert not outcome.ok and "121a" in outcome.found
