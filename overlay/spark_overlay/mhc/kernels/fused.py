"""One launch for up to 64 rows: write-back, projection, coefficients, collapse and norm.

Programs have two roles. ``projection`` programs share out the weight ``fn`` (a slice of the hidden
size and of the coefficients each), compute the new streams of their slice for ``ROWS`` rows and
leave partial sums; the last of a row group to arrive adds them, always in the same order, and makes
the coefficients. It leaves its counter at zero. Nobody waits for another program. ``row`` programs
compute one whole row: they store its streams, collapse it and normalise the result.

The streams are computed twice, which at 64 rows costs 3 MB of reads from L2, and spares the norm
the wait for the projection.
"""

from __future__ import annotations

import triton
import triton.language as tl

from spark_overlay.mhc.kernels.arithmetic import (
    COLUMNS,
    MIXES,
    SQUARES,
    carried,
    coefficients,
    collapsed,
    finish_mixes,
    loaded,
    pair,
    prefetch,
    project,
    renewed,
    weights,
)


@triton.jit
def _row_role(
    row, x, residual, post, comb, pre, weight, streams_out, input_out, mean_out, norm_eps,
    H: tl.constexpr, CHUNK: tl.constexpr, POST: tl.constexpr, PRE: tl.constexpr,
    NORM: tl.constexpr, MEAN: tl.constexpr, STAGES: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    one = row + tl.arange(0, 1)
    inside = one >= 0
    if NORM:
        prefetch(weight + tl.arange(0, PARTS * CHUNK // 64) * 64 % H)
    squares = tl.zeros([1, CHUNK], tl.float32)
    even: tl.constexpr = H % CHUNK == 0
    given = coefficients(post, comb, one, inside, POST)
    before = carried(pre, one, inside, PRE)
    # Pipelined: a stage's loads do not wait for another's stores.
    for begin in tl.range(0, H, CHUNK, num_stages=STAGES):
        h = begin + tl.arange(0, CHUNK)
        old = loaded(x, residual, one, inside, h, H, even, POST)
        s0, s1, s2, s3 = renewed(old, given, POST)
        at = one[:, None] * H + h[None, :]
        kept = inside[:, None] & (h < H)[None, :]
        if POST:
            to = streams_out + one[:, None] * (4 * H) + h[None, :]
            tl.store(to, s0, kept)
            tl.store(to + H, s1, kept)
            tl.store(to + 2 * H, s2, kept)
            tl.store(to + 3 * H, s3, kept)
        if MEAN:
            total = (s0.to(tl.float32) + s1.to(tl.float32)) + s2.to(tl.float32)
            tl.store(mean_out + at, ((total + s3.to(tl.float32)) * 0.25).to(tl.bfloat16), kept)
        value = collapsed(s0, s1, s2, s3, before, PRE)
        tl.store(input_out + at, value, kept)
        exact = value.to(tl.float32)
        squares += exact * exact
    if NORM:
        tl.debug_barrier()
        norm = tl.rsqrt(tl.sum(squares, 1) * (1.0 / H) + norm_eps)
        # All at once: loads of one chunk would wait for the stores of another.
        h = tl.arange(0, PARTS)[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
        value = tl.load(input_out + row * H + h, h < H, other=0.0).to(tl.float32)
        gain = tl.load(weight + h, h < H, other=0.0).to(tl.float32)
        tl.store(input_out + row * H + h, (value * norm[:, None] * gain).to(tl.bfloat16), h < H)


@triton.jit
def _add_and_finish(
    group, tokens, partials, totals, scale, base, post_out, comb_out, pre_out,
    rms_eps, pre_eps, sinkhorn_eps, post_gain,
    WIDE: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr, ITERATIONS: tl.constexpr,
    FOLD: tl.constexpr,
):  # fmt: skip
    size: tl.constexpr = ROWS * COLUMNS
    place = tl.arange(0, size)
    # The columns that nobody wrote are read, too, and not used.
    live = group * ROWS + place // COLUMNS < tokens
    total = tl.zeros([FOLD, size], tl.float32)
    for begin in tl.static_range(0, SPLITS, FOLD):
        at = partials + (group * SPLITS + begin + tl.arange(0, FOLD))[:, None] * size
        # Not by way of L1, which another program's stores do not reach.
        total += tl.load(at + place[None, :], live[None, :], other=0.0, cache_modifier=".cg")
    tl.store(totals + group * size + place, tl.sum(total, 0))
    tl.debug_barrier()
    final = tl.arange(0, ROWS)
    row = group * ROWS + final
    finish_mixes(
        totals + group * size + final * COLUMNS, 1, row < tokens, 1, row, WIDE, rms_eps, scale,
        base, post_out, comb_out, pre_out, pre_eps, sinkhorn_eps, post_gain, ITERATIONS,
    )  # fmt: skip


@triton.jit
def _projection_role(
    group, split, tile, tokens, x, residual, post, comb, fn, partials, totals, counters,
    scale, base, post_out, comb_out, pre_out, rms_eps, pre_eps, sinkhorn_eps, post_gain,
    H: tl.constexpr, SOURCES: tl.constexpr, POST: tl.constexpr, ROWS: tl.constexpr,
    TILE_N: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr,
    LOADS: tl.constexpr, LIMBS: tl.constexpr, ITERATIONS: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, FOLD: tl.constexpr,
):  # fmt: skip
    each: tl.constexpr = H // SPLITS
    even: tl.constexpr = each % BLOCK == 0
    lane = tl.arange(0, M)
    row = group * ROWS + lane
    inside = (lane < ROWS) & (row < tokens)
    n = tl.arange(0, N)
    kept = n < TILE_N
    high = tl.zeros([M, N], tl.float32)
    low, high1, low1 = high, high, high
    squares = tl.zeros([M], tl.float32)
    source = fn + tile * (TILE_N * SOURCES * H)
    # The last to arrive reads them when nothing else is left to wait for.
    prefetch(base + tl.arange(0, COLUMNS) % MIXES)
    prefetch(scale + tl.arange(0, COLUMNS) % 3)
    given = coefficients(post, comb, row, inside, POST)
    # Pipelined as the rows' are: with a stage more than steps, every load is under way at once.
    for step in tl.range(0, each // BLOCK, num_stages=LOADS):
        first = split * each + step * BLOCK
        h = first + tl.arange(0, BLOCK)
        if SOURCES == 4:
            weight = weights(source, n, kept, H, first, 4, 0, 2, BLOCK)
            weight1 = weights(source, n, kept, H, first, 4, 2, 2, BLOCK)
            old = loaded(x, residual, row, inside, h, H, even, POST)
            s0, s1, s2, s3 = renewed(old, given, POST)
            value, value1 = pair(s0, s1, M, BLOCK), pair(s2, s3, M, BLOCK)
            high, low, squares = project(high, low, squares, value, weight, LIMBS)
            high1, low1, squares = project(high1, low1, squares, value1, weight1, LIMBS)
        else:
            weight = weights(source, n, kept, H, first, 1, 0, 1, BLOCK)
            value = tl.load(x + row[:, None] * H + h[None, :], inside[:, None], other=0.0)
            high, low, squares = project(high, low, squares, value, weight, LIMBS)
    acc = (high + high1) + (low + low1)

    size: tl.constexpr = ROWS * COLUMNS
    mine = partials + (group * SPLITS + split) * size
    to = mine + lane[:, None] * COLUMNS + tile * TILE_N + n[None, :]
    tl.store(to, acc, inside[:, None] & kept[None, :])
    if tile == 0:
        tl.store(mine + lane * COLUMNS + SQUARES, squares, inside)

    # Every thread's sums are stored before one of them says so to the whole GPU.
    tl.debug_barrier()
    arrived = tl.atomic_add(counters + group, 1, sem="acq_rel")
    if arrived == SPLITS * (MIXES // TILE_N) - 1:
        tl.store(counters + group, 0)
        _add_and_finish(
            group, tokens, partials, totals, scale, base, post_out, comb_out, pre_out,
            rms_eps, pre_eps, sinkhorn_eps, post_gain, SOURCES * H, ROWS, SPLITS, ITERATIONS, FOLD,
        )  # fmt: skip


@triton.jit(do_not_specialize=["tokens"])
def one_launch(
    x, residual, post, comb, pre, fn, scale, base, weight, streams_out, post_out, comb_out,
    input_out, pre_out, mean_out, partials, totals, counters, tokens, rms_eps, pre_eps,
    sinkhorn_eps, post_gain, norm_eps,
    H: tl.constexpr, SOURCES: tl.constexpr, POST: tl.constexpr, PRE: tl.constexpr,
    NORM: tl.constexpr, MEAN: tl.constexpr, ITERATIONS: tl.constexpr, ROWS: tl.constexpr,
    TILE_N: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr, LOADS: tl.constexpr,
    LIMBS: tl.constexpr, M: tl.constexpr, N: tl.constexpr, FOLD: tl.constexpr,
    CHUNK: tl.constexpr, STAGES: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Grid: ``ceil(tokens / ROWS) * SPLITS * (24 / TILE_N)`` projection programs, then ``tokens``
    row programs. ``partials`` float32 ``[groups, SPLITS, ROWS, 32]`` and ``totals`` ``[groups,
    ROWS, 32]`` of any contents, ``counters`` int32 ``[groups]`` zero before and after."""
    tiles: tl.constexpr = MIXES // TILE_N
    program = tl.program_id(0)
    projections = tl.cdiv(tokens, ROWS) * (SPLITS * tiles)
    if program < projections:
        group = program // (SPLITS * tiles)
        of_group = program % (SPLITS * tiles)
        _projection_role(
            group, of_group % SPLITS, of_group // SPLITS, tokens, x, residual, post, comb, fn,
            partials, totals, counters, scale, base, post_out, comb_out, pre_out,
            rms_eps, pre_eps, sinkhorn_eps, post_gain,
            H, SOURCES, POST, ROWS, TILE_N, SPLITS, BLOCK, LOADS, LIMBS, ITERATIONS, M, N, FOLD,
        )  # fmt: skip
    else:
        _row_role(
            program - projections, x, residual, post, comb, pre, weight, streams_out, input_out,
            mean_out, norm_eps, H, CHUNK, POST, PRE, NORM, MEAN, STAGES, PARTS,
        )  # fmt: skip
