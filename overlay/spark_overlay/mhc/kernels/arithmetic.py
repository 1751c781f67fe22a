"""Pieces that mHC's kernels share. ``S`` is 4 everywhere; a mixture has 24 coefficients.

Of a row's 24 projections 0-3 make the next pre-mix, 4-7 the post mix, 8-23 the residual mix. In
scratch a row has 32 columns: these, ``SQUARES`` and ``COLLAPSED`` (sums of squares of what was
projected and of the collapsed streams), and six that nobody reads.
"""

from __future__ import annotations

import triton
import triton.language as tl

MIXES = tl.constexpr(24)
SQUARES = tl.constexpr(24)
COLLAPSED = tl.constexpr(25)
COLUMNS = tl.constexpr(32)


@triton.jit
def coefficients(post, comb, row, inside, POST: tl.constexpr):
    """The 4 post and 16 residual coefficients of rows ``[R]``: 20 float32 ``[R]``; unless ``POST``
    nobody reads them."""
    if not POST:
        inside = row < 0
    p = post + row * 4
    c = comb + row * 16
    p0 = tl.load(p, inside, other=0.0)
    p1 = tl.load(p + 1, inside, other=0.0)
    p2 = tl.load(p + 2, inside, other=0.0)
    p3 = tl.load(p + 3, inside, other=0.0)
    c00 = tl.load(c, inside, other=0.0)
    c01 = tl.load(c + 1, inside, other=0.0)
    c02 = tl.load(c + 2, inside, other=0.0)
    c03 = tl.load(c + 3, inside, other=0.0)
    c10 = tl.load(c + 4, inside, other=0.0)
    c11 = tl.load(c + 5, inside, other=0.0)
    c12 = tl.load(c + 6, inside, other=0.0)
    c13 = tl.load(c + 7, inside, other=0.0)
    c20 = tl.load(c + 8, inside, other=0.0)
    c21 = tl.load(c + 9, inside, other=0.0)
    c22 = tl.load(c + 10, inside, other=0.0)
    c23 = tl.load(c + 11, inside, other=0.0)
    c30 = tl.load(c + 12, inside, other=0.0)
    c31 = tl.load(c + 13, inside, other=0.0)
    c32 = tl.load(c + 14, inside, other=0.0)
    c33 = tl.load(c + 15, inside, other=0.0)
    return (p0, p1, p2, p3, c00, c01, c02, c03, c10, c11, c12, c13, c20, c21, c22, c23,
            c30, c31, c32, c33)  # fmt: skip


@triton.jit
def stream(x, r0, r1, r2, r3, p, c0, c1, c2, c3):
    """One new stream ``[R, B]``, rounded to bf16 as the model keeps it."""
    mixed = c0[:, None] * r0 + c1[:, None] * r1 + c2[:, None] * r2 + c3[:, None] * r3
    return (mixed + p[:, None] * x).to(tl.bfloat16)


@triton.jit
def expanded(x, r0, r1, r2, r3, given):
    """All four new streams ``[R, B]`` bf16 from the output ``x`` and the old ones, float32."""
    (p0, p1, p2, p3, c00, c01, c02, c03, c10, c11, c12, c13, c20, c21, c22, c23,
     c30, c31, c32, c33) = given  # fmt: skip
    s0 = stream(x, r0, r1, r2, r3, p0, c00, c10, c20, c30)
    s1 = stream(x, r0, r1, r2, r3, p1, c01, c11, c21, c31)
    s2 = stream(x, r0, r1, r2, r3, p2, c02, c12, c22, c32)
    s3 = stream(x, r0, r1, r2, r3, p3, c03, c13, c23, c33)
    return s0, s1, s2, s3


@triton.jit
def wide(at, mask):
    return tl.load(at, mask, other=0.0).to(tl.float32)


@triton.jit
def read_streams(
    x, residual, given, row, inside, h, H: tl.constexpr, EVEN: tl.constexpr, POST: tl.constexpr
):
    """The streams ``[R, B]`` bf16 at columns ``h``; ``POST``: after the sublayer's output is
    written back to them by the ``given`` coefficients. ``EVEN``: every ``h`` is inside."""
    at = row[:, None] * (4 * H) + h[None, :]
    mask = inside[:, None]
    if not EVEN:
        mask = mask & (h < H)[None, :]
    if POST:
        r0 = wide(residual + at, mask)
        r1 = wide(residual + at + H, mask)
        r2 = wide(residual + at + 2 * H, mask)
        r3 = wide(residual + at + 3 * H, mask)
        out = wide(x + row[:, None] * H + h[None, :], mask)
        s0, s1, s2, s3 = expanded(out, r0, r1, r2, r3, given)
    else:
        s0 = tl.load(residual + at, mask, other=0.0)
        s1 = tl.load(residual + at + H, mask, other=0.0)
        s2 = tl.load(residual + at + 2 * H, mask, other=0.0)
        s3 = tl.load(residual + at + 3 * H, mask, other=0.0)
    return s0, s1, s2, s3


@triton.jit
def carried(pre, row, inside, PRE: tl.constexpr):
    """The carried pre-mix of rows ``[R]``: four float32 ``[R]``; unless ``PRE`` nobody reads it."""
    if not PRE:
        inside = row < 0
    a0 = tl.load(pre + row * 4, inside, other=0.0)
    a1 = tl.load(pre + row * 4 + 1, inside, other=0.0)
    a2 = tl.load(pre + row * 4 + 2, inside, other=0.0)
    a3 = tl.load(pre + row * 4 + 3, inside, other=0.0)
    return a0, a1, a2, a3


@triton.jit
def collapsed(s0, s1, s2, s3, weights, PRE: tl.constexpr):
    """``[R, B]`` bf16: the streams mixed by the carried pre-mix, or the first where none is."""
    if PRE:
        a0, a1, a2, a3 = weights
        mixed = a0[:, None] * s0.to(tl.float32) + a1[:, None] * s1.to(tl.float32)
        mixed += a2[:, None] * s2.to(tl.float32) + a3[:, None] * s3.to(tl.float32)
        return mixed.to(tl.bfloat16)
    else:
        return s0


@triton.jit
def beside(s0, s1, s2, s3, M: tl.constexpr, BLOCK: tl.constexpr):
    """Four ``[M, B]`` as one ``[M, 4 B]``."""
    both = tl.join(tl.join(s0, s1), tl.join(s2, s3))
    return tl.reshape(tl.permute(both, (0, 3, 2, 1)), (M, 4 * BLOCK))


@triton.jit
def held(value, HOLD: tl.constexpr):
    """``value`` bf16, which the compiler may not compute in the layout of the dot it goes to: there
    every warp would compute all of it. (The interpreter knows no instructions: not ``HOLD``.)"""
    if HOLD:
        return tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [value], dtype=tl.bfloat16, is_pure=False, pack=2
        )
    else:
        return value


@triton.jit
def project(
    acc, squares, value, fn, H: tl.constexpr, begin, n, kept, SOURCES: tl.constexpr,
    BLOCK: tl.constexpr, LIMBS: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Add one tile's share to the projections and to the rows' sums of squares.

    ``value [M, SOURCES * B]`` bf16, the sources beside each other from column ``begin`` on; rows
    ``n`` of ``fn [24, SOURCES * H]`` (``kept``: which exist). ``DOT``: on tensor cores, ``acc [M,
    N]``; a float32 ``fn`` goes as ``LIMBS`` bf16 numbers, whose sum has 8 bits more each. Else by
    multiplying and adding, ``acc [M, N, SOURCES * B]``."""
    k = tl.arange(0, SOURCES * BLOCK)
    at = fn + n[:, None] * (SOURCES * H) + (k // BLOCK * H + begin + k % BLOCK)[None, :]
    weight = tl.load(at, kept[:, None], other=0.0)
    exact = value.to(tl.float32)
    squares += tl.sum(exact * exact, 1)
    if DOT:
        for limb in tl.static_range(LIMBS):
            part = weight.to(tl.bfloat16)
            acc = tl.dot(value, tl.trans(part), acc)
            if limb + 1 < LIMBS:
                weight -= part.to(tl.float32)
    else:
        acc += exact[:, None, :] * weight.to(tl.float32)[None, :, :]
    return acc, squares


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def quarter(a, b, c, d, eps):
    """``1 / (a + b + c + d + eps)``."""
    return 1.0 / ((a + b) + (c + d) + eps)


@triton.jit
def softmax(a, b, c, d, eps):
    """Of four, and ``eps`` more each."""
    top = tl.maximum(tl.maximum(a, b), tl.maximum(c, d))
    a, b, c, d = tl.exp(a - top), tl.exp(b - top), tl.exp(c - top), tl.exp(d - top)
    of = 1.0 / ((a + b) + (c + d))
    return a * of + eps, b * of + eps, c * of + eps, d * of + eps


@triton.jit
def column(at, k: tl.constexpr, stride, inside, SHARES: tl.constexpr):
    """Column ``k`` of ``[R]`` rows, the sum of ``SHARES`` shares of 32 columns each."""
    total = tl.load(at + k * stride, inside, other=0.0)
    for share in tl.static_range(1, SHARES):
        total += tl.load(at + (share * COLUMNS + k) * stride, inside, other=0.0)
    return total


@triton.jit
def logit(at, k: tl.constexpr, stride, inside, SHARES: tl.constexpr, norm, gain, base):
    """Projection ``k`` of each row, normed, scaled and moved."""
    return column(at, k, stride, inside, SHARES) * norm * gain + tl.load(base + k)


@triton.jit
def finish_mixes(
    at, stride, inside, SHARES: tl.constexpr, row, norm, scale, base, post_out, comb_out, pre_out,
    pre_eps, sinkhorn_eps, post_gain, ITERATIONS: tl.constexpr,
):  # fmt: skip
    """Coefficients of rows ``[R]`` from their projections: of each share, column ``k`` of its 32 at
    ``k * stride``.

    One thread holds all 16 of a row's residual mix, so that no iteration of Sinkhorn's waits for
    another thread."""
    gain = tl.load(scale)
    for k in tl.static_range(4):
        value = sigmoid(logit(at, k, stride, inside, SHARES, norm, gain, base)) + pre_eps
        tl.store(pre_out + row * 4 + k, value, inside)
    gain = tl.load(scale + 1)
    for k in tl.static_range(4):
        value = sigmoid(logit(at, k + 4, stride, inside, SHARES, norm, gain, base)) * post_gain
        tl.store(post_out + row * 4 + k, value, inside)
    gain = tl.load(scale + 2)
    a0 = logit(at, 8, stride, inside, SHARES, norm, gain, base)
    a1 = logit(at, 9, stride, inside, SHARES, norm, gain, base)
    a2 = logit(at, 10, stride, inside, SHARES, norm, gain, base)
    a3 = logit(at, 11, stride, inside, SHARES, norm, gain, base)
    b0 = logit(at, 12, stride, inside, SHARES, norm, gain, base)
    b1 = logit(at, 13, stride, inside, SHARES, norm, gain, base)
    b2 = logit(at, 14, stride, inside, SHARES, norm, gain, base)
    b3 = logit(at, 15, stride, inside, SHARES, norm, gain, base)
    c0 = logit(at, 16, stride, inside, SHARES, norm, gain, base)
    c1 = logit(at, 17, stride, inside, SHARES, norm, gain, base)
    c2 = logit(at, 18, stride, inside, SHARES, norm, gain, base)
    c3 = logit(at, 19, stride, inside, SHARES, norm, gain, base)
    d0 = logit(at, 20, stride, inside, SHARES, norm, gain, base)
    d1 = logit(at, 21, stride, inside, SHARES, norm, gain, base)
    d2 = logit(at, 22, stride, inside, SHARES, norm, gain, base)
    d3 = logit(at, 23, stride, inside, SHARES, norm, gain, base)
    a0, a1, a2, a3 = softmax(a0, a1, a2, a3, sinkhorn_eps)
    b0, b1, b2, b3 = softmax(b0, b1, b2, b3, sinkhorn_eps)
    c0, c1, c2, c3 = softmax(c0, c1, c2, c3, sinkhorn_eps)
    d0, d1, d2, d3 = softmax(d0, d1, d2, d3, sinkhorn_eps)
    u0 = quarter(a0, b0, c0, d0, sinkhorn_eps)
    u1 = quarter(a1, b1, c1, d1, sinkhorn_eps)
    u2 = quarter(a2, b2, c2, d2, sinkhorn_eps)
    u3 = quarter(a3, b3, c3, d3, sinkhorn_eps)
    a0, b0, c0, d0 = a0 * u0, b0 * u0, c0 * u0, d0 * u0
    a1, b1, c1, d1 = a1 * u1, b1 * u1, c1 * u1, d1 * u1
    a2, b2, c2, d2 = a2 * u2, b2 * u2, c2 * u2, d2 * u2
    a3, b3, c3, d3 = a3 * u3, b3 * u3, c3 * u3, d3 * u3
    for _ in range(ITERATIONS - 1):
        va = quarter(a0, a1, a2, a3, sinkhorn_eps)
        vb = quarter(b0, b1, b2, b3, sinkhorn_eps)
        vc = quarter(c0, c1, c2, c3, sinkhorn_eps)
        vd = quarter(d0, d1, d2, d3, sinkhorn_eps)
        a0, a1, a2, a3 = a0 * va, a1 * va, a2 * va, a3 * va
        b0, b1, b2, b3 = b0 * vb, b1 * vb, b2 * vb, b3 * vb
        c0, c1, c2, c3 = c0 * vc, c1 * vc, c2 * vc, c3 * vc
        d0, d1, d2, d3 = d0 * vd, d1 * vd, d2 * vd, d3 * vd
        u0 = quarter(a0, b0, c0, d0, sinkhorn_eps)
        u1 = quarter(a1, b1, c1, d1, sinkhorn_eps)
        u2 = quarter(a2, b2, c2, d2, sinkhorn_eps)
        u3 = quarter(a3, b3, c3, d3, sinkhorn_eps)
        a0, b0, c0, d0 = a0 * u0, b0 * u0, c0 * u0, d0 * u0
        a1, b1, c1, d1 = a1 * u1, b1 * u1, c1 * u1, d1 * u1
        a2, b2, c2, d2 = a2 * u2, b2 * u2, c2 * u2, d2 * u2
        a3, b3, c3, d3 = a3 * u3, b3 * u3, c3 * u3, d3 * u3
    out = comb_out + row * 16
    tl.store(out, a0, inside)
    tl.store(out + 1, a1, inside)
    tl.store(out + 2, a2, inside)
    tl.store(out + 3, a3, inside)
    tl.store(out + 4, b0, inside)
    tl.store(out + 5, b1, inside)
    tl.store(out + 6, b2, inside)
    tl.store(out + 7, b3, inside)
    tl.store(out + 8, c0, inside)
    tl.store(out + 9, c1, inside)
    tl.store(out + 10, c2, inside)
    tl.store(out + 11, c3, inside)
    tl.store(out + 12, d0, inside)
    tl.store(out + 13, d1, inside)
    tl.store(out + 14, d2, inside)
    tl.store(out + 15, d3, inside)
