"""Packed layers by the kernels: one launch for few rows; for many, weights decoded for the moment.

Weights stay packed. What is decoded for many rows (a prefill's) is scratch of one matrix at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from spark_overlay.exl3.cuda import library, ops, plan, workspace
from spark_overlay.exl3.cuda.ops import Entry
from spark_overlay.exl3.format import HADAMARD, TILE
from spark_overlay.exl3.reference import hadamard_rotate

#: Weights decoded at once: 128 MiB of fp16.
DECODED = 64 << 20
#: Calls of 128 ids each that a step's experts may take before each expert is decoded instead. By
#: arithmetic, not measured: decoding all 384 costs about as much as 32 such calls.
CALLS = 32


def _ready(device: torch.device) -> plan.Table | None:
    """The device's table, once library and counters are there; None on a CPU."""
    if device.type != "cuda":
        return None
    library.load()
    device = torch.device(
        "cuda", torch.cuda.current_device() if device.index is None else device.index
    )
    workspace.counters(device).reserve()
    return ops.table_of(device)


class Group:
    """Matrices that are multiplied side by side, over one input or one each.

    Raises Exl3CudaError if the library cannot be loaded, PlanError for a GPU without a table."""

    def __init__(self, matrices: Sequence[Entry]) -> None:
        self.matrices = list(matrices)
        self._trellis, self._suh, self._svh, books = map(list, zip(*matrices, strict=True))
        self._books = [library.CODEBOOKS[book] for book in books]
        self._none: list[Tensor | None] = [None] * len(self.matrices)
        table = _ready(self._suh[0].device)
        self.limit = plan.MAX_ROWS if table is None else table.dense_rows

    def __call__(self, xs: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """``xs``: ``[rows, in]``, one or as many as matrices -> ``[rows, sum of out]``. The kernels
        read bf16 and write bf16 or fp32; anything else is rounded to the one or from the other."""
        xs = [x.to(torch.bfloat16) for x in xs]
        if dtype not in ops.DTYPES:
            return self(xs, torch.float32).to(dtype)
        if xs[0].shape[0] <= self.limit:
            return ops.group(
                xs, self._trellis, self._suh, self._svh, self._none, self._books, dtype
            )
        every = xs if len(xs) == len(self.matrices) else list(xs) * len(self.matrices)
        parts = [many_rows(x, one, dtype) for x, one in zip(every, self.matrices, strict=True)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def many_rows(x: Tensor, matrix: Entry, dtype: torch.dtype) -> Tensor:
    """``x [rows, in] @ W``, by a product of torch's with the decoded values: rotated fp16 in, fp32
    out, as the kernels compute. A wide matrix is decoded in parts of its columns."""
    trellis, suh, svh, codebook = matrix
    rotated = hadamard_rotate(x.float() * suh.float()).half()
    step = max(HADAMARD, DECODED // len(suh) // HADAMARD * HADAMARD)
    parts = []
    for lo in range(0, len(svh), step):
        tiles = trellis[:, lo // TILE : (lo + step) // TILE].contiguous()
        inner = _product(rotated, ops.decode(tiles, codebook))
        parts.append((hadamard_rotate(inner) * svh[lo : lo + step].float()).to(dtype))
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def _product(x: Tensor, weight: Tensor) -> Tensor:
    """fp16 by fp16, summed and left in fp32."""
    if x.device.type == "cpu":
        return x.float() @ weight.float()
    return torch.mm(x, weight, out_dtype=torch.float32)


class Experts:
    """Routed experts and, as the last entry of each projection, the shared one if ``shared``."""

    def __init__(
        self,
        gate: Sequence[Entry],
        up: Sequence[Entry],
        down: Sequence[Entry],
        *,
        limit: float | None,
        shared: bool,
    ) -> None:
        self.gate, self.up, self.down = list(gate), list(up), list(down)
        self.limit, self.shared = limit, shared
        self.count = len(gate) - shared
        self.inter = gate[0][2].numel()
        self.max_k2 = max(entry[0].shape[2] for entry in (*gate, *up, *down)) // 8
        self.table = ops.experts_table(gate, up, down)
        table = _ready(self.table.device)
        self.slots = plan.MAX_SLOTS if table is None else table.expert_slots

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """``x [tokens, hidden]``, ``ids`` and ``weights`` ``[tokens, k]`` -> as ``x``, which the
        kernels read as bf16."""
        if x.dtype != torch.bfloat16:
            return self(x.to(torch.bfloat16), ids, weights).to(x.dtype)
        tokens, topk = ids.shape
        each = max(1, self.slots // topk)
        if tokens > CALLS * each and not _capturing(x.device):
            return self._decoded(x, ids, weights)
        weights = weights.float()
        parts = [
            self._launch(x[lo : lo + each], ids[lo : lo + each], weights[lo : lo + each])
            for lo in range(0, max(tokens, 1), each)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _launch(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return ops.experts(
            x, ids, weights, self.table, self.count, self.inter, self.max_k2,
            shared=self.shared, limit=self.limit,
        )  # fmt: skip

    def _decoded(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Expert by expert; asks the GPU which there are, so it cannot be captured."""
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        if self.shared:
            out += self._one(self.count, x)
        for expert in ids.unique().tolist():
            if 0 <= expert < self.count:
                token, choice = (ids == expert).nonzero(as_tuple=True)
                out[token] += self._one(expert, x[token]) * weights[token, choice, None].float()
        return out.to(x.dtype)

    def _one(self, expert: int, x: Tensor) -> Tensor:
        gate, up = (many_rows(x, part[expert], torch.float32) for part in (self.gate, self.up))
        if self.limit is not None:
            gate, up = gate.clamp_max(self.limit), up.clamp(-self.limit, self.limit)
        return many_rows(torch.nn.functional.silu(gate) * up, self.down[expert], torch.float32)


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
