"""Pieces that mHC's kernels share. ``S`` is 4 everywhere; a mixture has 24 coefficients.

Of a row's 24 projections 0-3 make the next pre-mix, 4-7 the post mix, 8-23 the residual mix. In
scratch a row has 32 columns: these, ``SQUARES`` and ``COLLAPSED`` (sums of squares of what was
projected and of the collapsed streams), and six that nobody reads.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

#: The interpreter knows no instructions: there the plain forms compute.
COMPILED = tl.constexpr(os.environ.get("TRITON_INTERPRET") != "1")

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
def loaded(x, residual, row, inside, h, H: tl.constexpr, EVEN: tl.constexpr, POST: tl.constexpr):
    """The old streams ``[R, B]`` bf16 at columns ``h``, and with ``POST`` the sublayer's output
    (else the first stream again). ``EVEN``: every ``h`` is inside."""
    at = residual + row[:, None] * (4 * H) + h[None, :]
    mask = inside[:, None]
    if not EVEN:
        mask = mask & (h < H)[None, :]
    r0 = tl.load(at, mask, other=0.0)
    r1 = tl.load(at + H, mask, other=0.0)
    r2 = tl.load(at + 2 * H, mask, other=0.0)
    r3 = tl.load(at + 3 * H, mask, other=0.0)
    out = r0
    if POST:
        out = tl.load(x + row[:, None] * H + h[None, :], mask, other=0.0)
    return r0, r1, r2, r3, out


@triton.jit
def renewed(old, given, POST: tl.constexpr):
    """The streams ``[R, B]`` bf16; ``POST``: after the sublayer's output is written back to them by
    the ``given`` coefficients."""
    r0, r1, r2, r3, out = old
    if POST:
        wide = tl.float32
        return expanded(out.to(wide), r0.to(wide), r1.to(wide), r2.to(wide), r3.to(wide), given)
    else:
        return r0, r1, r2, r3


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
def held(value):
    """``value`` bf16, which the compiler may not compute in the layout of the dot it goes to: there
    every warp would compute all of it."""
    if COMPILED:
        return tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [value], dtype=tl.bfloat16, is_pure=False, pack=2
        )
    else:
        return value


@triton.jit
def pair(s0, s1, M: tl.constexpr, BLOCK: tl.constexpr):
    """Two ``[M, B]`` beside each other, ``[M, 2 B]``: half the steps of one dot, of two at once."""
    return held(tl.reshape(tl.permute(tl.join(s0, s1), (0, 2, 1)), (M, 2 * BLOCK)))


@triton.jit
def weights(fn, n, kept, H: tl.constexpr, begin, SOURCES: tl.constexpr, FIRST: tl.constexpr,
            COUNT: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Columns from ``begin`` of ``COUNT`` sources of rows ``n`` of ``fn [24, SOURCES * H]``, beside
    each other: ``[N, COUNT * B]``; ``kept``: which rows exist."""
    k = tl.arange(0, COUNT * BLOCK)
    at = fn + n[:, None] * (SOURCES * H) + ((FIRST + k // BLOCK) * H + begin + k % BLOCK)[None, :]
    return tl.load(at, kept[:, None], other=0.0)


@triton.jit
def project(high, low, squares, value, weight, LIMBS: tl.constexpr):
    """Add one tile's share to the projections, on tensor cores.

    ``value [M, K]`` bf16, ``weight [N, K]`` float32 or bf16. A float32 goes as ``LIMBS`` bf16
    numbers, whose sum has 8 bits more each; ``high [M, N]`` sums the first, ``low`` the others, so
    that neither waits for the other."""
    exact = value.to(tl.float32)
    squares += tl.sum(exact * exact, 1)
    part = weight.to(tl.bfloat16)
    high = tl.dot(value, tl.trans(part), high)
    for _ in tl.static_range(1, LIMBS):
        weight -= part.to(tl.float32)
        part = weight.to(tl.bfloat16)
        low = tl.dot(value, tl.trans(part), low)
    return high, low, squares


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def reciprocal(x):
    """To a unit in the last place, of a number between 2^-126 and 2^126."""
    if COMPILED:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return 1.0 / x


@triton.jit
def prefetch(at):
    """Have L2 fetch the lines of addresses ``at``, a block of pointers, and wait for nothing."""
    if COMPILED:
        tl.inline_asm_elementwise(
            "{ prefetch.global.L2 [$1]; mov.b32 $0, 0; }", "=r,l", [at.to(tl.int64)],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def softmax(a, b, c, d, eps):
    """Of four, and ``eps`` more each."""
    top = tl.maximum(tl.maximum(a, b), tl.maximum(c, d))
    a, b, c, d = tl.exp(a - top), tl.exp(b - top), tl.exp(c - top), tl.exp(d - top)
    of = reciprocal((a + b) + (c + d))
    return a * of + eps, b * of + eps, c * of + eps, d * of + eps


@triton.jit
def lines(a, b, c, d, x0, x1, x2, x3, before, eps):
    """One line ``a .. d`` of Sinkhorn's first matrix; the crossing lines have factors ``x``.
    A step divides the line by its sum plus ``eps``: where the line's own factor was ``1 / before``
    it becomes one by what is returned."""
    return ((eps * before + a * x0) + b * x1) + (c * x2 + d * x3)


@triton.jit
def reciprocals(a, b, c, d):
    """Of four, by two: the unit that divides is slow."""
    ab, cd = reciprocal(a * b), reciprocal(c * d)
    return b * ab, a * ab, d * cd, c * cd


@triton.jit
def column(at, k: tl.constexpr, stride, inside, SHARES: tl.constexpr):
    """Column ``k`` of ``[R]`` rows, the sum of ``SHARES`` shares of 32 columns each."""
    total = tl.load(at + k * stride, inside, other=0.0)
    for share in tl.static_range(1, SHARES):
        total += tl.load(at + (share * COLUMNS + k) * stride, inside, other=0.0)
    return total


@triton.jit
def four(at, k: tl.constexpr, stride, inside, SHARES: tl.constexpr):
    a = column(at, k, stride, inside, SHARES)
    b = column(at, k + 1, stride, inside, SHARES)
    c = column(at, k + 2, stride, inside, SHARES)
    d = column(at, k + 3, stride, inside, SHARES)
    return a, b, c, d


@triton.jit
def moved(given, gain, base):
    """Four projections, scaled and moved."""
    a, b, c, d = given
    return (
        a * gain + tl.load(base),
        b * gain + tl.load(base + 1),
        c * gain + tl.load(base + 2),
        d * gain + tl.load(base + 3),
    )


@triton.jit
def store_four(to, a, b, c, d, inside):
    tl.store(to, a, inside)
    tl.store(to + 1, b, inside)
    tl.store(to + 2, c, inside)
    tl.store(to + 3, d, inside)


@triton.jit
def finish_mixes(
    at, stride, inside, SHARES: tl.constexpr, row, wide, rms_eps, scale, base, post_out, comb_out,
    pre_out, pre_eps, sinkhorn_eps, post_gain, ITERATIONS: tl.constexpr,
):  # fmt: skip
    """Coefficients of rows ``[R]`` from their projections: of each share, column ``k`` of its 32 at
    ``k * stride``; ``wide``: how many values a row's projections are made from.

    Everything is loaded before anything is stored. One thread holds all 16 of a row's residual mix,
    as its start and a factor for each row and column, so that no iteration of Sinkhorn's waits for
    another thread."""
    pre = four(at, 0, stride, inside, SHARES)
    post = four(at, 4, stride, inside, SHARES)
    a = four(at, 8, stride, inside, SHARES)
    b = four(at, 12, stride, inside, SHARES)
    c = four(at, 16, stride, inside, SHARES)
    d = four(at, 20, stride, inside, SHARES)
    norm = tl.rsqrt(column(at, SQUARES, stride, inside, SHARES) / wide + rms_eps)
    pre = moved(pre, norm * tl.load(scale), base)
    post = moved(post, norm * tl.load(scale + 1), base + 4)
    gain = norm * tl.load(scale + 2)
    a0, a1, a2, a3 = moved(a, gain, base + 8)
    b0, b1, b2, b3 = moved(b, gain, base + 12)
    c0, c1, c2, c3 = moved(c, gain, base + 16)
    d0, d1, d2, d3 = moved(d, gain, base + 20)
    a0, a1, a2, a3 = softmax(a0, a1, a2, a3, sinkhorn_eps)
    b0, b1, b2, b3 = softmax(b0, b1, b2, b3, sinkhorn_eps)
    c0, c1, c2, c3 = softmax(c0, c1, c2, c3, sinkhorn_eps)
    d0, d1, d2, d3 = softmax(d0, d1, d2, d3, sinkhorn_eps)
    one = a0 * 0.0 + 1.0
    wa, wb, wc, wd = one, one, one, one
    ua, ub, uc, ud = one, one, one, one
    eps = sinkhorn_eps
    z0 = lines(a0, b0, c0, d0, ua, ub, uc, ud, one, eps)
    z1 = lines(a1, b1, c1, d1, ua, ub, uc, ud, one, eps)
    z2 = lines(a2, b2, c2, d2, ua, ub, uc, ud, one, eps)
    z3 = lines(a3, b3, c3, d3, ua, ub, uc, ud, one, eps)
    v0, v1, v2, v3 = reciprocals(z0, z1, z2, z3)
    for _ in range(ITERATIONS - 1):
        wa = lines(a0, a1, a2, a3, v0, v1, v2, v3, wa, eps)
        wb = lines(b0, b1, b2, b3, v0, v1, v2, v3, wb, eps)
        wc = lines(c0, c1, c2, c3, v0, v1, v2, v3, wc, eps)
        wd = lines(d0, d1, d2, d3, v0, v1, v2, v3, wd, eps)
        ua, ub, uc, ud = reciprocals(wa, wb, wc, wd)
        z0 = lines(a0, b0, c0, d0, ua, ub, uc, ud, z0, eps)
        z1 = lines(a1, b1, c1, d1, ua, ub, uc, ud, z1, eps)
        z2 = lines(a2, b2, c2, d2, ua, ub, uc, ud, z2, eps)
        z3 = lines(a3, b3, c3, d3, ua, ub, uc, ud, z3, eps)
        v0, v1, v2, v3 = reciprocals(z0, z1, z2, z3)
    p0, p1, p2, p3 = pre
    p0, p1, p2, p3 = sigmoid(p0), sigmoid(p1), sigmoid(p2), sigmoid(p3)
    store_four(pre_out + row * 4, p0 + pre_eps, p1 + pre_eps, p2 + pre_eps, p3 + pre_eps, inside)
    p0, p1, p2, p3 = post
    p0, p1, p2, p3 = sigmoid(p0), sigmoid(p1), sigmoid(p2), sigmoid(p3)
    g = post_gain
    store_four(post_out + row * 4, p0 * g, p1 * g, p2 * g, p3 * g, inside)
    out = comb_out + row * 16
    store_four(out, a0 * ua * v0, a1 * ua * v1, a2 * ua * v2, a3 * ua * v3, inside)
    store_four(out + 4, b0 * ub * v0, b1 * ub * v1, b2 * ub * v2, b3 * ub * v3, inside)
    store_four(out + 8, c0 * uc * v0, c1 * uc * v1, c2 * uc * v2, c3 * uc * v3, inside)
    store_four(out + 12, d0 * ud * v0, d1 * ud * v1, d2 * ud * v2, d3 * ud * v3, inside)
