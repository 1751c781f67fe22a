"""torch ops for many rows: ``spark_exl3::many`` and ``::prefill``, on CUDA, on a CPU, and faked.

    many     as ``group``, for any number of rows: the matrices are decoded for the moment, as many
             in one launch as DECODED allows, and multiplied by cuBLAS, inputs and outputs rotated
             by kernels of their own
    prefill  as ``experts``, for any number of tokens: sorted on the device, weights decoded once
             for up to 64 rows of an expert

Nothing here asks the GPU anything, so both may be captured in CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

import torch
from torch import Tensor

from spark_overlay.exl3.cuda import many, on_cpu, ops, plan, workspace
from spark_overlay.exl3.cuda.checks import DTYPES, Routed, aligned
from spark_overlay.exl3.cuda.plan_prefill import PrefillPlan
from spark_overlay.exl3.format import bits_from_words

#: Of one ``many`` call, beside its rotated inputs: fp16 weights decoded at once, fp32 sums held at
#: once; 128 MiB each.
DECODED, SUMS = 64 << 20, 32 << 20


def dense(
    xs: Sequence[Tensor],
    trellis: Sequence[Tensor],
    suh: Sequence[Tensor],
    svh: Sequence[Tensor],
    codebooks: Sequence[int],
    dtype: torch.dtype,
) -> Tensor:
    """``x @ W`` of each matrix, side by side: ``[rows, sum of out]``; arguments as ``ops.group``.

    Inputs are rotated and rounded to fp16, weights are the codebook's fp16, sums fp32."""
    found: Tensor = torch.ops.spark_exl3.many(
        list(xs), list(trellis), list(suh), list(svh), list(codebooks), dtype
    )
    return found


def experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    table: Tensor,
    count: int,
    inter: int,
    max_k2: int,
    *,
    first_id: int = 0,
    shared: bool = False,
    limit: float | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """As ``ops.experts``, for any number of ids."""
    found: Tensor = torch.ops.spark_exl3.prefill(
        x, ids, weights, table, count, first_id, shared, inter, max_k2, limit or 0.0, dtype
    )
    return found


# -- dense ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Piece:
    """Outputs ``first``.. of matrix ``matrix``; ``codebook`` as library.CODEBOOKS numbers them."""

    trellis: Tensor
    codebook: int
    first: int
    columns: int
    matrix: int = 0


def pieces_of(trellis: Sequence[Tensor], codebooks: Sequence[int]) -> Iterator[list[Piece]]:
    """All outputs of the matrices, in lists of at most DECODED values: what is decoded at once."""
    held: list[Piece] = []
    room = DECODED
    for matrix, (tiles, book) in enumerate(zip(trellis, codebooks, strict=True)):
        inputs, outputs = 16 * tiles.shape[0], 16 * tiles.shape[1]
        step = max(plan.BLOCK, DECODED // inputs // plan.BLOCK * plan.BLOCK)
        for first in range(0, outputs, step):
            columns = min(step, outputs - first)
            if held and inputs * columns > room:
                yield held
                held, room = [], DECODED
            held.append(Piece(tiles, book, first, columns, matrix))
            room -= inputs * columns
    if held:
        yield held


def rotate(x: Tensor, suh: Tensor) -> Tensor:
    """fp16 ``[rows, in]`` of bf16 ``x``, in the order of ``reconstruct``: H(x * suh) at 1/8 of the
    matrix of signs. On CUDA only, as the next two; the reference is ``reference.linear``."""
    x = aligned(x)
    rotated = torch.empty(x.shape, dtype=torch.float16, device=x.device)
    with torch.cuda.device(x.device):
        many.load().rotate(
            x.data_ptr(), x.stride(0), suh.data_ptr(), *x.shape, rotated.data_ptr(), _stream(x)
        )
    return rotated


def reconstruct(pieces: Sequence[Piece]) -> list[Tensor]:
    """fp16 ``[columns, in]`` of each: the codebook's values, inputs permuted within each 32
    (``order``). Neighbours of one rate and codebook share a launch."""
    if not pieces:
        return []
    device = pieces[0].trellis.device
    made, parts = [], []
    for one in pieces:
        inputs, outputs = 16 * one.trellis.shape[0], 16 * one.trellis.shape[1]
        weights = torch.empty((one.columns, inputs), dtype=torch.float16, device=device)
        k2 = bits_from_words(one.trellis.shape[2])
        part = many.Weights(
            one.trellis.data_ptr(), weights.data_ptr(), inputs, outputs, k2, one.codebook,
            one.first, one.columns,
        )  # fmt: skip
        made.append(weights)
        parts.append(part)
    with torch.cuda.device(device):
        many.load().reconstruct(parts, _stream(pieces[0].trellis))
    return made


def finish(sums: Tensor, svh: Tensor, y: Tensor) -> None:
    """Into ``y [rows, columns]``, a view of rows: ``H(sums)`` at 1/16 of the signs, times svh."""
    rows, columns = sums.shape
    place = (y.data_ptr(), y.stride(0), DTYPES[y.dtype])
    with torch.cuda.device(y.device):
        many.load().finish(sums.data_ptr(), svh.data_ptr(), rows, columns, place, _stream(y))


def order(inputs: int) -> list[int]:
    """The input that stands at each place of ``rotate``'s rows and ``reconstruct``'s columns."""
    places = [
        16 * t + 8 * u + 2 * q + e
        for q in range(4) for t in range(2) for u in range(2) for e in range(2)
    ]  # fmt: skip
    return [32 * (i // 32) + places[i % 32] for i in range(inputs)]


def launch_many(
    xs: list[Tensor],
    trellis: list[Tensor],
    suh: list[Tensor],
    svh: list[Tensor],
    codebooks: list[int],
    dtype: torch.dtype,
) -> Tensor:
    y = ops.group_output(xs, trellis, suh, svh, [None] * len(trellis), codebooks, dtype)
    if y.shape[0] == 0:
        return y
    every = xs if len(xs) == len(trellis) else xs * len(trellis)
    starts = list(accumulate((v.numel() for v in svh), initial=0))
    strip = max(plan.BLOCK, SUMS // y.shape[0] // plan.BLOCK * plan.BLOCK)
    turned, rotated = -1, xs[0]
    for pieces in pieces_of(trellis, codebooks):
        decoded = reconstruct(pieces)
        for one, weights in zip(pieces, decoded, strict=True):
            if one.matrix != turned:
                turned, rotated = one.matrix, rotate(every[one.matrix], suh[one.matrix])
            to = y[:, starts[one.matrix] :]
            for lo in range(0, one.columns, strip):
                hi = min(lo + strip, one.columns)
                sums = torch.mm(rotated, weights[lo:hi].t(), out_dtype=torch.float32)
                outputs = slice(one.first + lo, one.first + hi)
                finish(sums, svh[one.matrix][outputs], to[:, outputs])
                del sums
        del decoded, weights  # before the next ones are made
    return y


# -- experts ----------------------------------------------------------------------------------


def launch_prefill(a: Routed, chosen: PrefillPlan | None = None) -> Tensor:
    """``prefill`` on CUDA, by ``chosen`` instead of the table's plan: what a tuner compares."""
    (tokens, topk), device = a.ids.shape, a.x.device
    y = a.output()
    if tokens == 0:
        return y
    if chosen is None:
        chosen = ops.table_of(device).prefill_plan(tokens * topk, a.experts)
    x, ids, weights = aligned(a.x), a.ids.contiguous(), a.weights.contiguous()
    args = many.Prefill(
        x.data_ptr(),
        x.stride(0),
        ids.data_ptr(),
        weights.data_ptr(),
        a.table.data_ptr(),
        y.data_ptr(),
        y.stride(0),
        chosen.pool_mib << 20,
        ids.element_size(),
        tokens,
        topk,
        a.experts,
        a.first_id,
        int(a.shared),
        a.x.shape[1],
        a.inter,
        DTYPES[a.dtype],
        a.max_k2,
        a.limit,
        chosen.variant,
    )
    loaded = many.load()
    need = loaded.prefill_need(args)
    with torch.cuda.device(device):
        scratch = workspace.scratch(need.scratch_bytes, device)
        loaded.prefill(args, scratch.data_ptr(), need.scratch_bytes, _stream(x))
    return y


def _stream(on: Tensor) -> int:
    stream: int = torch.cuda.current_stream(on.device).cuda_stream
    return stream


def _without_bias(op: ops.Op) -> ops.Op:
    """``group``'s as ``many``'s, which has no biases."""
    return lambda xs, trellis, suh, svh, codebooks, dtype: op(
        xs, trellis, suh, svh, [None] * len(trellis), codebooks, dtype
    )


@cache
def install() -> None:
    """Define the ops; done when this module is imported."""
    ops.define(
        "many",
        "(Tensor[] xs, Tensor[] trellis, Tensor[] suh, Tensor[] svh, int[] codebooks, "
        "ScalarType dtype) -> Tensor",
        launch_many,
        _without_bias(on_cpu.group),
        _without_bias(ops.group_output),
    )
    ops.define_routed("prefill", launch_prefill)


install()
