"""``scale_n * sum_h w_h relu(q_h . k_n)`` over keys read from their pages.

Keys are the rows of the product (their bytes go from memory through registers to the tensor cores),
heads of some query rows its columns; float32 sums. Both are read as words of four values, and each
of the four is a product of its own over a quarter of the dimension: what a thread reads at once is
what it multiplies. A program takes ``GROUP`` query rows, which share each key they read where they
are of one request, and every ``num_programs(1)``-th tile of ``KEYS`` keys. How far a row sees is
asked of the device, so that one launch, held in a graph, serves every length.

For sm_90: 1 row 174 registers and 43 KB of shared memory; 4 rows 255 (64 bytes spilled, at most
248 elsewhere) and 51 KB; 8 rows 255 (80; 744 for sm_86) and 76 KB; candidates 159 and 25 KB.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from spark_overlay.indexer.kernels.e4m3 import UNDO, halves

DIM = tl.constexpr(128)
WORDS = tl.constexpr(32)


@triton.jit
def row_count(starts, requests, rows):
    """Rows that belong to a request: a graph's batch is padded behind them."""
    return tl.minimum(tl.load(starts + requests), rows)


@triton.jit
def visible_keys(starts, lengths, owner, row, live, width, RATIO: tl.constexpr):
    """Compressed positions that rows of requests ``owner`` may see, at most ``width``; 0 where not
    ``live``. A request's rows are its last tokens."""
    end = tl.load(starts + owner + 1, mask=live, other=0)
    position = tl.load(lengths + owner, mask=live, other=0) - end + row
    return tl.where(live, tl.minimum((position + 1) // RATIO, width), 0)


@triton.jit
def load_queries(q, weights, row, live, HEADS: tl.constexpr, PADDED: tl.constexpr):
    """``row [R]`` -> words of queries ``[R * PADDED, 32]`` and weights ``[R * PADDED]``."""
    size: tl.constexpr = row.shape[0] * PADDED
    head = tl.arange(0, PADDED)
    each = row[:, None].to(tl.int64) * HEADS + head[None, :]
    there = live[:, None] & (head < HEADS)[None, :]
    index, known = tl.reshape(each, (size,)), tl.reshape(there, (size,))
    words = (q + index[:, None] * DIM).to(tl.pointer_type(tl.int32)) + tl.arange(0, WORDS)[None, :]
    weight = tl.load(weights + index, mask=known, other=0.0)
    return tl.load(words, mask=known[:, None], other=0), weight * UNDO


@triton.jit
def load_keys(cache, table, position, there, blocks, stride, STATES: tl.constexpr):
    """Keys at ``position [N]`` of the request whose block table begins at ``table``: words
    ``[N, 32]``, their scales, and which of them have a page."""
    block = tl.load(table + position // STATES, mask=there, other=-1)
    there = there & (block >= 0) & (block < blocks)
    page = cache + block.to(tl.int64) * stride
    state = position % STATES
    words = (page + state * DIM).to(tl.pointer_type(tl.int32))
    found = tl.load(words[:, None] + tl.arange(0, WORDS)[None, :], mask=there[:, None], other=0)
    scale = (page + STATES * DIM + state * 4).to(tl.pointer_type(tl.float32))
    return found, tl.load(scale, mask=there, other=0.0), there


@triton.jit
def score(keys, scale, first, second, third, fourth, weight, GROUP: tl.constexpr,
          PADDED: tl.constexpr, PACKED: tl.constexpr):  # fmt: skip
    """``[N, GROUP]`` float32 of key words and the four quarters of the queries ``[32, M]``."""
    product = tl.dot(halves(keys, 0, PACKED), first, out_dtype=tl.float32)
    product = tl.dot(halves(keys, 1, PACKED), second, product, out_dtype=tl.float32)
    product = tl.dot(halves(keys, 2, PACKED), third, product, out_dtype=tl.float32)
    product = tl.dot(halves(keys, 3, PACKED), fourth, product, out_dtype=tl.float32)
    product = tl.maximum(product, 0.0) * weight[None, :]
    heads = tl.reshape(product, (keys.shape[0], GROUP, PADDED))
    return tl.sum(heads, axis=2) * scale[:, None]


@triton.jit(do_not_specialize=["first_row", "rows", "requests", "width", "blocks"])
def dense_logits(
    q,
    weights,
    cache,
    table,
    request,
    starts,
    lengths,
    out,
    tops,
    first_row,
    rows,
    requests,
    width,
    blocks,
    cache_stride,
    table_stride,
    out_stride,
    tops_stride,
    RATIO: tl.constexpr,
    STATES: tl.constexpr,
    HEADS: tl.constexpr,
    PADDED: tl.constexpr,
    GROUP: tl.constexpr,
    KEYS: tl.constexpr,
    FAN: tl.constexpr,
    PACKED: tl.constexpr,
    EARLY: tl.constexpr = False,
):
    """Scores of rows ``first_row .. rows`` over every key they see, row ``i`` at
    ``out[i - first_row]``, and (``FAN`` > 0) in ``tops`` the best of every ``FAN`` of them."""
    if EARLY:  # the choice may start, and waits for the scores itself
        gdc_launch_dependents()
    first = first_row + tl.program_id(0) * GROUP
    row = first + tl.arange(0, GROUP)
    # Asked for at once: what they depend on is known on the host.
    inside = row < rows
    owner = tl.load(request + row, mask=inside, other=0)
    low = tl.load(request + first)
    words, weight = load_queries(q, weights, row, inside, HEADS, PADDED)
    live_rows = row_count(starts, requests, rows)
    if first >= live_rows:
        return
    live = row < live_rows
    high = tl.max(tl.where(live, owner, 0))
    seen = visible_keys(starts, lengths, owner, row, live, width, RATIO)
    q0, q1 = tl.trans(halves(words, 0, PACKED)), tl.trans(halves(words, 1, PACKED))
    q2, q3 = tl.trans(halves(words, 2, PACKED)), tl.trans(halves(words, 3, PACKED))
    here = (row - first_row).to(tl.int64)
    step = tl.num_programs(1) * KEYS
    # Rows of one request lie together; a program meets more than one at their borders.
    for index in range(low, high + 1):
        mine = live & (owner == index)
        bound = tl.max(tl.where(mine, seen, 0))
        page_table = table + tl.cast(index, tl.int64) * table_stride
        for start in range(tl.program_id(1) * KEYS, bound, step):
            position = start + tl.arange(0, KEYS)
            keys, scale, there = load_keys(
                cache, page_table, position, position < bound, blocks, cache_stride, STATES
            )
            value = score(keys, scale, q0, q1, q2, q3, weight, GROUP, PADDED, PACKED)
            shown = there[:, None] & (position[:, None] < seen[None, :])
            value = tl.where(shown, value, float("-inf"))
            tl.store(
                out + here[None, :] * out_stride + position[:, None],
                value,
                mask=mine[None, :] & (position < bound)[:, None],
            )
            if FAN > 0:
                top = tl.max(tl.reshape(value, (KEYS // FAN, FAN, GROUP)), axis=1)
                place = start // FAN + tl.arange(0, KEYS // FAN)
                tl.store(
                    tops + here[None, :] * tops_stride + place[:, None],
                    top,
                    mask=mine[None, :] & (place * FAN < bound)[:, None],
                )


@triton.jit(do_not_specialize=["first_row", "rows", "requests", "width", "blocks"])
def candidate_logits(
    q,
    weights,
    cache,
    table,
    request,
    starts,
    lengths,
    chosen,
    out,
    tops,
    first_row,
    rows,
    requests,
    width,
    blocks,
    cache_stride,
    table_stride,
    chosen_stride,
    out_stride,
    tops_stride,
    RATIO: tl.constexpr,
    STATES: tl.constexpr,
    HEADS: tl.constexpr,
    PADDED: tl.constexpr,
    KEYS: tl.constexpr,
    SIZE: tl.constexpr,
    COUNT: tl.constexpr,
    FAN: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Scores of one row over its own ``chosen`` blocks of ``SIZE`` positions, at most ``COUNT``:
    score ``c`` is that of position ``chosen[c // SIZE] * SIZE + c % SIZE``."""
    row = first_row + tl.program_id(0)
    one = row + tl.arange(0, 1)
    words, weight = load_queries(q, weights, one, one < rows, HEADS, PADDED)
    owner = tl.load(request + row)
    live = row < row_count(starts, requests, rows)
    if not live:
        return
    seen = visible_keys(starts, lengths, owner, row, live, width, RATIO)
    q0, q1 = tl.trans(halves(words, 0, PACKED)), tl.trans(halves(words, 1, PACKED))
    q2, q3 = tl.trans(halves(words, 2, PACKED)), tl.trans(halves(words, 3, PACKED))
    page_table = table + owner.to(tl.int64) * table_stride
    picks = chosen + row.to(tl.int64) * chosen_stride
    target = out + (row - first_row).to(tl.int64) * out_stride
    best = tops + (row - first_row).to(tl.int64) * tops_stride
    bound = tl.minimum((seen + SIZE - 1) // SIZE, COUNT) * SIZE
    for start in range(tl.program_id(1) * KEYS, bound, tl.num_programs(1) * KEYS):
        column = start + tl.arange(0, KEYS)
        block = tl.load(picks + column // SIZE, mask=column < bound, other=-1)
        position = block * SIZE + column % SIZE
        there = (block >= 0) & (position < seen)
        keys, scale, there = load_keys(
            cache, page_table, position, there, blocks, cache_stride, STATES
        )
        value = tl.reshape(score(keys, scale, q0, q1, q2, q3, weight, 1, PADDED, PACKED), (KEYS,))
        value = tl.where(there, value, float("-inf"))
        tl.store(target + column, value, mask=column < bound)
        if FAN > 0:
            place = start // FAN + tl.arange(0, KEYS // FAN)
            top = tl.max(tl.reshape(value, (KEYS // FAN, FAN)), axis=1)
            tl.store(best + place, top, mask=place * FAN < bound)
