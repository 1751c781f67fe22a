"""Records of whole requests, dequantised into bf16 rows: what a prefill over a workspace reads."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from spark_overlay.attention.format import DATA_BYTES, HEAD_DIM, RECORD_BYTES, SCALE_BYTES
from spark_overlay.attention.kernels.numbers import e4m3, ue8m0
from spark_overlay.early import starts_early

#: Rows of a program, its warps, and how its stores go through the caches. 2 KB of shared memory, 48
#: (SM120) to 72 (SM86) registers.
ROWS, WARPS, STORE = 8, 2, ".cs"


@triton.jit(do_not_specialize=["columns"])
def _gather(
    out,
    out_request,
    out_row,
    cache,
    page_stride,
    seq_lens,
    gather_lens,
    block_table,
    table_row,
    columns,
    offset,
    HAS_LENGTHS: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGN: tl.constexpr,
    OUT_ALIGN: tl.constexpr,
    ROWS: tl.constexpr,
    STORE: tl.constexpr,
    EARLY: tl.constexpr = False,
):
    if EARLY:
        gdc_launch_dependents()
    request = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    to = tl.multiple_of(request * out_request + (row + offset).to(tl.int64) * out_row, OUT_ALIGN)
    if EARLY:  # nothing is read or written before this
        gdc_wait()
    length = tl.load(seq_lens + request)
    count = length
    position = row
    if HAS_LENGTHS:
        count = tl.load(gather_lens + request)
        position = tl.maximum(length - count + row, 0)
    keep = row < count
    # Asked for while the length is under way: within the table, though perhaps beyond the request,
    # of whose pages none is followed.
    asked = position // BLOCK < columns
    page = tl.load(block_table + request * table_row + position // BLOCK, mask=asked, other=0)
    place = page.to(tl.int64) * page_stride
    data = tl.multiple_of(place + position % BLOCK * 576, ALIGN)
    scales = place + BLOCK * 576 + position % BLOCK * 8

    column = tl.arange(0, 512)
    # The last 64 codes are bytes of the RoPE values: loaded with the rest, and never used.
    codes = tl.load(cache + data[:, None] + column[None, :], mask=keep[:, None], other=0)
    group = tl.arange(0, 8)
    scale = ue8m0(tl.load(cache + scales[:, None] + group[None, :], mask=keep[:, None], other=0))
    tail = tl.arange(0, 64)
    rope = (cache + data[:, None] + 448).to(tl.pointer_type(tl.bfloat16)) + tail[None, :]
    rope = tl.load(rope, mask=keep[:, None])
    tiles = tl.reshape(e4m3(codes), (ROWS, 8, 64)) * scale[:, :, None]
    values = tl.reshape(tiles, (ROWS, 512)).to(tl.bfloat16)
    kept = keep[:, None] & (column < 448)[None, :]
    tl.store(out + to[:, None] + column[None, :], values, mask=kept, cache_modifier=STORE)
    tl.store(
        out + to[:, None] + 448 + tail[None, :], rope, mask=keep[:, None], cache_modifier=STORE
    )


def gather(
    out: Tensor,
    cache: Tensor,
    seq_lens: Tensor,
    gather_lens: Tensor | None,
    block_table: Tensor,
    offset: int = 0,
    most: int | None = None,
    *,
    rows: int = ROWS,
    warps: int = WARPS,
    store: str = STORE,
) -> None:
    """The last ``gather_lens[r]`` records of each request, row i to ``out[r, offset + i]``.

    ``out`` bf16 ``[R, M, 512]`` at any strides of its first two dimensions; other rows are left.
    ``cache`` uint8 ``[pages, block, 584]`` at any page stride, ``seq_lens`` and ``gather_lens``
    int32 ``[R]`` (None: all), ``block_table`` int32 ``[R, P]``. ``most``: no request has more rows
    to gather (None: as many as ``out`` has room for), on which the launch depends. Values are
    rounded to bf16 once, as ``read_records`` does. Raises ValueError for other shapes and types.

    From SM90 on it starts while the launch before it ends, and lets the next one start likewise,
    but reads and writes nothing before that one has ended: it sees all that one wrote, and
    overwrites nothing that one reads. The next is as safe: an ordinary launch begins when this one
    has ended, and one that starts early waits for that itself.
    """
    requests, room, width = out.shape
    if width != HEAD_DIM or out.dtype != torch.bfloat16 or out.stride(2) != 1:
        raise ValueError(f"out {out.dtype} {list(out.shape)}: bf16 rows of {HEAD_DIM} in one piece")
    check_cache(cache)
    for name, one in (("seq_lens", seq_lens), ("gather_lens", gather_lens)):
        if one is not None and (one.dtype != torch.int32 or one.shape != (requests,)):
            raise ValueError(f"{name} {one.dtype} {list(one.shape)}: int32 [{requests}]")
    if block_table.dtype != torch.int32 or block_table.shape[0] < requests:
        raise ValueError(f"block_table {block_table.dtype} {list(block_table.shape)}: int32 rows")
    most = room - offset if most is None else min(most, room - offset)
    if requests == 0 or most <= 0:
        return
    _gather[(requests, triton.cdiv(most, rows))](
        out,
        out.stride(0),
        out.stride(1),
        cache,
        cache.stride(0),
        seq_lens,
        seq_lens if gather_lens is None else gather_lens,
        block_table,
        block_table.stride(0),
        block_table.shape[1],
        offset,
        HAS_LENGTHS=gather_lens is not None,
        BLOCK=cache.shape[1],
        ALIGN=alignment(cache.data_ptr(), cache.stride(0)),
        OUT_ALIGN=alignment(out.data_ptr(), 2 * out.stride(0), 2 * out.stride(1)) // 2,
        ROWS=rows,
        STORE=store,
        num_warps=warps,
        **({"EARLY": True, "launch_pdl": True} if starts_early(out.device) else {}),
    )


def check_cache(cache: Tensor) -> None:
    """Raises ValueError unless ``cache`` is pages of 584-byte records."""
    if cache.dtype != torch.uint8 or cache.dim() != 3 or cache.shape[2] != RECORD_BYTES:
        raise ValueError(
            f"cache {cache.dtype} {list(cache.shape)}: uint8 pages of {RECORD_BYTES}-byte records"
        )
    if cache.shape[0] and cache.stride()[1:] != (RECORD_BYTES, 1):
        raise ValueError(f"cache strides {cache.stride()}: a page must lie in one piece")
    if cache.stride(0) % 2 or cache.data_ptr() % 2:
        raise ValueError(
            f"cache at {cache.data_ptr():#x}, pages {cache.stride(0)} bytes apart: odd"
        )


def alignment(*places: int) -> int:
    """The largest power of two up to 16 that divides all of ``places``."""
    return next(n for n in (16, 8, 4, 2, 1) if all(place % n == 0 for place in places))


assert (DATA_BYTES, SCALE_BYTES) == (576, 8)  # written as numbers in the kernels
