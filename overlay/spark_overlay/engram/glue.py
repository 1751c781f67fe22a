"""vLLM's Engram layer with its table in files (or in memory), never in parameters."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import get_current_vllm_config
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
)
from vllm.models.deepseek_v41.common import engram as vllm_engram

from spark_overlay.engram.layout import EngramLayout, RankRange
from spark_overlay.engram.native import NativeRowStore
from spark_overlay.engram.reference import dequantize_rows, gate_values
from spark_overlay.engram.reporting import Reporter
from spark_overlay.engram.source import locate_tables
from spark_overlay.engram.store import RowStore
from spark_overlay.engram.stores import open_store
from spark_overlay.settings import overlay_settings


class SparkEngramEmbedding(nn.Module):
    """This rank's heads of one layer's table. Attributes as vLLM's ParallelEngramEmbedding has
    them, without data parallelism: every replica reads for itself.

    It owns no parameter: a table is 94 GiB, and a loader that sees none cannot load it.
    """

    dp_size = 1

    def __init__(
        self,
        layout: EngramLayout,
        part: RankRange,
        store: RowStore,
        tp: int,
        kind: str,
        max_tokens: int,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.tp_size = tp
        self.dim = layout.dim
        self.n_hash_cols = layout.columns
        self.part_n_hash_cols = -(-layout.columns // tp)
        self.columns = slice(*part.columns)
        self.store = store
        # vLLM prefetches what is "offloaded" on a stream beside the decoder's.
        self.cpu_offload = device.type == "cuda"
        self._on_gpu: Any = None
        if self.cpu_offload:
            from spark_overlay.engram.cuda import CudaLookup, SyncLookup

            mine, width = self.columns, self.part_n_hash_cols
            if isinstance(store, NativeRowStore):
                self._on_gpu = CudaLookup(store, mine, width, self.dim, max_tokens, device)
            else:
                self._on_gpu = SyncLookup(store, kind, mine, width, self.dim)

    def lookup(self, indices: Tensor, out: Tensor, background: bool = False) -> None:
        """``indices [T, columns]`` -> ``out [T, local columns, dim]`` bf16; zeros where an id is
        -1. On a GPU it is queued on the current stream, ``background`` or not: the kernel is
        small, and the reads are the host's."""
        if self._on_gpu is not None:
            self._on_gpu(indices, out)
            return
        mine = indices[:, self.columns]
        rows = self.store.lookup(mine.reshape(-1).long().cpu().numpy())
        weights = torch.from_numpy(rows.weights).view(torch.float8_e4m3fn)
        dense = dequantize_rows(weights, torch.from_numpy(rows.scales))
        out[:, : mine.shape[1]] = dense.view(*mine.shape, self.dim).to(out.device)

    def collapse_huge_pages(self) -> None:
        """vLLM asks this of tables in memory under ``use_thp``."""


class SparkEngram(vllm_engram.Engram):
    """vLLM's Engram over a row store; on a CPU its gate runs on the torch reference."""

    def _create_embedding(self, layout: Any, layer_hash_index: int) -> SparkEngramEmbedding:
        config = get_current_vllm_config()
        settings = overlay_settings(config)
        if settings.engram_dir is None:
            raise ValueError(
                "found no Engram directory; V4.1 reads its n-gram tables from the native shards 47 "
                'and 48: --additional-config \'{"spark_overlay": {"engram_dir": "<dir>"}}\''
            )
        own = EngramLayout.from_config(config.model_config.hf_config)
        assert own is not None, "vLLM builds this layer only where the config names Engram layers"
        layer_id = layout.layer_ids[layer_hash_index]
        rank, tp = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
        source = locate_tables(Path(settings.engram_dir), own)[layer_id]
        store = open_store(settings, source, own, rank, tp)
        _reporter(settings.engram_stats_seconds).watch({f"layer {layer_id}": store})
        return SparkEngramEmbedding(
            own,
            own.rank_range(layer_id, rank, tp),
            store,
            tp,
            settings.engram_store,
            config.scheduler_config.max_num_batched_tokens,
            torch.get_default_device(),
        )

    def forward(
        self, hidden_states: Tensor, hash_ids: Tensor, token_mask: Tensor | None = None
    ) -> Tensor:
        if hidden_states.device.type != "cpu" or self.use_sequence_parallel:
            return super().forward(hidden_states, hash_ids, token_mask)
        kv = self.wkv(self.embed(hash_ids).flatten(-2))
        return gate_values(hidden_states, kv, self.q_weight, self.k_weight, self.eps, token_mask)


@cache
def _reporter(seconds: int) -> Reporter:
    """One for all tables of the process."""
    return Reporter(seconds)
