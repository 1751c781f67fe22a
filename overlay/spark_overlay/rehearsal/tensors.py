"""Seeded tensors of the rehearsal checkpoint.

Every bit pattern is a legal trellis, so random words make a valid EXL3 matrix. Its decoded weights
have deviation 1 and the Hadamards keep that, so ``suh`` and ``svh`` alone set the size of W.
"""

from __future__ import annotations

import math

import numpy as np

from spark_overlay.exl3.format import MARKERS, Codebook

from .bits import bits
from .shape import Linear, Native
from .shards import Raw, bf16
from .streams import Stream

CODEBOOK: Codebook = "mul1"


def packed(linear: Linear, seed: int) -> dict[str, Raw]:
    """The four tensors of one EXL3 matrix by their names in the checkpoint."""
    words = round(16 * bits(linear.key))
    tiles = (linear.n_in // 16, linear.n_out // 16, words)
    std = linear.gain / math.sqrt(linear.n_in)

    def stream(leaf: str) -> Stream:
        return Stream(seed, f"{linear.key}.{leaf}")

    trellis = stream("trellis").u16(math.prod(tiles)).view(np.int16).reshape(tiles)
    suh = stream("suh").signed(linear.n_in, 1.0).astype(np.float16)
    svh = stream("svh").signed(linear.n_out, std).astype(np.float16)
    return {
        f"{linear.key}.trellis": Raw.of("I16", trellis),
        f"{linear.key}.suh": Raw.of("F16", suh),
        f"{linear.key}.svh": Raw.of("F16", svh),
        f"{linear.key}.{CODEBOOK}": Raw.of("I32", np.array(MARKERS[CODEBOOK], dtype=np.int32)),
    }


def native(tensor: Native, seed: int) -> dict[str, Raw]:
    """One native tensor by its name."""
    values = Stream(seed, tensor.name).bell(math.prod(tensor.shape), tensor.std, tensor.mean)
    values = values.reshape(tensor.shape)
    if tensor.dtype == "BF16":
        return {tensor.name: Raw.of("BF16", bf16(values))}
    return {tensor.name: Raw.of("F32", values.astype(np.float32))}
