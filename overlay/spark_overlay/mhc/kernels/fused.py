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
    beside,
    carried,
    coefficients,
    collapsed,
    finish_mixes,
    held,
    project,
    read_streams,
)


@triton.jit
def _row_role(
    row, x, residual, post, comb, pre, weight, streams_out, input_out, mean_out, norm_eps,
    H: tl.constexpr, CHUNK: tl.constexpr, POST: tl.constexpr, PRE: tl.constexpr,
    NORM: tl.constexpr, MEAN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    one = row + tl.arange(0, 1)
    inside = one >= 0
    squares = tl.zeros([1, CHUNK], tl.float32)
    even: tl.constexpr = H % CHUNK == 0
    given = coefficients(post, comb, one, inside, POST)
    weights = carried(pre, one, inside, PRE)
    # Pipelined: a stage's loads do not wait for another's stores.
    for begin in tl.range(0, H, CHUNK, num_stages=STAGES):
        h = begin + tl.arange(0, CHUNK)
        s0, s1, s2, s3 = read_streams(x, residual, given, one, inside, h, H, even, POST)
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
        value = collapsed(s0, s1, s2, s3, weights, PRE)
        tl.store(input_out + at, value, kept)
        exact = value.to(tl.float32)
        squares += exact * exact
    if NORM:
        tl.debug_barrier()
        norm = tl.rsqrt(tl.sum(squares, 1) * (1.0 / H) + norm_eps)
        for begin in tl.static_range(0, H, CHUNK):
            h = begin + tl.arange(0, CHUNK)
            at = one[:, None] * H + h[None, :]
            kept = inside[:, None] & (h < H)[None, :]
            value = tl.load(input_out + at, kept, other=0.0).to(tl.float32)
            gain = tl.load(weight + h, h < H, other=0.0).to(tl.float32)
            tl.store(input_out + at, (value * norm[:, None] * gain[None, :]).to(tl.bfloat16), kept)


@triton.jit
def _add_and_finish(
    group, tokens, partials, totals, scale, base, post_out, comb_out, pre_out,
    rms_eps, pre_eps, sinkhorn_eps, post_gain,
    WIDE: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr, ITERATIONS: tl.constexpr,
    FOLD: tl.constexpr,
):  # fmt: skip
    size: tl.constexpr = ROWS * COLUMNS
    place = tl.arange(0, size)
    live = (group * ROWS + place // COLUMNS < tokens) & (place % COLUMNS <= SQUARES)
    total = tl.zeros([FOLD, size], tl.float32)
    for begin in tl.static_range(0, SPLITS, FOLD):
        at = partials + (group * SPLITS + begin + tl.arange(0, FOLD))[:, None] * size
        # Not by way of L1, which another program's stores do not reach.
        total += tl.load(at + place[None, :], live[None, :], other=0.0, cache_modifier=".cg")
    tl.store(totals + group * size + place, tl.sum(total, 0))
    tl.debug_barrier()
    final = tl.arange(0, ROWS)
    row = group * ROWS + final
    inside = row < tokens
    at = totals + group * size + final * COLUMNS
    squares = tl.load(at + SQUARES, inside, other=1.0)
    norm = tl.rsqrt(squares * (1.0 / WIDE) + rms_eps)
    finish_mixes(
        at, 1, inside, 1, row, norm, scale, base, post_out, comb_out, pre_out,
        pre_eps, sinkhorn_eps, post_gain, ITERATIONS,
    )  # fmt: skip


@triton.jit
def _projection_role(
    group, split, tile, tokens, x, residual, post, comb, fn, partials, totals, counters,
    scale, base, post_out, comb_out, pre_out, rms_eps, pre_eps, sinkhorn_eps, post_gain,
    H: tl.constexpr, SOURCES: tl.constexpr, POST: tl.constexpr, ROWS: tl.constexpr,
    TILE_N: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr, DOT: tl.constexpr,
    LIMBS: tl.constexpr, ITERATIONS: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    FOLD: tl.constexpr, HOLD: tl.constexpr,
):  # fmt: skip
    each: tl.constexpr = H // SPLITS
    even: tl.constexpr = each % BLOCK == 0
    lane = tl.arange(0, M)
    row = group * ROWS + lane
    inside = (lane < ROWS) & (row < tokens)
    n = tl.arange(0, N)
    kept = n < TILE_N
    if DOT:
        acc = tl.zeros([M, N], tl.float32)
    else:
        acc = tl.zeros([M, N, SOURCES * BLOCK], tl.float32)
    squares = tl.zeros([M], tl.float32)
    source = fn + tile * (TILE_N * SOURCES * H)
    given = coefficients(post, comb, row, inside, POST)
    for step in range(each // BLOCK):
        first = split * each + step * BLOCK
        h = first + tl.arange(0, BLOCK)
        if SOURCES == 4:
            s0, s1, s2, s3 = read_streams(x, residual, given, row, inside, h, H, even, POST)
            value = held(beside(s0, s1, s2, s3, M, BLOCK), HOLD)
        else:
            value = tl.load(x + row[:, None] * H + h[None, :], inside[:, None], other=0.0)
        acc, squares = project(
            acc, squares, value, source, H, first, n, kept, SOURCES, BLOCK, LIMBS, DOT
        )
    if not DOT:
        acc = tl.sum(acc, 2)

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
    TILE_N: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr, DOT: tl.constexpr,
    LIMBS: tl.constexpr, M: tl.constexpr, N: tl.constexpr, FOLD: tl.constexpr,
    CHUNK: tl.constexpr, STAGES: tl.constexpr, HOLD: tl.constexpr,
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
            H, SOURCES, POST, ROWS, TILE_N, SPLITS, BLOCK, DOT, LIMBS, ITERATIONS, M, N, FOLD,
            HOLD,
        )  # fmt: skip
    else:
        _row_role(
            program - projections, x, residual, post, comb, pre, weight, streams_out, input_out,
            mean_out, norm_eps, H, CHUNK, POST, PRE, NORM, MEAN, STAGES,
        )  # fmt: skip
