"""What an image must hold: vLLM of a known version, the overlay's plugin and its native code."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import entry_points, version
from pathlib import Path

from spark_overlay.engram import native
from spark_overlay.exl3.cuda import library
from spark_overlay.verify.report import Check, Outcome
from spark_overlay.versions import require_supported

GROUPS = ("vllm.general_plugins", "vllm.platform_plugins", "vllm.endpoint_plugins")


def checks(architectures: tuple[str, ...]) -> Iterator[Check]:
    yield Check("vLLM", "cpu", lambda: Outcome(True, require_supported(), "a known version"))
    yield Check("plugins", "cpu", plugins)
    yield Check("engram's library", "cpu", engram)
    yield Check("EXL3's library", "cpu", lambda: exl3(architectures))


def plugins() -> Outcome:
    missing = [
        group
        for group in GROUPS
        if not any(e.value.startswith("spark_overlay.") for e in entry_points(group=group))
    ]
    told = f"deepseek-recipe {version('deepseek-recipe')}"
    return Outcome(not missing, missing or told, "every entry point")


def engram() -> Outcome:
    native.load()
    return Outcome(True, native.LIBRARY.name, "loads")


def exl3(architectures: tuple[str, ...], path: Path = library.LIBRARY) -> Outcome:
    """Loads, and holds code of each architecture, as ``-lineinfo`` and ptxas name it in there."""
    library.load(path)
    code = path.read_bytes()
    missing = [name for name in architectures if f"sm_{name}".encode() not in code]
    return Outcome(not missing, f"no code for {missing}" if missing else path.name, "loads")
