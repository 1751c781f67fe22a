"""What tests compile with the machine's C++ compiler."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest


def compiled(file: Path, out: Path, flags: Sequence[str] = ()) -> Path:
    """A program or, as ``flags`` say, a library; without g++ the test is skipped, or fails where
    SPARK_TEST_DEMAND is set."""
    tool = shutil.which("g++")
    if tool is None:
        if os.environ.get("SPARK_TEST_DEMAND"):
            pytest.fail("no g++")
        pytest.skip("no g++")
    subprocess.run([tool, *flags, str(file), "-o", str(out)], check=True)
    return out
