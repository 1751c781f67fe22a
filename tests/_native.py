"""The native library of Engram for tests: built from the checkout's sources once for each state of
them, or the installed one where a test is about the overlay as it is installed.

Without pytest, which a GPU host lacks, all but the skipping works.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

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
        import pytest

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
    """Of these sources; skips without a compiler."""
    return built("native.so")


def installed(folder: Path) -> Path:
    """The overlay's own where it loads, else one built into ``folder``. Raises EngramError with the
    compiler's words."""
    from spark_overlay.engram import native
    from spark_overlay.engram.layout import EngramError

    try:
        native.load(native.LIBRARY)
    except EngramError:
        return build(folder / "_native.so")
    return native.LIBRARY


def build(target: Path) -> Path:
    """Raises EngramError."""
    from spark_overlay.engram.layout import EngramError

    module = builder()
    try:
        module.build(target)
    except module.BuildError as error:
        raise EngramError(f"{CSRC / 'build.py'}: {str(error)[-3000:]}") from error
    return target
