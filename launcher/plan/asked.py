"""What the settings ask of a node, in the budget's terms."""

from __future__ import annotations

from dataclasses import replace

import launcher.plan.overlay  # noqa: F401  (before spark_overlay)
from launcher.commands.vllm import STOCK_INDEXER_FACTOR, indexer_factor
from launcher.plan.source import Source
from launcher.settings.values import Settings
from spark_overlay.budget.buffers import MIB, Serving
from spark_overlay.budget.node import CONTEXT, GIB, SPARK, Asked, rank_rows
from spark_overlay.budget.weights import Part

TP = 2  # ranks of the pair


def serving(settings: Settings) -> Serving:
    s, factor = settings, indexer_factor(settings)
    return Serving(
        max_len=s.int("MAX_MODEL_LEN"),
        requests=s.int("MAX_NUM_SEQS"),
        batch=s.int("MAX_NUM_BATCHED_TOKENS"),
        draft_tokens=s.int("DSPARK_TOKENS") if s.text("SPEC_METHOD") == "dspark" else 0,
        block=s.int("KV_BLOCK_SIZE"),
        vision=not s.flag("LANGUAGE_MODEL_ONLY"),
        workspace=STOCK_INDEXER_FACTOR if factor is None else factor,
        logits=s.int("VLLM_SPARSE_INDEXER_MAX_LOGITS_MB") * MIB,
    )


def asked(settings: Settings, source: Source, tp: int = TP) -> Asked:
    """The pair's node, with one of ``tp`` ranks. Without KV_CACHE_MEMORY_BYTES the pool is what
    vLLM would find: the share GPU_MEM_UTIL of the memory, less all that it knows of."""
    found = Asked(
        serving(settings),
        pool=settings.maybe_int("KV_CACHE_MEMORY_BYTES") or 0,
        floor=int(settings.number("DSV41_MEM_GUARD_GIB") * GIB),
        tp=tp,
        memory=SPARK,
        engram_cache=int(settings.number("DSV41_CACHE_GIB") * GIB),
        nccl_buffer=settings.int("NCCL_BUFFSIZE"),
    )
    if found.pool:
        return found
    share = int(float(settings.text("GPU_MEM_UTIL")) * found.memory)
    part = Part.whole(source.shape, draft=found.serving.draft, vision=found.serving.vision)
    rows = rank_rows(source.shape, source.contents, part, found)
    return replace(found, pool=max(0, share - CONTEXT - sum(row.bytes for row in rows)))
