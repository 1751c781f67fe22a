"""V4.1's attention layer on portable kernels, the same class on a CPU and on every GPU, and which
class serves.

Only the parts vLLM leaves to a platform are here: sparse attention over paged records, and the
projections around it. On a CPU the torch references compute; they are the kernels' oracle.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.forward_context import get_forward_context
from vllm.logger import init_logger
from vllm.models.deepseek_v41.attention import DeepseekV4Attention
from vllm.models.deepseek_v41.sparse_mla import (
    DeepseekV4FlashMLABackend,
    DeepseekV41SparseSWAMetadataBuilder,
)
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.mla.sparse_swa import DeepseekSparseSWABackend

from spark_overlay import holding
from spark_overlay.attention import kernels, shared, stock
from spark_overlay.attention.kernels import Source
from spark_overlay.attention.projections import project_inputs, project_output, take_packed
from spark_overlay.attention.reference import read_records, rotate_tail, sparse_attention
from spark_overlay.attention.select import Choice, Found, choose, wishes
from spark_overlay.indexer.glue import SparkIndexer
from spark_overlay.settings import overlay_settings

logger = init_logger(__name__)


class SparkSWAMetadataBuilder(DeepseekV41SparseSWAMetadataBuilder):
    """The sliding window's metadata without FlashMLA's tile schedules."""

    #: A decode step in one graph, however many tokens each request has (adaptive verification):
    #: nothing below asks the device anything, and a padded row has no slot.
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS

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
        # What runs here gains nothing from side streams.
        kwargs["aux_stream_list"] = None
        super().__init__(*args, **kwargs)
        take_packed(self)
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
        return project_inputs(self, hidden_states)

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
        out: Tensor,
    ) -> None:
        """vLLM's break between pieces of a graph: what the indexer is told is told in it."""
        if self.indexer is not None:
            self.indexer.indexer_op.positions = positions
        super()._sparse_indexer_and_attn(
            hidden_states, index_q, index_q_scale, index_weights, q, kv, positions, out
        )

    def forward_mqa(self, q: Tensor, kv: Tensor, positions: Tensor, output: Tensor) -> None:
        """``q [T, H, 512]`` rotated; fills ``output [T, H, 512]``, on a GPU with RoPE turned back.
        Decodes come first; rows beyond them and the prefills are padding, and zero."""
        metadata = get_forward_context().attn_metadata
        if not isinstance(metadata, dict):
            output.zero_()
            return
        window = metadata[self.swa_cache_layer.prefix]
        decodes = window.num_decode_tokens
        tokens = decodes + window.num_prefill_tokens
        output[tokens:].zero_()
        chosen = self._chosen(metadata, window.is_valid_token[:tokens])
        for low, high, slots, lengths in (
            (0, decodes, window.decode_swa_indices, window.decode_swa_lens),
            (decodes, tokens, window.prefill_swa_indices, window.prefill_swa_lens),
        ):
            if high == low:
                continue
            count, rows = high - low, slice(low, high)
            sources = [
                Source(
                    self.swa_cache_layer.kv_cache,
                    slots[:count].reshape(count, -1),
                    lengths[:count],
                )
            ]
            if chosen is not None:
                sources.append(Source(self._compressed_kv_cache(), chosen[rows], None))
            self._attend(q[rows], sources, positions[rows], output[rows])

    def _chosen(self, metadata: dict[str, Any], valid: Tensor) -> Tensor | None:
        """Slots int32 [T, K] of the compressed records that this layer's index source chose."""
        if not self.compress_ratio:
            return None
        cache = metadata[self.compressed_cache_prefix]
        where = shared.geometry(cache, self.compress_ratio, valid, anew=self.is_kv_source)
        topk = self.topk_indices_buffer[: valid.shape[0]]

        def make() -> Tensor:
            if topk.device.type == "cpu":
                return shared.slots_of(topk, where)
            out = torch.empty_like(topk)
            kernels.chosen_slots(topk, where.block_table, where.request, where.states, out)
            return out

        return shared.chosen(cache, self.index_source_layer_id, make, anew=self.is_index_source)

    def _attend(self, q: Tensor, sources: list[Source], positions: Tensor, output: Tensor) -> None:
        if q.device.type != "cpu":
            turn = (self.rotary_emb.cos_sin_cache, positions)
            kernels.sparse_mla(q, sources, self.attn_sink, self.scale, output, unrotate=turn)
            return
        keys, valid = zip(*map(_read, sources), strict=True)
        attended = sparse_attention(
            q, torch.cat(keys, 1), torch.cat(valid, 1), self.attn_sink, self.scale
        )
        output.copy_(attended)

    def _o_proj(self, attn_out: Tensor, positions: Tensor) -> Tensor:
        heads = attn_out[:, : self.n_local_heads]
        if attn_out.device.type == "cpu":  # the kernel turned it back before it rounded
            heads = rotate_tail(
                heads,
                self.rotary_emb.cos_sin_cache,
                positions[: attn_out.shape[0]],
                inverse=True,
            )
        return project_output(self, heads)


def _read(source: Source) -> tuple[Tensor, Tensor]:
    """Records float32 [T, W, 512] of a source, and bool [T, W]: which of them exist."""
    slots = source.slots.long()
    valid = slots >= 0
    if source.lengths is not None:
        column = torch.arange(slots.shape[1], device=slots.device)
        valid &= column < source.lengths[:, None]
    return read_records(source.cache, torch.where(valid, slots, 0)), valid


def attention_class(vllm_config: Any) -> type[DeepseekV4Attention]:
    """What vLLM's dispatcher answers: one class for all layers, the draft's among them."""
    picked = _picked(overlay_settings(vllm_config).attention)
    if picked.kind == "portable":
        return SparkAttention
    return stock.over(stock.DISPATCH(vllm_config))


@cache
def _picked(setting: str | None) -> Choice:
    """Once for each setting; raises ChoiceError."""
    capability = holding.capability()
    found = Found(capability, stock.missing(capability))
    picked = choose(found, wishes(os.environ, setting))
    logger.info("attention: %s (%s)", picked.kind, picked.why)
    return picked
