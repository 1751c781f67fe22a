"""Takes the packed tensors out of a stream of weights, each to the matrix that wants it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from torch import Tensor, nn

from spark_overlay.exl3.format import Exl3FormatError
from spark_overlay.exl3.modules import OWN_LEAVES
from spark_overlay.exl3.names import parse
from spark_overlay.exl3.packed import PackedStack
from spark_overlay.headers import TensorHeader


class PackedLoader:
    """Routes ``<key>.<leaf>`` to this rank's matrices by key; everything else passes through.

    ``model`` holds the matrices; ``tensors`` are the checkpoint's headers, which know every packed
    tensor and the file it is in.
    """

    def __init__(self, model: nn.Module, tensors: Mapping[str, TensorHeader]) -> None:
        self.model = model
        self.tensors = tensors
        self.stacks = {
            key: stack
            for stack in model.modules()
            if isinstance(stack, PackedStack)
            for key in stack.keys
        }

    def take(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Load what is packed; yield the rest.

        Packed tensors of other ranks and of the other model (target or draft) are dropped. Raises
        Exl3FormatError or Exl3NameError, with the tensor and its file, for one that cannot be.
        """
        for name, tensor in weights:
            key, _, leaf = name.rpartition(".")
            if leaf not in OWN_LEAVES:
                yield name, tensor
                continue
            try:
                if (stack := self.stacks.get(key)) is not None:
                    stack.load(key, leaf, tensor)
                else:
                    parse(key)
            except ValueError as error:
                raise type(error)(f"{self.file(name)}: {error}") from error

    def file(self, name: str) -> str:
        header = self.tensors.get(name)
        return header.file.name if header is not None else "a file outside the index"

    def finish(self) -> set[str]:
        """Names of the filled parameters; an error names every tensor that never came."""
        missing = sorted(name for stack in set(self.stacks.values()) for name in stack.missing())
        if missing:
            first = ", ".join(f"{name} ({self.file(name)})" for name in missing[:5])
            raise Exl3FormatError(
                f"{len(missing)} packed tensors never came, first {first}: the index and the "
                "shards do not belong together; download the checkpoint again"
            )
        return {
            f"{path}.{name}"
            for path, module in self.model.named_modules()
            if isinstance(module, PackedStack)
            for name, _ in module.named_parameters(recurse=False)
        }
