"""What the ops take: each argument's dtype, shape and layout, before anything is launched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spark_overlay.exl3.cuda import library, plan
from spark_overlay.exl3.format import Codebook, bits_from_words, check_rate

#: The codebook of each number that an op takes, as api.h counts them.
NUMBERED: dict[int, Codebook] = {number: name for name, number in library.CODEBOOKS.items()}
DTYPES = {torch.bfloat16: library.BF16, torch.float32: library.FP32}


def check_group(
    xs: Sequence[Tensor],
    trellis: Sequence[Tensor],
    suh: Sequence[Tensor],
    svh: Sequence[Tensor],
    bias: Sequence[Tensor | None],
    codebooks: Sequence[int],
    dtype: torch.dtype,
) -> None:
    count = len(trellis)
    if not 1 <= count <= plan.MAX_SHARDS or len(xs) not in (1, count):
        raise ValueError(
            f"{count} matrices and {len(xs)} inputs; a group has 1 to {plan.MAX_SHARDS} matrices "
            "and one input, or one each"
        )
    if any(len(other) != count for other in (suh, svh, bias, codebooks)):
        raise ValueError(f"{count} matrices, but not as many scales, biases or codebooks")
    check_dtype(dtype)
    for x in xs:
        if x.dim() != 2 or x.dtype != torch.bfloat16 or x.shape[0] != xs[0].shape[0]:
            raise ValueError(f"x {x.dtype} {list(x.shape)}, expected bf16 [rows, in], rows alike")
    for i in range(count):
        check_matrix(trellis[i], suh[i], svh[i], codebooks[i], f"matrix {i}")
        if (x := xs[i if len(xs) > 1 else 0]).shape[1] != suh[i].numel():
            raise ValueError(f"matrix {i} has {suh[i].numel()} inputs, x {list(x.shape)}")
        extra = bias[i]
        if extra is not None and (extra.dtype, extra.shape) != (torch.float16, svh[i].shape):
            raise ValueError(f"matrix {i}: bias {extra.dtype} {list(extra.shape)}, expected fp16")


def check_matrix(trellis: Tensor, suh: Tensor, svh: Tensor, codebook: int, what: str) -> None:
    if trellis.dim() != 3 or trellis.dtype != torch.int16 or not trellis.is_contiguous():
        raise ValueError(
            f"{what}: trellis {trellis.dtype} {list(trellis.shape)}, expected contiguous int16 "
            "[in/16, out/16, T]"
        )
    if codebook not in NUMBERED:
        raise ValueError(f"{what}: codebook {codebook}, expected one of {NUMBERED}")
    k2 = bits_from_words(trellis.shape[2], what)
    check_rate(k2, NUMBERED[codebook], what)
    for scale, tiles in ((suh, trellis.shape[0]), (svh, trellis.shape[1])):
        size = 16 * tiles
        right = scale.dtype == torch.float16 and scale.shape == (size,) and scale.is_contiguous()
        if not right or size % plan.BLOCK:
            raise ValueError(
                f"{what}: scales {scale.dtype} {list(scale.shape)} beside {size} channels; "
                f"expected contiguous fp16, a multiple of {plan.BLOCK}"
            )


def check_dtype(dtype: torch.dtype) -> None:
    if dtype not in DTYPES:
        raise ValueError(f"output {dtype}, expected one of {', '.join(map(str, DTYPES))}")


def aligned(x: Tensor) -> Tensor:
    """``x`` with rows that can be read 8 bytes at a time."""
    right = x.stride(1) == 1 and x.stride(0) % 4 == 0 and x.data_ptr() % 8 == 0
    return x if right else x.clone(memory_format=torch.contiguous_format)


@dataclass(slots=True)
class Routed:
    """What ``experts`` and ``prefill`` take, in the order of their schema, and checked: ``x`` bf16
    ``[tokens, hidden]``, ``ids`` and fp32 ``weights`` ``[tokens, k]``, and a table of experts
    (``ops.experts_table``)."""

    x: Tensor
    ids: Tensor
    weights: Tensor
    table: Tensor
    experts: int
    first_id: int
    shared: bool
    inter: int
    max_k2: int
    limit: float
    dtype: torch.dtype

    def __post_init__(self) -> None:
        x, ids, weights, table = self.x, self.ids, self.weights, self.table
        lines = self.experts + self.shared
        check_dtype(self.dtype)
        if x.dim() != 2 or x.dtype != torch.bfloat16 or x.shape[1] % plan.BLOCK:
            raise ValueError(
                f"x {x.dtype} {list(x.shape)}, expected bf16 [tokens, hidden], hidden a multiple "
                f"of {plan.BLOCK}"
            )
        if ids.dim() != 2 or ids.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"ids {ids.dtype} {list(ids.shape)}, expected int32 or int64 [tokens, k]"
            )
        if weights.dtype != torch.float32 or weights.shape != ids.shape or len(ids) != len(x):
            raise ValueError(
                f"{len(x)} tokens with ids {list(ids.shape)} and weights {weights.dtype} "
                f"{list(weights.shape)}; expected fp32, shaped alike"
            )
        if table.dtype != torch.int64 or table.shape != (3, lines, 4):
            raise ValueError(
                f"table {table.dtype} {list(table.shape)}, expected int64 {[3, lines, 4]}"
            )
        if self.inter % plan.BLOCK or not 0 < self.inter <= plan.MAX_INTER:
            raise ValueError(f"{self.inter} intermediate channels; a multiple of 128, at most 4096")

    def output(self) -> Tensor:
        """``[tokens, hidden]`` of ``dtype``, not written yet."""
        return torch.empty_like(self.x, dtype=self.dtype, memory_format=torch.contiguous_format)
