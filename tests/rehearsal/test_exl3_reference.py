"""EXL3 in torch against EXL3 in numpy: the same bits, the same weight, a linear that learns."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_overlay.exl3 import format as exl3
from spark_overlay.exl3 import reference
from spark_overlay.exl3.format import Exl3FormatError

pytestmark = pytest.mark.rehearsal

RATES = [(c, k2) for c in exl3.CODEBOOKS for k2 in exl3.LEGAL_K2 if c == "mul1" or k2 % 2 == 0]


def random_parts(rows: int, columns: int, k2: int, seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    trellis = rng.integers(-(1 << 15), 1 << 15, (rows // 16, columns // 16, 8 * k2), np.int16)
    scales = [rng.normal(0, 1, size).astype(np.float16) for size in (rows, columns)]
    return [trellis, *scales]


def tensors(parts: list[np.ndarray]) -> list[torch.Tensor]:
    return [torch.from_numpy(part) for part in parts]


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


@settings(max_examples=60, deadline=None)
@given(
    rate=st.sampled_from(RATES),
    shape=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    seed=st.integers(0, 1 << 32),
)
def test_decode_is_bit_for_bit_the_numpy_decode(rate, shape, seed) -> None:
    codebook, k2 = rate
    trellis = random_parts(16 * shape[0], 16 * shape[1], k2, seed)[0]
    found = reference.decode_torch(torch.from_numpy(trellis), codebook)
    assert found.dtype == torch.float16
    assert found.numpy().tobytes() == exl3.decode(trellis, codebook).tobytes()


def test_decode_of_a_slice_that_is_not_contiguous() -> None:
    trellis = random_parts(64, 128, 6, 0)[0]
    whole = reference.decode_torch(torch.from_numpy(trellis), "mul1")
    part = reference.decode_torch(torch.from_numpy(trellis)[:, 2:5], "mul1")
    assert torch.equal(part, whole[:, 32:80])


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-7), (torch.float32, 1e-6)])
def test_dequantize_is_the_numpy_weight(dtype: torch.dtype, bound: float) -> None:
    parts = random_parts(256, 384, 6, 1)
    weight = reference.dequantize_torch(*tensors(parts), "mul1", dtype)
    assert weight.dtype == dtype
    assert relative(weight, torch.from_numpy(exl3.dequantize(*parts))) < bound


def test_dequantize_to_bf16_rounds_the_float32_weight_once() -> None:
    parts = tensors(random_parts(128, 128, 6, 2))
    weight = reference.dequantize_torch(*parts, dtype=torch.bfloat16)
    assert torch.equal(weight, reference.dequantize_torch(*parts).bfloat16())


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 2e-6), (torch.bfloat16, 4e-3)]
)
def test_linear_in_the_rotated_basis_is_the_product_with_the_weight(dtype, bound) -> None:
    parts = tensors(random_parts(384, 256, 5, 3))
    x = torch.randn(2, 5, 384, generator=torch.Generator().manual_seed(0)).to(dtype)
    bias = torch.arange(256, dtype=torch.float16)
    found = reference.linear(x, *parts, bias=bias)
    weight = reference.dequantize_torch(*parts, dtype=torch.float64)
    assert found.dtype == dtype and found.shape == (2, 5, 256)
    assert relative(found, x.double() @ weight + bias) < bound


def test_row_parallel_partial_sums_add_up() -> None:
    trellis, suh, svh = tensors(random_parts(512, 128, 6, 4))
    x = torch.randn(3, 512, dtype=torch.float64)
    bias = torch.ones(128, dtype=torch.float16)
    total = torch.zeros(3, 128, dtype=torch.float64)
    for lo, hi in exl3.shard_ranges(512, 2):
        cut = exl3.row_slice(lo, hi, 512)
        own_bias = None if cut.bias is None else bias[cut.bias]
        total += reference.linear(
            x[:, lo:hi], trellis[cut.trellis], suh[cut.suh], svh[cut.svh], bias=own_bias
        )
    assert relative(total, reference.linear(x, trellis, suh, svh, bias=bias)) < 1e-12


@pytest.mark.parametrize("through", ["linear", "weight"])
def test_gradients_reach_the_scales_and_the_input(through: str) -> None:
    trellis, suh, svh = tensors(random_parts(128, 256, 6, 5))
    scales = [s.double().requires_grad_() for s in (suh, svh)]
    x = torch.randn(4, 128, dtype=torch.float64, requires_grad=True)

    def run(x: torch.Tensor, suh: torch.Tensor, svh: torch.Tensor) -> torch.Tensor:
        if through == "linear":
            return reference.linear(x, trellis, suh, svh)
        return x @ reference.dequantize_torch(trellis, suh, svh, dtype=torch.float64)

    inner = torch.from_numpy(exl3.decode(trellis.numpy(), "mul1")).double()
    had = torch.from_numpy(exl3.hadamard_128().copy())
    rotated = had @ (inner.view(128, 2, 128) @ had).reshape(128, 256)
    out = run(x, *scales)
    out.square().sum().backward()
    grad_out = 2 * out.detach()
    grad_weight = x.detach().t() @ grad_out
    suh64, svh64 = (s.detach() for s in scales)
    assert relative(scales[0].grad, (grad_weight * rotated * svh64).sum(1)) < 1e-10
    assert relative(scales[1].grad, (grad_weight * rotated * suh64[:, None]).sum(0)) < 1e-10
    assert relative(x.grad, grad_out @ (suh64[:, None] * rotated * svh64).t()) < 1e-10


def test_half_precision_scales_train_too() -> None:
    trellis, suh, svh = tensors(random_parts(128, 128, 6, 6))
    suh.requires_grad_()
    reference.linear(torch.ones(1, 128), trellis, suh, svh).sum().backward()
    assert suh.grad is not None and suh.grad.dtype == torch.float16 and suh.grad.abs().sum() > 0


def test_rotating_twice_is_the_identity_along_both_dimensions() -> None:
    x = torch.randn(3, 256, 384, dtype=torch.float64)
    for dim in (-1, -2):
        once = reference.hadamard_rotate(x, dim)
        assert torch.allclose(reference.hadamard_rotate(once, dim), x, atol=1e-12)
        assert not torch.allclose(once, x, atol=0.1)
    across = reference.hadamard_rotate(x.transpose(1, 2), -1).transpose(1, 2)
    assert torch.allclose(reference.hadamard_rotate(x, -2), across, atol=1e-12)


def test_what_does_not_fit_is_refused() -> None:
    trellis, suh, svh = tensors(random_parts(128, 128, 6, 7))
    with pytest.raises(Exl3FormatError, match="expected int16"):
        reference.decode_torch(trellis.int(), "mul1")
    with pytest.raises(Exl3FormatError, match=r"suh \[64\]"):
        reference.linear(torch.ones(1, 128), trellis, suh[:64], svh)
    with pytest.raises(Exl3FormatError, match="multiple of 128"):
        reference.hadamard_rotate(torch.ones(1, 100))
    with pytest.raises(Exl3FormatError, match=r"K=1\.5 exists for codebook mul1 only"):
        reference.decode_torch(torch.zeros(1, 1, 24, dtype=torch.int16), "mcg")


def test_the_quantizers_tensors_restore_their_source() -> None:
    data = np.load(Path(__file__).parents[1] / "data" / "exl3" / "exl3_vectors.npz")
    parts = [torch.from_numpy(data[f"{name}_6"]) for name in ("trellis", "su", "sv")]
    source = torch.from_numpy(data["W"])
    error = relative(reference.dequantize_torch(*parts), source) ** 2
    assert error == pytest.approx(0.0177, rel=0.01)


def test_the_reference_needs_no_vllm() -> None:
    code = (
        "import sys, spark_overlay.exl3.reference, spark_overlay.engram.reference;"
        "sys.exit('vllm' in sys.modules)"
    )
    overlay = str(Path(exl3.__file__).parents[2])
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": overlay})
