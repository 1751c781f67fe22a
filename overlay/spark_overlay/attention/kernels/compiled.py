"""Attention's Triton kernels as served at V4.1's shapes, for overlay/benchmarks/triton_check.py."""

from __future__ import annotations

from typing import Any

from spark_overlay.attention.kernels import indices, plan, records, tiles
from spark_overlay.compiled import Compiled

_TYPES = {
    **dict.fromkeys(("q", "out"), "*bf16"),
    **dict.fromkeys(("sink", "partial", "peaks", "cos_sin"), "*fp32"),
    **dict.fromkeys(("cache", "cache0", "cache1"), "*u8"),
    **dict.fromkeys(
        ("slots0", "slots1", "lengths0", "lengths1", "topk", "block_table", "combined", "lengths",
         "starts", "seq_lens", "gather_lens"), "*i32",
    ),
    "positions": "*i64", "scale": "fp32",
}  # fmt: skip
_PLAIN = (
    "scale", "tokens", "heads", "offset", "rows", "compressed", "pages", "requests", "columns",
)  # fmt: skip
#: ``attend`` keeps 64 KB of sums in registers: some of the rest is spilled within its loop. It
#: serves where the CUDA library is not.
_SPILLS = 2048


def _made(
    name: str,
    kernel: Any,
    constants: dict[str, Any],
    warps: int,
    spills: int = 0,
    since: int = 80,
    **types: str,
) -> Compiled:
    known = {**_TYPES, **types}
    signature = {n: known.get(n, "i32") for n in kernel.arg_names if n not in constants}
    plain = tuple(n for n in _PLAIN if n in signature and signature[n][0] != "*")
    return Compiled(name, kernel, signature, constants, warps, 1, plain, spills, since)


def kernels() -> list[Compiled]:
    chosen = plan.shape((8, 0), 2048, 32, 640, False)
    assert isinstance(chosen, plan.Shape)
    sources = dict(PAGE0=32, PAGE1=64, WIDTH0=128, WIDTH1=512, LENGTHS0=True, LENGTHS1=False,
                   ALIGN0=16, ALIGN1=16)  # fmt: skip
    form = dict(HEADS=chosen.heads, KEYS=chosen.keys, TURN=True, PTX=True, SPLITS=chosen.splits)
    split = dict(SPLITS=20, HEADS=plan.REDUCE_HEADS, TURN=True)
    rows = dict(
        HAS_LENGTHS=True, BLOCK=64, ALIGN=16, OUT_ALIGN=8, ROWS=records.ROWS, STORE=records.STORE,
        EARLY=False,
    )  # fmt: skip
    row = dict(TOPK=512, RATIO=1, WINDOW=128, WIDTH=640, REQUESTS=4, TOKENS=indices.TOKENS)
    states = dict(STATES=64, WIDTH=512, PADDED=512)
    return [
        _made("attend", tiles.attend, {**sources, **form}, chosen.warps, _SPILLS),
        _made("reduce", tiles.reduce, split, plan.REDUCE_WARPS),
        _made("gather", records._gather, rows, records.WARPS),
        _made("gather, early", records._gather, {**rows, "EARLY": True}, records.WARPS, since=90),
        _made("combine", indices._combine, row, indices.WARPS, requests="i32"),
        _made("chosen", indices._chosen, states, 4, requests="*i32", out="*i32"),
    ]
