"""The JSON files of the rehearsal checkpoint: model, quantisation and generation config."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from spark_overlay.exl3.format import MARKERS

from . import bits
from .shape import TEXT, Linear
from .shards import Raw
from .tensors import CODEBOOK
from .tokenizer import IMAGE

#: Key of config.json that says: made here, from this seed. vLLM carries it along unread.
MARK = "rehearsal"

#: Of the native checkpoint. The EXL3 pack carries it along; its fp8 must not be taken for the
#: pack's own format.
NATIVE_QUANTIZATION = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [32, 32],
    "scale_fmt": "ue8m0",
    "expert_dtype": "fp4",
}

#: As the real pack has it. ``bits`` is that pack's average: a reader that sizes anything by it
#: fails here as it would there.
QUANTIZATION = {
    "quant_method": "exl3",
    "version": "1.4.2",
    "bits": 2.9,
    "head_bits": int(bits.HEAD),
    "mtp_bits": int(bits.DRAFT),
    "codebook": CODEBOOK,
    "out_scales": "auto",
    "calibration": {"rows": 0, "cols": 0},
    "original_quantization_config": NATIVE_QUANTIZATION,
}


def model_config(
    text: dict[str, Any],
    vocab: dict[str, int],
    quantization: dict[str, Any],
    origin: dict[str, Any],
) -> dict[str, Any]:
    """config.json around ``text`` (shape.text_config); ``origin`` is seed, variant, generator."""
    return {
        MARK: origin,
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "torch_dtype": "bfloat16",
        "bos_token_id": TEXT["bos_token_id"],
        "eos_token_id": TEXT["eos_token_id"],
        "pad_token_id": TEXT["pad_token_id"],
        "image_token_id": vocab[IMAGE],
        "text_config": text,
        # No tower: images are out of the rehearsal, their three vectors are loaded all the same.
        "vision_config": {
            "num_hidden_layers": 0,
            "hidden_size": 64,
            "num_attention_heads": 2,
            "intermediate_size": 64,
            "patch_size": 14,
        },
        "quantization_config": quantization,
    }


def generation_config() -> dict[str, Any]:
    return {"bos_token_id": TEXT["bos_token_id"], "eos_token_id": TEXT["eos_token_id"]}


def storage_entry(linear: Linear, tensors: dict[str, Raw]) -> dict[str, Any]:
    """One module of ``tensor_storage``, the quantizer's ledger."""
    stored = {
        name: {"shape": list(raw.shape), "dtype": raw.dtype, "n_bytes": len(raw.data)}
        for name, raw in tensors.items()
    }
    return {
        "stored_tensors": stored,
        "quant_format": "exl3",
        "bits_per_weight": bits.bits(linear.key),
        f"{CODEBOOK}_multiplier": MARKERS[CODEBOOK] & 0xFFFFFFFF,
    }


def quantization_file(packed: Iterable[tuple[Linear, dict[str, Raw]]]) -> dict[str, Any]:
    """quantization_config.json: QUANTIZATION with the ledger of every packed matrix."""
    storage = {linear.key: storage_entry(linear, tensors) for linear, tensors in packed}
    return {**QUANTIZATION, "tensor_storage": storage}
