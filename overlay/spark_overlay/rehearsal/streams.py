"""Seeded values, equal bit for bit on every machine.

Each tensor has its own stream, keyed by seed and name, so one can be made without the others.
Only the bit generator's raw words are used (its output is fixed; NumPy's distributions are not)
and only operations that IEEE 754 defines exactly: no libm, no BLAS.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
from numpy.typing import NDArray

#: Standard deviation of the sum of four uniform 16-bit integers.
_BELL_STD = math.sqrt((65536.0**2 - 1.0) / 3.0)


class Stream:
    """The random words of one name under one seed."""

    def __init__(self, seed: int, name: str) -> None:
        key = hashlib.sha256(f"{seed}/{name}".encode()).digest()
        self._generator = np.random.PCG64(int.from_bytes(key, "little"))
        self._within = 0  # 16-bit integers of the next word that were passed over

    def skip(self, count: int) -> Stream:
        """The stream itself, ``count`` 16-bit integers further on from its begin."""
        self._generator.advance(count // 4)
        self._within = count % 4
        return self

    def u16(self, count: int) -> NDArray[np.uint16]:
        """``count`` uniform 16-bit integers."""
        begin, self._within = self._within, 0
        words = np.asarray(self._generator.random_raw((begin + count + 3) // 4), dtype="<u8")
        return words.view("<u2")[begin : begin + count]

    def u8(self, count: int) -> NDArray[np.uint8]:
        """``count`` uniform bytes."""
        return self.u16((count + 1) // 2).view(np.uint8)[:count]

    def bell(self, count: int, std: float, mean: float = 0.0) -> NDArray[np.float64]:
        """``count`` values, nearly normal: the centred sum of four uniforms (at most 3.5 std)."""
        sums = self.u16(4 * count).reshape(count, 4).sum(axis=1, dtype=np.int64)
        centred: NDArray[np.float64] = (sums - 2 * 65535).astype(np.float64)
        return centred * (std / _BELL_STD) + mean

    def signed(self, count: int, rms: float) -> NDArray[np.float64]:
        """``count`` values of random sign, magnitudes uniform within a quarter around ``rms``."""
        raw = self.u16(count).astype(np.int64)
        sign = 1 - 2 * (raw & 1)
        magnitude = 0.75 + (raw >> 1) / 65534.0
        return sign * magnitude * (rms / math.sqrt(1.0 + 1.0 / 48.0))
