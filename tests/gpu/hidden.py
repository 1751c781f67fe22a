"""Hides what newer GPUs have from an engine's processes: DeepGEMM, TileLang, FlashMLA, FlashInfer.

They cannot be found or imported there, as if nobody had installed them."""

from __future__ import annotations

import sys
from pathlib import Path

#: Modules, and all below them.
HIDDEN = (
    "deep_gemm",
    "vllm.third_party.deep_gemm",
    "tilelang",
    "flash_mla",
    "vllm.third_party.flashmla",
    "vllm._flashmla_C",
    "vllm._flashmla_extension_C",
    "flashinfer",
    "flashinfer_cubin",
    "flashinfer_jit_cache",
)
# Python imports it before anything else, in every process that has the folder on its path.
SITE = """\
import importlib.machinery
import sys

HIDDEN = {hidden!r}


class Finder(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        if any(fullname == name or fullname.startswith(name + ".") for name in HIDDEN):
            return None
        return super().find_spec(fullname, path, target)


at = sys.meta_path.index(importlib.machinery.PathFinder)
sys.meta_path[at] = Finder
"""


def folder(scratch: Path) -> Path:
    """A folder for PYTHONPATH that hides them."""
    made = scratch / "hidden"
    made.mkdir(parents=True, exist_ok=True)
    (made / "sitecustomize.py").write_text(SITE.format(hidden=HIDDEN))
    return made


def loaded() -> list[str]:
    """Which of them this process has imported nevertheless."""
    return sorted(
        each for each in sys.modules
        if any(each == name or each.startswith(f"{name}.") for name in HIDDEN)
    )  # fmt: skip
