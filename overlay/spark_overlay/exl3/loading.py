"""Takes the packed tensors out of a stream of weights, each to the matrix that wants it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor, nn

from spark_overlay.exl3.format import Exl3FormatError
from spark_overlay.exl3.modules import OWN_LEAVES
from spark_overlay.exl3.packed import PackedStack


class PackedLoader:
    """Routes ``<key>.<leaf>`` to this rank's matrices by key; everything else passes through."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.stacks = {
            key: stack
            for stack in model.modules()
            if isinstance(stack, PackedStack)
            for key in stack.keys
        }

    def take(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Load what is packed; yield the rest. Packed tensors of other ranks and of the other model
        (target or draft) are dropped."""
        for name, tensor in weights:
            key, _, leaf = name.rpartition(".")
            if leaf not in OWN_LEAVES:
                yield name, tensor
            elif (stack := self.stacks.get(key)) is not None:
                stack.load(key, leaf, tensor)

    def finish(self) -> set[str]:
        """Names of the filled parameters; an error names every tensor that never came."""
        missing = [name for stack in set(self.stacks.values()) for name in stack.missing()]
        if missing:
            raise Exl3FormatError(
                f"{len(missing)} packed tensors never came, first "
                f"{', '.join(sorted(missing)[:5])}: "
                "the index and the shards do not belong together; download the checkpoint again"
            )
        return {
            f"{path}.{name}"
            for path, module in self.model.named_modules()
            if isinstance(module, PackedStack)
            for name, _ in module.named_parameters(recurse=False)
        }
