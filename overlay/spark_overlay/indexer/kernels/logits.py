"""``scale_n * sum_h w_h relu(q_h . k_n)`` over keys read from their pages.

Keys are the rows of the product (their bytes go from memory through registers to the tensor cores),
heads of some query rows its columns; float32 sums. A program takes ``GROUP`` query rows, which
share each key they read where they are of one request, and every ``num_programs(1)``-th tile of
``KEYS`` keys. How far a row sees is asked of ``positions`` on the device, so that one launch, held
in a graph, serves every length.
"""

from __future__ import annotations

import triton
import triton.language as tl

from spark_overlay.indexer.kernels.e4m3 import UNDO, as_float16

DIM = tl.constexpr(128)


@triton.jit
def row_count(starts, requests, rows):
    """Rows that belong to a request: a graph's batch is padded behind them."""
    return tl.minimum(tl.load(starts + requests), rows)


@triton.jit
def visible_keys(positions, row, live, width, RATIO: tl.constexpr):
    """Compressed positions a row may see, at most ``width``; 0 where not ``live``."""
    position = tl.load(positions + row, mask=live, other=-1)
    seen = ((position + 1) // RATIO).to(tl.int32)
    return tl.where(live, tl.minimum(seen, width), 0)


@triton.jit
def load_queries(
    q, weights, row, live, HEADS: tl.constexpr, PADDED: tl.constexpr, PACKED: tl.constexpr
):
    """``row [R]`` -> queries float16 ``[R * PADDED, 128]`` and weights ``[R * PADDED]``."""
    size: tl.constexpr = row.shape[0] * PADDED
    head = tl.arange(0, PADDED)
    each = row[:, None].to(tl.int64) * HEADS + head[None, :]
    there = live[:, None] & (head < HEADS)[None, :]
    index, known = tl.reshape(each, (size,)), tl.reshape(there, (size,))
    byte = tl.load(
        q + index[:, None] * DIM + tl.arange(0, DIM)[None, :], mask=known[:, None], other=0
    )
    weight = tl.load(weights + index, mask=known, other=0.0)
    return as_float16(byte, PACKED), weight * UNDO


@triton.jit
def load_keys(
    cache, table, position, there, blocks, stride, STATES: tl.constexpr, PACKED: tl.constexpr
):
    """Keys at ``position [N]`` of the request whose block table begins at ``table``: float16
    ``[N, 128]``, their scales, and which of them have a page."""
    block = tl.load(table + position // STATES, mask=there, other=-1)
    there = there & (block >= 0) & (block < blocks)
    page = cache + block.to(tl.int64) * stride
    state = position % STATES
    byte = tl.load(
        page[:, None] + (state * DIM)[:, None] + tl.arange(0, DIM)[None, :],
        mask=there[:, None],
        other=0,
    )
    scale = (page + STATES * DIM + state * 4).to(tl.pointer_type(tl.float32))
    return as_float16(byte, PACKED), tl.load(scale, mask=there, other=0.0), there


@triton.jit
def score(keys, scale, queries, weight, GROUP: tl.constexpr, PADDED: tl.constexpr):
    """``[N, GROUP]`` float32."""
    product = tl.dot(keys, tl.trans(queries), out_dtype=tl.float32)
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
    positions,
    out,
    best,
    first_row,
    rows,
    requests,
    width,
    blocks,
    cache_stride,
    table_stride,
    out_stride,
    best_stride,
    RATIO: tl.constexpr,
    STATES: tl.constexpr,
    HEADS: tl.constexpr,
    PADDED: tl.constexpr,
    GROUP: tl.constexpr,
    KEYS: tl.constexpr,
    SIZE: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Scores of rows ``first_row .. rows`` over every key they see, row ``i`` at
    ``out[i - first_row]``. ``SIZE`` > 0 asks for the best score of each block of that many
    positions, too, in ``best``; a row's newest block gets +inf."""
    live_rows = row_count(starts, requests, rows)
    first = first_row + tl.program_id(0) * GROUP
    if first >= live_rows:
        return
    row = first + tl.arange(0, GROUP)
    live = row < live_rows
    owner = tl.load(request + row, mask=live, other=-1)
    seen = visible_keys(positions, row, live, width, RATIO)
    queries, weight = load_queries(q, weights, row, live, HEADS, PADDED, PACKED)
    target = out + (row - first_row).to(tl.int64) * out_stride
    step = tl.num_programs(1) * KEYS
    # Rows of one request lie together; a program meets more than one at their borders.
    low = tl.load(request + first)
    high = tl.load(request + tl.minimum(first + GROUP, live_rows) - 1)
    for index in range(low, high + 1):
        mine = live & (owner == index)
        bound = tl.max(tl.where(mine, seen, 0))
        page_table = table + tl.cast(index, tl.int64) * table_stride
        for start in range(tl.program_id(1) * KEYS, bound, step):
            position = start + tl.arange(0, KEYS)
            keys, scale, there = load_keys(
                cache, page_table, position, position < bound, blocks, cache_stride, STATES, PACKED
            )
            value = score(keys, scale, queries, weight, GROUP, PADDED)
            shown = there[:, None] & (position[:, None] < seen[None, :])
            value = tl.where(shown, value, float("-inf"))
            tl.store(
                target[None, :] + position[:, None],
                value,
                mask=mine[None, :] & (position < bound)[:, None],
            )
            if SIZE > 0:
                block = start // SIZE + tl.arange(0, KEYS // SIZE)
                top = tl.max(tl.reshape(value, (KEYS // SIZE, SIZE, GROUP)), axis=1)
                newest = block[:, None] == ((seen - 1) // SIZE)[None, :]
                tl.store(
                    best + (row - first_row).to(tl.int64)[None, :] * best_stride + block[:, None],
                    tl.where(newest & (seen > 0)[None, :], float("inf"), top),
                    mask=mine[None, :] & (block * SIZE < bound)[:, None],
                )


@triton.jit(do_not_specialize=["first_row", "rows", "requests", "width", "blocks"])
def candidate_logits(
    q,
    weights,
    cache,
    table,
    request,
    starts,
    positions,
    chosen,
    out,
    first_row,
    rows,
    requests,
    width,
    blocks,
    cache_stride,
    table_stride,
    chosen_stride,
    out_stride,
    RATIO: tl.constexpr,
    STATES: tl.constexpr,
    HEADS: tl.constexpr,
    PADDED: tl.constexpr,
    KEYS: tl.constexpr,
    SIZE: tl.constexpr,
    COUNT: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Scores of one row over its own ``chosen`` blocks of ``SIZE`` positions, at most ``COUNT``:
    score ``c`` is that of position ``chosen[c // SIZE] * SIZE + c % SIZE``."""
    row = first_row + tl.program_id(0)
    if row >= row_count(starts, requests, rows):
        return
    seen = visible_keys(positions, row, row >= 0, width, RATIO)
    one = row + tl.arange(0, 1)
    queries, weight = load_queries(q, weights, one, one >= 0, HEADS, PADDED, PACKED)
    page_table = table + tl.load(request + row).to(tl.int64) * table_stride
    picks = chosen + row.to(tl.int64) * chosen_stride
    target = out + (row - first_row).to(tl.int64) * out_stride
    bound = tl.minimum((seen + SIZE - 1) // SIZE, COUNT) * SIZE
    for start in range(tl.program_id(1) * KEYS, bound, tl.num_programs(1) * KEYS):
        column = start + tl.arange(0, KEYS)
        block = tl.load(picks + column // SIZE, mask=column < bound, other=-1)
        position = block * SIZE + column % SIZE
        there = (block >= 0) & (position < seen)
        keys, scale, there = load_keys(
            cache, page_table, position, there, blocks, cache_stride, STATES, PACKED
        )
        value = tl.reshape(score(keys, scale, queries, weight, 1, PADDED), (KEYS,))
        tl.store(target + column, tl.where(there, value, float("-inf")), mask=column < bound)
