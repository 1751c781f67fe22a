"""The model of the GPU checks: V4.1's real dimensions, few layers, few experts. Pure.

Six layers hold one of each kind: window only; a ratio-2 source and a layer that reads it; a ratio-1
source, which publishes candidates; a layer that chooses anew within them; one that chooses nothing.
``TINY`` is the same structure in the rehearsal's sizes, to try a check where there is no GPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from spark_overlay.engram.layout import column_primes
from spark_overlay.exl3.format import Exl3FormatError, shard_ranges
from spark_overlay.rehearsal import tokenizer
from spark_overlay.rehearsal.bits import ENGRAM_OF_LAYER, bits
from spark_overlay.rehearsal.shape import VOCAB, Linear, Native

HEAD_DIM, INDEX_DIM = 512, 128

_STRUCTURE: Mapping[str, Any] = {
    "num_hidden_layers": 6,
    "num_key_value_heads": 1,
    "head_dim": HEAD_DIM,
    "qk_rope_head_dim": 64,
    "hidden_act": "silu",
    "swiglu_limit": 10.0,
    "rms_norm_eps": 1e-20,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "compress_ratios": [0, 2, 2, 1, 1, 1],
    "kv_source_layer_ids": [1, 3],
    "index_source_layer_ids": [1, 3, 4],
    "index_head_dim": INDEX_DIM,
    "candidate_source_layer_id": 3,
    "candidate_block_size": 8,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "engram_layer_ids": [],
    "num_nextn_predict_layers": 0,
    "dspark_block_size": 5,
    "dspark_target_layer_ids": [],
    "dspark_noise_token_id": 3,
    "dspark_n_routed_experts": 16,
    "dspark_num_experts_per_tok": 3,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
REAL: Mapping[str, Any] = {
    **_STRUCTURE,
    "vocab_size": 8192,
    "hidden_size": 5120,
    "num_attention_heads": 64,
    "q_lora_rank": 1280,
    "o_lora_rank": 1024,
    "o_groups": 8,
    "moe_intermediate_size": 2304,
    "max_position_embeddings": 1048576,
    "rope_scaling": {
        "type": "yarn",
        "rope_type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "sliding_window": 128,
    "index_n_heads": 32,
    "index_topk": 512,
    # The real model keeps 2048 blocks; so few that a prompt of some 1500 tokens is filtered.
    "candidate_topk_blocks": 96,
}
TINY: Mapping[str, Any] = {
    **REAL,
    "vocab_size": 512,
    "hidden_size": 256,
    "num_attention_heads": 8,
    "q_lora_rank": 128,
    "o_lora_rank": 128,
    "o_groups": 4,
    "moe_intermediate_size": 256,
    "max_position_embeddings": 4096,
    "rope_scaling": {**REAL["rope_scaling"], "original_max_position_embeddings": 1024},
    "sliding_window": 32,
    "index_n_heads": 8,
    "index_topk": 16,
    "candidate_topk_blocks": 4,
}
SHAPES = {"real": REAL, "tiny": TINY}
#: Engram on two layers before the last KV source, so that replay stays possible. The hash needs a
#: tokenizer of the whole vocabulary, which is the rehearsal's.
ENGRAM: Mapping[str, Any] = {
    "vocab_size": VOCAB,
    "engram_layer_ids": [1, 2],
    "engram_max_ngram_size": 4,
    "engram_n_heads": 8,
    "engram_pad_token_id": 2,
}
ENGRAM_SIZES: Mapping[str, Mapping[str, int]] = {
    "real": {"engram_head_dim": 256, "engram_vocab_size": 20000},
    "tiny": {"engram_head_dim": 64, "engram_vocab_size": 300},
}


#: DSpark's draft of three stages behind the packed model, fed by its last three layers.
STAGES, MARKOV_RANK = 3, 128
DRAFT: Mapping[str, Any] = {
    "num_nextn_predict_layers": STAGES,
    "dspark_target_layer_ids": [3, 4, 5],
    "dspark_markov_rank": MARKOV_RANK,
    "compress_ratios": [*_STRUCTURE["compress_ratios"], *[0] * STAGES],
}


@dataclass(frozen=True)
class Slices:
    """``wo_a``: ``groups`` matrices ``[n_in, n_out]``, packed apart; plain, they are one tensor."""

    key: str
    groups: int
    n_in: int
    n_out: int


def linears(text: Mapping[str, Any]) -> Iterator[Linear | Slices]:
    """Every matrix the EXL3 variant packs."""
    for layer in range(text["num_hidden_layers"]):
        yield from layer_linears(text, layer)
    yield Linear("head", text["hidden_size"], text["vocab_size"], "columns", gain=3.0)
    for stage in range(text["num_nextn_predict_layers"]):
        yield from stage_linears(text, stage)


def with_draft(name: str) -> dict[str, Any]:
    """The shape of that name with a draft behind it."""
    return {**SHAPES[name], **DRAFT}


def stage_linears(text: Mapping[str, Any], stage: int) -> Iterator[Linear | Slices]:
    hidden, targets = text["hidden_size"], len(text["dspark_target_layer_ids"])
    if stage == 0:
        yield Linear("mtp.0.main_proj", hidden * targets, hidden)
    yield from layer_linears(text, text["num_hidden_layers"] + stage, f"mtp.{stage}")


def stage_natives(text: Mapping[str, Any], stage: int) -> Iterator[Native]:
    hidden, rank = text["hidden_size"], text["dspark_markov_rank"]
    yield from layer_natives(text, text["num_hidden_layers"] + stage, f"mtp.{stage}")
    if stage == 0:
        yield _norm("mtp.0.main_norm", hidden)
    if stage == text["num_nextn_predict_layers"] - 1:
        last = f"mtp.{stage}"
        yield _norm(f"{last}.norm", hidden)
        for name in ("embed", "head"):
            std = 1.0 / math.sqrt(rank)
            size = (text["vocab_size"], rank)
            yield Native(f"{last}.markov_head.{name}.weight", "BF16", size, std=std)
        width = hidden + rank
        std = 1.0 / math.sqrt(width)
        yield Native(f"{last}.confidence_head.proj.weight", "BF16", (1, width), std=std)


def with_engram(name: str) -> dict[str, Any]:
    """The shape of that name with two n-gram tables by the real rule, small ones."""
    text = {**SHAPES[name], **ENGRAM, **ENGRAM_SIZES[name]}
    layers, orders = len(text["engram_layer_ids"]), text["engram_max_ngram_size"] - 1
    primes = column_primes(text["engram_vocab_size"], layers, orders, text["engram_n_heads"])
    return text | {
        "engram_num_embeddings": [sum(sizes) for sizes in primes],
        "engram_compressed_vocab_size": tokenizer.compressed_vocab_size(),
    }


def layer_linears(
    text: Mapping[str, Any], layer: int, prefix: str = ""
) -> Iterator[Linear | Slices]:
    """Of a layer of the backbone, or of a draft's stage by its ``prefix``."""
    routed = "dspark_n_routed_experts" if prefix else "n_routed_experts"
    prefix = prefix or f"layers.{layer}"
    attn, hidden, q_rank = f"{prefix}.attn", text["hidden_size"], text["q_lora_rank"]
    heads, groups, o_rank = text["num_attention_heads"], text["o_groups"], text["o_lora_rank"]
    source = layer in text["kv_source_layer_ids"]
    yield Linear(f"{attn}.wq_a", hidden, q_rank)
    yield Linear(f"{attn}.wq_b", q_rank, heads * HEAD_DIM, "columns", gain=0.5)
    yield Linear(f"{attn}.wkv", hidden, HEAD_DIM)
    yield Slices(f"{attn}.wo_a", groups, heads * HEAD_DIM // groups, o_rank)
    yield Linear(f"{attn}.wo_b", groups * o_rank, hidden, "rows")
    if source:
        yield Linear(f"{attn}.compressor.wkv", hidden, HEAD_DIM)
        if text["compress_ratios"][layer] > 1:
            yield Linear(f"{attn}.compressor.wgate", hidden, HEAD_DIM, gain=2.0)
    if layer in text["index_source_layer_ids"]:
        yield Linear(f"{attn}.indexer.wq_b", q_rank, text["index_n_heads"] * INDEX_DIM)
        if source:
            yield Linear(f"{attn}.indexer.wk", HEAD_DIM, INDEX_DIM)
    if layer in text["engram_layer_ids"]:
        columns = (text["engram_max_ngram_size"] - 1) * text["engram_n_heads"]
        n_out = (text["hc_mult"] + 1) * hidden
        yield Linear(f"{prefix}.engram.wkv", columns * text["engram_head_dim"], n_out)
    inner = text["moe_intermediate_size"]
    names = [f"experts.{e}" for e in range(text[routed])] + ["shared_experts"]
    for name in (f"{prefix}.ffn.{n}" for n in names):
        yield Linear(f"{name}.w1", hidden, inner, "columns")
        yield Linear(f"{name}.w2", inner, hidden, "rows")
        yield Linear(f"{name}.w3", hidden, inner, "columns")


def natives(text: Mapping[str, Any]) -> Iterator[Native]:
    """Every tensor that stays as it is in both variants. Scales are smooth: rounding must not grow
    into other tokens within a few layers."""
    hidden = text["hidden_size"]
    yield Native("embed.weight", "BF16", (text["vocab_size"], hidden), std=1.0)
    yield _norm("norm", hidden)
    for name in ("image_start", "image_end", "image_newline"):
        yield Native(name, "F32", (hidden,), std=1.0)
    for layer in range(text["num_hidden_layers"]):
        yield from layer_natives(text, layer)
    for stage in range(text["num_nextn_predict_layers"]):
        yield from stage_natives(text, stage)


def layer_natives(text: Mapping[str, Any], layer: int, prefix: str = "") -> Iterator[Native]:
    routed = "dspark_n_routed_experts" if prefix else "n_routed_experts"
    prefix = prefix or f"layers.{layer}"
    hidden, mult = text["hidden_size"], text["hc_mult"]
    attn = f"{prefix}.attn"
    yield _norm(f"{prefix}.attn_norm", hidden)
    yield _norm(f"{prefix}.ffn_norm", hidden)
    yield _norm(f"{attn}.q_norm", text["q_lora_rank"])
    yield _norm(f"{attn}.kv_norm", HEAD_DIM)
    yield Native(f"{attn}.attn_sink", "F32", (text["num_attention_heads"],), std=1.0)
    if layer in text["kv_source_layer_ids"]:
        yield _norm(f"{attn}.compressor.norm", HEAD_DIM)
        yield _norm(f"{attn}.indexer.k_norm", INDEX_DIM)
    if layer in text["engram_layer_ids"]:
        for name in ("q_weight", "k_weight"):
            yield Native(f"{prefix}.engram.{name}", "BF16", (mult, hidden), std=0.1, mean=1.0)
    per_root = 1.0 / math.sqrt(hidden)
    if layer in text["index_source_layer_ids"]:
        shape = (text["index_n_heads"], hidden)
        yield Native(f"{attn}.indexer.weights_proj.weight", "BF16", shape, std=per_root)
    experts, gate = text[routed], f"{prefix}.ffn.gate"
    yield Native(f"{gate}.weight", "BF16", (experts, hidden), std=0.5 * per_root)
    yield Native(f"{gate}.bias", "F32", (experts,), std=1.0)
    mixes, fan_in = mult * (mult + 2), mult * hidden
    for part in ("attn", "ffn"):
        per_stream = 1.0 / math.sqrt(fan_in)
        yield Native(f"{prefix}.hc_{part}_fn", "F32", (mixes, fan_in), std=per_stream)
        yield Native(f"{prefix}.hc_{part}_base", "F32", (mixes,), std=0.5)
        yield Native(f"{prefix}.hc_{part}_scale", "F32", (3,), std=0.1, mean=0.5)


def rate(key: str) -> float:
    """Bits per weight, mixed as the rehearsal's checkpoint (and the real pack) mixes them."""
    if ".engram." in key:  # whose layers are others than here
        return ENGRAM_OF_LAYER[min(ENGRAM_OF_LAYER)]
    return bits(key)


def check_ranks(text: Mapping[str, Any], tp: int) -> None:
    """Raise Exl3FormatError if ``tp`` ranks cannot share every packed matrix."""
    if text["num_attention_heads"] % tp or text["o_groups"] % tp:
        raise Exl3FormatError(f"{tp} ranks cannot share the heads in their output groups")
    for linear in linears(text):
        split = getattr(linear, "split", "none")
        for side, size in (("rows", linear.n_in), ("columns", linear.n_out)):
            shard_ranges(size, tp if split == side else 1, f"{linear.key} ({side})")


def _norm(prefix: str, width: int) -> Native:
    return Native(f"{prefix}.weight", "BF16", (width,), std=0.1, mean=1.0)
