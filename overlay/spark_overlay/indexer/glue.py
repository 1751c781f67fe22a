"""vLLM's indexer with its scoring done over the paged key cache: on a GPU by the kernels beside
this, on a CPU by the torch reference."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import vllm.envs as envs
from torch import Tensor, nn
from vllm.forward_context import get_forward_context
from vllm.models.deepseek_v41.attention import DeepseekV4Indexer
from vllm.models.deepseek_v41.common import ops as vllm_ops
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadataBuilder
from vllm.v1.attention.backends.mla.compressor_utils import get_compressed_slot_mapping
from vllm.v1.attention.backends.mla.indexer import (
    DeepseekV32IndexerMetadata,
    DeepseekV41IndexerBackend,
)

from spark_overlay.indexer import workspace
from spark_overlay.indexer.reference import (
    candidate_blocks,
    keep_candidates,
    read_keys,
    scores,
    top_positions,
)

STOCK_QUERIES = vllm_ops.fused_indexer_q_rope_quant


def fused_indexer_q_rope_quant(
    positions: Tensor,
    index_q: Tensor,
    index_q_cos_sin_cache: Tensor,
    index_weights: Tensor,
    index_weights_softmax_scale: float,
    index_weights_head_scale: float,
    use_fp4: bool = False,
    weights_out_dtype: torch.dtype = torch.float32,
) -> Any:
    """vLLM's index queries in e4m3; on a GPU without a conversion that some lack."""
    given = (
        positions,
        index_q,
        index_q_cos_sin_cache,
        index_weights,
        index_weights_softmax_scale,
        index_weights_head_scale,
    )
    if use_fp4 or weights_out_dtype != torch.float32 or not index_q.is_cuda:
        return STOCK_QUERIES(*given, use_fp4, weights_out_dtype)
    from spark_overlay.indexer.kernels.queries import quantise_queries

    positions, query, table, weights, softmax_scale, head_scale = given
    return quantise_queries(query, weights, positions, table, softmax_scale, head_scale)


class SparkIndexerMetadataBuilder(AttentionMetadataBuilder[DeepseekV32IndexerMetadata]):
    """Where index keys are stored, and how long the step's longest request is. The kernels ask the
    rest of the attention's metadata on the device, so that graphs hold any batch and a request's
    rows may differ from what the host knows (adaptive verification)."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        parallel = vllm_config.parallel_config
        for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
            if getattr(parallel, name, 1) > 1:
                raise ValueError(f"the portable indexer needs {name}=1")
        self.ratio = int(kv_cache_spec.tokens_per_state)
        tokens = vllm_config.scheduler_config.max_num_batched_tokens
        # A graph writes keys by these, so they stay where they are.
        self.slots = torch.zeros(tokens, dtype=torch.int64, device=device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> DeepseekV32IndexerMetadata:
        common = common_attn_metadata
        slots = common.slot_mapping
        if self.ratio > 1:
            slots = get_compressed_slot_mapping(
                common.num_actual_tokens,
                slots,
                common.query_start_loc,
                common.seq_lens,
                common.block_table_tensor,
                int(self.kv_cache_spec.num_states),
                self.ratio,
                out=self.slots,
            )
        # vLLM's indexer reads the sum of both kinds of tokens only.
        return DeepseekV32IndexerMetadata(
            seq_lens=common.seq_lens,
            max_seq_len=common.max_seq_len,
            slot_mapping=slots,
            num_decodes=common.num_reqs,
            num_decode_tokens=common.num_actual_tokens,
            num_prefills=0,
            num_prefill_tokens=0,
            block_table=common.block_table_tensor,
        )


class SparkIndexerBackend(DeepseekV41IndexerBackend):
    """The index key cache in pages of 64 or 128 tokens."""

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int]:
        return [64, 128]


class PortableIndexerBackend(SparkIndexerBackend):
    """That of a cache which the operation below reads: nothing of DeepGEMM's is built."""

    @staticmethod
    def get_builder_cls() -> type[SparkIndexerMetadataBuilder]:
        return SparkIndexerMetadataBuilder

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        return True


def _portable_backend() -> type[PortableIndexerBackend]:
    return PortableIndexerBackend


class SparkIndexerOp(nn.Module):
    """Scores, filters and selects compressed positions; constructor as vLLM's SparseAttnIndexer.

    ``metadata_key`` names the compressed cache whose block table holds the keys' pages (key and
    value pages of a source share their block ids); the attention layer sets it. ``positions`` are
    the step's; the attention layer hands them over with each call, for a graph that is replayed
    runs no Python but that of its breaks."""

    metadata_key: str
    positions: Tensor
    #: Whether every kernel that this layer may need is there; the first step sees to it.
    compiled = False

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
        k_cache.get_attn_backend = _portable_backend
        self.topk_tokens = topk_tokens
        self.topk_indices_buffer = topk_indices_buffer
        self.compress_ratio = compress_ratio
        self.candidates = candidate_blocks
        self.candidate_size = candidate_block_size
        self.candidate_write = candidate_write
        if topk_indices_buffer.is_cuda:
            blocks = 0 if candidate_blocks is None else candidate_blocks.shape[1]
            workspace.reserve(
                topk_indices_buffer.device,
                rows=topk_indices_buffer.shape[0],
                width=max_model_len,
                blocks=blocks if candidate_write else 0,
                size=candidate_block_size,
                most=envs.VLLM_SPARSE_INDEXER_MAX_LOGITS_MB << 20,
            )

    def forward(self, hidden: Tensor, q: Tensor, k: None, weights: Tensor) -> Tensor:
        """``q [T, H, 128]`` e4m3, ``weights [T, H]`` (scales folded in). Fills the shared buffer
        ``[T, top_k]`` with positions within each request, -1 padded."""
        metadata = get_forward_context().attn_metadata
        if not isinstance(metadata, dict):
            return self.topk_indices_buffer
        pages = metadata[self.metadata_key]
        if q.is_cuda:
            keys = metadata[self.k_cache.prefix]
            self._by_kernels(q, weights, pages, keys, hidden.shape[0])
            return self.topk_indices_buffer
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

    def _by_kernels(self, q: Tensor, weights: Tensor, pages: Any, keys: Any, rows: int) -> None:
        from spark_overlay.indexer.kernels.launch import Candidates, Selection, Step

        cache = self.k_cache.kv_cache
        candidates = None
        if self.candidates is not None:
            chosen = self.candidates[:rows]
            candidates = Candidates(chosen, self.candidate_size, self.candidate_write)
        step = Step(
            request=pages.req_id_per_token,
            starts=pages.query_start_loc,
            lengths=keys.seq_lens,
            table=keys.block_table,
            longest=pages.max_query_len,
            bound=pages.max_seq_len,
        )
        choice = Selection(self.compress_ratio, self.topk_tokens, workspace.reserved(q.device))
        final = self.topk_indices_buffer[:rows]
        if not self.compiled and rows and not torch.cuda.is_current_stream_capturing():
            choice.compile(q, weights, cache, step, final, candidates)
            self.compiled = True
        choice(q, weights, cache, step, final, candidates)

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
