"""EXL3's CUDA kernels (overlay/csrc/exl3) as torch ops, with the launch tables they run by."""

from __future__ import annotations

import os
from typing import Any

#: "1" puts packed weights on a GPU to the kernels.
SWITCH = "SPARK_EXL3_KERNELS"


def serves(device: Any) -> bool:
    """Whether packed weights on this torch device are computed with by the kernels. Elsewhere they
    are decoded once and multiplied by torch: on a GPU, too, unless SPARK_EXL3_KERNELS=1 asks for
    the kernels, until they are proven in vLLM."""
    return bool(device.type == "cuda") and os.environ.get(SWITCH) == "1"
