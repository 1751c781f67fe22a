"""What of vLLM's own ways to load an EXL3 pack is refused, and why. No torch, no vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: All of them end in the one reader of safetensors that ours stands in for, or read nothing.
FORMATS = ("auto", "hf", "safetensors", "dummy")


def check(load_format: str, extra: Mapping[str, Any], strategy: str | None) -> None:
    """Raise ValueError for a load format, loader option or strategy that would not come to our
    reader and so would read every tensor whole, or map the files."""
    needed = "The overlay reads this rank's share of an EXL3 pack itself"
    if load_format not in FORMATS:
        raise ValueError(
            f"found --load-format {load_format}, needed one of {', '.join(FORMATS)}. {needed}: "
            "leave the option out"
        )
    if extra.get("enable_multithread_load"):
        raise ValueError(
            "found enable_multithread_load in --model-loader-extra-config, needed none. "
            f"{needed}, by several threads: leave the option out"
        )
    if strategy not in (None, "lazy"):
        raise ValueError(
            f"found --safetensors-load-strategy {strategy}, needed lazy or none. {needed}, ahead "
            "of its use: leave the option out"
        )
