"""vLLM's Engram layer with its table in files (or in memory), never in parameters."""

from __future__ import annotations

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
from spark_overlay.engram.reference import dequantize_rows, gate_values
from spark_overlay.engram.source import locate_tables
from spark_overlay.engram.store import FileRowStore, MemoryRowStore, RowStore
from spark_overlay.settings import overlay_settings


class SparkEngramEmbedding(nn.Module):
    """This rank's heads of one layer's table. Attributes as vLLM's ParallelEngramEmbedding has
    them.

    It owns no parameter: a table is 94 GiB, and a loader that sees none cannot load it.
    """

    cpu_offload = False
    dp_size = 1

    def __init__(self, layout: EngramLayout, part: RankRange, store: RowStore, tp: int) -> None:
        super().__init__()
        self.tp_size = tp
        self.dim = layout.dim
        self.n_hash_cols = layout.columns
        self.part_n_hash_cols = -(-layout.columns // tp)
        self.columns = slice(*part.columns)
        self.store = store

    def lookup(self, indices: Tensor, out: Tensor, background: bool = False) -> None:
        """``indices [T, columns]`` -> ``out [T, local columns, dim]`` bf16; zeros where an id is
        -1."""
        mine = indices[:, self.columns]
        rows = self.store.lookup(mine.reshape(-1).long().cpu().numpy())
        weights = torch.from_numpy(rows.weights).view(torch.float8_e4m3fn)
        dense = dequantize_rows(weights, torch.from_numpy(rows.scales))
        out[:, : mine.shape[1]] = dense.view(*mine.shape, self.dim).to(out.device)


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
        part = own.rank_range(layer_id, rank, tp)
        source = locate_tables(Path(settings.engram_dir), own)[layer_id]
        kind = FileRowStore if settings.engram_store == "file" else MemoryRowStore
        return SparkEngramEmbedding(own, part, kind(source, *part.rows), tp)

    def forward(
        self, hidden_states: Tensor, hash_ids: Tensor, token_mask: Tensor | None = None
    ) -> Tensor:
        if hidden_states.device.type != "cpu" or self.use_sequence_parallel:
            return super().forward(hidden_states, hash_ids, token_mask)
        kv = self.wkv(self.embed(hash_ids).flatten(-2))
        return gate_values(hidden_states, kv, self.q_weight, self.k_weight, self.eps, token_mask)
