"""vLLM's indexer with its scoring done over the paged key cache by portable operations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from vllm.forward_context import get_forward_context
from vllm.models.deepseek_v41.attention import DeepseekV4Indexer
from vllm.v1.attention.backends.mla.indexer import DeepseekV41IndexerBackend

from spark_overlay.indexer.reference import (
    candidate_blocks,
    keep_candidates,
    read_keys,
    scores,
    top_positions,
)


class SparkIndexerBackend(DeepseekV41IndexerBackend):
    """The index key cache in pages of 64 or 128 tokens."""

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int]:
        return [64, 128]


class SparkIndexerOp(nn.Module):
    """Scores, filters and selects compressed positions; constructor as vLLM's SparseAttnIndexer.

    ``metadata_key`` names the compressed cache whose block table holds the keys' pages (key and
    value pages of a source share their block ids); the attention layer sets it. ``positions`` are
    the step's, handed over by the indexer."""

    metadata_key: str
    positions: Tensor

    def __init__(
        self,
        k_cache: Any,
        quant_block_size: int,
        scale_fmt: str,
        topk_tokens: int,
        head_dim: int,
        max_model_len: int,
        max_total_seq_len: int,
        topk_indices_buffer: Tensor,
        skip_k_cache_insert: bool = False,
        use_fp4_cache: bool = False,
        compress_ratio: int = 1,
        candidate_blocks: Tensor | None = None,
        candidate_block_size: int = 0,
        candidate_write: bool = False,
    ) -> None:
        super().__init__()
        if not skip_k_cache_insert or use_fp4_cache:
            raise NotImplementedError(
                "the portable indexer reads V4.1's FP8 key cache, written before it runs: set "
                "attention_config.indexer_kv_dtype=fp8"
            )
        # The cache is a layer of its own; keep it out of this module's children.
        object.__setattr__(self, "k_cache", k_cache)
        self.topk_tokens = topk_tokens
        self.topk_indices_buffer = topk_indices_buffer
        self.compress_ratio = compress_ratio
        self.candidates = candidate_blocks
        self.candidate_size = candidate_block_size
        self.candidate_write = candidate_write

    def forward(self, hidden: Tensor, q: Tensor, k: None, weights: Tensor) -> Tensor:
        """``q [T, H, 128]`` e4m3, ``weights [T, H]`` (scales folded in). Fills the shared buffer
        ``[T, top_k]`` with positions within each request, -1 padded."""
        metadata = get_forward_context().attn_metadata
        if not isinstance(metadata, dict):
            return self.topk_indices_buffer
        pages = metadata[self.metadata_key]
        count = pages.num_actual_tokens
        visible = (self.positions[:count] + 1) // self.compress_ratio
        states = pages.block_size // self.compress_ratio
        request = pages.req_id_per_token[:count].long()
        self.topk_indices_buffer[: hidden.shape[0]] = -1
        for index in request.unique().tolist():
            rows = (request == index).nonzero()[:, 0]
            length = int(visible[rows].max())
            if length == 0:
                continue
            position = torch.arange(length, device=q.device)
            blocks = pages.block_table[index].long()
            keys = read_keys(
                self.k_cache.kv_cache, blocks[position // states] * states + position % states
            )
            score = scores(q[rows], weights[rows], keys)
            score = score.masked_fill(position >= visible[rows, None], float("-inf"))
            self.topk_indices_buffer[rows] = self._select(score, visible[rows], rows)
        return self.topk_indices_buffer

    def _select(self, score: Tensor, visible: Tensor, rows: Tensor) -> Tensor:
        if self.candidates is not None:
            if self.candidate_write:
                self.candidates[rows] = candidate_blocks(
                    score, visible, self.candidates.shape[1], self.candidate_size
                )
            else:
                score = keep_candidates(score, self.candidates[rows], self.candidate_size)
        return top_positions(score, self.topk_tokens)


class SparkIndexer(DeepseekV4Indexer):
    attn_cls = SparkIndexerOp

    def forward(
        self,
        qr: Any,
        latent: Tensor | None,
        indexer_weights: Tensor,
        positions: Tensor,
        rotary_emb: nn.Module,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        self.indexer_op.positions = positions
        return super().forward(qr, latent, indexer_weights, positions, rotary_emb, *args, **kwargs)
