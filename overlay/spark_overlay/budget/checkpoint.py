"""What a checkpoint holds: told by its headers, or by its config and the rates of its matrices.

The second is for a checkpoint that is not on this disk. A test holds it against the rehearsal's
real files, name by name; of the published pack the counts, the file size and a load are known.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path

from spark_overlay.budget.names import one_expert
from spark_overlay.budget.shape import BudgetError, ModelShape
from spark_overlay.exl3.kmap import PUBLISHED_2_9
from spark_overlay.exl3.layout import Codebook
from spark_overlay.exl3.modules import OWN_LEAVES, Exl3Facts, scan_modules
from spark_overlay.headers import DTYPE_BITS, CheckpointHeaders, TensorHeader

#: Of a header that no file stands behind.
NOWHERE = Path("not-on-this-disk")

Sized = tuple[str, str, tuple[int, ...]]  # name, dtype, shape
Matrix = tuple[str, int, int]  # key, inputs, outputs


@dataclass(frozen=True, eq=False)
class Contents:
    """Packed linears by key, and every other tensor by name. Equal to itself alone, so that what
    was counted of it can be kept."""

    packed: Mapping[str, Exl3Facts]
    native: Mapping[str, TensorHeader]

    @cached_property
    def kinds(self) -> Counter[Exl3Facts]:
        """How many matrices there are of each kind. Experts of a layer differ in their number
        alone, so equal ones are one kind, named as expert 0."""
        kinds: Counter[Exl3Facts] = Counter()
        known: dict[tuple[str, int, int, int], Exl3Facts] = {}
        for key, facts in self.packed.items():
            first = one_expert(key)
            like = (first, facts.in_features, facts.out_features, facts.k2)
            if like not in known:
                known[like] = replace(facts, key=first)
            kinds[known[like]] += 1
        return kinds

    @classmethod
    def of_headers(cls, headers: Mapping[str, TensorHeader]) -> Contents:
        """Raises Exl3FormatError where packed tensors contradict each other."""
        packed = scan_modules(headers)
        own = {f"{key}.{leaf}" for key in packed for leaf in OWN_LEAVES}
        return cls(packed, {name: h for name, h in headers.items() if name not in own})

    @classmethod
    def of_directory(cls, root: Path) -> Contents:
        """Raises HeaderError for a damaged or incomplete directory."""
        return cls.of_headers(CheckpointHeaders.scan(root).tensors)

    @classmethod
    def of_config(
        cls, shape: ModelShape, bits: Callable[[str], float | None], codebook: Codebook
    ) -> Contents:
        """``bits`` gives K of a packed matrix's key; BudgetError where it has none."""

        @cache
        def k2(key: str) -> int:
            rate = bits(key)
            if rate is None:
                raise BudgetError(f"{key}: the K map has no rate for it; it is another model's")
            return round(2 * rate)

        packed = {
            key: Exl3Facts(key, n_in, n_out, k2(one_expert(key)), codebook)
            for key, n_in, n_out in matrices(shape)
        }
        return cls(packed, dict(map(_header, _natives(shape))))

    @classmethod
    def published(cls, shape: ModelShape) -> Contents:
        """Mia-AiLab/DeepSeek-V4.1-Flash-EXL3-2.9bpw (spark_overlay.exl3.kmap)."""
        return cls.of_config(shape, PUBLISHED_2_9.expected, PUBLISHED_2_9.codebook)


def matrices(shape: ModelShape) -> Iterator[Matrix]:
    """Every packed linear."""
    yield "head", shape.hidden, shape.vocab
    for layer in range(shape.layers):
        yield from _attention(shape, f"layers.{layer}.attn")
        yield from _indexing(shape, layer)
        yield from _experts(shape, f"layers.{layer}.ffn", shape.experts)
        if layer in shape.engram_layers:
            rows = shape.engram_columns * shape.engram_dim
            yield f"layers.{layer}.engram.wkv", rows, shape.hidden * (shape.hc_mult + 1)
    if shape.stages:
        yield "mtp.0.main_proj", len(shape.draft_targets) * shape.hidden, shape.hidden
    for stage in range(shape.stages):
        yield from _attention(shape, f"mtp.{stage}.attn")
        yield from _experts(shape, f"mtp.{stage}.ffn", shape.draft_experts)


def _attention(shape: ModelShape, attn: str) -> Iterator[Matrix]:
    width = shape.heads * shape.head_dim
    yield f"{attn}.wq_a", shape.hidden, shape.q_rank
    yield f"{attn}.wq_b", shape.q_rank, width
    yield f"{attn}.wkv", shape.hidden, shape.head_dim
    for group in range(shape.o_groups):
        yield f"{attn}.wo_a.slice.{group}", width // shape.o_groups, shape.o_rank
    yield f"{attn}.wo_b", shape.o_groups * shape.o_rank, shape.hidden


def _indexing(shape: ModelShape, layer: int) -> Iterator[Matrix]:
    attn, source = f"layers.{layer}.attn", layer in shape.kv_sources
    if source:
        yield f"{attn}.compressor.wkv", shape.hidden, shape.head_dim
        if shape.ratio(layer) > 1:
            yield f"{attn}.compressor.wgate", shape.hidden, shape.head_dim
    if layer in shape.index_sources:
        yield f"{attn}.indexer.wq_b", shape.q_rank, shape.index_heads * shape.index_dim
        if source:
            yield f"{attn}.indexer.wk", shape.head_dim, shape.index_dim


def _experts(shape: ModelShape, ffn: str, routed: int) -> Iterator[Matrix]:
    for name in (*(f"experts.{e}" for e in range(routed)), "shared_experts"):
        yield f"{ffn}.{name}.w1", shape.hidden, shape.inner
        yield f"{ffn}.{name}.w2", shape.inner, shape.hidden
        yield f"{ffn}.{name}.w3", shape.hidden, shape.inner


def _natives(shape: ModelShape) -> Iterator[Sized]:
    """What is not packed. The Engram tables are other files'."""
    yield "embed.weight", "BF16", (shape.vocab, shape.hidden)
    yield "norm.weight", "BF16", (shape.hidden,)
    for name in ("image_start", "image_end", "image_newline"):
        yield name, "F32", (shape.hidden,)
    for layer in range(shape.layers):
        yield from _block(shape, f"layers.{layer}", layer, shape.experts)
        if layer in shape.engram_layers:
            for name in ("q_weight", "k_weight"):
                yield f"layers.{layer}.engram.{name}", "BF16", (shape.hc_mult, shape.hidden)
    for stage in range(shape.stages):
        yield from _block(shape, f"mtp.{stage}", shape.layers + stage, shape.draft_experts)
    if shape.stages:
        last, rank = f"mtp.{shape.stages - 1}", shape.markov_rank
        yield "mtp.0.main_norm.weight", "BF16", (shape.hidden,)
        yield f"{last}.norm.weight", "BF16", (shape.hidden,)
        yield f"{last}.markov_head.embed.weight", "BF16", (shape.vocab, rank)
        yield f"{last}.markov_head.head.weight", "BF16", (shape.vocab, rank)
        yield f"{last}.confidence_head.proj.weight", "BF16", (1, shape.hidden + rank)
    if shape.vision.layers:
        yield from _tower(shape)


def _block(shape: ModelShape, prefix: str, layer: int, routed: int) -> Iterator[Sized]:
    attn, gate = f"{prefix}.attn", f"{prefix}.ffn.gate"
    source, backbone = layer in shape.kv_sources, layer < shape.layers
    yield f"{prefix}.attn_norm.weight", "BF16", (shape.hidden,)
    yield f"{prefix}.ffn_norm.weight", "BF16", (shape.hidden,)
    yield f"{attn}.q_norm.weight", "BF16", (shape.q_rank,)
    yield f"{attn}.kv_norm.weight", "BF16", (shape.head_dim,)
    yield f"{attn}.attn_sink", "F32", (shape.heads,)
    if source and backbone:
        yield f"{attn}.compressor.norm.weight", "BF16", (shape.head_dim,)
        yield f"{attn}.indexer.k_norm.weight", "BF16", (shape.index_dim,)
    if layer in shape.index_sources and backbone:
        yield f"{attn}.indexer.weights_proj.weight", "BF16", (shape.index_heads, shape.hidden)
    yield f"{gate}.weight", "BF16", (routed, shape.hidden)
    yield f"{gate}.bias", "F32", (routed,)
    if shape.vision.layers:
        yield f"{gate}.bias_vl", "F32", (routed,)
    mixes = shape.hc_mult * (shape.hc_mult + 2)
    for part in ("attn", "ffn"):
        yield f"{prefix}.hc_{part}_fn", "F32", (mixes, shape.hc_mult * shape.hidden)
        yield f"{prefix}.hc_{part}_base", "F32", (mixes,)
        yield f"{prefix}.hc_{part}_scale", "F32", (3,)


def _tower(shape: ModelShape) -> Iterator[Sized]:
    tower, h = shape.vision, shape.vision.hidden
    yield "vision.patch_embed.proj.weight", "BF16", (h, 3 * tower.patch**2)
    yield "vision.patch_embed.proj.bias", "BF16", (h,)
    for block in range(tower.layers):
        prefix = f"vision.blocks.{block}"
        yield f"{prefix}.norm1.weight", "BF16", (h,)
        yield f"{prefix}.attn.wqkv.weight", "BF16", (3 * h, h)
        yield f"{prefix}.attn.wqkv.bias", "BF16", (3 * h,)
        yield f"{prefix}.attn.wo.weight", "BF16", (h, h)
        yield f"{prefix}.attn.wo.bias", "BF16", (h,)
        yield f"{prefix}.norm2.weight", "BF16", (h,)
        yield f"{prefix}.mlp.w1.weight", "BF16", (2 * tower.inner, h)
        yield f"{prefix}.mlp.w2.weight", "BF16", (h, tower.inner)
    yield "vision.norm.weight", "BF16", (h,)
    merged = h * tower.downsample**2
    for name, n_in in (("w1", merged), ("w2", shape.hidden)):
        yield f"aligner.{name}.weight", "BF16", (shape.hidden, n_in)
        yield f"aligner.{name}.bias", "BF16", (shape.hidden,)


def _header(sized: Sized) -> tuple[str, TensorHeader]:
    name, dtype, shape = sized
    return name, TensorHeader(dtype, shape, 0, math.prod(shape) * DTYPE_BITS[dtype] // 8, NOWHERE)
