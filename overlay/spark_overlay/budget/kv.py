"""How many tokens a KV pool holds: vLLM's own accounting for V4.1's five kinds of cache.

Every layer has a sliding-window cache; layers of ``kv_source_layer_ids`` have a compressed one, an
index beside it and, where two tokens are pooled, a ring of the tokens still to be pooled. vLLM puts
caches into groups whose pages share blocks of one size, and a request takes whole blocks of each
group (vLLM 0.33.0, ``v1/core/kv_cache_utils.py``). Ranks of a tensor-parallel group hold the same.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from spark_overlay.budget.buffers import INDEX_BYTES, Serving
from spark_overlay.budget.shape import BudgetError, ModelShape
from spark_overlay.budget.weights import Part

#: Bytes of a cached latent (fp8_ds_mla, every GPU but SM100), and what pages are rounded to.
RECORD, ALIGNMENT = 584, 576
WINDOW_BLOCK = 32

#: Pages of ``block`` tokens, as vLLM 0.33.0 has them; or of ``block`` states, windows included, as
#: the image has them whose capacity was published (774,400 tokens in 2.5 GiB).
Paging = Literal["tokens", "states"]
Kind = Literal["full", "window", "ring"]


@dataclass(frozen=True)
class Cache:
    """One layer's cache of one kind. ``block``: tokens of a page, ``page``: its bytes."""

    name: str
    kind: Kind
    block: int
    page: int


@dataclass(frozen=True)
class Capacity:
    """``tokens`` as vLLM logs them: requests of ``max_len`` that fit, times ``max_len``."""

    tokens: int
    requests: float
    blocks: int
    blocks_per_request: int
    block_bytes: int


def caches(
    shape: ModelShape, part: Part, serving: Serving, paging: Paging = "tokens"
) -> list[Cache]:
    """Those of one rank, in the order of its layers.

    A stage that reads a compressed cache of an earlier one (no vLLM can do that) has a copy of it.
    """
    found: list[Cache] = []
    drafts = range(shape.layers, shape.layers + shape.stages if part.last and part.draft else 0)
    window = serving.block if paging == "states" else WINDOW_BLOCK
    for layer in (*part.layers, *drafts):
        found.append(Cache(f"{layer}.window", "window", window, _page(window * RECORD)))
        if layer in shape.kv_sources and layer < shape.layers:
            found += _compressed(shape, layer, str(layer), serving, paging)
    read = {source for layer in part.layers if (source := shape.kv_source(layer)) is not None}
    for source in sorted(read - {*part.layers}):
        name = f"{source} for {part.layers.start}"
        found += _compressed(shape, source, name, serving, paging)[:2]
    return found


def _compressed(
    shape: ModelShape, layer: int, name: str, serving: Serving, paging: Paging
) -> list[Cache]:
    """Compressed cache, index and ring of a KV source."""
    ratio = shape.ratio(layer)
    block = serving.block * ratio if paging == "states" else serving.block
    states = block // ratio
    if states * ratio != block:
        raise BudgetError(f"KV pages of {block} tokens cannot hold states of {ratio}")
    found = [
        Cache(f"{name}.compressed", "full", block, _page(states * RECORD)),
        Cache(f"{name}.index", "full", block, _page(states * INDEX_BYTES)),
    ]
    if ratio > 1:
        rows = max(8, 1 << (serving.draft_tokens + 1).bit_length())
        found.append(Cache(f"{name}.ring", "ring", rows, rows * 2 * shape.head_dim * 4))
    return found


def capacity(
    shape: ModelShape,
    parts: Sequence[Part],
    pools: Sequence[int],
    serving: Serving,
    paging: Paging = "tokens",
) -> Capacity:
    """Of a pipeline whose stages hold ``parts`` and give ``pools`` bytes to their caches."""
    local = [caches(shape, part, serving, paging) for part in parts]
    groups = grouped([cache for stage in local for cache in stage])
    blocks = block_bytes = 0
    for stage, pool in zip(local, pools, strict=True):
        mine = {cache.name for cache in stage}
        size = max(sum(c.page for c in group if c.name in mine) for group in groups)
        here = pool // size
        if not block_bytes or here < blocks:
            blocks, block_bytes = here, size
    each = sum(_blocks(group[0], shape, serving, len(parts)) for group in groups)
    requests = blocks / each
    return Capacity(int(requests * serving.max_len), requests, blocks, each, block_bytes)


def _blocks(cache: Cache, shape: ModelShape, serving: Serving, stages: int) -> int:
    """Blocks that a request of ``max_len`` takes of a group."""
    match cache.kind:
        case "full":
            return _ceil(serving.max_len, cache.block)
        case "window":
            # A step is computed on each stage; with overlap one more is scheduled meanwhile.
            in_flight = (stages + serving.overlap) * serving.batch
            held = min(shape.window - 1 + in_flight, serving.max_len)
            return _ceil(held, cache.block) + 1
        case _:
            return 1


def grouped(every: Iterable[Cache]) -> list[list[Cache]]:
    """Caches whose pages lie side by side in one block, by vLLM's rule."""
    buckets: dict[tuple[Kind, int], list[Cache]] = defaultdict(list)
    for cache in every:
        buckets[cache.kind, cache.block].append(cache)
    by_page = {key: _by_page(bucket) for key, bucket in buckets.items()}
    repeats = {key: max(map(len, pages.values())) for key, pages in by_page.items()}
    balanced = {key: len({*map(len, pages.values())}) == 1 for key, pages in by_page.items()}
    patterns = [repeats[k] for k in buckets if balanced[k] and len(by_page[k]) > 1]
    step = _step([repeats[k] for k in buckets if balanced[k]], max(patterns)) if patterns else None

    def split(key: tuple[Kind, int]) -> int:
        return _ceil(repeats[key], step) if step and balanced[key] else 1

    def state(key: tuple[Kind, int]) -> bool:
        return key[0] == "ring" or (key[0] == "window" and step is None)

    def widest(key: tuple[Kind, int]) -> int:
        n = len(buckets[key]) if state(key) else split(key)
        return sum(_ceil(len(caches), n) * page for page, caches in by_page[key].items())

    anchor = max(map(widest, buckets), default=0)
    groups = []
    for key, bucket in buckets.items():
        n = split(key)
        if state(key):
            n = max(n, _ceil(len(bucket), max(anchor // bucket[0].page, 1)))
        if n == 1:
            groups.append(bucket)
            continue
        rows = [*zip(*by_page[key].values(), strict=True)]
        groups += [[cache for row in rows[i::n] for cache in row] for i in range(n)]
    return groups


def _by_page(bucket: Iterable[Cache]) -> dict[int, list[Cache]]:
    found: dict[int, list[Cache]] = defaultdict(list)
    for cache in bucket:
        found[cache.page].append(cache)
    return found


def _step(counts: Sequence[int], least: int) -> int:
    """Layers of a group that leave the fewest places empty; the larger of equals."""

    def empty(step: int) -> int:
        return sum(-count % step for count in counts)

    return min(range(least, max(*counts, least) + 1), key=lambda step: (empty(step), -step))


def _page(content: int) -> int:
    return math.ceil(content / ALIGNMENT) * ALIGNMENT


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def longest(
    shape: ModelShape, parts: Sequence[Part], pools: Sequence[int], serving: Serving, most: int
) -> int:
    """Tokens of the longest request, up to ``most``, that the pools hold alone; 0 if none."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        asked = replace(serving, max_len=middle)
        if capacity(shape, parts, pools, asked).requests >= 1:
            low = middle
        else:
            high = middle - 1
    return low
