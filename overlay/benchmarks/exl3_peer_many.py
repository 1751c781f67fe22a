"""exllamav3 1.6.5 at many rows, beside our kernels: exl3_moe, reconstruct and its Hadamard.

As exl3_peer, whose wheel and build it uses, by a wrapper and units of its own (2 and 3 bits of mul1
for the experts; reconstruct knows every rate).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
WRAPPER = HERE / "exl3_peer_many.cu"
#: A library built elsewhere, in place of building one.
OVERRIDE = "SPARK_EXL3_PEER_MANY"
UNITS = (
    *(
        f"quant/comp_units/exl3_moe_inst_k{k}_cb2{size}.cu"
        for k in (3, 2)
        for size in ("_m64", "_m32", "")
    ),
    *(f"quant/{name}.cu" for name in ("reconstruct", "hadamard", "exl3_moe", "exl3_devctx")),
)
#: Its caller's: an expert of more rows than these takes the tile of 32, of 64; at most the last.
TILES = (16, 32, 256)
Call = Callable[[], Any]


def library(wheel: Path | None) -> Path | None:
    """What OVERRIDE names, else built from the wheel; None without either.

    Raises exl3_peer.PeerError or build_cuda.BuildError."""
    if named := os.environ.get(OVERRIDE):
        return Path(named)
    if wheel is None:
        return None
    import exl3_peer
    import torch

    import build_cuda

    major, minor = torch.cuda.get_device_capability()
    arch = build_cuda.architecture(f"{major}.{minor}")
    root = Path(torch.__file__).parent
    found: Path = exl3_peer.built(
        wheel, root, torch.__version__, arch, units=UNITS, wrapper=WRAPPER
    )
    return found


class PeerMany:
    """Its calls on random tensors of ours. Inputs were made fp16 before: no cast is in a call."""

    def __init__(self, path: Path) -> None:
        import torch

        self.torch = torch
        torch.ops.load_library(str(path))
        self.ops = torch.ops.spark_peer_many
        self.groups = self.ops.concurrency(torch.cuda.current_device())

    def reconstructed(self, matrix: Any) -> tuple[Call, Any]:
        n_in, n_out = matrix.suh.numel(), matrix.svh.numel()
        out = self.torch.empty((n_in, n_out), dtype=self.torch.half, device=matrix.suh.device)
        rate = matrix.trellis.shape[2] / 16
        return lambda: self.ops.reconstruct(out, matrix.trellis, rate), out

    def rotated(self, x: Any, scale: Any) -> tuple[Call, Any]:
        out = self.torch.empty_like(x)
        return lambda: self.ops.hadamard(x, out, scale, None), out

    def linear(self, x: Any, matrix: Any, by_weights: bool) -> tuple[Call, Any]:
        """cuBLAS with the weights as they were, or (``by_weights`` False) with W_hat between two
        Hadamards of the rows: its two ways, of which it takes the first from 1024 rows on."""
        torch = self.torch
        x = x.half().contiguous()
        n_in, n_out = matrix.suh.numel(), matrix.svh.numel()
        weights = torch.empty((n_in, n_out), dtype=torch.half, device=x.device)
        out = torch.empty((len(x), n_out), dtype=torch.half, device=x.device)
        turned, rate = torch.empty_like(x), matrix.trellis.shape[2] / 16

        def whole() -> None:
            self.ops.reconstruct_had(weights, matrix.trellis, matrix.suh, matrix.svh, rate)
            torch.mm(x, weights, out=out)

        def around() -> None:
            self.ops.reconstruct(weights, matrix.trellis, rate)
            self.ops.hadamard(x, turned, matrix.suh, None)
            torch.mm(turned, weights, out=out)
            self.ops.hadamard(out, out, None, matrix.svh)

        return (whole if by_weights else around), out

    def experts(
        self, table: Any, k2: int, inter: int, x: Any, ids: Any, weights: Any
    ) -> tuple[Call, Any]:
        """exl3_moe as its caller uses it: sort, counts read back, a launch for each of three tiles,
        sums by atomics. And the output, fp32."""
        torch, rate = self.torch, k2 / 2
        x, (tokens, topk), count = x.half().contiguous(), ids.shape, table.shape[1]
        hidden, device = x.shape[1], x.device
        scratch = [
            torch.empty((self.groups, TILES[-1], width), dtype=torch.half, device=device)
            for width in (hidden, hidden, inter, inter)
        ]
        tables = [table[which, :, part].contiguous() for which in range(3) for part in range(3)]
        token = torch.arange(tokens, device=device).repeat_interleave(topk)
        out = torch.empty((tokens, hidden), dtype=torch.float32, device=device)
        flat, factors = ids.flatten(), weights.flatten().half()

        def run() -> None:
            out.zero_()
            order = flat.argsort()
            tokens_sorted, factors_sorted = token[order], factors[order]
            counts = torch.bincount(flat, minlength=count + 1)
            for low, high, rows, active in tiles(counts.tolist()[:count]):
                self.ops.moe(
                    x, out, counts, tokens_sorted, factors_sorted, scratch, rate, tables, 10.0,
                    active, None, None, low, high, rows,
                )  # fmt: skip

        return run, out


def tiles(counts: Sequence[int]) -> list[tuple[int, int, int, int]]:
    """Least and most rows, tile, experts of each launch, the largest first.

    Raises ValueError where an expert has more rows than its buffers."""
    if max(counts) > TILES[-1]:
        raise ValueError(f"an expert has {max(counts)} rows; the peer's buffers hold {TILES[-1]}")
    found = []
    for rows, low, high in ((64, 33, 256), (32, 17, 32), (16, 1, 16)):
        if active := sum(low <= n <= high for n in counts):
            found.append((low, high, rows, active))
    return found
