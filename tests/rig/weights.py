"""Model files that are whole but tiny: config, index and every shard of it. Pure."""

from __future__ import annotations

import json

SHARD = 4096  # bytes of each tensor


def checkpoint() -> dict[str, bytes]:
    """The EXL3 checkpoint: file name and content."""
    names = [f"model-{n:05}-of-00003.safetensors" for n in (1, 2, 3)]
    config = {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "quantization_config": {"quant_method": "exl3", "bits": 2.9, "codebook": "mul1"},
    }
    tensors = {f"layers.{n}.attn.wkv.trellis": name for n, name in enumerate(names)}
    return {"config.json": json.dumps(config).encode(), **_files(tensors)}


def engram() -> dict[str, bytes]:
    """The original's shards 47 and 48, with the tables of two layers."""
    tensors = {
        f"layers.{layer}.engram.embed.{kind}": f"model-{shard:05}-of-00048.safetensors"
        for layer, shard in ((1, 47), (14, 48))
        for kind in ("weight", "scale")
    }
    config = {"model_type": "deepseek_v41", "engram_layer_ids": [1, 14]}
    return {"config.json": json.dumps(config).encode(), **_files(tensors)}


def _files(tensors: dict[str, str]) -> dict[str, bytes]:
    index = {"metadata": {"total_size": SHARD * len(tensors)}, "weight_map": tensors}
    made = {"model.safetensors.index.json": json.dumps(index).encode()}
    for shard in sorted(set(tensors.values())):
        held = [name for name, where in tensors.items() if where == shard]
        header = {
            name: {
                "dtype": "U8",
                "shape": [SHARD],
                "data_offsets": [at * SHARD, (at + 1) * SHARD],
            }
            for at, name in enumerate(held)
        }
        text = json.dumps(header).encode()
        made[shard] = len(text).to_bytes(8, "little") + text + bytes(SHARD * len(held))
    return made
