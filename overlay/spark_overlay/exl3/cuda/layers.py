"""Packed layers by the kernels: one launch for few rows; for many, those of ``prefill``.

Weights stay packed. What is decoded for many rows of a linear is scratch of one matrix at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from spark_overlay.exl3.cuda import library, ops, plan, prefill, workspace
from spark_overlay.exl3.cuda.ops import Entry


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
        return prefill.dense(xs, self._trellis, self._suh, self._svh, self._books, dtype)


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
        self.many = plan.MAX_SLOTS + 1 if table is None else table.prefill_slots

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """``x [tokens, hidden]``, ``ids`` and ``weights`` ``[tokens, k]`` -> as ``x``, which the
        kernels read as bf16."""
        if x.dtype != torch.bfloat16:
            return self(x.to(torch.bfloat16), ids, weights).to(x.dtype)
        (tokens, topk), weights = ids.shape, weights.float()
        if tokens * topk >= self.many:
            return self._launch(prefill.experts, x, ids, weights)
        each = max(1, self.slots // topk)
        parts = [
            self._launch(
                ops.experts, x[lo : lo + each], ids[lo : lo + each], weights[lo : lo + each]
            )
            for lo in range(0, max(tokens, 1), each)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _launch(
        self, call: Callable[..., Tensor], x: Tensor, ids: Tensor, weights: Tensor
    ) -> Tensor:
        return call(
            x, ids, weights, self.table, self.count, self.inter, self.max_k2,
            shared=self.shared, limit=self.limit,
        )  # fmt: skip
