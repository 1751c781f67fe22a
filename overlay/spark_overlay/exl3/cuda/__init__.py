"""EXL3's CUDA kernels (overlay/csrc/exl3) as torch ops, with the launch tables they run by."""

from __future__ import annotations

from typing import Any


def serves(device: Any) -> bool:
    """Whether packed weights on this torch device are computed with by the kernels. Elsewhere they
    are decoded once and multiplied by torch: so far everywhere, until the kernels are proven."""
    return False
