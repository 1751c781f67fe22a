"""The checkpoint that is counted: one on this disk, or the published one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import launcher.plan.overlay  # noqa: F401  (before spark_overlay)
from launcher.errors import LauncherError
from spark_overlay.budget.checkpoint import Contents
from spark_overlay.budget.published import CONFIG as PUBLISHED
from spark_overlay.budget.shape import ModelShape

CONFIG = "config.json"
NAME = "Mia-AiLab/DeepSeek-V4.1-Flash-EXL3-2.9bpw, by its config and K map"


@dataclass(frozen=True)
class Source:
    name: str
    shape: ModelShape
    contents: Contents


@cache
def published() -> Source:
    shape = ModelShape.from_config(PUBLISHED)
    return Source(NAME, shape, Contents.published(shape))


def of_directory(root: Path) -> Source:
    """Raises LauncherError for a directory that is not a whole EXL3 checkpoint of V4.1."""
    try:
        config = json.loads((root / CONFIG).read_bytes())
        if not isinstance(config, Mapping):
            raise ValueError("it holds no object")
    except (OSError, ValueError) as error:
        raise _unreadable(f"{root / CONFIG} cannot be read: {_words(error)}") from None
    try:
        shape = ModelShape.from_config(config)
        contents = Contents.of_directory(root)
    except ValueError as error:
        raise _unreadable(f"{root}: {error}") from None
    if not contents.packed:
        raise _unreadable(f"{root} holds no EXL3 tensor")
    return Source(str(root), shape, contents)


def of_settings(root: Path) -> Source:
    """The checkpoint of MODEL_HOST where it is there, else the published one."""
    return of_directory(root) if (root / CONFIG).is_file() else published()


def _unreadable(found: str) -> LauncherError:
    return LauncherError(
        found,
        "a directory with config.json and every shard of an EXL3 checkpoint of V4.1",
        "give such a directory, or --published for the one that the kit is made for",
    )


def _words(error: Any) -> str:
    return str(getattr(error, "strerror", None) or error)
