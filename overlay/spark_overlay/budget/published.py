"""config.json of DeepSeek V4.1 Flash, as far as it decides sizes (native revision dba1be0a)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

CONFIG: Final[Mapping[str, Any]] = {
    "text_config": {
        "vocab_size": 129280,
        "hidden_size": 5120,
        "num_hidden_layers": 40,
        "num_attention_heads": 64,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "q_lora_rank": 1280,
        "o_lora_rank": 1024,
        "o_groups": 8,
        "max_position_embeddings": 1048576,
        "rope_scaling": {"factor": 16, "original_max_position_embeddings": 65536},
        "sliding_window": 128,
        "compress_ratios": [0, 0, *[2] * 18, *[1] * 20, 0, 0, 0],
        "kv_source_layer_ids": [2, 8, 14, 20],
        "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36],
        "index_n_heads": 32,
        "index_head_dim": 128,
        "index_topk": 512,
        "candidate_source_layer_id": 20,
        "candidate_topk_blocks": 2048,
        "n_routed_experts": 384,
        "moe_intermediate_size": 2304,
        "hc_mult": 4,
        "num_nextn_predict_layers": 3,
        "dspark_target_layer_ids": [37, 38, 39],
        "dspark_n_routed_experts": 128,
        "dspark_markov_rank": 256,
        "engram_layer_ids": [1, 14],
        "engram_max_ngram_size": 4,
        "engram_n_heads": 8,
        "engram_head_dim": 256,
    },
    "vision_config": {
        "num_hidden_layers": 32,
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "patch_size": 14,
        "downsample_ratio": 3,
    },
}
