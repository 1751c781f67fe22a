"""Where a token's records lie: slots of the paged cache, or rows of a gathered workspace."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

#: FlashMLA's prefill takes rows of whole 128s.
ROW_ALIGN = 128
#: Tokens and warps of a combining program.
TOKENS, WARPS = 2, 4


@triton.jit
def _chosen(
    topk,
    topk_row,
    block_table,
    table_row,
    pages,
    requests,
    out,
    out_row,
    STATES: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    request = tl.load(requests + token).to(tl.int64)
    column = tl.arange(0, PADDED)
    inside = column < WIDTH
    chosen = tl.load(topk + token * topk_row + column, mask=inside, other=-1)
    page = chosen // STATES
    # Stale entries may name any page; a padded token belongs to no request.
    there = (chosen >= 0) & (page < pages) & (request >= 0)
    where = block_table + tl.maximum(request, 0) * table_row + tl.where(there, page, 0)
    block = tl.load(where, mask=there, other=-1)
    slot = tl.where(there & (block >= 0), block * STATES + chosen % STATES, -1)
    tl.store(out + token * out_row + column, slot, mask=inside)


def chosen_slots(
    topk: Tensor,
    block_table: Tensor,
    request_of_token: Tensor,
    states_per_page: int,
    out: Tensor,
) -> None:
    """Positions in the request -> slots (page * states_per_page + offset); -1 where absent.

    ``topk`` int32 ``[T, K]`` (negative: none), ``block_table`` int32 ``[R, P]``,
    ``request_of_token`` int32 or int64 ``[>= T]`` (negative: the token is padding), ``out`` int32
    ``[T, K]``. A position beyond the table's pages is absent. Raises ValueError.
    """
    tokens, width = topk.shape
    for name, one in (("topk", topk), ("out", out), ("block_table", block_table)):
        if one.dtype != torch.int32 or one.dim() != 2 or (one.numel() and one.stride(1) != 1):
            raise ValueError(f"{name} {one.dtype} {list(one.shape)}: int32 rows in one piece")
    if out.shape != topk.shape or request_of_token.shape[0] < tokens or states_per_page < 1:
        raise ValueError(
            f"topk {list(topk.shape)}, out {list(out.shape)}, {request_of_token.shape[0]} requests "
            f"of tokens, {states_per_page} states a page do not fit together"
        )
    if tokens == 0 or width == 0:
        return
    _chosen[(tokens,)](
        topk,
        topk.stride(0),
        block_table,
        block_table.stride(0),
        block_table.shape[1],
        request_of_token,
        out,
        out.stride(0),
        STATES=states_per_page,
        WIDTH=width,
        PADDED=triton.next_power_of_2(width),
        num_warps=4 if width > 256 else 2,
    )


@triton.jit
def _combine(
    combined,
    combined_row,
    lengths,
    topk,
    topk_row,
    starts,
    seq_lens,
    gather_lens,
    requests,
    rows,
    compressed,
    tokens,
    TOPK: tl.constexpr,
    RATIO: tl.constexpr,
    WINDOW: tl.constexpr,
    WIDTH: tl.constexpr,
    REQUESTS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    inside = token < tokens
    base = tl.load(starts)
    # The token's request is the last one that starts at or before it: empty ones start there, too.
    each = tl.arange(0, REQUESTS)
    begins = tl.load(starts + each, mask=each < requests, other=2147483647)
    started = (begins[None, :] - base <= token[:, None]) & (each < requests)[None, :]
    request = tl.maximum(tl.sum(started.to(tl.int32), 1) - 1, 0)
    begin = tl.load(starts + request, mask=inside, other=0) - base
    end = tl.load(starts + request + 1, mask=inside, other=0) - base
    length = tl.load(seq_lens + request, mask=inside, other=0)
    gather_start = length - tl.load(gather_lens + request, mask=inside, other=0)
    mine = inside & (token < end)
    position = length - (end - begin) + token - begin
    count = tl.zeros((TOKENS,), tl.int32)
    if RATIO > 0:
        count = tl.maximum(tl.minimum((position + 1) // RATIO, TOPK), 0)
    first = tl.maximum(tl.maximum(position - (WINDOW - 1), 0), gather_start)
    window = tl.maximum(position - first + 1, 0)

    count = tl.where(mine, count, 0)
    window = tl.where(mine, window, 0)
    base_row = (rows * request)[:, None]
    token = token.to(tl.int64)
    for part in tl.static_range(WIDTH // 128):
        column = part * 128 + tl.arange(0, 128)[None, :]
        chosen = column < count[:, None]
        found = tl.load(topk + token[:, None] * topk_row + column, mask=chosen, other=-1)
        found = tl.where((found >= 0) & (found < compressed), found + base_row, -1)
        within = column - count[:, None]
        recent = base_row + compressed + (first - gather_start)[:, None] + within
        row = tl.where(chosen, found, tl.where(within < window[:, None], recent, -1))
        tl.store(combined + token[:, None] * combined_row + column, row, mask=inside[:, None])
    tl.store(lengths + token, count + window, mask=mine)


def combine(
    topk_indices: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    gather_lens: Tensor,
    window: int,
    ratio: int,
    topk: int,
    rows: int,
    compressed: int,
    out: tuple[Tensor, Tensor] | None = None,
    *,
    tokens_a_program: int = TOKENS,
    warps: int = WARPS,
) -> tuple[Tensor, Tensor]:
    """Choice and window of each token as one row of workspace indices, in one launch.

    The arguments and results of vLLM's ``combine_topk_swa_indices``: ``topk_indices`` int32
    ``[T, K]`` positions of compressed rows (-1 and stale entries may stand in it),
    ``query_start_loc`` int32 ``[R + 1]`` (need not begin at 0), ``seq_lens`` and ``gather_lens``
    int32 ``[R]``; the workspace has ``rows`` rows a request, the first ``compressed`` of them
    compressed ones, then those of the window from ``seq_len - gather_len`` on. Returns int32
    ``[T, W]`` (W: topk + window, rounded up to 128) and int32 ``[T]``: the chosen rows, the
    window's, then -1; and how many come before the -1s. ``ratio`` 0: no choice.
    """
    tokens, requests = topk_indices.shape[0], seq_lens.shape[0]
    width = triton.cdiv(topk + window, ROW_ALIGN) * ROW_ALIGN
    if out is None:
        made = topk_indices.new_empty((tokens, width))
        out = (made, topk_indices.new_empty(tokens))
    combined, lengths = out
    for name, one in (
        ("topk_indices", topk_indices), ("query_start_loc", query_start_loc),
        ("seq_lens", seq_lens), ("gather_lens", gather_lens), ("out", combined), ("out", lengths),
    ):  # fmt: skip
        if one.dtype != torch.int32 or (one.numel() and one.stride(-1) != 1):
            raise ValueError(f"{name} {one.dtype} {list(one.shape)}: int32, rows in one piece")
    if combined.shape != (tokens, width) or ratio < 0 or query_start_loc.shape[0] != requests + 1:
        raise ValueError(
            f"out {list(combined.shape)} for {[tokens, width]}, ratio {ratio}, query_start_loc "
            f"{list(query_start_loc.shape)} for {requests} requests"
        )
    if tokens == 0 or requests == 0:
        combined.fill_(-1)
        return combined, lengths
    _combine[(triton.cdiv(tokens, tokens_a_program),)](
        combined,
        combined.stride(0),
        lengths,
        topk_indices,
        topk_indices.stride(0),
        query_start_loc,
        seq_lens,
        gather_lens,
        requests,
        rows,
        compressed,
        tokens,
        TOPK=min(topk, topk_indices.shape[1]),
        RATIO=ratio,
        WINDOW=window,
        WIDTH=width,
        REQUESTS=triton.next_power_of_2(requests),
        TOKENS=tokens_a_program,
        num_warps=warps,
    )
    return combined, lengths
