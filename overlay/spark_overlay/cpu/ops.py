"""CPU implementations of the C++ ops that V4.1 calls by name and vLLM's CPU build lacks: two in
every build, the third in the one for processors without AVX-512."""

from __future__ import annotations

import torch
from torch import Tensor

from spark_overlay.attention.format import NOPE_DIM
from spark_overlay.attention.reference import insert_kv, rotate
from spark_overlay.indexer.reference import quantise_queries

INSERT = "fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert"
INSERT_SCHEMA = (
    "(Tensor q, Tensor kv, Tensor(a!) k_cache, Tensor slot_mapping, Tensor positions, "
    "Tensor cos_sin_cache, int q_head_padded, float eps, int block_size, bool apply_q_norm, "
    "bool kv_mxfp8, bool apply_q_rope, bool is_q_interleaved) -> Tensor"
)
KV_INSERT = "fused_deepseek_v4_kv_rope_insert"
KV_INSERT_SCHEMA = (
    "(Tensor kv, Tensor(a!) cache, Tensor slots, Tensor positions, Tensor cos_sin, "
    "int block_size, Tensor? fp8_scale, bool kv_mxfp8) -> ()"
)
INDEX_QUERY = "fused_indexer_q_rope_quant_cpu"
INDEX_QUERY_SCHEMA = (
    "(Tensor positions, Tensor index_q, Tensor cos_sin_cache, Tensor(a!) index_q_fp8, "
    "Tensor index_weights, float softmax_scale, float head_scale, Tensor(b!) weights_out) -> ()"
)

_library: torch.library.Library | None = None


def _query_and_kv(
    q: Tensor,
    kv: Tensor,
    k_cache: Tensor,
    slot_mapping: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    q_head_padded: int,
    eps: float,
    block_size: int,
    apply_q_norm: bool,
    kv_mxfp8: bool,
    apply_q_rope: bool,
    is_q_interleaved: bool,
) -> Tensor:
    if apply_q_norm or kv_mxfp8 or not apply_q_rope or is_q_interleaved:
        raise NotImplementedError(f"{INSERT}: only V4.1's 584-byte record with a normed query")
    rotated = rotate(q[..., NOPE_DIM:].float(), cos_sin_cache, positions[: q.shape[0]])
    out = q.new_zeros(q.shape[0], q_head_padded, q.shape[2])
    out[:, : q.shape[1], :NOPE_DIM] = q[..., :NOPE_DIM]
    out[:, : q.shape[1], NOPE_DIM:] = rotated.to(q.dtype)
    insert_kv(kv, k_cache, slot_mapping, positions, cos_sin_cache, block_size)
    return out


def _kv_only(
    kv: Tensor,
    cache: Tensor,
    slots: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    block_size: int,
    fp8_scale: Tensor | None,
    kv_mxfp8: bool,
) -> None:
    if kv_mxfp8 or fp8_scale is not None:
        raise NotImplementedError(f"{KV_INSERT}: only V4.1's 584-byte record")
    insert_kv(kv, cache, slots, positions, cos_sin, block_size)


def _index_query(
    positions: Tensor,
    index_q: Tensor,
    cos_sin_cache: Tensor,
    index_q_fp8: Tensor,
    index_weights: Tensor,
    softmax_scale: float,
    head_scale: float,
    weights_out: Tensor,
) -> None:
    values, weights = quantise_queries(
        index_q, index_weights, positions, cos_sin_cache, softmax_scale, head_scale
    )
    index_q_fp8.view(torch.uint8).copy_(values.view(torch.uint8))
    weights_out.copy_(weights)


def register() -> None:
    """Define each op that is absent; an op vLLM brings is never overridden."""
    global _library
    if _library is not None:
        return
    _library = torch.library.Library("_C", "FRAGMENT")
    for name, schema, implementation in (
        (INSERT, INSERT_SCHEMA, _query_and_kv),
        (KV_INSERT, KV_INSERT_SCHEMA, _kv_only),
        (INDEX_QUERY, INDEX_QUERY_SCHEMA, _index_query),
    ):
        if not hasattr(torch.ops._C, name):
            _library.define(name + schema)
            _library.impl(name, implementation, "CPU")
