"""Sparse MLA over paged records: one launch, or two where a token's records are split.

Decode and prefill are one operation: each token attends to its own records, read where they lie.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from spark_overlay.attention.format import HEAD_DIM, ROPE_DIM
from spark_overlay.attention.kernels import library, plan
from spark_overlay.attention.kernels.numbers import COMPILED
from spark_overlay.attention.kernels.records import alignment, check_cache
from spark_overlay.attention.kernels.tiles import attend, reduce

LOG2E = 1.4426950408889634


@dataclass(frozen=True)
class Source:
    """Records that tokens attend to, in one paged cache.

    ``cache``    uint8 ``[pages, block, 584]``, pages at any even stride
    ``slots``    int32 ``[T, W]``: page * block + offset; negative: no record
    ``lengths``  int32 ``[T]``: only so many of a row's slots count; None: all
    """

    cache: Tensor
    slots: Tensor
    lengths: Tensor | None = None


def sparse_mla(
    q: Tensor,
    sources: Sequence[Source],
    sink: Tensor,
    scale: float,
    out: Tensor,
    *,
    unrotate: tuple[Tensor, Tensor] | None = None,
    chosen: plan.Shape | plan.Cuda | None = None,
) -> None:
    """Softmax attention of ``q [T, H, 512]`` bf16 over the union of 1 or 2 sources, into ``out``.

    Key and value are the same record. ``sink`` float32 ``[>= H]``: a logit a head that joins the
    denominator and has no value. ``out`` bf16 ``[T, H, 512]``; a token without records gets zeros.
    ``unrotate``: (cos_sin ``[P, 64]``, positions ``[>= T]``) turns the last 64 values of the output
    back before they are rounded, as ``rotate_tail(..., inverse=True)`` does. ``chosen``: another
    launch than the table's, for tests and measuring. The same launch gives the same bits.
    Raises ValueError for other shapes and types.
    """
    tokens, heads = check(q, sources, sink, out, unrotate)
    if tokens == 0 or heads == 0:
        return
    width = sum(source.slots.shape[1] for source in sources)
    if chosen is None:
        by_library = COMPILED and library.present() and all(map(_at_16_bytes, sources))
        chosen = plan.shape(plan.capability(q.device), tokens, heads, width, by_library)
    if isinstance(chosen, plan.Cuda):
        launch_cuda(q, sources, sink, scale, out, unrotate, chosen)
    else:
        launch(q, sources, sink, scale, out, unrotate, chosen)


def check(
    q: Tensor,
    sources: Sequence[Source],
    sink: Tensor,
    out: Tensor,
    unrotate: tuple[Tensor, Tensor] | None,
) -> tuple[int, int]:
    """Tokens and heads. Raises ValueError where the arguments do not belong together."""
    tokens, heads, _ = q.shape
    for name, one in (("q", q), ("out", out)):
        if one.shape != (tokens, heads, HEAD_DIM) or one.dtype != torch.bfloat16:
            raise ValueError(f"{name} {one.dtype} {list(one.shape)}: bf16 [T, H, {HEAD_DIM}]")
        if one.numel() and (one.stride(2) != 1 or alignment(one.data_ptr()) < 16):
            raise ValueError(f"{name} strides {one.stride()}: rows in one piece, at 16 bytes")
        if one.numel() and (one.stride(0) % 8 or one.stride(1) % 8):
            raise ValueError(f"{name} strides {one.stride()}: multiples of 8 values")
    if sink.dtype != torch.float32 or sink.numel() < heads:
        raise ValueError(f"sink {sink.dtype} {list(sink.shape)}: float32, one for each head")
    if not 1 <= len(sources) <= 2:
        raise ValueError(f"{len(sources)} sources; 1 or 2")
    for source in sources:
        check_cache(source.cache)
        slots, lengths = source.slots, source.lengths
        if slots.dtype != torch.int32 or slots.dim() != 2 or slots.shape[0] != tokens:
            raise ValueError(f"slots {slots.dtype} {list(slots.shape)}: int32 [{tokens}, W]")
        if slots.numel() and slots.stride(1) != 1:
            raise ValueError(f"slots strides {slots.stride()}: rows in one piece")
        if lengths is not None and (lengths.dtype != torch.int32 or lengths.shape != (tokens,)):
            raise ValueError(f"lengths {lengths.dtype} {list(lengths.shape)}: int32 [{tokens}]")
    if unrotate is not None:
        table, positions = unrotate
        known = table.dtype in (torch.float32, torch.bfloat16) and positions.dtype in (
            torch.int32, torch.int64
        )  # fmt: skip
        if (
            not known
            or table.shape[1:] != (ROPE_DIM,)
            or table.stride(1) != 1
            or len(positions) < tokens
            or (tokens and positions.stride(0) != 1)
        ):
            raise ValueError(
                f"unrotate by {table.dtype} {list(table.shape)} at {positions.dtype} "
                f"{list(positions.shape)}: float32 or bf16 [P, {ROPE_DIM}] and at least {tokens} "
                "integers"
            )
    return tokens, heads


def launch(
    q: Tensor,
    sources: Sequence[Source],
    sink: Tensor,
    scale: float,
    out: Tensor,
    unrotate: tuple[Tensor, Tensor] | None,
    chosen: plan.Shape,
) -> None:
    """The Triton kernels by a given shape."""
    tokens, heads, _ = q.shape
    groups = triton.cdiv(heads, chosen.heads)
    splits = chosen.splits
    first, second = sources[0], sources[-1]
    table, positions = unrotate or (sink, first.slots)
    turn = unrotate is not None
    if splits > 1:
        partial = torch.empty((splits, tokens, heads, HEAD_DIM), device=q.device)
        peaks = torch.empty((2, splits, tokens, heads), device=q.device)
    else:
        partial = peaks = sink
    args = []
    for source in (first, second):
        length = source.lengths
        args += [
            source.cache, source.cache.stride(0), source.slots, source.slots.stride(0),
            source.slots if length is None else length,
        ]  # fmt: skip
    attend[(tokens, splits, groups)](
        q, q.stride(0), q.stride(1), out, out.stride(0), out.stride(1), sink,
        scale * LOG2E, partial, peaks, tokens, heads, table, table.stride(0), positions, *args,
        PAGE0=first.cache.shape[1],
        PAGE1=second.cache.shape[1],
        WIDTH0=first.slots.shape[1],
        WIDTH1=second.slots.shape[1] if len(sources) > 1 else 0,
        LENGTHS0=first.lengths is not None,
        LENGTHS1=second.lengths is not None,
        ALIGN0=alignment(first.cache.data_ptr(), first.cache.stride(0)),
        ALIGN1=alignment(second.cache.data_ptr(), second.cache.stride(0)),
        SPLITS=splits,
        HEADS=chosen.heads,
        KEYS=chosen.keys,
        TURN=turn,
        PTX=COMPILED,
        num_warps=chosen.warps,
        num_stages=chosen.stages,
    )  # fmt: skip
    if splits > 1:
        reduce[(tokens, triton.cdiv(heads, plan.REDUCE_HEADS))](
            out, out.stride(0), out.stride(1), sink, partial, peaks, tokens, heads,
            table, table.stride(0), positions,
            SPLITS=splits, HEADS=plan.REDUCE_HEADS, TURN=turn, num_warps=plan.REDUCE_WARPS,
        )  # fmt: skip


def _at_16_bytes(source: Source) -> bool:
    """What the library's copies need; vLLM's pages lie so."""
    return alignment(source.cache.data_ptr(), source.cache.stride(0)) == 16


def launch_cuda(
    q: Tensor,
    sources: Sequence[Source],
    sink: Tensor,
    scale: float,
    out: Tensor,
    unrotate: tuple[Tensor, Tensor] | None,
    chosen: plan.Cuda,
) -> None:
    """The library's kernels by a given shape."""
    tokens, heads, _ = q.shape
    args = library.Args()
    args.q, args.q_token, args.q_head = q.data_ptr(), q.stride(0), q.stride(1)
    args.out, args.out_token, args.out_head = out.data_ptr(), out.stride(0), out.stride(1)
    args.sink, args.tokens, args.heads = sink.data_ptr(), tokens, heads
    args.keys, args.splits, args.scale = chosen.keys, chosen.splits, scale
    args.many = chosen.many
    for place, source in zip(args.source, sources, strict=False):
        slots, lengths = source.slots, source.lengths
        place.cache, place.stride = source.cache.data_ptr(), source.cache.stride(0)
        place.page, place.width = source.cache.shape[1], slots.shape[1]
        place.slots, place.slots_row = slots.data_ptr(), slots.stride(0)
        place.lengths = None if lengths is None else lengths.data_ptr()
    if unrotate is not None:
        table, positions = unrotate
        args.cos_sin, args.cos_sin_row = table.data_ptr(), table.stride(0)
        args.cos_sin_float = table.dtype == torch.float32
        args.positions, args.positions_wide = positions.data_ptr(), positions.dtype == torch.int64
    if chosen.splits > 1:
        # Kept until the launches are on the stream; torch then gives it to later work only.
        partial = torch.empty((chosen.splits, tokens, heads, HEAD_DIM), device=q.device)
        peaks = torch.empty((2, chosen.splits, tokens, heads), device=q.device)
        args.partial, args.peaks = partial.data_ptr(), peaks.data_ptr()
    with torch.cuda.device(q.device):
        stream = torch.cuda.current_stream(q.device).cuda_stream
        library.load().sparse(args, stream)
