"""vLLM's own attention classes under the overlay, and what is rebound in them (hooks.py).

They compute as vLLM ships them; packed projections and the indexer are ours.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.models.deepseek_v41.attention import DeepseekV4Attention
from vllm.models.deepseek_v41.nvidia import model
from vllm.platforms import current_platform

from spark_overlay.attention import kernels
from spark_overlay.attention.pages import stock_sizes
from spark_overlay.attention.projections import (
    packed_compressor,
    packed_output,
    project_inputs,
    project_output,
    take_packed,
)
from spark_overlay.attention.reference import rotate_tail
from spark_overlay.indexer.glue import SparkIndexer

#: vLLM's dispatcher, before the overlay's stands in its place.
DISPATCH = model._select_dsv4_attn_cls


def missing(capability: tuple[int, int] | None) -> str:
    """What vLLM's class for this GPU lacks here, in words; empty: nothing. On SM12x FlashInfer is
    tried on a small case."""
    if capability is None or capability[0] != 12:
        return ""
    from vllm.utils.flashinfer import has_flashinfer_sparse_mla_sm120

    if not has_flashinfer_sparse_mla_sm120():
        return "FlashInfer's sparse MLA is not installed (flashinfer-python==0.7.2.post1 has it)"
    from spark_overlay.attention import contest

    return contest.fault("stock", contest.case(torch.device("cuda"), 4))


def _page_sizes(kv_cache_spec: Any = None) -> list[int]:
    """See pages.py."""
    family = next((f for f in (90, 120) if current_platform.is_device_capability_family(f)), None)
    return stock_sizes(family)


page_sizes = staticmethod(_page_sizes)


def bounded_topk(
    topk_indices: Tensor,
    token_to_req_indices: Tensor,
    block_table: Tensor,
    block_size: int,
    is_valid_token: Tensor,
) -> tuple[Tensor, Tensor]:
    """Slots int32 [T, K] of chosen positions, and how many each row has (0 where it is padding).

    vLLM's own loads the block table at whatever column an index names; here a page beyond the
    table's width is absent (-1), and a padded row asks nothing of it."""
    request = torch.where(is_valid_token, token_to_req_indices[: len(is_valid_token)], -1)
    slots = torch.empty_like(topk_indices)
    kernels.chosen_slots(topk_indices, block_table, request, block_size, slots)
    counts = (topk_indices >= 0).sum(-1, dtype=torch.int32)
    return slots, counts * is_valid_token


def padded_prefill_heads(self: Any) -> int:
    """Heads of FlashMLA's prefill on SM90: all that the query is padded to (64). With 32 it takes
    almost twice as long (1.76 to 1.96), and its results differ by at most one bf16 ulp."""
    return int(self.padded_heads)


class _Packed:
    """Beside a class of vLLM's: packed projections where the checkpoint has them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        take_packed(self)
        layer: Any = self
        if layer.indexer is not None:
            layer.indexer.indexer_op.metadata_key = layer.compressed_cache_prefix

    def _run_parallel_input_projections(self, hidden_states: Tensor) -> Any:
        if packed_compressor(self):
            return project_inputs(self, hidden_states)
        return super()._run_parallel_input_projections(hidden_states)  # type: ignore[misc]

    def _o_proj(self, attn_out: Any, positions: Tensor) -> Tensor:
        if not packed_output(self):
            return super()._o_proj(attn_out, positions)  # type: ignore[misc, no-any-return]
        layer: Any = self
        if not isinstance(attn_out, Tensor):
            raise NotImplementedError(
                f"{type(self).__name__} hands on quantised heads, and wo_a is packed: "
                "OVERLAY_ATTENTION=portable, or a checkpoint whose wo_a is not"
            )
        heads = rotate_tail(
            attn_out[:, : layer.n_local_heads],
            layer.rotary_emb.cos_sin_cache,
            positions[: attn_out.shape[0]],
            inverse=True,
        )
        return project_output(layer, heads)

    @eager_break_during_capture
    def _sparse_indexer_and_attn(
        self,
        hidden_states: Tensor,
        index_q: Tensor | None,
        index_q_scale: Tensor | None,
        index_weights: Tensor | None,
        q: Tensor,
        kv: Tensor,
        positions: Tensor,
        out: Any,
    ) -> None:
        """vLLM's break between pieces of a graph: what the indexer is told is told in it."""
        layer: Any = self
        if layer.indexer is not None:
            layer.indexer.indexer_op.positions = positions
        super()._sparse_indexer_and_attn(  # type: ignore[misc]
            hidden_states, index_q, index_q_scale, index_weights, q, kv, positions, out
        )

    def _indexer_cls(self, k_cache: Any) -> Any:
        # The index cache's metadata are made for ours (indexer/glue.py).
        return SparkIndexer


@cache
def over(base: type[DeepseekV4Attention]) -> type[DeepseekV4Attention]:
    """``base`` with packed projections."""
    return type(f"Spark{base.__name__}", (_Packed, base), {"__module__": __name__})
