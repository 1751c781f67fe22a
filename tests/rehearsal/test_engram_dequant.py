"""The Triton kernel that dequantises rows: bit for bit the reference, and fit for every GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_overlay.engram.dequant import GROUPS, dequantize_into
from spark_overlay.engram.layout import EngramError
from spark_overlay.engram.reference import dequantize_rows

pytestmark = pytest.mark.rehearsal
FP8 = torch.float8_e4m3fn


def same_bits(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Bit for bit; a NaN's other bits are each device's own."""
    nan = expected.isnan()
    differ = (found.view(torch.int16) != expected.view(torch.int16)) & ~nan
    return torch.equal(found.isnan(), nan) and not differ.any()


def dequantized(weights: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    out = torch.full(weights.shape, 7.0, dtype=torch.bfloat16)
    dequantize_into(weights.view(FP8), scales, out)
    return out


def test_every_code_under_every_scale() -> None:
    weights = torch.arange(256, dtype=torch.uint8).repeat(256, 1)
    scales = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, 8)
    found = dequantized(weights, scales)
    assert same_bits(found, dequantize_rows(weights.view(FP8), scales))
    # What the corners are worth, said once in numbers.
    tiny, one, infinite = found[1].double(), found[127].double(), found[255].double()
    assert one[0x38] == 1 and one[0xFE] == -448 and one[1] == 2.0**-9 and one[0x7F].isnan()
    assert tiny[0x38] == 2.0**-126 and tiny[1] == 0 and tiny[2] == 0 and tiny[3] == 2.0**-133
    assert infinite[1] == float("inf") and infinite[0].isnan()
    assert (found[0].double().nan_to_num(0) == 0).all() and found[0, 0x81].signbit()


@settings(max_examples=25, deadline=None)
@given(rows=st.integers(0, 3 * GROUPS // 8 + 2), per_row=st.integers(1, 9), seed=st.integers(0, 99))
def test_ragged_numbers_of_rows_and_columns(rows: int, per_row: int, seed: int) -> None:
    """Nothing is left out at the end, and nothing behind it is written."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (rows, 32 * per_row), generator=generator, dtype=torch.uint8)
    scales = torch.randint(0, 256, (rows, per_row), generator=generator, dtype=torch.uint8)
    room = torch.full((codes.numel() + 64,), 7.0, dtype=torch.bfloat16)
    out = room[: codes.numel()].view(codes.shape)
    dequantize_into(codes.view(FP8), scales, out)
    assert same_bits(out, dequantize_rows(codes.view(FP8), scales))
    assert (room[codes.numel() :] == 7).all()


def test_bytes_that_are_not_typed_fp8_are_a_type_error() -> None:
    codes, scales = torch.zeros(2, 64, dtype=torch.uint8), torch.zeros(2, 2, dtype=torch.uint8)
    out = torch.empty(2, 64, dtype=torch.bfloat16)
    for wrong in (codes, codes.view(torch.int8), codes.view(torch.float8_e5m2), codes.float()):
        with pytest.raises(TypeError, match="view the bytes, do not convert them"):
            dequantize_into(wrong, scales, out)
    with pytest.raises(TypeError, match=r"torch\.float32 scales"):
        dequantize_into(codes.view(FP8), scales.float(), out)
    with pytest.raises(TypeError, match=r"bfloat16, not torch\.float32"):
        dequantize_into(codes.view(FP8), scales, out.float())


def test_shapes_that_do_not_fit_and_strides_are_refused() -> None:
    codes = torch.zeros(4, 64, dtype=torch.uint8).view(FP8)
    scales, out = torch.zeros(4, 2, dtype=torch.uint8), torch.empty(4, 64, dtype=torch.bfloat16)
    with pytest.raises(EngramError, match="one scale for 32 columns"):
        dequantize_into(codes, scales[:3], out)
    with pytest.raises(EngramError, match="one scale for 32 columns"):
        dequantize_into(codes, scales, out[:3])
    with pytest.raises(EngramError, match="contiguous"):
        dequantize_into(codes[:2], scales[::2], out[:2])
    with pytest.raises(EngramError, match="contiguous"):
        dequantize_into(codes, scales, torch.empty(64, 4, dtype=torch.bfloat16).t())


def test_it_compiles_for_every_gpu_and_takes_what_it_says() -> None:
    """Ahead of time, without a GPU: no shared memory, 40 registers, no spill, no fp8 instruction,
    accesses of several bytes."""
    here = Path(__file__).resolve()
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = str(here.parents[2] / "overlay")
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", str(here.with_name("engram_compiled.py"))],
        env=env, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-4000:]
    found = json.loads(ran.stdout)
    assert sorted(found) == ["121", "80", "86", "90"]
    for name, one in found.items():
        assert one["shared"] == 0 and one["spilled"] == 0, (name, one)
        assert 16 <= one["registers"] <= 40, (name, one)
        assert one["fp8"] == [] and one["wide"], (name, one)
