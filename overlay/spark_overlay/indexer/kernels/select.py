"""The best ``COUNT`` of a row's values without sorting them, in rounds of equal blocks.

A program takes ``BLOCK`` values into registers, finds the COUNT-th largest bit by bit (a value's
bits, put in order, are an integer: count how many reach a prefix), and writes what is above it and
the first of what equals it, in the order of their places. A row of more than one block is narrowed
to ``COUNT`` a block, and a further round chooses among those. The time does not depend on the
values, and equal values go to the lowest place always.
"""

from __future__ import annotations

import triton
import triton.language as tl

from spark_overlay.indexer.kernels.logits import row_count, visible_keys

#: What a row's values are.
POSITIONS = tl.constexpr(0)  # scores of all it sees
BLOCKS = tl.constexpr(1)  # the best score of each block of SIZE positions
CANDIDATES = tl.constexpr(2)  # scores of its chosen blocks' positions


@triton.jit
def in_order(value):
    """float32 -> uint32 of the same order, more than 0 for every number; zeros are equal."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) | -2147483648)).to(tl.uint32, bitcast=True)


@triton.jit
def kth_largest(key, COUNT: tl.constexpr):
    """The COUNT-th largest of ``key``, or a lesser value that as many reach; 1 where fewer are
    more than 0."""
    least = tl.full((), 0, tl.uint32)
    bit = tl.full((), 1 << 31, tl.uint32)
    more = tl.sum((key > 0).to(tl.int32)) > COUNT
    while more:
        tried = least | bit
        reach = tl.sum((key >= tried).to(tl.int32))
        least = tl.where(reach >= COUNT, tried, least)
        bit = bit >> 1
        more = (reach != COUNT) & (bit > 0)
    return tl.maximum(least, 1)


@triton.jit
def entries(seen, KIND: tl.constexpr, SIZE: tl.constexpr, CHOSEN: tl.constexpr):
    """How many values a row that sees ``seen`` positions has."""
    if KIND == POSITIONS:
        return seen
    elif KIND == BLOCKS:
        return (seen + SIZE - 1) // SIZE
    else:
        return tl.minimum((seen + SIZE - 1) // SIZE, CHOSEN) * SIZE


@triton.jit(do_not_specialize=["first_row", "last_row", "rows", "requests", "width"])
def choose(
    values,
    places,
    chosen,
    starts,
    positions,
    final,
    next_keys,
    next_places,
    first_row,
    last_row,
    rows,
    requests,
    width,
    value_stride,
    chosen_stride,
    final_stride,
    next_stride,
    RATIO: tl.constexpr,
    KIND: tl.constexpr,
    SIZE: tl.constexpr,
    CHOSEN: tl.constexpr,
    COUNT: tl.constexpr,
    TAIL: tl.constexpr,
    BLOCK: tl.constexpr,
    ROUND: tl.constexpr,
):
    """One round for rows ``first_row .. last_row``; program (row, block).

    Round 0 reads scores (``values`` float32), later ones the keys and places the one before wrote.
    A row whose values fit one block is finished in that round: ``final [row, COUNT]`` gets its
    places, ascending, -1 padded. Rows from ``rows`` on get -1 alone."""
    row = first_row + tl.program_id(0)
    part = tl.program_id(1)
    live = row < row_count(starts, requests, rows)
    seen = visible_keys(positions, row, live, width, RATIO)
    left = entries(seen, KIND, SIZE, CHOSEN)
    done = left < 0
    for _ in tl.static_range(ROUND):
        done = done | (left <= BLOCK)
        left = (left + BLOCK - 1) // BLOCK * COUNT
    # The first block of the first round writes a row that sees nothing, too.
    if done | ((part > 0) & (part * BLOCK >= left)):
        return
    here = (row - first_row).to(tl.int64)
    index = part * BLOCK + tl.arange(0, BLOCK)
    there = index < left
    if ROUND == 0:
        value = tl.load(values + here * value_stride + index, mask=there, other=float("-inf"))
        key = tl.where(value == float("-inf"), 0, in_order(value))
    else:
        key = tl.load(values + here * value_stride + index, mask=there, other=0)
        key = key.to(tl.uint32, bitcast=True)
    least = kth_largest(key, COUNT)
    above = key > least
    equal = key == least
    # Both counts before each place in one scan: neither reaches 2**15.
    before = tl.cumsum((above.to(tl.int32) << 16) | equal.to(tl.int32), 0)
    need = COUNT - tl.sum(above.to(tl.int32))
    equals = before & 0xFFFF
    keep = above | (equal & (equals <= need))
    rank = (before >> 16) + tl.minimum(equals, need) - 1
    found = tl.sum(keep.to(tl.int32))
    if ROUND == 0:
        place = index
        if KIND == CANDIDATES:
            block = tl.load(
                chosen + row.to(tl.int64) * chosen_stride + index // SIZE, mask=keep, other=0
            )
            place = block * SIZE + index % SIZE
    else:
        place = tl.load(places + here * value_stride + index, mask=keep, other=-1)
    tail = tl.arange(0, TAIL)
    empty = (tail >= found) & (tail < COUNT)
    if left <= BLOCK:
        line = final + row.to(tl.int64) * final_stride
        tl.store(line + rank, place, mask=keep)
        tl.store(line + tail, tl.full((TAIL,), -1, tl.int32), mask=empty)
    else:
        onward = here * next_stride + part * COUNT
        tl.store(next_places + onward + rank, place, mask=keep)
        tl.store(next_keys + onward + rank, key.to(tl.int32, bitcast=True), mask=keep)
        tl.store(next_keys + onward + tail, tl.full((TAIL,), 0, tl.int32), mask=empty)


@triton.jit(do_not_specialize=["rows", "requests", "width"])
def fill_visible(
    starts,
    positions,
    final,
    rows,
    requests,
    width,
    final_stride,
    RATIO: tl.constexpr,
    COUNT: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Every position a row sees, where none sees more than COUNT."""
    row = tl.program_id(0)
    live = row < row_count(starts, requests, rows)
    seen = visible_keys(positions, row, live, width, RATIO)
    column = tl.arange(0, PADDED)
    tl.store(
        final + row.to(tl.int64) * final_stride + column,
        tl.where(column < seen, column, -1),
        mask=column < COUNT,
    )
