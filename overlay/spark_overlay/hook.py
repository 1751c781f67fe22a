"""One name of vLLM that the overlay rebinds, and its check."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal

from spark_overlay.stand_ins import HookError
from spark_overlay.versions import installed


@dataclass(frozen=True)
class Hook:
    """``target`` is ``module:name`` or ``module:Class.name``. ``parameters`` are the leading ones
    the replacement relies on (None: not callable by us, only its existence counts). ``replacement``
    is ``module:name`` inside the overlay. ``since``: the first vLLM that has the target."""

    target: str
    parameters: tuple[str, ...] | None
    replacement: str
    reason: str
    device: Literal["any", "cpu", "cuda"] = "any"
    since: tuple[int, int] = (0, 32)

    def serves(self) -> bool:
        """Whether the installed vLLM is one that has the target."""
        major, minor = installed().split(".")[:2]
        return (int(major), int(minor)) >= self.since

    def locate(self) -> tuple[Any, str]:
        """Owner object and attribute name; raises HookError if absent."""
        module, _, path = self.target.partition(":")
        try:
            owner: Any = import_module(module)
            *parents, name = path.split(".")
            for parent in parents:
                owner = getattr(owner, parent)
            getattr(owner, name)
        except (ImportError, AttributeError) as error:
            raise HookError(
                f"vLLM {installed()} has no {self.target} ({error}); the overlay replaces it "
                f"because: {self.reason}. Use a vLLM the overlay supports, or a newer overlay"
            ) from error
        return owner, name

    def check(self) -> None:
        """Raise HookError unless the target takes the expected leading parameters."""
        owner, name = self.locate()
        if self.parameters is None:
            return
        current = inspect.getattr_static(owner, name)
        current = getattr(current, "__func__", current)
        found = tuple(inspect.signature(current).parameters)
        if found[: len(self.parameters)] != self.parameters:
            raise HookError(
                f"vLLM {installed()}: {self.target} takes ({', '.join(found)}), the overlay "
                f"expects it to begin with ({', '.join(self.parameters)}). Use a vLLM the overlay "
                "supports, or a newer overlay"
            )

    def apply(self) -> None:
        owner, name = self.locate()
        module, _, attribute = self.replacement.partition(":")
        setattr(owner, name, getattr(import_module(module), attribute))
