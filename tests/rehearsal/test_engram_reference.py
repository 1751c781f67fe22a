"""Engram in torch: rows are fp8, not integers; the gate is the model's; the hash is vLLM's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_overlay.engram.layout import EngramError
from spark_overlay.engram.reference import dequantize_rows, gate_values

pytestmark = pytest.mark.rehearsal


def e4m3(byte: int) -> float:
    """Value of one e4m3fn byte, from its fields."""
    sign, exponent, mantissa = byte >> 7, byte >> 3 & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    size = mantissa * 2.0**-9 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -size if sign else size


def rows(byte_values: list[int]) -> torch.Tensor:
    return torch.tensor([byte_values], dtype=torch.uint8).view(torch.float8_e4m3fn)


@settings(max_examples=50, deadline=None)
@given(
    values=st.lists(st.integers(0, 255), min_size=64, max_size=64),
    scales=st.lists(st.integers(1, 254), min_size=2, max_size=2),
)
def test_rows_are_e4m3_times_a_power_of_two_rounded_once(values, scales) -> None:
    found = dequantize_rows(rows(values), torch.tensor([scales], dtype=torch.uint8))
    exact = [e4m3(v) * 2.0 ** (scales[i // 32] - 127) for i, v in enumerate(values)]
    # An e4m3 value has fewer bits than bf16 keeps, so outside float32's denormals nothing rounds.
    expected = torch.tensor([exact], dtype=torch.float64).float().bfloat16()
    assert found.dtype == torch.bfloat16
    assert torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0))


def test_bytes_that_are_not_typed_fp8_are_refused() -> None:
    """Converted as integers they give numbers of the right size and the wrong table."""
    scales = torch.full((1, 1), 127, dtype=torch.uint8)
    weights = torch.arange(32, dtype=torch.uint8)[None] + 40
    for wrong in (weights, weights.float(), weights.bfloat16()):
        with pytest.raises(EngramError, match="view the bytes, do not convert them"):
            dequantize_rows(wrong, scales)
    right = dequantize_rows(weights.view(torch.float8_e4m3fn), scales)
    assert not torch.equal(right, weights.bfloat16())
    with pytest.raises(EngramError, match="float32 scales"):
        dequantize_rows(weights.view(torch.float8_e4m3fn), scales.float())
    with pytest.raises(EngramError, match="one scale for 32 columns"):
        dequantize_rows(weights.view(torch.float8_e4m3fn), scales.repeat(1, 2))


def test_rows_of_zeros_are_zero_under_any_scale() -> None:
    zeros = torch.zeros(3, 64, dtype=torch.uint8).view(torch.float8_e4m3fn)
    scales = torch.tensor([[0, 1], [127, 254], [0, 0]], dtype=torch.uint8)
    assert torch.equal(dequantize_rows(zeros, scales), torch.zeros(3, 64, dtype=torch.bfloat16))


def slow_gate(hidden, kv, q, k, eps, mask) -> torch.Tensor:
    """The same in float64, one token and stream at a time."""
    tokens, streams, dim = hidden.shape
    out = hidden.double().clone()
    for t in range(tokens):
        value = kv[t, streams * dim :].double()
        for s in range(streams):
            h, key = hidden[t, s].double(), kv[t, s * dim : (s + 1) * dim].double()
            q_norm = h / torch.sqrt(h.square().mean() + eps) * q[s].double()
            k_norm = key / torch.sqrt(key.square().mean() + eps) * k[s].double()
            dot = (q_norm @ k_norm).item() / dim**0.5
            root = max(abs(dot), 1e-6) ** 0.5
            gate = 1 / (1 + np.exp(-root if dot >= 0 else root))
            out[t, s] += (gate if mask is None or mask[t] else 0.0) * value
    return out


@pytest.mark.parametrize("masked", [False, True])
def test_the_gate_is_the_formula(masked: bool) -> None:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    hidden, kv, q, k = normal(6, 4, 64), normal(6, 5 * 64), normal(4, 64), normal(4, 64)
    kv[2] = 0  # a key of zeros: dot is 0 and the gate not quite a half
    mask = torch.tensor([1, 0, 1, 1, 0, 1]).bool() if masked else None
    found = gate_values(hidden, kv, q, k, 1e-6, mask)
    assert torch.allclose(found.double(), slow_gate(hidden, kv, q, k, 1e-6, mask), atol=1e-5)
    if mask is not None:
        assert torch.equal(found[~mask], hidden[~mask])
    bf16 = gate_values(hidden.bfloat16(), kv, q, k, 1e-6, mask)
    assert bf16.dtype == torch.bfloat16
    with pytest.raises(EngramError, match="wkv gave"):
        gate_values(hidden, kv[:, 64:], q, k, 1e-6, mask)


def test_a_masked_token_is_untouched_even_by_a_key_that_is_not_a_number() -> None:
    hidden, kv = torch.ones(1, 2, 32), torch.ones(1, 96)
    kv[:, :32] = float("nan")
    weight = torch.ones(2, 32)
    found = gate_values(hidden, kv, weight, weight, 1e-6, torch.tensor([False]))
    assert torch.equal(found, hidden)


def test_layout_hash_rows_and_gate_are_those_of_vllms_own_kernels() -> None:
    """In a process of its own: Triton reads TRITON_INTERPRET when it is first imported."""
    here = Path(__file__).resolve()
    places = (here.parent, here.parents[1], here.parents[2] / "overlay")
    path = os.pathsep.join([*map(str, places), os.environ.get("PYTHONPATH", "")])
    ran = subprocess.run(
        [sys.executable, str(here.parent / "engram_kernels.py")],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    assert "layouts 3, hashes 3, gates 2, rows 1: equal" in ran.stdout
