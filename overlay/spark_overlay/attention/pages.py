"""Tokens of a page, and what a page takes. Pure."""

from __future__ import annotations

from typing import Final

from spark_overlay.attention.format import DATA_BYTES, RECORD_BYTES

#: vLLM's own for the window's cache, on every GPU.
WINDOW_PAGE: Final = 32
#: Records of a page that vLLM's index kernels (DeepGEMM) take on SM12x; FlashInfer takes any.
SM12X_RECORDS: Final = (32, 64)


def stock_sizes(family: int | None) -> list[int]:
    """What vLLM's attention classes are offered, by the GPU's ``family`` (80, 90, 100, 120).

    On SM12x vLLM says 128, whose pages of 128 ratio-1 records its own index kernels refuse there;
    64 gives pages of 64 and 32."""
    return [64 if family in (90, 120) else 128]


def page_bytes(tokens: int, ratio: int = 1) -> int:
    """Of a page of ``tokens`` that keeps a record for each ``ratio`` of them: whole rows of data,
    as vLLM aligns them."""
    content = tokens // ratio * RECORD_BYTES
    return -(-content // DATA_BYTES) * DATA_BYTES
