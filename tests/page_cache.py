"""How much of a file the kernel holds in memory."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

import numpy as np


def resident(path: Path) -> int:
    """Pages of the file in the page cache."""
    size = path.stat().st_size
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY) as memory:
        count = -(-size // mmap.PAGESIZE)
        seen = (ctypes.c_ubyte * count)()
        hold = ctypes.c_char.from_buffer(memory)
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
        assert libc.mincore(ctypes.addressof(hold), size, ctypes.addressof(seen)) == 0
        del hold
        return int((np.frombuffer(seen, np.uint8) & 1).sum())
