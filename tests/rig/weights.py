"""Model files that are whole but tiny: config, index and every shard of it. Pure."""

from __future__ import annotations

import json
from random import Random

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


def packed() -> dict[str, bytes]:
    """A checkpoint whose matrices are EXL3's: what `prepare` can cut. Values mean nothing."""
    tensors, files = {}, {}
    for n in range(3):
        shard = f"model-{n + 1:05}-of-00003.safetensors"
        held = {
            **_matrix(f"layers.{n}.ffn.experts.0.w1", 256, 512, n),
            **_matrix(f"layers.{n}.attn.wo_a.slice.{n % 2}", 256, 128, n + 3),
            f"layers.{n}.norm.weight": ("F32", [8], bytes([n + 1]) * 32),
        }
        header, at = {}, 0
        for name, (dtype, shape, data) in held.items():
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
            tensors[name] = shard
            at += len(data)
        text = json.dumps(header).encode()
        data = b"".join(data for _, _, data in held.values())
        files[shard] = len(text).to_bytes(8, "little") + text + data
    index = {"metadata": {}, "weight_map": tensors}
    config = json.loads(checkpoint()["config.json"]) | {"o_groups": 2}
    files["config.json"] = json.dumps(config).encode()
    return {**files, "model.safetensors.index.json": json.dumps(index).encode()}


def _matrix(key: str, n_in: int, n_out: int, seed: int) -> dict[str, tuple[str, list[int], bytes]]:
    """At 3 bits."""
    sizes = {
        "trellis": ("I16", [n_in // 16, n_out // 16, 48], n_in * n_out * 3 // 8),
        "suh": ("F16", [n_in], 2 * n_in),
        "svh": ("F16", [n_out], 2 * n_out),
    }
    random = Random(seed)
    found = {
        f"{key}.{leaf}": (t, s, random.randbytes(size)) for leaf, (t, s, size) in sizes.items()
    }
    return {**found, f"{key}.mul1": ("I32", [], (0x83DCD12D).to_bytes(4, "little"))}


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
