"""Two launches for any number of rows: streams and projection, then coefficients and norm.

The first shares rows and hidden size out among programs: each computes the new streams of its tile
once, stores them, adds its share of the projection on tensor cores and leaves the collapsed tile in
the output, rounded to bf16 as the model keeps it before its norm. The second adds the shares: some
programs make coefficients, a thread a row; the others scale a row in place.
"""

from __future__ import annotations

import triton
import triton.language as tl

from spark_overlay.mhc.kernels.arithmetic import (
    COLLAPSED,
    COLUMNS,
    MIXES,
    SQUARES,
    carried,
    coefficients,
    collapsed,
    column,
    finish_mixes,
    loaded,
    pair,
    project,
    renewed,
    weights,
)


@triton.jit(do_not_specialize=["tokens"])
def streams_and_projection(
    x, residual, post, comb, pre, fn, streams_out, input_out, mean_out, partials, tokens,
    H: tl.constexpr, SOURCES: tl.constexpr, POST: tl.constexpr, PRE: tl.constexpr,
    MEAN: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr,
    LIMBS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Grid ``(ceil(tokens / ROWS), SPLITS)``; ``partials`` float32 ``[SPLITS, 32, tokens]``."""
    each: tl.constexpr = H // SPLITS
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    split = tl.program_id(1)
    inside = row < tokens
    kept = inside[:, None]
    n = tl.arange(0, COLUMNS)
    real = n < MIXES
    high = tl.zeros([ROWS, COLUMNS], tl.float32)
    low, high1, low1 = high, high, high
    squares = tl.zeros([ROWS], tl.float32)
    collapse = tl.zeros([ROWS], tl.float32)
    given = coefficients(post, comb, row, inside, POST)
    before = carried(pre, row, inside, PRE)
    for step in tl.range(0, each // BLOCK, num_stages=STAGES):
        first = split * each + step * BLOCK
        h = first + tl.arange(0, BLOCK)
        at = row[:, None] * H + h[None, :]
        old = loaded(x, residual, row, inside, h, H, True, POST)
        if SOURCES == 4:
            weight = weights(fn, n, real, H, first, 4, 0, 2, BLOCK)
            weight1 = weights(fn, n, real, H, first, 4, 2, 2, BLOCK)
            s0, s1, s2, s3 = renewed(old, given, POST)
            value, value1 = pair(s0, s1, ROWS, BLOCK), pair(s2, s3, ROWS, BLOCK)
            high, low, squares = project(high, low, squares, value, weight, LIMBS)
            high1, low1, squares = project(high1, low1, squares, value1, weight1, LIMBS)
        else:
            weight = weights(fn, n, real, H, first, 1, 0, 1, BLOCK)
            s0, s1, s2, s3 = renewed(old, given, POST)
            value = tl.load(x + at, kept, other=0.0)
            high, low, squares = project(high, low, squares, value, weight, LIMBS)
        if POST:
            to = streams_out + row[:, None] * (4 * H) + h[None, :]
            tl.store(to, s0, kept)
            tl.store(to + H, s1, kept)
            tl.store(to + 2 * H, s2, kept)
            tl.store(to + 3 * H, s3, kept)
        if MEAN:
            total = (s0.to(tl.float32) + s1.to(tl.float32)) + s2.to(tl.float32)
            tl.store(mean_out + at, ((total + s3.to(tl.float32)) * 0.25).to(tl.bfloat16), kept)
        mixed = collapsed(s0, s1, s2, s3, before, PRE)
        tl.store(input_out + at, mixed, kept)
        exact = mixed.to(tl.float32)
        collapse += tl.sum(exact * exact, 1)
    mine = partials + split * (COLUMNS * tokens)
    tl.store(
        mine + n[None, :] * tokens + row[:, None],
        (high + high1) + (low + low1),
        kept & real[None, :],
    )
    tl.store(mine + SQUARES * tokens + row, squares, inside)
    tl.store(mine + COLLAPSED * tokens + row, collapse, inside)


@triton.jit
def _coefficients_role(
    program, partials, scale, base, post_out, comb_out, pre_out, tokens,
    rms_eps, pre_eps, sinkhorn_eps, post_gain,
    WIDE: tl.constexpr, ITERATIONS: tl.constexpr, SPLITS: tl.constexpr, MIX_ROWS: tl.constexpr,
):  # fmt: skip
    row = program * MIX_ROWS + tl.arange(0, MIX_ROWS)
    inside = row < tokens
    finish_mixes(
        partials + row, tokens, inside, SPLITS, row, WIDE, rms_eps, scale, base, post_out, comb_out,
        pre_out, pre_eps, sinkhorn_eps, post_gain, ITERATIONS,
    )  # fmt: skip


@triton.jit
def _norm_role(
    row, partials, weight, input_out, tokens, norm_eps,
    H: tl.constexpr, SPLITS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    one = row + tl.arange(0, 1)
    inside = one >= 0
    squares = column(partials + one, COLLAPSED, tokens, inside, SPLITS)
    norm = tl.rsqrt(squares * (1.0 / H) + norm_eps)
    for begin in tl.static_range(0, H, CHUNK):
        h = begin + tl.arange(0, CHUNK)
        at = one[:, None] * H + h[None, :]
        kept = inside[:, None] & (h < H)[None, :]
        value = tl.load(input_out + at, kept, other=0.0).to(tl.float32)
        gain = tl.load(weight + h, h < H, other=0.0).to(tl.float32)
        tl.store(input_out + at, (value * norm[:, None] * gain[None, :]).to(tl.bfloat16), kept)


@triton.jit(do_not_specialize=["tokens"])
def coefficients_and_norm(
    partials, scale, base, weight, post_out, comb_out, pre_out, input_out, tokens,
    rms_eps, pre_eps, sinkhorn_eps, post_gain, norm_eps,
    H: tl.constexpr, SOURCES: tl.constexpr, NORM: tl.constexpr, ITERATIONS: tl.constexpr,
    SPLITS: tl.constexpr, MIX_ROWS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Grid: ``ceil(tokens / MIX_ROWS)`` programs for coefficients, then with ``NORM`` one a row."""
    program = tl.program_id(0)
    mixing = tl.cdiv(tokens, MIX_ROWS)
    if program < mixing:
        _coefficients_role(
            program, partials, scale, base, post_out, comb_out, pre_out, tokens,
            rms_eps, pre_eps, sinkhorn_eps, post_gain, SOURCES * H, ITERATIONS, SPLITS, MIX_ROWS,
        )  # fmt: skip
    elif NORM:
        _norm_role(
            program - mixing, partials, weight, input_out, tokens, norm_eps, H, SPLITS, CHUNK
        )
