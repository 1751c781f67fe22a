"""Lookups of table rows on a GPU's stream: ids down, rows read by the host, rows up, dequantised.

The host's part is a function of the native store that the driver calls when the stream gets there,
so nothing waits in Python, the GIL is not needed, and a captured CUDA graph reads anew on every
replay. Another stream computes meanwhile; whoever uses the rows waits for an event of this one.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from spark_overlay.engram.dequant import dequantize_into
from spark_overlay.engram.layout import SCALE_GROUP, EngramError
from spark_overlay.engram.native import Work
from spark_overlay.engram.store import RowStore


class HostStore(Protocol):
    """What the native store gives beside ``RowStore``: addresses of itself and of ``engram_host``,
    which ends the process if rows cannot be read: the GPU would go on with whatever is there."""

    @property
    def handle(self) -> int: ...

    @property
    def host_function(self) -> int: ...


class CudaLookup:
    """One layer's lookups, eager or captured.

    ``mine`` are the hash columns that this rank owns, ``width`` how many ``out`` has (the last rank
    may own fewer: the rest is zeros). Buffers hold ``max_tokens`` and are used by one lookup at a
    time. On several streams eager lookups take turns by themselves; replays of a graph must be
    ordered against other lookups by the caller, as vLLM's steps are.
    """

    def __init__(
        self,
        store: HostStore,
        mine: slice,
        width: int,
        dim: int,
        max_tokens: int,
        device: torch.device,
    ) -> None:
        self.store, self.mine, self.width, self.dim = store, mine, width, dim
        self.max_tokens, self.device = max_tokens, device
        most, row = max_tokens * width, dim + dim // SCALE_GROUP
        pin = device.type == "cuda"
        # Columns that no rank owns stay -1, whose rows are zeros.
        self._ids = torch.full((most,), -1, dtype=torch.int64, device=device)
        self._host_ids = torch.full((most,), -1, dtype=torch.int64, device="cpu", pin_memory=pin)
        self._host_rows = torch.zeros(most * row, dtype=torch.uint8, device="cpu", pin_memory=pin)
        self._rows = torch.zeros(most * row, dtype=torch.uint8, device=device)
        self._works: dict[int, Work] = {}
        self._last: Any = None
        self._done: Any = torch.cuda.Event() if pin else None
        # Compiles the kernel: the first lookup may be one that a graph captures, where that fails.
        warm = torch.empty(SCALE_GROUP, dtype=torch.bfloat16, device=device)
        codes, scales = self._rows[:SCALE_GROUP], self._rows[SCALE_GROUP : SCALE_GROUP + 1]
        dequantize_into(codes.view(torch.float8_e4m3fn), scales, warm)

    def __call__(self, indices: Tensor, out: Tensor) -> None:
        """``indices [T, columns]`` -> ``out [T, width, dim]`` bf16, on the current stream."""
        tokens = indices.shape[0]
        check_out(out, tokens, self.width, self.dim)
        if tokens > self.max_tokens:
            raise EngramError(
                f"rows of {tokens} tokens asked of buffers for {self.max_tokens}; these are sized "
                "by max_num_batched_tokens"
            )
        if not tokens:
            return
        stream = self._begin()
        n = tokens * self.width
        codes = n * self.dim
        used = codes + codes // SCALE_GROUP
        mine = indices[:, self.mine]
        self._ids[:n].view(tokens, self.width)[:, : mine.shape[1]].copy_(mine)
        self._host_ids[:n].copy_(self._ids[:n], non_blocking=True)
        self._launch_host(stream, self.store.host_function, ctypes.addressof(self._work(n)))
        # Weights, then scales: one copy for both.
        self._rows[:used].copy_(self._host_rows[:used], non_blocking=True)
        weights = self._rows[:codes].view(torch.float8_e4m3fn)
        dequantize_into(weights, self._rows[codes:used], out)
        self._end()

    def _work(self, n: int) -> Work:
        """Never freed before ``self``: graphs hold its address."""
        if n not in self._works:
            rows = self._host_rows.data_ptr()
            self._works[n] = Work(
                self.store.handle, self._host_ids.data_ptr(), n, rows, rows + n * self.dim
            )
        return self._works[n]

    def _begin(self) -> int:
        """The current stream's handle, behind an eager lookup on another one."""
        stream = torch.cuda.current_stream(self.device)
        if not torch.cuda.is_current_stream_capturing():
            if self._last is not None and self._last != stream:
                stream.wait_event(self._done)
            self._last = stream
        return int(stream.cuda_stream)

    def _end(self) -> None:
        if not torch.cuda.is_current_stream_capturing():
            self._done.record(self._last)

    def _launch_host(self, stream: int, function: int, data: int) -> None:
        status = _driver().cuLaunchHostFunc(stream, function, data)
        if status:
            raise RuntimeError(f"cuLaunchHostFunc on stream {stream:#x}: {_error(status)}")


class SyncLookup:
    """The same for a store in Python: the host waits for the ids, so no graph can hold it."""

    def __init__(self, store: RowStore, kind: str, mine: slice, width: int, dim: int) -> None:
        self.store, self.kind, self.mine, self.width, self.dim = store, kind, mine, width, dim

    def __call__(self, indices: Tensor, out: Tensor) -> None:
        check_out(out, indices.shape[0], self.width, self.dim)
        if torch.cuda.is_current_stream_capturing():
            raise EngramError(
                f"ENGRAM_STORE={self.kind} waits for every step's ids in Python, which a CUDA "
                "graph cannot; set ENFORCE_EAGER=1, or ENGRAM_STORE=file"
            )
        mine = indices[:, self.mine]
        rows = self.store.lookup(mine.reshape(-1).long().cpu().numpy())
        weights = torch.from_numpy(rows.weights).to(out.device).view(torch.float8_e4m3fn)
        scales = torch.from_numpy(rows.scales).to(out.device)
        if mine.shape[1] == self.width:
            dequantize_into(weights, scales, out)
            return
        dense = torch.empty((*mine.shape, self.dim), dtype=out.dtype, device=out.device)
        dequantize_into(weights, scales, dense)
        out[:, mine.shape[1] :] = 0
        out[:, : mine.shape[1]] = dense


def check_out(out: Tensor, tokens: int, width: int, dim: int) -> None:
    """Raise EngramError unless ``out`` is what vLLM stages: bf16 ``[T, width, dim]``."""
    if out.dtype != torch.bfloat16 or out.shape != (tokens, width, dim):
        raise EngramError(
            f"rows go into {out.dtype} {list(out.shape)}, expected bfloat16 "
            f"{[tokens, width, dim]}; packed rows for data parallelism are not offered"
        )


@cache
def _driver() -> ctypes.CDLL:
    """The driver's own library: its name and calls are those of every CUDA version."""
    driver = ctypes.CDLL("libcuda.so.1")
    driver.cuLaunchHostFunc.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    driver.cuGetErrorString.argtypes = (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p))
    return driver


def _error(status: int) -> str:
    text = ctypes.c_char_p()
    _driver().cuGetErrorString(status, ctypes.byref(text))
    return (text.value or b"unknown").decode() + f" (CUDA error {status})"
