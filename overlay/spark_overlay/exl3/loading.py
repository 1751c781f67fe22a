"""Says what a model wants of an EXL3 pack, and takes its packed tensors, each to its matrix."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from spark_overlay.collector import paused
from spark_overlay.engram.names import is_table_tensor
from spark_overlay.exl3.format import Exl3FormatError
from spark_overlay.exl3.modules import OWN_LEAVES
from spark_overlay.exl3.names import parse
from spark_overlay.exl3.packed import PackedStack
from spark_overlay.headers import TensorHeader
from spark_overlay.loading import cuts
from spark_overlay.loading.plan import Wanted
from spark_overlay.loading.staging import Flat
from spark_overlay.loading.stream import DTYPES, Handed, Into, Place

#: Leaves whose share goes straight to where it stays; the others are looked at on the host.
KEPT = ("trellis", "suh", "svh")


class Rows:
    """Rows ``low..high`` of a native tensor that this rank holds in the first rows of ``tensor``;
    the rows behind are made zero. ``name`` is the parameter's."""

    def __init__(self, tensor: Tensor, low: int, high: int, name: str) -> None:
        self.tensor, self.low, self.high, self.name = tensor, low, high, name
        self.came = False

    def fit(self, header: TensorHeader, rows: int | None = None) -> bool:
        """Whether bytes of the file are bytes of the parameter, and as many rows as are needed
        there (``rows``: exactly so many)."""
        same = DTYPES[header.dtype] == self.tensor.dtype and len(header.shape) == self.tensor.ndim
        enough = self.high <= header.shape[0] if rows is None else rows == header.shape[0]
        return same and header.shape[1:] == self.tensor.shape[1:] and enough

    def done(self) -> None:
        self.tensor[self.high - self.low :].zero_()
        self.came = True


class PackedLoader:
    """Routes ``<key>.<leaf>`` to this rank's matrices by key; everything else passes through.

    ``model`` holds the matrices; ``tensors`` are the checkpoint's headers, which know every packed
    tensor and the file it is in. ``native`` says of any other tensor, by name, whether the model
    has a use for it; ``rows`` are those that go by rows to a parameter.
    """

    def __init__(
        self,
        model: nn.Module,
        tensors: Mapping[str, TensorHeader],
        *,
        native: Callable[[str], bool] = lambda name: True,
        rows: Mapping[str, Rows] | None = None,
    ) -> None:
        self.model = model
        self.tensors = tensors
        self.native = native
        self.rows = rows or {}
        self.stacks = {
            key: stack
            for stack in model.modules()
            if isinstance(stack, PackedStack)
            for key in stack.keys
        }

    @property
    def device(self) -> torch.device:
        """Where the packed matrices are."""
        for stack in self.stacks.values():
            return stack.suh.device
        return torch.device("cpu")

    @paused()
    def wanted(
        self, files: Collection[Path], prepared: Mapping[str, TensorHeader] | None = None
    ) -> list[Wanted]:
        """What of these files this rank has a use for, by byte; or of its ``prepared`` file, where
        all is cut already. Raises Exl3FormatError where the share is not what the model has room
        for."""
        names = {file.name for file in files}
        chosen = {file for file in {h.file for h in self.tensors.values()} if file.name in names}
        flats: dict[int, Flat] = {}
        found = []
        for name, header in (prepared or {}).items():
            if (one := self._want(name, header, flats, cut=True)) is not None:
                found.append(one)
        if prepared is not None:
            return found
        for name, header in self.tensors.items():
            if header.file in chosen and (one := self._want(name, header, flats)) is not None:
                found.append(one)
        return found

    def _want(
        self, name: str, header: TensorHeader, flats: dict[int, Flat], cut: bool = False
    ) -> Wanted | None:
        key, _, leaf = name.rpartition(".")
        into: Into
        if leaf in OWN_LEAVES:
            stack = self.stacks.get(key)
            if stack is None:  # another rank's, or the other model's
                return None
            if leaf not in KEPT:
                into = Handed(partial(self._load, stack, name))
                return Wanted(name, header, cuts.whole(header), into)
            parameter: Tensor = getattr(stack, leaf).data
            part = cuts.whole(header) if cut else cuts.packed(header, leaf, stack.cut)
            if part.nbytes != parameter[0].nbytes:
                raise Exl3FormatError(
                    f"{name} in {header.file.name}: this rank's part is {part.nbytes} bytes, the "
                    f"model has room for {parameter[0].nbytes}: the headers were changed while the "
                    "model was built; start again"
                )
            place = Place(
                self._flat(parameter, flats),
                stack.base(key, leaf),
                partial(stack.arrived, key, leaf),
            )
            return Wanted(name, header, part, place)
        if is_table_tensor(name):
            return None
        by_rows = self.rows.get(name)
        if by_rows is not None and (cut or by_rows.fit(header)):
            low, high = (0, by_rows.high - by_rows.low) if cut else (by_rows.low, by_rows.high)
            if cut and not by_rows.fit(header, high):
                raise Exl3FormatError(
                    f"{name} in {header.file.name} is {header.dtype} {list(header.shape)}: this "
                    f"rank needs {high} rows like {list(by_rows.tensor.shape)}. Make the file again"
                )
            part = cuts.rows(header, low, high)
            if not part.nbytes:  # a rank behind the vocabulary
                by_rows.done()
                return None
            place = Place(self._flat(by_rows.tensor, flats), 0, by_rows.done)
            return Wanted(name, header, part, place)
        return Wanted(name, header, cuts.whole(header), Handed()) if self.native(name) else None

    @staticmethod
    def _flat(tensor: Tensor, flats: dict[int, Flat]) -> Flat:
        at = tensor.data_ptr()
        found = flats.get(at)
        if found is None:
            found = flats[at] = Flat(tensor)
        return found

    def _load(self, stack: PackedStack, name: str, tensor: Tensor) -> None:
        key, _, leaf = name.rpartition(".")
        try:
            stack.load(key, leaf, tensor)
        except ValueError as error:
            raise type(error)(f"{self.file(name)}: {error}") from error

    def take(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Load what is packed of whole tensors; yield the rest.

        Packed tensors of other ranks and of the other model (target or draft) are dropped. Raises
        Exl3FormatError or Exl3NameError, with the tensor and its file, for one that cannot be.
        """
        for name, tensor in weights:
            key, _, leaf = name.rpartition(".")
            if leaf not in OWN_LEAVES:
                yield name, tensor
            elif (stack := self.stacks.get(key)) is not None:
                self._load(stack, name, tensor)
            else:
                try:
                    parse(key)
                except ValueError as error:
                    raise type(error)(f"{self.file(name)}: {error}") from error

    def file(self, name: str) -> str:
        header = self.tensors.get(name)
        return header.file.name if header is not None else "a file outside the index"

    def finish(self) -> set[str]:
        """Names of the filled parameters; an error names every tensor that never came, or the
        first that is damaged."""
        stacks = set(self.stacks.values())
        missing = sorted(name for stack in stacks for name in stack.missing())
        if missing:
            first = ", ".join(f"{name} ({self.file(name)})" for name in missing[:5])
            raise Exl3FormatError(
                f"{len(missing)} packed tensors never came, first {first}: the index and the "
                "shards do not belong together; download the checkpoint again"
            )
        damaged = sorted(name for stack in stacks for name in stack.nonfinite())
        if damaged:
            first = ", ".join(f"{name} ({self.file(name)})" for name in damaged[:5])
            raise Exl3FormatError(
                f"{len(damaged)} tensors hold scales that are not finite, first {first}; the file "
                "is damaged: download it again"
            )
        return {
            f"{path}.{name}"
            for path, module in self.model.named_modules()
            if isinstance(module, PackedStack)
            for name, _ in module.named_parameters(recurse=False)
        } | {rows.name for rows in self.rows.values() if rows.came}
