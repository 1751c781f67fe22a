"""The memory hooks of vLLM's loader and indexer (see hooks.py); each asks the settings itself."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
)
from vllm.model_executor.model_loader import default_loader
from vllm.v1.attention.backends.mla import indexer

from spark_overlay.headers import TensorHeader, read_header
from spark_overlay.loading import prepared, request
from spark_overlay.loading.stream import stream
from spark_overlay.memory import pagecache
from spark_overlay.settings import overlay_settings

log = logging.getLogger("vllm.spark_overlay.loading")

STOCK_ITERATOR = default_loader.safetensors_weights_iterator
STOCK_SIZE = indexer.get_max_prefill_buffer_size


def safetensors_weights_iterator(
    hf_weights_files: list[str],
    use_tqdm_on_load: bool,
    safetensors_load_strategy: str | None = None,
    local_expert_ids: set[int] | None = None,
    **more: Any,
) -> Iterator[tuple[str, Tensor]]:
    """This rank's share of an EXL3 pack, by our reader; of other checkpoints vLLM's own, with the
    page cache of each file dropped behind it."""
    given = (hf_weights_files, use_tqdm_on_load, safetensors_load_strategy, local_expert_ids)
    told = overlay_settings(get_current_vllm_config())
    drop = told.memory_drop_page_cache
    if (taker := request.current()) is not None:
        files = [Path(file) for file in hf_weights_files]
        rank, ranks = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
        who = f"rank {rank} of {ranks}"
        own = _prepared(told.weights_prepared_dir, files, rank, ranks)
        wanted = taker.wanted(files, own)
        return stream(wanted, taker.device, who=who, keep=not drop)
    if not drop:
        found: Iterator[tuple[str, Tensor]] = STOCK_ITERATOR(*given, **more)
        return found
    return pagecache.iterator(STOCK_ITERATOR, _names, *given, **more)


def _prepared(
    folder: str | None, files: list[Path], rank: int, ranks: int
) -> dict[str, TensorHeader] | None:
    """Headers of this rank's prepared file; None where the shards themselves are to be read."""
    if folder is None or not files:
        return None
    origin = prepared.origin(files[0].parent, rank, ranks)
    found = prepared.find(Path(folder), origin)
    if found is None:
        log.info(
            "[load] no %s in %s: the checkpoint itself is read (./start.sh prepare makes it)",
            origin.file_name,
            folder,
        )
    else:
        log.info("[load] reading %s", Path(folder) / origin.file_name)
    return found


def _names(path: Path) -> list[str]:
    return list(read_header(path))


def get_max_prefill_buffer_size(vllm_config: Any) -> int:
    """Rows (132 bytes each, before compression) of the indexer's prefill workspace.

    vLLM takes 40 prompts of full length. One is enough for any request; the builder cuts what does
    not fit at once into more pieces.
    """
    stock = int(STOCK_SIZE(vllm_config))
    factor = overlay_settings(vllm_config).indexer_prefill_factor
    return (
        stock
        if factor is None
        else min(stock, int(vllm_config.model_config.max_model_len) * factor)
    )
