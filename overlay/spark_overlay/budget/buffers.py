"""What a rank allocates beside weights and KV cache, as far as config and settings decide it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from spark_overlay.budget.shape import ModelShape
from spark_overlay.budget.weights import Part

#: Bytes of an indexed state: 128 e4m3 values and a float32 scale.
INDEX_BYTES = 132
MIB = 1 << 20


@dataclass(frozen=True)
class Serving:
    """What is asked of a server; tokens, requests and bytes."""

    max_len: int
    requests: int
    batch: int  # tokens of one step
    draft_tokens: int  # 0 without speculation
    block: int = 64  # tokens of a KV page
    vision: bool = False
    workspace: int = 40  # prompts of max_len that the indexer's workspace holds; 40 is vLLM's
    logits: int = 256 * MIB  # of one indexer call
    overlap: bool = True  # the next step is scheduled while one is computed (not on a CPU)

    @property
    def draft(self) -> bool:
        return self.draft_tokens > 0


@dataclass(frozen=True)
class Buffer:
    """``place``: in GPU memory, or in the host's pinned memory, which on a Spark is the same."""

    name: str
    bytes: int
    place: Literal["device", "pinned"] = "device"


def model_buffers(shape: ModelShape, part: Part, tp: int, serving: Serving) -> list[Buffer]:
    """What vLLM's model code keeps beside its parameters, on any device, to the byte."""
    tokens, local = serving.batch, [*part.layers]
    drafts = part.last and part.draft
    plain = drafts or any(not shape.ratio(layer) for layer in local)
    stretched = any(shape.ratio(layer) for layer in local)
    rope = 4 * shape.rope_dim * (plain * shape.max_position + stretched * shape.yarn_position)
    chosen = 4 * tokens * shape.index_topk
    found = [
        Buffer("rotary tables", rope),
        Buffer("indexer's choice", chosen * (2 if drafts else 1)),
    ]
    if shape.candidate_blocks:
        found.append(Buffer("candidate blocks", 4 * tokens * shape.candidate_blocks))
    if drafts:
        found.append(Buffer("the draft's inputs", 2 * tokens * shape.hc_mult * shape.hidden))
    if part.first:
        mixes = shape.hc_mult * (shape.hc_mult + 2)
        found.append(Buffer("first layer's mix", 4 * mixes * shape.hidden))
    tables = [layer for layer in shape.engram_layers if layer in part.layers]
    if tables:
        rows = tokens * _columns(shape, tp) * shape.engram_dim
        found.append(Buffer("Engram rows", len(tables) * 2 * rows))
        every = len(shape.engram_layers)
        hashing = 4 * shape.vocab + 8 * every * (2 * shape.engram_columns + shape.engram_ngram)
        found.append(Buffer("Engram hashing", hashing))
    return found


def engram_staging(shape: ModelShape, part: Part, tp: int, serving: Serving) -> list[Buffer]:
    """The overlay's way from files to a GPU: ids down, rows up, for each table of the rank."""
    tables = sum(layer in part.layers for layer in shape.engram_layers)
    most = serving.batch * _columns(shape, tp)
    each = most * (8 + shape.engram_dim + shape.engram_dim // 32)
    return [
        Buffer("Engram staging", tables * each),
        Buffer("Engram staging, host's", tables * each, "pinned"),
    ]


def indexer_buffers(shape: ModelShape, part: Part, serving: Serving) -> list[Buffer]:
    """The workspace that vLLM's indexer kernels gather keys into, and one call's logits."""
    if not any(layer in part.layers for layer in shape.index_sources):
        return []
    gathered = serving.workspace * serving.max_len * INDEX_BYTES
    return [Buffer("indexer workspace", gathered), Buffer("indexer logits", serving.logits)]


def _columns(shape: ModelShape, tp: int) -> int:
    return -(-shape.engram_columns // tp)
