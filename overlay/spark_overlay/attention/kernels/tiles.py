"""The attention kernels in Triton: tiles of records, and the reduction of splits.

A tile of records is dequantised into one bf16 matrix of 512 columns, NoPE and RoPE together, which
is key and value both: one product for the logits, one for the output, for all heads of the CTA.
Sums are float32. Softmax runs in powers of two.
"""

from __future__ import annotations

import triton
import triton.language as tl

from spark_overlay.attention.kernels.numbers import product, ue8m0

NONE = tl.constexpr(float("-inf"))


@triton.jit
def read_tile(
    cache, page_stride, slots, column, limit,
    PAGE: tl.constexpr, ALIGN: tl.constexpr, KEYS: tl.constexpr, PTX: tl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """bf16 [KEYS, 512] of the records at ``slots[column...]``, zeros where there is none, and which
    are there."""
    column = column + tl.arange(0, KEYS)
    slot = tl.load(slots + column, mask=column < limit, other=-1)
    there = slot >= 0
    slot = tl.maximum(slot, 0)
    page = (slot // PAGE).to(tl.int64) * page_stride
    data = tl.multiple_of(page + slot % PAGE * 576, ALIGN)
    scales = page + PAGE * 576 + slot % PAGE * 8
    value = tl.arange(0, 512)
    here = there[:, None]
    codes = tl.load(cache + data[:, None] + value[None, :], mask=here, other=0)
    group = tl.arange(0, 8)
    scale = ue8m0(tl.load(cache + scales[:, None] + group[None, :], mask=here, other=0))
    scale = scale.to(tl.bfloat16)
    nope = product(tl.reshape(codes, (KEYS, 8, 64)), scale[:, :, None], PTX)
    # The RoPE values lie 448 bytes in, 2 bytes each: column 448 at byte 448.
    rope = (cache + data[:, None] - 448).to(tl.pointer_type(tl.bfloat16)) + value[None, :]
    last = (value >= 448)[None, :]
    rope = tl.load(rope, mask=here & last, other=0.0)
    return tl.where(last, rope, tl.reshape(nope, (KEYS, 512))), there


@triton.jit
def take_tile(q, keys, there, peak, total, acc, scale):  # type: ignore[no-untyped-def]
    """One tile into the running softmax of q's heads."""
    logits = tl.dot(q, tl.trans(keys)) * scale
    logits = tl.where(there[None, :], logits, NONE)
    higher = tl.maximum(peak, tl.max(logits, 1))
    # Nothing seen yet: subtract 0 from -inf, not -inf from -inf.
    base = tl.where(higher == NONE, 0.0, higher)
    weight = tl.exp2(logits - base[:, None])
    fade = tl.exp2(peak - base)
    total = total * fade + tl.sum(weight, 1)
    acc = acc * fade[:, None]
    acc = tl.dot(weight.to(tl.bfloat16), keys, acc)
    return higher, total, acc


@triton.jit
def finish(acc, peak, total, sink, turn, HEADS: tl.constexpr, TURN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Output rows [HEADS, 512] float32 of whole sums; ``turn``: where the token's cosines are."""
    sink = sink * 1.4426950408889634
    top = tl.maximum(peak, sink)
    top = tl.where(top == NONE, 0.0, top)
    fade = tl.exp2(peak - top)
    below = total * fade + tl.exp2(sink - top)
    row = acc * (fade / tl.where(below == 0.0, 1.0, below))[:, None]
    if TURN:
        even, odd = tl.split(tl.reshape(row, (HEADS, 256, 2)))
        pair = tl.arange(0, 256)
        last = pair >= 224
        at = turn + tl.where(last, pair - 224, 0)
        cos = tl.load(at, mask=last, other=1.0).to(tl.float32)[None, :]
        sin = tl.load(at + 32, mask=last, other=0.0).to(tl.float32)[None, :]
        row = tl.reshape(tl.join(even * cos + odd * sin, odd * cos - even * sin), (HEADS, 512))
    return row


@triton.jit(do_not_specialize=["tokens", "heads"])
def attend(
    q, q_token, q_head, out, out_token, out_head, sink, scale, partial, peaks, tokens, heads,
    cos_sin, cos_sin_row, positions,
    cache0, stride0, slots0, row0, lengths0,
    cache1, stride1, slots1, row1, lengths1,
    PAGE0: tl.constexpr, PAGE1: tl.constexpr,
    WIDTH0: tl.constexpr, WIDTH1: tl.constexpr,
    LENGTHS0: tl.constexpr, LENGTHS1: tl.constexpr,
    ALIGN0: tl.constexpr, ALIGN1: tl.constexpr,
    SPLITS: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr,
    TURN: tl.constexpr, PTX: tl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """A split of one token's records for HEADS heads; without splits, the output itself."""
    token = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    head = tl.program_id(2) * HEADS + tl.arange(0, HEADS)
    mine = head < heads
    value = tl.arange(0, 512)
    at = token * q_token + head.to(tl.int64)[:, None] * q_head + value[None, :]
    query = tl.load(q + at, mask=mine[:, None], other=0.0)

    TILES0: tl.constexpr = (WIDTH0 + KEYS - 1) // KEYS
    TILES1: tl.constexpr = (WIDTH1 + KEYS - 1) // KEYS
    EACH: tl.constexpr = (TILES0 + TILES1 + SPLITS - 1) // SPLITS
    low, high = split * EACH, split * EACH + EACH
    limit0, limit1 = WIDTH0, WIDTH1
    if LENGTHS0:
        limit0 = tl.minimum(tl.load(lengths0 + token), WIDTH0)
    if WIDTH1 > 0 and LENGTHS1:
        limit1 = tl.minimum(tl.load(lengths1 + token), WIDTH1)
    peak = tl.full((HEADS,), NONE, tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    acc = tl.zeros((HEADS, 512), tl.float32)
    for tile in range(low, tl.minimum(high, (limit0 + KEYS - 1) // KEYS)):
        keys, there = read_tile(
            cache0, stride0, slots0 + token * row0, tile * KEYS, limit0, PAGE0, ALIGN0, KEYS, PTX
        )
        peak, total, acc = take_tile(query, keys, there, peak, total, acc, scale)
    if WIDTH1 > 0:
        last = tl.minimum(high - TILES0, (limit1 + KEYS - 1) // KEYS)
        for tile in range(tl.maximum(low - TILES0, 0), last):
            keys, there = read_tile(
                cache1, stride1, slots1 + token * row1, tile * KEYS, limit1, PAGE1, ALIGN1, KEYS,
                PTX,
            )  # fmt: skip
            peak, total, acc = take_tile(query, keys, there, peak, total, acc, scale)
    if SPLITS == 1:
        own = tl.load(sink + head, mask=mine, other=NONE)
        turn = cos_sin
        if TURN:
            turn = cos_sin + tl.load(positions + token).to(tl.int64) * cos_sin_row
        row = finish(acc, peak, total, own, turn, HEADS, TURN)
        to = token * out_token + head.to(tl.int64)[:, None] * out_head + value[None, :]
        tl.store(out + to, row.to(tl.bfloat16), mask=mine[:, None])
    else:
        place = (split * tokens + token) * heads + head
        tl.store(partial + place[:, None] * 512 + value[None, :], acc, mask=mine[:, None])
        tl.store(peaks + place, peak, mask=mine)
        tl.store(peaks + SPLITS * tokens.to(tl.int64) * heads + place, total, mask=mine)


@triton.jit(do_not_specialize=["tokens", "heads"])
def reduce(
    out, out_token, out_head, sink, partial, peaks, tokens, heads, cos_sin, cos_sin_row, positions,
    SPLITS: tl.constexpr, HEADS: tl.constexpr, TURN: tl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """The splits of one token's heads to its output, always in the same order."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    mine = head < heads
    value = tl.arange(0, 512)
    far = tokens.to(tl.int64) * heads
    place = token * heads + head
    peak = tl.full((HEADS,), NONE, tl.float32)
    for split in tl.static_range(SPLITS):
        peak = tl.maximum(peak, tl.load(peaks + split * far + place, mask=mine, other=NONE))
    base = tl.where(peak == NONE, 0.0, peak)
    total = tl.zeros((HEADS,), tl.float32)
    acc = tl.zeros((HEADS, 512), tl.float32)
    for split in tl.static_range(SPLITS):
        there = split * far + place
        fade = tl.exp2(tl.load(peaks + there, mask=mine, other=NONE) - base)
        total += fade * tl.load(peaks + SPLITS * far + there, mask=mine, other=0.0)
        part = tl.load(partial + there[:, None] * 512 + value[None, :], mask=mine[:, None])
        acc += fade[:, None] * part
    own = tl.load(sink + head, mask=mine, other=NONE)
    turn = cos_sin
    if TURN:
        turn = cos_sin + tl.load(positions + token).to(tl.int64) * cos_sin_row
    row = finish(acc, peak, total, own, turn, HEADS, TURN)
    to = token * out_token + head.to(tl.int64)[:, None] * out_head + value[None, :]
    tl.store(out + to, row.to(tl.bfloat16), mask=mine[:, None])
