"""The best ``COUNT`` of a row's values without sorting them; equal values: the lowest place.

What is chosen of a row lies in the ``COUNT`` blocks (of ``FAN`` values each) whose best values are
best: each of those holds a value that goes before any in another block. So a program, one a row,
chooses blocks by their best (which the scoring launch wrote) and then among their values; where
blocks are too many, blocks of blocks first. Each step looks at few thousand values in registers.

A value's bits, put in order, are an integer. The COUNT-th largest is found between bounds, where
how many values reach a guess is counted for two guesses at once: one in proportion (few steps for
values that lie evenly), one in the middle (32 at most for any). Blocks may be some more than COUNT,
so that few guesses do. What is chosen is written in the order of its places.

For sm_90: 128 registers of 512 threads (8 bytes spilled) and 2 KB of shared memory; candidate
blocks 64 of 1024 threads (216 bytes spilled) and 4 KB.
"""

from __future__ import annotations

import triton
import triton.language as tl

from spark_overlay.indexer.kernels.logits import row_count, visible_keys

#: What a row's values are.
POSITIONS = tl.constexpr(0)  # scores of all it sees
BLOCKS = tl.constexpr(1)  # the best score of each block of SIZE positions; the newest is chosen
CANDIDATES = tl.constexpr(2)  # scores of its chosen blocks' positions
#: Values in a line of the square that a program's values are laid out in.
LINE = tl.constexpr(16)


@triton.jit
def in_order(value):
    """float32 -> uint32 of the same order; zeros are equal, -inf is 0, every number more."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    key = (bits ^ ((bits >> 31) | -2147483648)).to(tl.uint32, bitcast=True)
    return tl.where(value == float("-inf"), 0, key)


@triton.jit
def extremes(key):
    """The largest of ``key`` and the least that is more than 0 (or 0xFFFFFFFF), in one go."""
    least = ~tl.where(key > 0, key, 0xFFFFFFFF)
    both = tl.max(tl.reshape(tl.join(key, least), (key.shape[0] * key.shape[1], 2)), axis=0)
    most, least = tl.split(both)
    return most, ~least


@triton.jit
def threshold(key, low, high, reach, COUNT: tl.constexpr, MOST: tl.constexpr):
    """A value that at least COUNT of ``key`` reach and at most MOST, or all that tie at it do
    (``low`` where fewer are). At least COUNT reach ``low``, or all: ``reach``; none ``high``."""
    beyond = reach * 0
    while (high > low + 1) & (reach > MOST):
        wide = high - low
        share = (reach - COUNT).to(tl.float32) / (reach - beyond).to(tl.float32)
        guess = (wide.to(tl.float32) * share).to(tl.uint32)
        guess = low + tl.minimum(tl.maximum(guess, 1), wide - 1)
        middle = low + (wide >> 1)
        both = tl.sum((key >= guess).to(tl.int32) + ((key >= middle).to(tl.int32) << 16))
        count = both & 0xFFFF
        low, reach = tl.where(count >= COUNT, guess, low), tl.where(count >= COUNT, count, reach)
        high, beyond = tl.where(count < COUNT, guess, high), tl.where(count < COUNT, count, beyond)
        count = both >> 16
        up = (count >= COUNT) & (middle > low)
        down = (count < COUNT) & (middle < high)
        low, reach = tl.where(up, middle, low), tl.where(up, count, reach)
        high, beyond = tl.where(down, middle, high), tl.where(down, count, beyond)
    return low


@triton.jit
def write(key, place, least, line, COUNT: tl.constexpr, TAIL: tl.constexpr):
    """``place`` of the COUNT largest of ``key`` (both ``[R, LINE]``) to ``line``, in order, then
    -1. No more than COUNT are more than ``least``."""
    above = (key > least) & (key > 0)
    equal = (key == least) & (key > 0)
    # Both counts in one number: neither reaches 2**15.
    each = (above.to(tl.int32) << 16) | equal.to(tl.int32)
    rows = tl.sum(each, axis=1)
    before = (tl.cumsum(rows, 0) - rows)[:, None] + tl.cumsum(each, 1)
    total = tl.sum(rows)
    need = COUNT - (total >> 16)
    equals = before & 0xFFFF
    keep = above | (equal & (equals <= need))
    rank = (before >> 16) + tl.minimum(equals, need) - 1
    tl.store(line + rank, place, mask=keep)
    found = (total >> 16) + tl.minimum(total & 0xFFFF, need)
    tail = tl.arange(0, TAIL)
    tl.store(line + tail, tail * 0 - 1, mask=(tail >= found) & (tail < COUNT))


@triton.jit
def square(BLOCK: tl.constexpr):
    """``0 .. BLOCK - 1`` as ``[BLOCK / LINE, LINE]``."""
    return tl.arange(0, BLOCK // LINE)[:, None] * LINE + tl.arange(0, LINE)[None, :]


@triton.jit
def within(index, picked, all_of_them, COUNT: tl.constexpr, FAN: tl.constexpr):
    """The entries that ``index`` stands for: itself, or those of the ``picked`` blocks."""
    block = tl.load(
        picked + index // FAN, mask=(index < COUNT * FAN) & (all_of_them == 0), other=-1
    )
    inside = tl.where(block >= 0, block * FAN + index % FAN, -1)
    return tl.where(all_of_them != 0, index, inside)


@triton.jit
def best_of(values, index, entries, newest, FAN: tl.constexpr):
    """The best of ``FAN`` values from ``index * FAN`` on; ``newest`` counts as +inf."""
    best = tl.full(index.shape, float("-inf"), tl.float32)
    for n in tl.static_range(FAN):
        at = index * FAN + n
        there = (index >= 0) & (at < entries)
        value = tl.load(values + at, mask=there, other=float("-inf"))
        best = tl.maximum(best, tl.where(there & (at == newest), float("inf"), value))
    return best


@triton.jit(do_not_specialize=["first_row", "rows", "requests", "width"])
def choose(
    values,
    tops,
    chosen,
    request,
    starts,
    lengths,
    final,
    lists,
    first_row,
    rows,
    requests,
    width,
    value_stride,
    tops_stride,
    chosen_stride,
    final_stride,
    lists_stride,
    RATIO: tl.constexpr,
    KIND: tl.constexpr,
    SIZE: tl.constexpr,
    CHOSEN: tl.constexpr,
    COUNT: tl.constexpr,
    TAIL: tl.constexpr,
    PICKED: tl.constexpr,
    ROOM: tl.constexpr,
    FAN: tl.constexpr,
    LAST: tl.constexpr,
    MIDDLE: tl.constexpr,
    FIRST: tl.constexpr,
):
    """``final [row, COUNT]``: places of a row's best, ascending, -1 padded; rows that are padding
    get -1 alone. Blocks of values each step looks at: ``LAST`` values, ``MIDDLE`` blocks of
    ``FAN`` (0: no row has more than ``LAST`` values), ``FIRST`` blocks of blocks (0: none has more
    than ``MIDDLE`` blocks). ``tops``: each block's best, where KIND is not BLOCKS. At most
    ``PICKED`` blocks are picked, at least COUNT of them; ``lists [row, 2 * PICKED]`` int32 has room
    for them. TAIL and ROOM: COUNT and PICKED as powers of two."""
    row = first_row + tl.program_id(0)
    owner = tl.load(request + row, mask=row < rows, other=0)
    live = row < row_count(starts, requests, rows)
    seen = visible_keys(starts, lengths, owner, row, live, width, RATIO)
    newest = -1
    if KIND == POSITIONS:
        entries = seen
    elif KIND == BLOCKS:
        entries = (seen + SIZE - 1) // SIZE
        newest = entries - 1
    else:
        entries = tl.minimum((seen + SIZE - 1) // SIZE, CHOSEN) * SIZE
    here = (row - first_row).to(tl.int64)
    values += here * value_stride
    tops += here * tops_stride
    outer = lists + here * lists_stride
    inner = outer + PICKED
    low = tl.full((), 1, tl.uint32)
    high = low
    all_of_them = (entries <= LAST).to(tl.int32)
    if MIDDLE > 0:  # noqa: SIM102 (known when compiled, then asked of the device)
        if entries > LAST:
            blocks = (entries + FAN - 1) // FAN
            if FIRST > 0:  # noqa: SIM102
                if blocks > MIDDLE:
                    index = square(FIRST)
                    key = in_order(best_of(tops, index, blocks, -1, FAN))
                    most, least = extremes(key)
                    left = (blocks + FAN - 1) // FAN
                    least = threshold(key, least, most + 1, left, COUNT, PICKED)
                    write(key, index, least, outer, PICKED, ROOM)
                    tl.debug_barrier()
            index = within(square(MIDDLE), outer, (blocks <= MIDDLE).to(tl.int32), PICKED, FAN)
            if KIND == BLOCKS:
                best = best_of(values, index, entries, newest, FAN)
            else:
                there = (index >= 0) & (index < blocks)
                best = tl.load(tops + index, mask=there, other=float("-inf"))
            key = in_order(best)
            most, least = extremes(key)
            # COUNT blocks have a value that reaches this, so what is chosen does.
            low = threshold(key, least, most + 1, tl.minimum(blocks, MIDDLE), COUNT, PICKED)
            high = most + 1
            write(key, index, low, inner, PICKED, ROOM)
            tl.debug_barrier()
    index = within(square(LAST), inner, all_of_them, PICKED, FAN)
    there = (index >= 0) & (index < entries)
    value = tl.load(values + index, mask=there, other=float("-inf"))
    if KIND == BLOCKS:
        value = tl.where(there & (index == newest), float("inf"), value)
    key = in_order(value)
    if high <= low:
        most, low = extremes(key)
        high = most + 1
    low = threshold(key, low, high, tl.sum((key >= low).to(tl.int32)), COUNT, COUNT)
    if KIND == CANDIDATES:
        block = tl.load(
            chosen + row.to(tl.int64) * chosen_stride + index // SIZE, mask=there, other=0
        )
        index = block * SIZE + index % SIZE
    write(key, index, low, final + row.to(tl.int64) * final_stride, COUNT, TAIL)


@triton.jit(do_not_specialize=["rows", "requests", "width"])
def fill_visible(
    request,
    starts,
    lengths,
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
    owner = tl.load(request + row)
    live = row < row_count(starts, requests, rows)
    seen = visible_keys(starts, lengths, owner, row, live, width, RATIO)
    column = tl.arange(0, PADDED)
    tl.store(
        final + row.to(tl.int64) * final_stride + column,
        tl.where(column < seen, column, -1),
        mask=column < COUNT,
    )
