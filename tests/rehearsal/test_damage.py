"""Twelve kinds of broken checkpoint: each is refused, naming tensor, file and mend.

Eleven are made from the rehearsal's own files and met by what the loader asks in its own order:
headers, ledger, the layers' shapes, then the tensors. The last needs vLLM's tokenizer.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from spark_overlay.exl3.config import Exl3Config
from spark_overlay.exl3.format import Exl3FormatError
from spark_overlay.exl3.linear import Exl3LinearMethod
from spark_overlay.exl3.loading import PackedLoader
from spark_overlay.headers import INDEX_NAME
from spark_overlay.loading.stream import stream

pytestmark = pytest.mark.rehearsal

KEY = "layers.2.attn.wq_b"
#: What a user can do about a damaged file stands in every message.
MENDS = ("download", "Download", "remove the shard", "belong together", "Legal", "pack is of")


@pytest.fixture
def broken(checkpoint: Callable[[str], Path], tmp_path: Path) -> Path:
    """A copy of the model directory, to be damaged."""
    return Path(shutil.copytree(checkpoint("standard") / "checkpoint", tmp_path / "model"))


def load(model: Path, *, rows: int = 128, columns: int = 4096, tp: int = 1) -> nn.Module:
    """Build and fill one layer the way vLLM does: ``wq_b`` of layer 2, of ``rows`` inputs."""
    config = Exl3Config()
    config.model_dir = model
    config.num_layers, config.o_groups = 9, 4
    layer = nn.Module()
    layer.tp_size, layer.tp_rank = tp, 0  # type: ignore[assignment]
    shards = [config.modules[KEY]]
    method = Exl3LinearMethod(shards)
    method.create_weights(layer, rows, [columns // tp], rows, columns, torch.bfloat16)
    loader = PackedLoader(layer, config.tensors)
    wanted = loader.wanted(sorted(model.glob("model-*.safetensors")))
    for _ in stream(wanted, loader.device, size=1 << 16):
        pass
    loader.finish()
    return layer


def shard_of(model: Path, name: str) -> Path:
    index = json.loads((model / INDEX_NAME).read_bytes())["weight_map"]
    return Path(model / index[name])


def edit(model: Path, name: str, change: Callable[[dict[str, Tensor]], None]) -> Path:
    """Rewrite the shard that holds ``name``."""
    path = shard_of(model, name)
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    return path


def truncated_shard(model: Path) -> None:
    path = shard_of(model, f"{KEY}.trellis")
    path.write_bytes(path.read_bytes()[:-1000])


def wrong_marker(model: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[f"{KEY}.mul1"] = torch.tensor(-2082680532, dtype=torch.int32)

    edit(model, f"{KEY}.mul1", change)


def missing_svh(model: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        del tensors[f"{KEY}.svh"]

    edit(model, f"{KEY}.svh", change)
    reindex(model, lambda names: names.pop(f"{KEY}.svh"))


def int8_trellis(model: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[f"{KEY}.trellis"] = tensors[f"{KEY}.trellis"].to(torch.int8)

    edit(model, f"{KEY}.trellis", change)


def other_rate(model: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[f"{KEY}.trellis"] = tensors[f"{KEY}.trellis"][..., :32].contiguous()

    edit(model, f"{KEY}.trellis", change)


def duplicate_tensor(model: Path) -> None:
    name = f"{KEY}.suh"
    tensor = load_file(shard_of(model, name))[name]
    other = next(p for p in sorted(model.glob("model-*.safetensors")) if p != shard_of(model, name))
    tensors = load_file(other)
    tensors[name] = tensor
    save_file(tensors, other)


def missing_index_entry(model: Path) -> None:
    reindex(model, lambda names: names.pop(f"{KEY}.suh"))


def foreign_tensor(model: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        for leaf in ("trellis", "suh", "svh", "mul1"):
            tensors[f"layers.2.attn.q_proj.{leaf}"] = tensors[f"{KEY}.{leaf}"].clone()

    path = edit(model, f"{KEY}.trellis", change)
    more = {f"layers.2.attn.q_proj.{leaf}": path.name for leaf in ("trellis", "suh", "svh", "mul1")}
    reindex(model, lambda names: names.update(more))


def nan_scale(model: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[f"{KEY}.suh"][7] = float("nan")

    edit(model, f"{KEY}.suh", change)


def reindex(model: Path, change: Callable[[dict[str, str]], Any]) -> None:
    path = model / INDEX_NAME
    index = json.loads(path.read_bytes())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


def whole(model: Path) -> None:
    pass


#: name -> damage, how the layer is built, what the message must name beside a mend.
DAMAGES: Mapping[str, tuple[Callable[[Path], None], Mapping[str, int], tuple[str, ...]]] = {
    "truncated shard": (truncated_shard, {}, (".safetensors",)),
    "wrong marker": (wrong_marker, {}, (f"{KEY}.mul1", ".safetensors", "-2082680532")),
    "missing svh": (missing_svh, {}, (f"{KEY}.svh", ".safetensors")),
    "int8 trellis": (int8_trellis, {}, (f"{KEY}.trellis", ".safetensors", "I8")),
    "K contradiction": (other_rate, {}, (f"{KEY}.trellis", "quantization_config.json", "K = 2")),
    "duplicate tensor": (duplicate_tensor, {}, (f"{KEY}.suh", ".safetensors")),
    "missing index entry": (missing_index_entry, {}, (f"{KEY}.suh",)),
    "foreign tensor": (foreign_tensor, {}, ("layers.2.attn.q_proj",)),
    "split not on 128": (whole, {"tp": 64}, (KEY, "128")),
    "wrong hidden size": (whole, {"rows": 256}, (KEY, "256", "config.json")),
    "NaN scale": (nan_scale, {}, (f"{KEY}.suh", ".safetensors")),
}


def test_a_whole_checkpoint_loads(broken: Path) -> None:
    layer = load(broken)
    assert layer.exl3[0].missing() == []


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named(broken: Path, damage: str) -> None:
    make, build, named = DAMAGES[damage]
    make(broken)
    with pytest.raises(ValueError) as caught:
        load(broken, **build)
    said = str(caught.value)
    print(f"{damage}: {said}")
    for word in named:
        assert word in said
    assert any(mend in said for mend in MENDS)


def test_the_wrong_tokenizer_is_named(checkpoint: Callable[[str], Path], vllm: Any) -> None:
    """Another tokenizer hashes n-grams to other rows: the compressed vocabulary gives it away."""
    from spark_overlay.engram.layout import EngramError, EngramLayout
    from spark_overlay.rehearsal.train import tokens_of

    model = checkpoint("standard") / "checkpoint"
    layout = EngramLayout.from_config(json.loads((model / "config.json").read_bytes()))
    assert layout is not None
    words = tokens_of(model).numpy()
    with pytest.raises(EngramError, match="Use the tokenizer that came with the model"):
        layout.hash_ids(words[:4], words[words < words.max()])


def test_format_errors_are_value_errors() -> None:
    assert issubclass(Exl3FormatError, ValueError)
