"""Kernels that write records and keys, a token each program of theirs.

Rows without a slot (-1) and rows that do not end their group write nothing. Positions within a page
go through the page's stride, which may be larger than its bytes.

Byte for byte what vLLM writes: its compilers add some products unrounded (``fma``), and here the
same ones. Latents and keys are Triton's there, too: whether it contracts is its default in both.
"""

from __future__ import annotations

import triton
import triton.language as tl

from spark_overlay.attention.inserts.encode import power_of_two, scale_exponent, scaled_e4m3

HEAD = tl.constexpr(512)
NOPE = tl.constexpr(448)
ROPE = tl.constexpr(64)
DATA = tl.constexpr(576)
SCALES = tl.constexpr(8)
KEY = tl.constexpr(128)


@triton.jit
def _turned(even, odd, cos, sin, WINDOW: tl.constexpr):
    """Pairs turned, float32. Of two products the compiler leaves the one written first unrounded:
    the even value's both times in the ``WINDOW``, the cosine's elsewhere."""
    first = even * cos - odd * sin
    second = even * sin + odd * cos if WINDOW else odd * cos + even * sin
    return first, second


@triton.jit
def _turned_tail(at, cos_sin, stride, position, real, WINDOW: tl.constexpr):
    """The 64 bf16 at each of ``at [R]`` that is ``real [R]``, turned by ``position``: bf16
    ``[R, 64]``."""
    rows: tl.constexpr = at.shape[0]
    half: tl.constexpr = ROPE // 2
    value = tl.load(at[:, None] + tl.arange(0, ROPE)[None, :], real[:, None], other=0.0)
    even, odd = tl.split(tl.reshape(value.to(tl.float32), (rows, half, 2)))
    table = cos_sin + position * stride + tl.arange(0, half)
    cos = tl.load(table).to(tl.float32)[None, :]
    sin = tl.load(table + half).to(tl.float32)[None, :]
    first, second = _turned(even, odd, cos, sin, WINDOW)
    return tl.reshape(tl.join(first, second), (rows, ROPE)).to(tl.bfloat16)


@triton.jit
def _write_record(
    at, cos_sin, cos_stride, position, slot, cache, page_stride,
    BLOCK: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """The 584-byte record of the 512 bf16 at ``at``."""
    page = cache + (slot // BLOCK) * page_stride
    inside = slot % BLOCK
    data = page + inside * DATA
    scales = page + BLOCK * DATA + inside * SCALES
    group = tl.arange(0, 8)
    column = group[:, None] * 64 + tl.arange(0, 64)[None, :]
    mask = (group < NOPE // 64)[:, None]
    x = tl.load(at + column, mask, other=0.0).to(tl.float32)
    one = tl.zeros([1], tl.int64)
    turned = _turned_tail(at + NOPE + one, cos_sin, cos_stride, position, one == 0, WINDOW)
    exponent = scale_exponent(tl.max(tl.abs(x), 1))
    tl.store(data + column, scaled_e4m3(x, exponent[:, None]), mask)
    # The eighth scale is padding, zero.
    stored = tl.where(group < NOPE // 64, exponent + 127, 0)
    tl.store(scales + group, stored.to(tl.uint8))
    to = (data + NOPE).to(tl.pointer_type(tl.bfloat16))
    tl.store(to + tl.arange(0, ROPE)[None, :], turned)


@triton.jit
def _group_end(row, positions, slots, RATIO: tl.constexpr):
    """A row's slot, its group's first position, and whether it is written."""
    slot = tl.load(slots + row).to(tl.int64)
    position = tl.load(positions + row).to(tl.int64)
    return slot, position // RATIO * RATIO, (slot >= 0) & ((position + 1) % RATIO == 0)


@triton.jit
def write_latents(
    latent, positions, cos_sin, cos_stride, cache, page_stride, slots,
    BLOCK: tl.constexpr, RATIO: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Grid ``T``: ``latent [T, 512]`` bf16 to records of ``cache``; ``WINDOW``: the window's rows,
    with ``RATIO`` 1."""
    row = tl.program_id(0).to(tl.int64)
    slot, position, kept = _group_end(row, positions, slots, RATIO)
    if kept:
        _write_record(
            latent + row * HEAD, cos_sin, cos_stride, position, slot, cache, page_stride, BLOCK,
            WINDOW,
        )  # fmt: skip


@triton.jit
def _rotate_heads(
    program, q, q_stride, out, positions, cos_sin, cos_stride, heads, padded, HEADS: tl.constexpr
):
    """``HEADS`` of a token's padded heads: copied and rotated, or zero beyond the real ones."""
    blocks = tl.cdiv(padded, HEADS)
    token = (program // blocks).to(tl.int64)
    head = program % blocks * HEADS + tl.arange(0, HEADS)
    real = head < heads
    kept = head < padded
    column = tl.arange(0, HEAD)
    source = q + token * q_stride + head * HEAD
    to = out + (token * padded + head) * HEAD
    plain = (column < NOPE)[None, :]
    copied = tl.load(source[:, None] + column[None, :], real[:, None] & plain, other=0.0)
    tl.store(to[:, None] + column[None, :], copied, kept[:, None] & plain)
    position = tl.load(positions + token).to(tl.int64)
    turned = _turned_tail(source + NOPE, cos_sin, cos_stride, position, real, True)
    turned = tl.where(real[:, None], turned, 0.0)  # a zero that was turned may be negative
    tl.store((to + NOPE)[:, None] + tl.arange(0, ROPE)[None, :], turned, kept[:, None])


@triton.jit(do_not_specialize=["rows", "heads", "padded"])
def rotate_queries_and_write(
    q, q_stride, out, kv, kv_stride, positions, cos_sin, cos_stride, cache, page_stride, slots,
    rows, heads, padded,
    HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid ``rows`` programs for records (a token each), then ``tokens * ceil(padded / HEADS)`` for
    queries: ``out [tokens, padded, 512]`` bf16."""
    program = tl.program_id(0)
    if program < rows:
        row = program.to(tl.int64)
        slot, position, kept = _group_end(row, positions, slots, 1)
        if kept:
            _write_record(
                kv + row * kv_stride, cos_sin, cos_stride, position, slot, cache, page_stride,
                BLOCK, True,
            )  # fmt: skip
    else:
        _rotate_heads(
            program - rows, q, q_stride, out, positions, cos_sin, cos_stride, heads, padded, HEADS
        )


@triton.jit
def write_keys(
    key, key_stride, positions, cos_sin, cos_stride, weight, eps, cache, page_stride, slots,
    BLOCK: tl.constexpr, RATIO: tl.constexpr,
):  # fmt: skip
    """Grid ``T``, one warp each: index keys ``[T, 128]`` bf16 normed, their second half rotated,
    stored as e4m3 with one float32 scale.

    A lane holds four neighbours of a row: the order in which vLLM's kernel adds the squares."""
    row = tl.program_id(0).to(tl.int64)
    slot, position, kept = _group_end(row, positions, slots, RATIO)
    if kept:
        half: tl.constexpr = ROPE // 2
        column = tl.arange(0, KEY)
        x = tl.load(key + row * key_stride + column).to(tl.float32)
        norm = tl.rsqrt(tl.sum(x * x, 0) / KEY + eps)
        normed = (x * norm * tl.load(weight + column).to(tl.float32)).to(tl.bfloat16)
        even, odd = tl.split(tl.reshape(normed.to(tl.float32), (KEY // 2, 2)))
        pair = tl.arange(0, KEY // 2) - half
        table = cos_sin + position * cos_stride + pair
        cos = tl.load(table, pair >= 0, other=1.0).to(tl.float32)
        sin = tl.load(table + half, pair >= 0, other=0.0).to(tl.float32)
        first, second = _turned(even, odd, cos, sin, False)
        value = tl.reshape(tl.join(first, second), (KEY,)).to(tl.bfloat16).to(tl.float32)
        exponent = scale_exponent(tl.max(tl.abs(value), 0))
        page = cache + (slot // BLOCK) * page_stride
        inside = slot % BLOCK
        tl.store(page + inside * KEY + column, scaled_e4m3(value, exponent))
        scale = (page + BLOCK * KEY + inside * 4).to(tl.pointer_type(tl.float32))
        tl.store(scale, power_of_two(exponent))
