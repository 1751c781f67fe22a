"""The native library of Engram, built from the checkout's sources, once for each state of them."""

from __future__ import annotations

import hashlib
import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest

OVERLAY = Path(__file__).resolve().parents[1] / "overlay"
CSRC = OVERLAY / "csrc"
BUILT = OVERLAY / "build" / "tests"


def builder() -> ModuleType:
    """overlay/csrc/build.py."""
    spec = importlib.util.spec_from_file_location("engram_build", CSRC / "build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def built(name: str, extra: Sequence[str] = (), driver: Path | None = None) -> Path:
    """The library, or a program around it, for these sources; skips without a compiler.

    Where SPARK_TEST_DEMAND is set a skip fails the run (conftest.py).
    """
    module = builder()
    try:
        command = module.compiler()
    except module.BuildError as error:
        if os.environ.get("SPARK_TEST_DEMAND"):
            pytest.fail(str(error))
        pytest.skip(str(error))
    files = sorted(p for p in CSRC.rglob("*") if p.suffix in (".cpp", ".hpp", ".h", ".py"))
    digest = hashlib.sha256(repr((command, module.uring(), list(extra))).encode())
    for file in files:
        digest.update(file.read_bytes())
    place = BUILT / f"{name}-{digest.hexdigest()[:16]}"
    if not place.exists():
        module.build(place, extra, driver)
        for old in BUILT.glob(f"{name}-*"):
            if old != place:
                old.unlink(missing_ok=True)
    return place


def library() -> Path:
    return built("native.so")
