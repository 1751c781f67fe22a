"""The projections around V4.1's attention, plain or packed; with any of its attention classes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from spark_overlay.exl3.linear import (
    Exl3GroupedLinearMethod,
    Exl3LinearMethod,
    pack_if_stored,
    project,
    project_groups,
)


def take_packed(layer: Any) -> None:
    """Give the linears that vLLM builds without a quantization config what the checkpoint stores:
    an attention layer's compressor and its indexer's key."""
    if layer.compressor is not None:
        pack_if_stored(
            layer.compressor.fused_wkv_wgate, f"{layer.prefix}.compressor.fused_wkv_wgate"
        )
    if layer.indexer is not None and layer.indexer.owns_k:
        pack_if_stored(layer.indexer.wk, f"{layer.prefix}.indexer.wk")


def packed_compressor(layer: Any) -> bool:
    compressor = layer.compressor
    return compressor is not None and isinstance(
        compressor.fused_wkv_wgate.quant_method, Exl3LinearMethod
    )


def packed_output(layer: Any) -> bool:
    return isinstance(layer.wo_a.quant_method, Exl3GroupedLinearMethod)


def project_inputs(
    layer: Any, hidden_states: Tensor
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Query and kv, the compressor's scores in float32, the indexer's weights; one after the
    other."""
    qr_kv = layer._fused_wqa_wkv_gemm(hidden_states)
    kv_score = None
    if layer.compressor is not None:
        kv_score = project(layer.compressor.fused_wkv_wgate, hidden_states, torch.float32)
    weights = None if layer.indexer is None else layer.indexer.weights_proj(hidden_states)[0]
    return qr_kv, kv_score, weights


def project_output(layer: Any, heads: Tensor) -> Tensor:
    """``heads [T, H, 512]``, RoPE turned back, through ``wo_a`` and ``wo_b``."""
    groups = heads.reshape(heads.shape[0], layer.n_local_groups, -1)
    out: Tensor = layer._wo_b_proj(project_groups(layer.wo_a, groups, layer.o_lora_rank))
    return out
