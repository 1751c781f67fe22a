"""vLLM 0.33's own indexer (DeepGEMM's scores, its top-k and candidates) on the same inputs.

Only what it launches for each layer is timed: schedules, lengths and tables that its metadata
builder makes once a step are made beforehand, as is the workspace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import indexer_inputs as made
from indexer_inputs import COUNT, KEY_DIM, SIZE, STATES, Inputs, Shape

#: Rows of a request that DeepGEMM's SM90 kernel takes together; others are flattened.
NATIVE = (1, 2, 4)
RADIX_BYTES = 1 << 20


def decode(shape: Shape, one: Inputs, kind: str) -> Callable[[], Any]:
    """``kind``: plain, write (candidate blocks), limited (to them)."""
    import torch
    from vllm.model_executor.kernels.attention.dsa import candidate_blocks as blocks
    from vllm.utils import deep_gemm

    together = shape.rows if shape.rows in NATIVE else 1
    batch = shape.total // together
    seen = made.seen(shape).view(batch, together)
    table = one.step.table.repeat_interleave(shape.rows // together, 0).contiguous()
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    schedule = deep_gemm.get_paged_mqa_logits_metadata(seen, STATES, sms)
    q = one.q.view(batch, together, *one.q.shape[1:])
    cache = one.cache.unsqueeze(-2)
    workspace = torch.zeros(RADIX_BYTES, dtype=torch.uint8, device="cuda")
    rows = shape.total
    topk = torch.ops._C.cooperative_topk if rows <= 64 else torch.ops._C.persistent_topk
    lengths = seen.reshape(-1)

    def call() -> None:
        logits = deep_gemm.fp8_fp4_paged_mqa_logits(
            (q, None), cache, one.weights, seen, table, schedule, max_model_len=shape.context
        )
        one.final.fill_(-1)
        if kind == "write":
            blocks.select_candidate_blocks(
                logits, None, lengths, one.chosen.shape[1], SIZE, one.chosen, 1
            )
        elif kind == "limited":
            blocks.apply_candidate_mask(logits, None, lengths, one.chosen, SIZE, 1)
        topk(logits, seen, one.final, workspace, COUNT, shape.context)

    return call


def prefill(shape: Shape, one: Inputs, kind: str) -> Callable[[], Any]:
    """One request, one chunk of its rows."""
    import torch
    from vllm import _custom_ops as ops
    from vllm.model_executor.kernels.attention.dsa import candidate_blocks as blocks
    from vllm.utils import deep_gemm

    gpu = "cuda"
    keys = torch.empty(shape.context, KEY_DIM, dtype=torch.float8_e4m3fn, device=gpu)
    scales = torch.empty(shape.context, 4, dtype=torch.uint8, device=gpu)
    ends = made.seen(shape)
    starts = torch.zeros_like(ends)
    lengths = torch.tensor([0, shape.context], dtype=torch.int32, device=gpu)

    def call() -> None:
        one.final.fill_(-1)
        ops.cp_gather_indexer_k_quant_cache(one.cache, keys, scales, one.step.table, lengths)
        logits = deep_gemm.fp8_fp4_mqa_logits(
            (one.q, None),
            (keys, scales.view(torch.float32).squeeze(-1)),
            one.weights,
            starts,
            ends,
            shape.context,
        )
        if kind == "write":
            blocks.select_candidate_blocks(
                logits, None, ends, one.chosen.shape[1], SIZE, one.chosen
            )
        elif kind == "limited":
            blocks.apply_candidate_mask(logits, None, ends, one.chosen, SIZE)
        ops.top_k_per_row_prefill(
            logits, starts, ends, one.final, shape.total, logits.stride(0), logits.stride(1), COUNT
        )

    return call
