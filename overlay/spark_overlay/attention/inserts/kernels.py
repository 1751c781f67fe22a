"""Kernels that write records and keys. A program takes ``ROWS`` tokens.

Rows without a slot (-1) and rows that do not end their group write nothing. Positions within a page
go through the page's stride, which may be larger than its bytes.
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
def _rotated(at, cos_sin, stride, position, kept):
    """Even and odd values, float32 ``[R, 32]`` each, of the 64 bf16 at ``at [R]``, turned by their
    ``position [R]``."""
    pair = tl.arange(0, ROPE // 2)
    even = tl.load(at[:, None] + 2 * pair[None, :], kept[:, None], other=0.0).to(tl.float32)
    odd = tl.load(at[:, None] + 2 * pair[None, :] + 1, kept[:, None], other=0.0).to(tl.float32)
    table = cos_sin + (position * stride)[:, None] + pair[None, :]
    cos = tl.load(table, kept[:, None], other=1.0).to(tl.float32)
    sin = tl.load(table + ROPE // 2, kept[:, None], other=0.0).to(tl.float32)
    return even * cos - odd * sin, odd * cos + even * sin


@triton.jit
def _write_record(
    at, cos_sin, cos_stride, position, slot, kept, cache, page_stride,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One 584-byte record each of the rows ``at [R]`` (512 bf16) points to."""
    page = cache + (slot // BLOCK) * page_stride
    inside = slot % BLOCK
    data = page + inside * DATA
    scales = page + BLOCK * DATA + inside * SCALES
    group = tl.arange(0, 8)
    value = tl.arange(0, 64)
    column = group[:, None] * 64 + value[None, :]
    mask = kept[:, None, None] & (group < NOPE // 64)[None, :, None]
    x = tl.load(at[:, None, None] + column[None, :, :], mask, other=0.0).to(tl.float32)
    exponent = scale_exponent(tl.max(tl.abs(x), 2))
    codes = scaled_e4m3(x, exponent[:, :, None])
    tl.store(data[:, None, None] + column[None, :, :], codes, mask)
    # The eighth scale is padding, zero.
    stored = tl.where(group[None, :] < NOPE // 64, exponent + 127, 0)
    tl.store(scales[:, None] + group[None, :], stored.to(tl.uint8), kept[:, None])
    even, odd = _rotated(at + NOPE, cos_sin, cos_stride, position, kept)
    turned = tl.reshape(tl.join(even, odd), (ROWS, ROPE)).to(tl.bfloat16)
    to = (data + NOPE).to(tl.pointer_type(tl.bfloat16))
    tl.store(to[:, None] + tl.arange(0, ROPE)[None, :], turned, kept[:, None])


@triton.jit
def _group_ends(program, positions, slots, tokens, ROWS: tl.constexpr, RATIO: tl.constexpr):
    """A program's rows: which, their groups' first positions, their slots, and which count."""
    row = (program * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    inside = row < tokens
    slot = tl.load(slots + row, inside, other=-1).to(tl.int64)
    position = tl.load(positions + row, inside, other=0).to(tl.int64)
    kept = inside & (slot >= 0) & ((position + 1) % RATIO == 0)
    return row, position // RATIO * RATIO, tl.where(kept, slot, 0), kept


@triton.jit(do_not_specialize=["tokens"])
def write_latents(
    latent, positions, cos_sin, cos_stride, cache, page_stride, slots, tokens,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, RATIO: tl.constexpr,
):  # fmt: skip
    """Grid ``ceil(tokens / ROWS)``: ``latent [T, 512]`` bf16 to records of ``cache``; the window's
    rows with ``RATIO`` 1."""
    row, position, slot, kept = _group_ends(tl.program_id(0), positions, slots, tokens, ROWS, RATIO)
    _write_record(
        latent + row * HEAD, cos_sin, cos_stride, position, slot, kept, cache, page_stride,
        ROWS, BLOCK,
    )  # fmt: skip


@triton.jit
def _rotate_heads(
    program, q, q_stride, out, positions, cos_sin, cos_stride, tokens, heads, padded,
    HEADS: tl.constexpr,
):  # fmt: skip
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
    position = tl.load(positions + token).to(tl.int64) + tl.zeros([HEADS], tl.int64)
    even, odd = _rotated(source + NOPE, cos_sin, cos_stride, position, real)
    turned = tl.reshape(tl.join(even, odd), (HEADS, ROPE)).to(tl.bfloat16)
    tl.store((to + NOPE)[:, None] + tl.arange(0, ROPE)[None, :], turned, kept[:, None])


@triton.jit(do_not_specialize=["tokens", "rows", "heads", "padded"])
def rotate_queries_and_write(
    q, q_stride, out, kv, kv_stride, positions, cos_sin, cos_stride, cache, page_stride, slots,
    tokens, rows, heads, padded,
    HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid ``rows`` programs for records (a token each), then ``tokens * ceil(padded / HEADS)`` for
    queries: ``out [tokens, padded, 512]`` bf16."""
    program = tl.program_id(0)
    if program < rows:
        row, position, slot, kept = _group_ends(program, positions, slots, rows, 1, 1)
        _write_record(
            kv + row * kv_stride, cos_sin, cos_stride, position, slot, kept, cache, page_stride,
            1, BLOCK,
        )  # fmt: skip
    else:
        _rotate_heads(
            program - rows, q, q_stride, out, positions, cos_sin, cos_stride, tokens, heads,
            padded, HEADS,
        )  # fmt: skip


@triton.jit(do_not_specialize=["tokens"])
def write_keys(
    key, key_stride, positions, cos_sin, cos_stride, weight, eps, cache, page_stride, slots,
    tokens, ROWS: tl.constexpr, BLOCK: tl.constexpr, RATIO: tl.constexpr,
):  # fmt: skip
    """Grid ``ceil(tokens / ROWS)``: index keys ``[T, 128]`` bf16 normed, their second half rotated,
    stored as e4m3 with one float32 scale."""
    row, position, slot, kept = _group_ends(tl.program_id(0), positions, slots, tokens, ROWS, RATIO)
    pair = tl.arange(0, KEY // 2)
    at = key + row[:, None] * key_stride + 2 * pair[None, :]
    even = tl.load(at, kept[:, None], other=0.0).to(tl.float32)
    odd = tl.load(at + 1, kept[:, None], other=0.0).to(tl.float32)
    norm = tl.rsqrt((tl.sum(even * even, 1) + tl.sum(odd * odd, 1)) / KEY + eps)[:, None]
    even = (even * norm * tl.load(weight + 2 * pair).to(tl.float32)[None, :]).to(tl.bfloat16)
    odd = (odd * norm * tl.load(weight + 2 * pair + 1).to(tl.float32)[None, :]).to(tl.bfloat16)
    even, odd = even.to(tl.float32), odd.to(tl.float32)
    turning = kept[:, None] & (pair >= ROPE // 2)[None, :]
    table = cos_sin + (position * cos_stride)[:, None] + (pair - ROPE // 2)[None, :]
    cos = tl.load(table, turning, other=1.0).to(tl.float32)
    sin = tl.load(table + ROPE // 2, turning, other=0.0).to(tl.float32)
    new_even = (even * cos - odd * sin).to(tl.bfloat16).to(tl.float32)
    new_odd = (odd * cos + even * sin).to(tl.bfloat16).to(tl.float32)
    amax = tl.maximum(tl.max(tl.abs(new_even), 1), tl.max(tl.abs(new_odd), 1))
    exponent = scale_exponent(amax)
    codes = tl.join(
        scaled_e4m3(new_even, exponent[:, None]), scaled_e4m3(new_odd, exponent[:, None])
    )
    page = cache + (slot // BLOCK) * page_stride
    inside = slot % BLOCK
    to = (page + inside * KEY)[:, None] + tl.arange(0, KEY)[None, :]
    tl.store(to, tl.reshape(codes, (ROWS, KEY)), kept[:, None])
    scale = (page + BLOCK * KEY + inside * 4).to(tl.pointer_type(tl.float32))
    tl.store(scale, power_of_two(exponent), kept)
