"""Stand-ins for vLLM's kernels that are slow under Triton's interpreter. Names and parameters are
vLLM's; the arithmetic is the references'."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from spark_overlay.arithmetic import wide
from spark_overlay.attention.format import RECORD_BYTES
from spark_overlay.attention.reference import rms_norm
from spark_overlay.compressor.reference import insert_latent, pool_and_norm
from spark_overlay.indexer.reference import all_visible, store_keys


def not_capturing() -> bool:
    return False


def top_k_top_p(
    logits: Tensor,
    k: Tensor | None,
    p: Tensor | None,
    mask_value: float = float("-inf"),
    has_topp_only_rows: bool = True,  # from 0.33 on
) -> Tensor:
    """vLLM's own torch form. ``logits`` [rows, vocabulary], ``k`` and ``p`` [rows]."""
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

    if mask_value != float("-inf"):
        raise NotImplementedError(f"logits are masked with -inf on a CPU, not {mask_value}")
    return apply_top_k_top_p_pytorch(logits, k, p, allow_cpu_sync=True)


def fused_q_kv_rmsnorm(
    qr: Tensor, kv: Tensor, q_weight: Tensor, kv_weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    return rms_norm(qr, q_weight, eps).to(qr.dtype), rms_norm(kv, kv_weight, eps).to(kv.dtype)


def indexer_k_norm_rope_store(
    k_pre: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    rms_norm_weight: Tensor,
    rms_norm_eps: float,
    k_cache: Tensor,
    kv_slot_mapping: Tensor,
    compress_ratio: int,
    use_fp4_cache: bool,
) -> None:
    if use_fp4_cache:
        raise NotImplementedError("the CPU indexer has an FP8 key cache only")
    store_keys(
        k_pre,
        positions,
        cos_sin_cache,
        rms_norm_weight,
        rms_norm_eps,
        k_cache,
        kv_slot_mapping,
        compress_ratio,
    )


def fused_save_compress_norm(
    kv_score: Tensor,
    positions: Tensor,
    state_cache: Tensor | None,
    slot_mapping: Tensor,
    query_start_loc: Tensor | None,
    token_to_req_indices: Tensor | None,
    rms_norm_weight: Tensor,
    rms_norm_eps: float,
    compress_ratio: int,
    latent_out: Tensor,
    prev_rows: Tensor | None = None,
    prev_row_indices: Tensor | None = None,
) -> None:
    if prev_rows is not None or prev_row_indices is not None:
        raise NotImplementedError("prefill context parallelism does not run on a CPU")
    pool_and_norm(
        kv_score,
        positions,
        state_cache,
        slot_mapping,
        query_start_loc,
        token_to_req_indices,
        rms_norm_weight,
        rms_norm_eps,
        compress_ratio,
        latent_out,
    )


def rope_quant_insert(
    latent: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    compress_ratio: int,
    fp8_scale: Tensor | None = None,
) -> None:
    if kv_cache.shape[-1] != RECORD_BYTES or fp8_scale is not None:
        raise NotImplementedError(
            f"found a cache of {kv_cache.shape[-1]} bytes a token; the CPU writes {RECORD_BYTES}"
        )
    insert_latent(latent, positions, cos_sin_cache, kv_cache, slot_mapping, compress_ratio)


class _FillShortContext:
    """Called as a Triton kernel is: ``kernel[grid](...)``."""

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(
            output: Tensor, positions: Tensor, *, TOP_K: int, COMPRESS_RATIO: int, **_: Any
        ) -> None:
            tokens = grid[0]
            output[:tokens] = all_visible(positions[:tokens], TOP_K, COMPRESS_RATIO)

        return launch


fill_short_context = _FillShortContext()


def clamped_swiglu(self: Any, x: Tensor) -> Tensor:
    """``silu(min(gate, L)) * clamp(up, -L, L)`` of ``x [..., 2 d]``, rounded once."""
    gate, up = wide(x).chunk(2, -1)
    gate, up = gate.clamp(max=self.swiglu_limit), up.clamp(-self.swiglu_limit, self.swiglu_limit)
    return (gate * torch.sigmoid(self.alpha * gate) * (up + self.beta)).to(x.dtype)


def zero_block_ids(self: Any, block_ids: list[int]) -> None:
    """Zero new KV blocks by address, as vLLM's kernel does: tables count 4-byte words."""
    if not block_ids or self._meta is None:
        return
    addresses, strides, sizes = (table.tolist() for table in self._meta[:3])
    for address, stride, size in zip(addresses, strides, sizes, strict=True):
        for block in block_ids:
            ctypes.memset(address + 4 * block * stride, 0, 4 * size)


def prepare() -> None:
    """What a CPU process needs before a V4.1 model is built, hooks aside."""
    from spark_overlay.cpu import ops

    ops.register()
