"""Packed matrices as a rank holds them: allocated by the headers, filled slice by slice."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from spark_overlay.exl3.format import (
    Codebook,
    Exl3FormatError,
    Exl3Slice,
    check_marker,
    signs_from_bits,
)
from spark_overlay.exl3.modules import Exl3Facts
from spark_overlay.exl3.reference import dequantize_torch

SIGN_BITS = {"su": "suh", "sv": "svh"}
MARKERS = ("mul1", "mcg")


Allocate = Callable[[tuple[int, ...], torch.dtype], Tensor]


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype)


class Slab:
    """One allocation that several stacks are cut out of, in the order in which they ask."""

    def __init__(self, nbytes: int) -> None:
        self._left = torch.empty(nbytes, dtype=torch.uint8)

    def __call__(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        size = math.prod(shape) * dtype.itemsize
        part, self._left = self._left[:size], self._left[size:]
        return part.view(dtype).view(shape)


class PackedStack(nn.Module):
    """``n`` matrices of one rate, codebook and shape, each cut alike, one behind the other.

    Parameters: ``trellis`` int16 ``[n, in/16, out/16, T]``, ``suh`` fp16 ``[n, in]``, ``svh`` fp16
    ``[n, out]`` (this rank's channels). ``dense`` float ``[n, in, out]`` exists after ``prepare``.
    """

    def __init__(
        self, members: Sequence[Exl3Facts], cut: Exl3Slice, allocate: Allocate = empty
    ) -> None:
        super().__init__()
        first = members[0]
        self.keys = [facts.key for facts in members]
        self.codebook = first.codebook
        self.k2 = first.k2
        self.cut = cut
        rows, columns, words = first.trellis_shape
        rows, columns = _length(cut.trellis[0], rows), _length(cut.trellis[1], columns)
        count = len(members)
        self.trellis = _parameter(allocate((count, rows, columns, words), torch.int16))
        self.suh = _parameter(allocate((count, 16 * rows), torch.float16))
        self.svh = _parameter(allocate((count, 16 * columns), torch.float16))
        self.dense: Tensor | None = None
        self._index = {key: index for index, key in enumerate(self.keys)}
        self._sides = {f.key: {"trellis", "suh", "svh"} for f in members}

    @property
    def in_features(self) -> int:
        return self.suh.shape[1]

    @property
    def out_features(self) -> int:
        return self.svh.shape[1]

    def load(self, key: str, leaf: str, tensor: Tensor) -> None:
        """Copy this rank's part of one whole checkpoint tensor of matrix ``key``."""
        if leaf in MARKERS:
            check_marker(leaf, int(tensor.item()), f"{key}.{leaf}")  # type: ignore[arg-type]
            return
        if leaf in SIGN_BITS:
            leaf, tensor = SIGN_BITS[leaf], torch.from_numpy(signs_from_bits(tensor.cpu().numpy()))
        index = self._index[key]
        part = tensor[getattr(self.cut, leaf)]
        target: Tensor = getattr(self, leaf).data[index]
        if part.shape != target.shape or part.dtype != target.dtype:
            raise Exl3FormatError(
                f"{key}.{leaf}: found {part.dtype} {list(part.shape)}, the headers announced "
                f"{target.dtype} {list(target.shape)} for this rank; the file changed while loading"
            )
        if leaf != "trellis" and not bool(torch.isfinite(part).all()):
            raise Exl3FormatError(
                f"{key}.{leaf}: {int((~torch.isfinite(part)).sum())} of {part.numel()} scales are "
                "not finite; the file is damaged: download it again"
            )
        target.copy_(part)
        self.arrived(key, leaf)

    def arrived(self, key: str, leaf: str) -> None:
        """Say that this rank's part of one tensor is in its place."""
        self._sides[key].discard(leaf)

    def base(self, key: str, leaf: str) -> int:
        """Where in the bytes of parameter ``leaf`` the matrix ``key`` begins."""
        parameter: Tensor = getattr(self, leaf)
        return self._index[key] * parameter.stride(0) * parameter.element_size()

    def nonfinite(self) -> list[str]:
        """Names of scale tensors that hold an infinity or a NaN."""
        found = []
        for leaf in ("suh", "svh"):
            good = torch.isfinite(getattr(self, leaf).data).all(dim=1)
            if not bool(good.all()):
                found += [f"{self.keys[i]}.{leaf}" for i in (~good).nonzero()[:, 0].tolist()]
        return found

    def missing(self) -> list[str]:
        """Tensors that were announced and never came."""
        return [f"{key}.{leaf}" for key, sides in self._sides.items() for leaf in sorted(sides)]

    def matrix(self, index: int) -> tuple[Tensor, Tensor, Tensor, Codebook]:
        """Trellis, suh, svh and codebook of one matrix, as kernels take it; views."""
        parts = (self.trellis.data, self.suh.data, self.svh.data)
        trellis, suh, svh = (part[index] for part in parts)
        return trellis, suh, svh, self.codebook

    def prepare(self, dtype: torch.dtype) -> None:
        """Decode every matrix once (the torch path; kernels read the packed form)."""
        self.dense = torch.stack(
            [
                dequantize_torch(trellis, suh, svh, self.codebook, dtype)
                for trellis, suh, svh in zip(self.trellis, self.suh, self.svh, strict=True)
            ]
        )


def _length(part: slice, size: int) -> int:
    return len(range(*part.indices(size)))


def _parameter(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)
