"""Make the model of the GPU checks on the spot, from a seed: plain bf16, and packed as EXL3.

``python3 model.py OUT --kind plain`` writes a checkpoint directory that vLLM and the reference read
alike. Values come from torch's generator on the device at hand: the same seed gives the same model
on the same kind of device, which is all that a check within one run needs.
"""

from __future__ import annotations

import argparse
import json
import math
import time
import zlib
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors.torch import save_file
from torch import Tensor

from gpu import shape
from gpu.shape import Slices
from spark_overlay.engram.layout import SCALE_GROUP
from spark_overlay.exl3.format import MARKERS
from spark_overlay.headers import INDEX_NAME
from spark_overlay.rehearsal import tokenizer
from spark_overlay.rehearsal.shape import Linear, Native

Kind = Literal["plain", "exl3", "draft", "engram", "served", "bigram"]
PACKED = ("exl3", "draft", "served")
#: Scale bytes of the tables, 2^-8 to 2^-6: over all finite codes rows come out around 1.
SCALES = (119, 122)
#: Deviation of the logits of a hidden state of unit size; the Markov head's logit of a successor in
#: these: of 8192 random ones the largest lies at 3.9.
HEAD_GAIN, MARKOV_GAIN = 3.0, 4.5
DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32}


def successor(token: int, vocab: int) -> int:
    """What the "bigram" kind says after ``token``: one cycle through all but 8 at each end."""
    return 8 + (token - 8 + 101) % (vocab - 16)


def text_of(name: str, kind: Kind) -> Mapping[str, Any]:
    """The shape of that name as the checkpoint of this kind has it."""
    if kind == "engram":
        return shape.with_engram(name)
    if kind == "served":  # all that the pair serves: packed, with a draft and n-gram tables
        return {**shape.with_engram(name), **shape.DRAFT}
    return shape.with_draft(name) if kind in ("draft", "bigram") else shape.SHAPES[name]


def make(out: Path, text: Mapping[str, Any], kind: Kind, seed: int, device: torch.device) -> int:
    """Write the checkpoint directory ``out``; the number of its bytes. A finished one is kept."""
    index = out / INDEX_NAME
    if index.is_file():
        return int(json.loads(index.read_text())["metadata"]["total_size"])
    out.mkdir(parents=True, exist_ok=True)
    draw = Draw(seed, device)
    outer = [n for n in shape.natives(text) if not n.name.startswith(("layers.", "mtp."))]
    head = [linear for linear in shape.linears(text) if linear.key == "head"]
    parts: list[Iterator[Native | Linear | Slices]] = [chain(outer, head)]
    for layer in range(text["num_hidden_layers"]):
        linears = shape.layer_linears(text, layer)
        parts.append(chain(shape.layer_natives(text, layer), linears))
    for stage in range(text["num_nextn_predict_layers"]):
        parts.append(chain(shape.stage_natives(text, stage), shape.stage_linears(text, stage)))
    # The first part holds what is outside the layers.
    tables = {
        layer + 2: draw.table(layer, rows, text["engram_head_dim"])
        for layer, rows in zip(
            text["engram_layer_ids"], text.get("engram_num_embeddings", ()), strict=True
        )
    }
    known = draw.bigram(text) if kind == "bigram" else {}
    weight_map: dict[str, str] = {}
    total = 0
    for number, part in enumerate(parts, 1):
        tensors = {name: t for item in part for name, t in draw.tensors(item, kind).items()}
        tensors |= tables.get(number, {})
        tensors |= {name: known[name] for name in tensors if name in known}
        file = f"model-{number:05}-of-{len(parts):05}.safetensors"
        save_file(tensors, out / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, file))
        total += sum(t.nbytes for t in tensors.values())
    for name, value in configs(text, kind, seed).items():
        (out / name).write_text(json.dumps(value, indent=1))
    index.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))
    return total


class Draw:
    """Random tensors by name."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self.seed, self.device = seed, device

    def generator(self, name: str) -> torch.Generator:
        key = zlib.crc32(f"{self.seed}/{name}".encode())
        return torch.Generator(self.device).manual_seed(key)

    def normal(self, name: str, shape: tuple[int, ...], std: float, mean: float = 0.0) -> Tensor:
        values = torch.randn(shape, generator=self.generator(name), device=self.device)
        return values * std + mean

    def tensors(self, item: Native | Linear | Slices, kind: Kind) -> dict[str, Tensor]:
        if isinstance(item, Native):
            values = self.normal(item.name, item.shape, item.std, item.mean)
            return {item.name: values.to(DTYPES[item.dtype])}
        if kind not in PACKED:
            groups = item.groups if isinstance(item, Slices) else 1
            size = (groups * item.n_out, item.n_in)
            gain = item.gain if isinstance(item, Linear) else 1.0
            values = self.normal(item.key, size, gain / math.sqrt(item.n_in))
            return {f"{item.key}.weight": values.bfloat16()}
        if isinstance(item, Linear):
            return self.packed(item)
        slices = (
            Linear(f"{item.key}.slice.{g}", item.n_in, item.n_out) for g in range(item.groups)
        )
        return {name: t for one in slices for name, t in self.packed(one).items()}

    def table(self, layer: int, rows: int, dim: int) -> dict[str, Tensor]:
        """A layer's n-gram table: random finite e4m3 codes and scales."""
        name = f"layers.{layer}.engram.embed"
        low, high = SCALES
        codes = self.bytes(f"{name}.weight", (rows, dim), 0, 256)
        codes[(codes & 0x7F) == 0x7F] = 0
        scales = self.bytes(f"{name}.scale", (rows, dim // SCALE_GROUP), low, high)
        return {f"{name}.weight": codes.view(torch.float8_e4m3fn), f"{name}.scale": scales}

    def bigram(self, text: Mapping[str, Any]) -> dict[str, Tensor]:
        """The target says successor() of a token whatever its layers add: embeddings lie along
        their successor's row of the head, in the Markov head's few dimensions. The draft's Markov
        head is as loud as what its layers add, so that its attention decides which half of its
        tokens is right."""
        vocab, hidden, rank = (text[n] for n in ("vocab_size", "hidden_size", "dspark_markov_rank"))
        rows = self.normal("bigram", (vocab, rank), 1.0)
        rows = rows / rows.norm(dim=1, keepdim=True)
        after = rows[[successor(token, vocab) for token in range(vocab)]]
        wide = torch.zeros(2, vocab, hidden, device=self.device)
        wide[0, :, :rank], wide[1, :, :rank] = HEAD_GAIN * rows, math.sqrt(hidden) * after
        wide[1, text["dspark_noise_token_id"]] = 0
        markov = f"mtp.{text['num_nextn_predict_layers'] - 1}.markov_head"
        found = {
            "head.weight": wide[0],
            "embed.weight": wide[1],
            f"{markov}.embed.weight": MARKOV_GAIN * after,
            f"{markov}.head.weight": HEAD_GAIN * rows,
        }
        return {name: tensor.bfloat16().contiguous() for name, tensor in found.items()}

    def bytes(self, name: str, shape: tuple[int, ...], low: int, high: int) -> Tensor:
        return torch.randint(
            low, high, shape, dtype=torch.uint8, device=self.device, generator=self.generator(name)
        )

    def packed(self, linear: Linear) -> dict[str, Tensor]:
        """Random words are a legal trellis whose weights have deviation 1; the scales size them."""
        tiles = (linear.n_in // 16, linear.n_out // 16, round(16 * shape.rate(linear.key)))
        words = torch.randint(
            -(1 << 15), 1 << 15, tiles, dtype=torch.int16, device=self.device,
            generator=self.generator(f"{linear.key}.trellis"),
        )  # fmt: skip
        std = linear.gain / math.sqrt(linear.n_in)
        return {
            f"{linear.key}.trellis": words,
            f"{linear.key}.suh": self.signed(f"{linear.key}.suh", linear.n_in, 1.0),
            f"{linear.key}.svh": self.signed(f"{linear.key}.svh", linear.n_out, std),
            f"{linear.key}.mul1": torch.tensor(MARKERS["mul1"], dtype=torch.int32),
        }

    def signed(self, name: str, count: int, size: float) -> Tensor:
        """fp16 of random sign, magnitudes within a quarter around ``size``."""
        values = torch.rand(count, generator=self.generator(name), device=self.device) * 2 - 1
        return ((0.75 + 0.5 * values.abs()) * values.sign() * size).half()


def configs(text: Mapping[str, Any], kind: Kind, seed: int) -> dict[str, Any]:
    model = {
        "made_from_seed": seed,
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "torch_dtype": "bfloat16",
        **{name: text[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
        "image_token_id": 4,
        "text_config": dict(text),
        "vision_config": {"num_hidden_layers": 0, "hidden_size": 64},
    }
    if kind in PACKED:
        model["quantization_config"] = {"quant_method": "exl3", "bits": 2.9, "codebook": "mul1"}
    return {
        "config.json": model,
        "generation_config.json": {"bos_token_id": 0, "eos_token_id": 1},
        "tokenizer.json": tokenizer.tokenizer_json(),
        "tokenizer_config.json": tokenizer.tokenizer_config(text["max_position_embeddings"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--kind", choices=get_args(Kind), default="plain")
    parser.add_argument("--shape", choices=tuple(shape.SHAPES), default="real")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    began = time.monotonic()
    device = torch.device(args.device)
    size = make(args.out, text_of(args.shape, args.kind), args.kind, args.seed, device)
    print(f"{args.out}: {args.kind} {args.shape}, {size / 1e9:.2f} GB, "
          f"{time.monotonic() - began:.1f} s")  # fmt: skip


if __name__ == "__main__":
    main()
