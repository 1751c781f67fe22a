"""Which tensors of a checkpoint are Engram tables. No numpy, no torch."""

from __future__ import annotations

import re

#: In the checkpoint, and under the names that vLLM gives the parameters.
_TABLE_TENSOR = re.compile(
    r"(?:.+\.)?layers\.\d+\.engram\.(?:embed\.(?:weight|scale)"
    r"|embed_tokens\.(?:weight|weight_scale_inv))"
)


def is_table_tensor(name: str) -> bool:
    """Whether a tensor is part of a table: read by row, never loaded as a parameter."""
    return _TABLE_TENSOR.fullmatch(name) is not None
