"""The native row store for tests: the installed one, or one built here where there is none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from spark_overlay.engram import native
from spark_overlay.engram.layout import EngramError

BUILD = Path(__file__).resolve().parents[1] / "overlay" / "csrc" / "build.py"


def library(folder: Path) -> Path:
    """Path of a library that loads, built into ``folder`` if need be. Raises EngramError with the
    compiler's words."""
    try:
        native.load(native.LIBRARY)
    except EngramError:
        return build(folder / "_native.so")
    return native.LIBRARY


def build(target: Path) -> Path:
    done = subprocess.run([sys.executable, str(BUILD), str(target)], capture_output=True, text=True)
    if done.returncode:
        raise EngramError(f"{BUILD}: {done.stderr[-3000:]}")
    return target
