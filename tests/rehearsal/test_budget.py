"""The budget, made of headers and config, is what engines allocate: to the byte, to a block."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from jobs import COMMON, JOBS

from spark_overlay.budget import kv
from spark_overlay.budget.buffers import Serving, model_buffers
from spark_overlay.budget.checkpoint import Contents
from spark_overlay.budget.published import CONFIG
from spark_overlay.budget.shape import ModelShape
from spark_overlay.budget.weights import Part, total, weigh

pytestmark = pytest.mark.rehearsal


@pytest.mark.parametrize(("name", "ranks"), [("plain", 1), ("draft3", 1), ("pair", 2)])
def test_what_a_rank_allocates(
    request: pytest.FixtureRequest, checkpoint: Callable[[str], Path], name: str, ranks: int
) -> None:
    allocated = request.getfixturevalue(name)["allocated"]
    options: Mapping[str, Any] = {**COMMON, **JOBS[name].options}
    root = checkpoint(JOBS[name].variant) / "checkpoint"
    shape = ModelShape.from_config(json.loads((root / "config.json").read_text()))
    contents = Contents.of_directory(root)
    draft = options.get("speculative_config", {}).get("num_speculative_tokens", 0)
    serving = Serving(
        max_len=options["max_model_len"],
        requests=options["max_num_seqs"],
        batch=options["max_num_batched_tokens"],
        draft_tokens=draft,
        block=options["block_size"],
        overlap=False,
    )
    part = Part.whole(shape, draft=bool(draft), vision=False)
    pool = options["kv_cache_memory_bytes"]
    blocks = kv.capacity(shape, [part], [pool], serving).blocks
    expected = [
        {
            "parameters": total(weigh(contents, shape, part, ranks, rank)),
            "buffers": sum(each.bytes for each in model_buffers(shape, part, ranks, serving)),
            "kv_blocks": blocks,
        }
        for rank in range(ranks)
    ]
    assert allocated == expected


def spec_of(cache: kv.Cache, shape: ModelShape) -> Any:
    """vLLM's own description of a cache, as its layers give it (attention.py, compressor.py)."""
    import torch
    from vllm.v1.kv_cache_interface import (
        CircularBufferSpec,
        MLAAttentionSpec,
        SlidingWindowMLASpec,
    )

    layer, kind = cache.name.split(".")
    record: dict[str, Any] = {
        "block_size": cache.block,
        "num_kv_heads": 1,
        "dtype": torch.uint8,
        "alignment": 576,
    }
    packed = {
        **record,
        "head_size": 512,
        "state_content_bytes": 584,
        "model_version": "deepseek_v4",
    }
    packed["cache_dtype_str"] = "fp8_ds_mla"
    if kind == "window":
        return SlidingWindowMLASpec(**packed, sliding_window=shape.window)
    if kind == "ring":
        ring = {"head_size": 1024, "head_size_v": 0, "dtype": torch.float32, "num_kv_heads": 1}
        return CircularBufferSpec(block_size=cache.block, **ring)
    ratio = shape.ratio(int(layer))
    if kind == "index":
        return MLAAttentionSpec(**record, head_size=132, tokens_per_state=ratio)
    return MLAAttentionSpec(**packed, tokens_per_state=ratio)


@pytest.mark.parametrize("paging", ["tokens", "states"])
@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize("batch", [1024, 2048])
def test_capacity_is_vllms_own(vllm: ModuleType, paging: kv.Paging, block: int, batch: int) -> None:
    """Of the published model, whose caches no machine here could hold."""
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.kv_cache_layout import KVCacheLayout

    shape = ModelShape.from_config(CONFIG)
    part, length, pool = Part.whole(shape), 614_400, int(2.5 * 2**30)
    serving = Serving(length, 2, batch, draft_tokens=3, block=block)
    config = SimpleNamespace(
        cache_config=SimpleNamespace(
            get_resolved_kv_cache_layout=lambda: KVCacheLayout.BLHNC,
            num_gpu_blocks_override=None,
            prefix_cache_retention_interval=None,
        ),
        attention_config=SimpleNamespace(hisparse_config=None),
        speculative_config=None,
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1, prefill_context_parallel_size=1
        ),
        model_config=SimpleNamespace(max_model_len=length),
        max_in_flight_tokens=2 * batch,
    )
    caches = kv.caches(shape, part, serving, paging)
    specs = {cache.name: spec_of(cache, shape) for cache in caches}
    assert {cache.name: cache.page for cache in caches} == {
        name: spec.page_size_bytes for name, spec in specs.items()
    }
    groups = kv_cache_utils._get_packed_kv_cache_groups(config, specs)
    built = kv_cache_utils.get_kv_cache_config_from_groups(config, groups, pool)
    tokens, requests = kv_cache_utils.get_kv_cache_capacity(config, built)
    mine = kv.capacity(shape, [part], [pool], serving, paging)
    assert (mine.tokens, mine.blocks) == (tokens, built.num_blocks)
    assert mine.requests == pytest.approx(requests, rel=1e-12)
