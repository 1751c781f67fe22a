"""A sublayer's output written back to the streams, and nothing else."""

from __future__ import annotations

import triton
import triton.language as tl

from spark_overlay.mhc.kernels.arithmetic import coefficients, loaded, renewed


@triton.jit
def write_back(x, residual, post, comb, out, H: tl.constexpr, CHUNK: tl.constexpr):
    """Grid ``(tokens, ceil(H / CHUNK))``: ``out [T, 4, H]`` bf16."""
    one = tl.program_id(0) + tl.arange(0, 1)
    inside = one >= 0
    h = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    given = coefficients(post, comb, one, inside, True)
    old = loaded(x, residual, one, inside, h, H, False, True)
    s0, s1, s2, s3 = renewed(old, given, True)
    kept = inside[:, None] & (h < H)[None, :]
    to = out + one[:, None] * (4 * H) + h[None, :]
    tl.store(to, s0, kept)
    tl.store(to + H, s1, kept)
    tl.store(to + 2 * H, s2, kept)
    tl.store(to + 3 * H, s3, kept)
