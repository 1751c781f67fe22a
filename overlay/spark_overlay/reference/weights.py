"""A checkpoint's tensors by their native names, packed (EXL3) or plain; fixed or learning."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spark_overlay.engram.names import is_table_tensor
from spark_overlay.engram.source import TableSource, locate_tables
from spark_overlay.engram.store import FileRowStore
from spark_overlay.exl3.modules import OWN_LEAVES, Exl3Facts, scan_modules
from spark_overlay.exl3.reference import decode_torch, hadamard_rotate
from spark_overlay.headers import CheckpointHeaders, TensorHeader

DTYPES: Mapping[str, torch.dtype] = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "I16": torch.int16,
    "I32": torch.int32,
}


class Weights:
    """Lazily read tensors. ``learning`` maps tensor names (``…suh`` and ``…svh`` too) to tensors
    that stand in their place and may require gradients."""

    def __init__(
        self,
        model_dir: Path,
        engram_dir: Path | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        learning: Mapping[str, Tensor] | None = None,
    ) -> None:
        headers = CheckpointHeaders.scan(model_dir).tensors
        self.headers: Mapping[str, TensorHeader] = headers
        self.packed: Mapping[str, Exl3Facts] = scan_modules(headers)
        self.dtype = dtype
        self.device = torch.device(device)
        self.learning = dict(learning or {})
        tables = locate_tables(engram_dir) if engram_dir is not None else {}
        self._tables = {layer: _whole(source) for layer, source in tables.items()}
        self._tensors: dict[str, Tensor] = {}
        self._inner: dict[str, Tensor] = {}

    def __contains__(self, name: str) -> bool:
        return name in self.headers

    def __getitem__(self, name: str) -> Tensor:
        """A native tensor, in float (``dtype``)."""
        if name in self.learning:
            return self.learning[name]
        if name not in self._tensors:
            self._tensors[name] = self._read(name).to(self.dtype)
        return self._tensors[name]

    def learnable(self) -> Iterator[str]:
        """Names of all tensors that can learn: native ones, and the scales of packed ones."""
        for name in self.headers:
            leaf = name.rpartition(".")[2]
            if leaf in ("suh", "svh") or (leaf not in OWN_LEAVES and not is_table_tensor(name)):
                yield name

    def has(self, key: str) -> bool:
        """Whether a linear of this key exists, packed or plain."""
        return key in self.packed or f"{key}.weight" in self.headers

    def linear(self, x: Tensor, key: str) -> Tensor:
        """``x [..., in]`` through the linear ``key``: ``[..., out]``, in x's dtype.

        Packed: ``((x * suh) @ C) * svh`` with ``C = H W_hat H`` decoded once, so that gradients
        reach the scales. Plain: ``x @ W^T``."""
        if key not in self.packed:
            return x @ self[f"{key}.weight"].T
        return (x * self[f"{key}.suh"]) @ self.inner(key) * self[f"{key}.svh"]

    def inner(self, key: str) -> Tensor:
        """``H W_hat H`` ``[in, out]``: a packed matrix without its scales."""
        if key not in self._inner:
            trellis = self._read(f"{key}.trellis")
            core = decode_torch(trellis, self.packed[key].codebook).double()
            self._inner[key] = hadamard_rotate(hadamard_rotate(core.T).T).to(self.dtype)
        return self._inner[key]

    def share_decoded(self, other: Weights) -> None:
        """Use another reading's decoded matrices of the same checkpoint: scales are not in them."""
        self._inner = other._inner

    def engram_rows(self, layer: int, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Table rows of ``ids [n]``: e4m3 ``[n, dim]`` and scale bytes ``[n, dim / 32]``."""
        rows = self._tables[layer].lookup(ids.reshape(-1).long().cpu().numpy())
        weights, scales = (
            torch.from_numpy(part).to(self.device) for part in (rows.weights, rows.scales)
        )
        return weights.view(torch.float8_e4m3fn), scales

    def _read(self, name: str) -> Tensor:
        return read_tensor(self.headers[name]).to(self.device)


def read_tensor(header: TensorHeader) -> Tensor:
    """One tensor by its header; raises KeyError for a dtype that no native tensor has."""
    with header.file.open("rb") as source:
        source.seek(header.begin)
        data = bytearray(source.read(header.end - header.begin))
    flat: Any = torch.frombuffer(data, dtype=DTYPES[header.dtype])
    return flat.view(header.shape)


def _whole(source: TableSource) -> FileRowStore:
    return FileRowStore(source, 0, source.rows)
