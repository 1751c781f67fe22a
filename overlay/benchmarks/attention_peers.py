"""What vLLM 0.33.0 has for the same operations, where it is installed: FlashMLA on SM90, its Triton
kernels anywhere. Each maker prepares what a step prepares once and returns one call a set."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Call = Callable[[], Any]
Sets = Sequence[tuple[Any, ...]]


def load(kind: str) -> None:
    """Import what a kind's calls need, which takes vLLM half a minute; what is absent is found
    again by the call that needs it."""
    try:
        import torch  # noqa: F401

        if kind == "flashmla":
            import vllm.v1.attention.ops.flashmla
        elif kind == "operations":
            import vllm.models.deepseek_v41.common.ops.cache_utils
        else:
            import vllm.v1.attention.ops.rocm_aiter_mla_sparse  # noqa: F401
    except Exception:
        pass


def decode(name: str, q: Any, sets: Sets, sink: Any, scale: float) -> tuple[list[Call], Any]:
    """Calls, and the output ``[T, H, 512]`` that the last one leaves."""
    return {"flashmla": _flashmla_decode, "triton": _triton_decode}[name](q, sets, sink, scale)


def _padded(q: Any, sink: Any, heads: int) -> tuple[Any, Any]:
    import torch

    tokens, own, width = q.shape
    whole = torch.zeros(tokens, heads, width, dtype=q.dtype, device=q.device)
    whole[:, :own] = q
    logits = torch.zeros(heads, device=q.device)
    logits[:own] = sink[:own]
    return whole, logits


def _flashmla_decode(q: Any, sets: Sets, sink: Any, scale: float) -> tuple[list[Call], Any]:
    """Planned beforehand; 32 heads padded to the 64 it knows, as vLLM does."""
    import torch
    from vllm.v1.attention.ops.flashmla import flash_mla_with_kvcache, get_mla_metadata

    whole, logits = _padded(q, sink, 64)
    out = torch.empty_like(whole)
    plan = get_mla_metadata()[0]
    tokens = q.shape[0]
    chosen_lengths = torch.full((tokens,), 512, dtype=torch.int32, device=q.device)

    def call(window: Any, chosen: Any) -> Any:
        return flash_mla_with_kvcache(
            q=whole.unsqueeze(1),
            k_cache=window.cache.unsqueeze(-2),
            block_table=None,
            head_dim_v=512,
            tile_scheduler_metadata=plan,
            cache_seqlens=None,
            is_fp8_kvcache=True,
            indices=window.slots.view(tokens, 1, -1),
            topk_length=window.lengths,
            softmax_scale=scale,
            attn_sink=logits,
            extra_k_cache=chosen.cache.unsqueeze(-2),
            extra_indices_in_kvcache=chosen.slots.view(tokens, 1, -1),
            extra_topk_length=chosen_lengths,
            out=out.unsqueeze(1),
        )

    return [lambda w=w, c=c: call(w, c) for w, c in sets], out[:, : q.shape[1]]


def _triton_decode(q: Any, sets: Sets, sink: Any, scale: float) -> tuple[list[Call], Any]:
    """As vLLM runs it off ROCm: no splits; the ragged indices are built beforehand."""
    import torch
    from vllm.v1.attention.ops import rocm_aiter_mla_sparse as stock

    out = torch.empty_like(q)
    ragged = []
    for window, chosen in sets:
        made = []
        for one in (window, chosen):
            lengths = one.lengths
            if lengths is None:
                lengths = (one.slots >= 0).sum(-1, dtype=torch.int32)
            rows = one.cache.shape[0] * one.cache.shape[1]
            made.append(stock.build_ragged_indices_from_dense(one.slots, lengths, num_rows=rows))
        ragged.append((window, chosen, *made))

    def call(window: Any, chosen: Any, main: Any, extra: Any) -> Any:
        return stock._rocm_sparse_attn_decode_ragged_triton(
            q=q,
            main_cache=window.cache,
            main_indices=main[0],
            main_indptr=main[1],
            scale=scale,
            attn_sink=sink,
            nope_head_dim=448,
            rope_head_dim=64,
            extra_cache=chosen.cache,
            extra_indices=extra[0],
            extra_indptr=extra[1],
            out=out,
        )

    return [lambda s=s: call(*s) for s in ragged], out


def prefill(
    name: str, q: Any, workspace: Any, indices: Sequence[Any], sink: Any, scale: float
) -> tuple[list[Call], Any]:
    """Over bf16 rows that were gathered before (not counted): ``workspace [rows, 512]``."""
    import torch

    tokens, width = indices[0].shape
    lengths = torch.full((tokens,), width, dtype=torch.int32, device=q.device)
    kv = workspace.view(-1, 1, 512)
    if name == "triton":
        from vllm.v1.attention.ops import rocm_aiter_mla_sparse as stock

        out = torch.empty_like(q)
        ragged = [
            stock.build_ragged_indices_from_dense(i, lengths, num_rows=len(workspace))
            for i in indices
        ]

        def plain(places: Any, bounds: Any) -> Any:
            return stock._rocm_sparse_attn_prefill_ragged_triton(
                q=q,
                kv=workspace,
                indices=places,
                indptr=bounds,
                scale=scale,
                attn_sink=sink,
                nope_head_dim=448,
                rope_head_dim=64,
                out=out,
            )

        return [lambda r=r: plain(*r) for r in ragged], out
    from vllm.v1.attention.ops.flashmla import flash_mla_sparse_fwd

    whole, logits = (q, sink) if name == "flashmla" else _padded(q, sink, 64)
    out = torch.empty_like(whole)

    def call(places: Any) -> Any:
        return flash_mla_sparse_fwd(
            q=whole,
            kv=kv,
            indices=places.unsqueeze(1),
            sm_scale=scale,
            attn_sink=logits[: whole.shape[1]],
            topk_length=lengths,
            out=out,
        )

    return [lambda i=i: call(i) for i in indices], out[:, : q.shape[1]]


def gather(out: Any, cache: Any, lengths: Any, table: Any, most: int | None) -> Call:
    """vLLM's Triton form with ``max_gather_len`` (None: as its SM90 path calls it)."""
    from vllm.models.deepseek_v41.common.ops import cache_utils as stock

    return lambda: stock.dequantize_and_gather_k_cache_triton(
        out, cache, lengths, None, table, cache.shape[1], 0, max_gather_len=most
    )


def combine(topk: Any, out: Any, args: Sequence[Any]) -> Call:
    """vLLM's pair of launches: fill with -1, then the kernel."""
    from vllm.models.deepseek_v41.common.ops import cache_utils as stock

    return lambda: stock.combine_topk_swa_indices(topk, *args, out=out)


def chosen(topk: Any, request: Any, table: Any, states: int) -> Call:
    import torch
    from vllm.models.deepseek_v41.common.ops import cache_utils as stock

    valid = torch.ones(topk.shape[0], dtype=torch.bool, device=topk.device)
    return lambda: stock.compute_global_topk_indices_and_lens(topk, request, table, states, valid)
