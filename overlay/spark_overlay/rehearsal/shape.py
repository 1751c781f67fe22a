"""The tiny model: its config as data, and every tensor that the config calls for.

The structure is V4.1's own (both compression ratios, shared KV sources, reindex layers with
candidates, two Engram layers, mHC, three draft stages); only the numbers are small. Each packed
matrix is legal for two ranks under EXL3's 128 rule: a boundary that is no multiple of 128 would
cut a Hadamard block.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from spark_overlay.exl3.format import Exl3FormatError, shard_ranges

VOCAB = 512
HIDDEN = 256
HEADS = 8
HEAD_DIM = 512
O_GROUPS = 4
LAYERS = 9
STAGES = 3
ENGRAM_DIM = 256
MARKOV_RANK = 32

#: Keys as in V4.1's config.json. What depends on tokenizer or tables is added by text_config().
TEXT: Mapping[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 1,
    "head_dim": HEAD_DIM,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 128,
    "o_lora_rank": 128,
    "o_groups": O_GROUPS,
    "hidden_act": "silu",
    "swiglu_limit": 10.0,
    "rms_norm_eps": 1e-20,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "rope_scaling": {
        "type": "yarn",
        "rope_type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 1024,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "sliding_window": 32,
    "compress_ratios": [0, 0, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0],
    "kv_source_layer_ids": [2, 4, 5],
    "index_source_layer_ids": [2, 4, 5, 7],
    "index_n_heads": 8,
    "index_head_dim": 128,
    "index_topk": 16,
    "candidate_source_layer_id": 5,
    "candidate_topk_blocks": 4,
    "candidate_block_size": 8,
    "n_routed_experts": 32,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 256,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "engram_layer_ids": [1, 3],
    "engram_max_ngram_size": 4,
    "engram_n_heads": 8,
    "engram_head_dim": ENGRAM_DIM,
    "engram_vocab_size": 500,
    "engram_pad_token_id": 2,
    "num_nextn_predict_layers": STAGES,
    "dspark_block_size": 5,
    "dspark_target_layer_ids": [6, 7, 8],
    "dspark_markov_rank": MARKOV_RANK,
    "dspark_n_routed_experts": 16,
    "dspark_num_experts_per_tok": 3,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}

#: How two ranks share a matrix: by output columns, by input rows, by whole matrices, or not.
Split = Literal["columns", "rows", "whole", "none"]
Dtype = Literal["BF16", "F32"]


@dataclass(frozen=True, slots=True)
class Linear:
    """One EXL3 matrix ``W[n_in, n_out]``, kept as ``<key>.{trellis,suh,svh,mul1}``.

    ``gain`` is the wanted standard deviation of its weights times sqrt(n_in).
    """

    key: str
    n_in: int
    n_out: int
    split: Split = "none"
    gain: float = 1.0


@dataclass(frozen=True, slots=True)
class Native:
    """One tensor kept as it is: values drawn around ``mean`` with deviation ``std``."""

    name: str
    dtype: Dtype
    shape: tuple[int, ...]
    std: float
    mean: float = 0.0


def linears() -> Iterator[Linear]:
    """Every packed matrix of the checkpoint, in the order of its layers."""
    for layer in range(LAYERS):
        prefix = f"layers.{layer}"
        yield from _attention_linears(prefix, layer)
        yield from _expert_linears(prefix, TEXT["n_routed_experts"])
        if layer in TEXT["engram_layer_ids"]:
            columns = (TEXT["engram_max_ngram_size"] - 1) * TEXT["engram_n_heads"]
            n_out = (TEXT["hc_mult"] + 1) * HIDDEN
            yield Linear(f"{prefix}.engram.wkv", columns * ENGRAM_DIM, n_out, "columns")
    yield Linear("head", HIDDEN, VOCAB, "columns", gain=3.0)
    yield Linear("mtp.0.main_proj", HIDDEN * len(TEXT["dspark_target_layer_ids"]), HIDDEN)
    for stage in range(STAGES):
        yield from _attention_linears(f"mtp.{stage}", LAYERS + stage)
        yield from _expert_linears(f"mtp.{stage}", TEXT["dspark_n_routed_experts"])


def natives() -> Iterator[Native]:
    """Every native tensor of the checkpoint. The Engram tables are not among them."""
    yield Native("embed.weight", "BF16", (VOCAB, HIDDEN), std=1.0)
    yield _norm("norm", HIDDEN)
    for name in ("image_start", "image_end", "image_newline"):
        yield Native(name, "F32", (HIDDEN,), std=1.0)
    for layer in range(LAYERS):
        yield from _block_natives(f"layers.{layer}", layer, TEXT["n_routed_experts"])
        if layer in TEXT["engram_layer_ids"]:
            for name in ("q_weight", "k_weight"):
                shape = (TEXT["hc_mult"], HIDDEN)
                yield Native(f"layers.{layer}.engram.{name}", "BF16", shape, std=0.1, mean=1.0)
    for stage in range(STAGES):
        experts = TEXT["dspark_n_routed_experts"]
        yield from _block_natives(f"mtp.{stage}", LAYERS + stage, experts)
    last = f"mtp.{STAGES - 1}"
    yield _norm("mtp.0.main_norm", HIDDEN)
    yield _norm(f"{last}.norm", HIDDEN)
    for name in ("embed", "head"):
        shape = (VOCAB, MARKOV_RANK)
        yield Native(f"{last}.markov_head.{name}.weight", "BF16", shape, std=_per_root(MARKOV_RANK))
    width = HIDDEN + MARKOV_RANK
    yield Native(f"{last}.confidence_head.proj.weight", "BF16", (1, width), std=_per_root(width))


def check_ranks(tp: int) -> None:
    """Raise Exl3FormatError if ``tp`` ranks cannot share the model under the 128 rule."""
    if HEADS % tp or O_GROUPS % tp:
        raise Exl3FormatError(f"{tp} ranks cannot share {HEADS} heads in {O_GROUPS} output groups")
    for linear in linears():
        for side, size in (("rows", linear.n_in), ("columns", linear.n_out)):
            shard_ranges(size, tp if linear.split == side else 1, f"{linear.key} ({side})")


def text_config(compressed_vocab: int, rows_of: Sequence[int], noise_token: int) -> dict[str, Any]:
    """TEXT with what tokenizer and tables decide: compressed vocabulary, rows, noise token."""
    return {
        **TEXT,
        "engram_num_embeddings": list(rows_of),
        "engram_compressed_vocab_size": compressed_vocab,
        "dspark_noise_token_id": noise_token,
    }


def _attention_linears(prefix: str, layer: int) -> Iterator[Linear]:
    attn, ratio = f"{prefix}.attn", TEXT["compress_ratios"][layer]
    q_rank, o_rank = TEXT["q_lora_rank"], TEXT["o_lora_rank"]
    yield Linear(f"{attn}.wq_a", HIDDEN, q_rank)
    # Queries of half the size keep the softmax smooth: a sharper one turns bf16 rounding into
    # different tokens after a few layers and hides real faults.
    yield Linear(f"{attn}.wq_b", q_rank, HEADS * HEAD_DIM, "columns", gain=0.5)
    yield Linear(f"{attn}.wkv", HIDDEN, HEAD_DIM)
    for group in range(O_GROUPS):
        n_in = HEADS * HEAD_DIM // O_GROUPS
        yield Linear(f"{attn}.wo_a.slice.{group}", n_in, o_rank, "whole")
    yield Linear(f"{attn}.wo_b", O_GROUPS * o_rank, HIDDEN, "rows")
    kv_source = layer in TEXT["kv_source_layer_ids"]
    index_dim = TEXT["index_head_dim"]
    if kv_source:
        yield Linear(f"{attn}.compressor.wkv", HIDDEN, HEAD_DIM)
        if ratio > 1:
            yield Linear(f"{attn}.compressor.wgate", HIDDEN, HEAD_DIM, gain=2.0)
    if layer in TEXT["index_source_layer_ids"]:
        yield Linear(f"{attn}.indexer.wq_b", q_rank, TEXT["index_n_heads"] * index_dim)
        if kv_source:
            yield Linear(f"{attn}.indexer.wk", HEAD_DIM, index_dim)


def _expert_linears(prefix: str, routed: int) -> Iterator[Linear]:
    inner = TEXT["moe_intermediate_size"]
    names = [f"experts.{e}" for e in range(routed)] + ["shared_experts"]
    for name in names:
        yield Linear(f"{prefix}.ffn.{name}.w1", HIDDEN, inner, "columns")
        yield Linear(f"{prefix}.ffn.{name}.w2", inner, HIDDEN, "rows")
        yield Linear(f"{prefix}.ffn.{name}.w3", HIDDEN, inner, "columns")


def _block_natives(prefix: str, layer: int, routed: int) -> Iterator[Native]:
    attn, mult = f"{prefix}.attn", TEXT["hc_mult"]
    yield _norm(f"{prefix}.attn_norm", HIDDEN)
    yield _norm(f"{prefix}.ffn_norm", HIDDEN)
    yield _norm(f"{attn}.q_norm", TEXT["q_lora_rank"])
    yield _norm(f"{attn}.kv_norm", HEAD_DIM)
    yield Native(f"{attn}.attn_sink", "F32", (HEADS,), std=1.0)
    if layer in TEXT["kv_source_layer_ids"]:
        yield _norm(f"{attn}.compressor.norm", HEAD_DIM)
        yield _norm(f"{attn}.indexer.k_norm", TEXT["index_head_dim"])
    if layer in TEXT["index_source_layer_ids"]:
        shape = (TEXT["index_n_heads"], HIDDEN)
        yield Native(f"{attn}.indexer.weights_proj.weight", "BF16", shape, std=_per_root(HIDDEN))
    # Router: the bias decides and the logits only nudge, so that ties are rare.
    gate = f"{prefix}.ffn.gate"
    yield Native(f"{gate}.weight", "BF16", (routed, HIDDEN), std=0.5 * _per_root(HIDDEN))
    yield Native(f"{gate}.bias", "F32", (routed,), std=3.0)
    mixes = mult * (mult + 2)
    for part in ("attn", "ffn"):
        fan_in = mult * HIDDEN
        yield Native(f"{prefix}.hc_{part}_fn", "F32", (mixes, fan_in), std=_per_root(fan_in))
        yield Native(f"{prefix}.hc_{part}_base", "F32", (mixes,), std=0.5)
        yield Native(f"{prefix}.hc_{part}_scale", "F32", (3,), std=0.1, mean=0.5)


def _norm(prefix: str, width: int) -> Native:
    return Native(f"{prefix}.weight", "BF16", (width,), std=0.1, mean=1.0)


def _per_root(width: int) -> float:
    """1/sqrt(width), by operations that round alike everywhere (``**`` is libm's)."""
    return 1.0 / math.sqrt(width)
