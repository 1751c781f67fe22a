"""How the torch path sums: on a CPU so exactly that a token's result depends on nothing else.

A float32 product sums in an order that changes with the number of rows, and one flipped bf16
rounding in a sparse, routed model grows into another token. Summed in float64, the same token gives
the same bits alone, in a batch, in a chunk and as a draft to verify: what the rehearsal compares,
it compares exactly. A GPU's torch path sums as its libraries do.

The same holds for sigmoid, silu, softplus and softmax: torch computes the last few elements of a
tensor by other code than the rest, so a float32 result changes with the number of rows. Taken in
float64 and rounded once, it does not.
"""

from __future__ import annotations

import torch
from torch import Tensor


def weight_dtype(device: torch.device, activation: torch.dtype) -> torch.dtype:
    """The dtype a decoded weight is kept in: float64 on a CPU, the activations' on a GPU."""
    return torch.float64 if device.type == "cpu" else activation


def matmul(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """``x [..., in] @ weight [in, out]`` as ``dtype``, summed in float64 on a CPU.

    A GPU sums in float32; where that is what is asked for, nothing is rounded in between."""
    if x.device.type == "cpu":
        return (x.double() @ weight.double()).to(dtype)
    x = x.to(weight.dtype)
    if dtype == torch.float32 and weight.dtype != dtype:
        rows = torch.mm(x.reshape(-1, x.shape[-1]), weight, out_dtype=dtype)
        return rows.view(*x.shape[:-1], -1)
    return (x @ weight).to(dtype)


def wide(x: Tensor) -> Tensor:
    """``x`` in the dtype sums are made in: float64 on a CPU, float32 elsewhere."""
    return x.double() if x.device.type == "cpu" else x.float()


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """float32 ``a * b + c`` rounded once, as a GPU's ``fma``: the float64 sum is rounded to odd
    first, for rounded to nearest twice it could differ in the last bit."""
    product, addend = a.double() * b.double(), c.double()
    total = product + addend
    back = total - product
    lost = (product - (total - back)) + (addend - back)
    bits = total.view(torch.int64)
    step = torch.where((lost > 0) == (total > 0), 1, -1)
    moved = total.isfinite() & (lost != 0) & (bits % 2 == 0)
    return torch.where(moved, bits + step, bits).view(torch.float64).float()


def einsum(equation: str, *operands: Tensor) -> Tensor:
    """``torch.einsum`` of ``wide`` operands; float32 out."""
    return torch.einsum(equation, *(wide(operand) for operand in operands)).float()
