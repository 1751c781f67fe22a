"""V4.1's attention layer on portable operations, the same class on a CPU and on every GPU.

Only the parts vLLM leaves to a platform are here: sparse attention over paged records, the output
projection, and the input projections of modules the checkpoint packs.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.models.deepseek_v41.attention import DeepseekV4Attention
from vllm.models.deepseek_v41.sparse_mla import (
    DeepseekV4FlashMLABackend,
    DeepseekV41SparseSWAMetadataBuilder,
)
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.mla.sparse_swa import DeepseekSparseSWABackend

from spark_overlay.attention.reference import read_records, rotate_tail, sparse_attention
from spark_overlay.exl3.linear import pack_if_stored, project, project_groups
from spark_overlay.indexer.glue import SparkIndexer


class SparkSWAMetadataBuilder(DeepseekV41SparseSWAMetadataBuilder):
    """The sliding window's metadata without FlashMLA's tile schedules."""

    #: The indexer and the attention below ask the device how long each request is, which no graph
    #: can hold; vLLM then captures the pieces between them.
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER

    def build_tile_scheduler(self, num_decode_tokens: int) -> dict[str, None]:
        return dict.fromkeys(("swaonly", "c4a", "c128a", "c1a", "c2a"))


class SparkSWABackend(DeepseekSparseSWABackend):
    @staticmethod
    def get_builder_cls() -> type[SparkSWAMetadataBuilder]:
        return SparkSWAMetadataBuilder


class SparkSparseMLABackend(DeepseekV4FlashMLABackend):
    """Paged records of any block size the kernels below can address."""

    @staticmethod
    def get_name() -> str:
        return "SPARK_SPARSE_MLA"

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int]:
        return [64, 128]

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return bool(capability.major >= 8)


class SparkAttention(DeepseekV4Attention):
    """Sparse MLA over the union of the sliding window and the indexer's choice, with a sink."""

    backend_cls = SparkSparseMLABackend
    swa_backend_cls = SparkSWABackend

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # Torch's operations here gain nothing from side streams.
        kwargs["aux_stream_list"] = None
        super().__init__(*args, **kwargs)
        if self.compressor is not None:
            pack_if_stored(
                self.compressor.fused_wkv_wgate, f"{self.prefix}.compressor.fused_wkv_wgate"
            )
        if self.indexer is not None and self.indexer.owns_k:
            pack_if_stored(self.indexer.wk, f"{self.prefix}.indexer.wk")
        if self.indexer is not None:
            self.indexer.indexer_op.metadata_key = self.compressed_cache_prefix

    @classmethod
    def get_padded_num_q_heads(cls, num_heads: int) -> int:
        return num_heads

    def _indexer_cls(self, k_cache: Any) -> type[SparkIndexer]:
        return SparkIndexer

    def _run_parallel_input_projections(
        self, hidden_states: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        qr_kv = self._fused_wqa_wkv_gemm(hidden_states)
        kv_score = None
        if self.compressor is not None:
            kv_score = project(self.compressor.fused_wkv_wgate, hidden_states, torch.float32)
        weights = None if self.indexer is None else self.indexer.weights_proj(hidden_states)[0]
        return qr_kv, kv_score, weights

    def forward_mqa(self, q: Tensor, kv: Tensor, positions: Tensor, output: Tensor) -> None:
        """``q [T, H, 512]`` rotated; fills ``output [T, H, 512]``. Decodes come first."""
        metadata = get_forward_context().attn_metadata
        if not isinstance(metadata, dict):
            output.zero_()
            return
        window = metadata[self.swa_cache_layer.prefix]
        decodes = window.num_decode_tokens
        tokens = decodes + window.num_prefill_tokens
        output[tokens:].zero_()
        for low, high, slots, lengths in (
            (0, decodes, window.decode_swa_indices, window.decode_swa_lens),
            (decodes, tokens, window.prefill_swa_indices, window.prefill_swa_lens),
        ):
            if high > low:
                self._attend(q, output, low, high, slots, lengths, metadata)

    def _attend(
        self,
        q: Tensor,
        output: Tensor,
        low: int,
        high: int,
        slots: Tensor,
        lengths: Tensor,
        metadata: dict[str, Any],
    ) -> None:
        count = high - low
        slots = slots[:count].reshape(count, -1).long()
        column = torch.arange(slots.shape[1], device=slots.device)
        valid = (column < lengths[:count, None]) & (slots >= 0)
        keys = read_records(self.swa_cache_layer.kv_cache, slots.clamp_min(0))
        if self.compress_ratio:
            compressed, chosen = self._chosen_records(low, high, metadata)
            keys, valid = torch.cat((keys, compressed), 1), torch.cat((valid, chosen), 1)
        attended = sparse_attention(q[low:high], keys, valid, self.attn_sink, self.scale)
        output[low:high] = attended.to(output.dtype)

    def _chosen_records(
        self, low: int, high: int, metadata: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        """Compressed records the indexer chose for tokens ``low:high``, and which of them exist."""
        compressed = metadata[self.compressed_cache_prefix]
        states = compressed.block_size // self.compress_ratio
        chosen = self.topk_indices_buffer[low:high].long()
        valid = chosen >= 0
        chosen = chosen.clamp_min(0)
        blocks = compressed.block_table[compressed.req_id_per_token[low:high].long()].long()
        slots = blocks.gather(1, chosen // states) * states + chosen % states
        return read_records(self._compressed_kv_cache(), slots.clamp_min(0)), valid

    def _o_proj(self, attn_out: Tensor, positions: Tensor) -> Tensor:
        heads = rotate_tail(
            attn_out[:, : self.n_local_heads],
            self.rotary_emb.cos_sin_cache,
            positions[: attn_out.shape[0]],
            inverse=True,
        )
        groups = heads.reshape(heads.shape[0], self.n_local_groups, -1)
        return self._wo_b_proj(project_groups(self.wo_a, groups, self.o_lora_rank))


def attention_class(vllm_config: Any) -> type[SparkAttention]:
    """What vLLM's dispatcher answers: one class for every device."""
    return SparkAttention
