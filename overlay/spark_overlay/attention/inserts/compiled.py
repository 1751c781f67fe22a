"""The inserts' kernels as served, for overlay/benchmarks/triton_check.py."""

from __future__ import annotations

from typing import Any

from spark_overlay.attention.inserts import kernels as written
from spark_overlay.attention.inserts.ops import LATENT_WARPS
from spark_overlay.compiled import Compiled

_TYPES = {
    **dict.fromkeys(("latent", "q", "kv", "out", "key", "weight"), "*bf16"),
    **dict.fromkeys(("positions", "slots"), "*i64"),
    "cos_sin": "*fp32",
    "cache": "*u8",
    "eps": "fp32",
    **dict.fromkeys(("cos_stride", "page_stride", "q_stride", "kv_stride", "key_stride"), "i32"),
    **dict.fromkeys(("rows", "heads", "padded"), "i32"),
}
#: An index key's page, 132 bytes a state, is no multiple of 16 on its own.
_PLAIN = ("eps", "rows", "heads", "padded", "page_stride")


def _of(kernel: Any, constants: dict[str, int], warps: int) -> Compiled:
    types = {one: _TYPES[one] for one in kernel.arg_names if one in _TYPES}
    return Compiled(f"insert {kernel.__name__}", kernel, types, constants, warps, plain=_PLAIN)


def kernels() -> list[Compiled]:
    rows = {"BLOCK": 64, "RATIO": 2}
    return [
        _of(written.write_latents, {"WINDOW": 0, **rows}, LATENT_WARPS),
        _of(written.rotate_queries_and_write, {"HEADS": 4, "BLOCK": 32}, 4),
        _of(written.write_keys, rows, 1),
    ]
