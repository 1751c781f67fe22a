"""EXL3's CUDA kernels (overlay/csrc/exl3) as torch ops, with the launch tables they run by."""

from __future__ import annotations

import os
from typing import Any

#: "0" keeps packed weights on a GPU from the kernels, to compare with the torch path.
SWITCH = "SPARK_EXL3_KERNELS"


def serves(device: Any) -> bool:
    """Whether packed weights on this torch device are computed with by the kernels. Elsewhere they
    are decoded once and multiplied by torch."""
    return bool(device.type == "cuda") and os.environ.get(SWITCH) != "0"
