"""Triton kernels compiled for a GPU that is not there: what must not be in them is found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.rehearsal

CHECK = Path(__file__).resolve().parents[2] / "overlay/benchmarks/triton_check.py"
PROBE = """
import sys
import triton, triton.language as tl
sys.path.insert(1, {folder!r})
import triton_check
from spark_overlay.compiled import Compiled

@triton.jit
def narrow(x, out):
    at = tl.arange(0, 128)
    tl.store(out + at, tl.load(x + at).to(tl.float8e4nv))

class Package:
    @staticmethod
    def kernels():
        return [Compiled("narrow", narrow, {{"x": "*fp32", "out": "*fp8e4nv"}}, {{}})]

triton_check.importlib.import_module = lambda name: Package
found = triton_check.compile_one("any", 0, 90)
print(*found.faults())
"""


def run(*argv: str) -> str:
    environment = {name: v for name, v in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, *argv], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_indexer_s_kernels_are_for_sm_80() -> None:
    said: dict[str, Any] = json.loads(
        run(str(CHECK), "--json", "--arch", "80", "--jobs", "1", "candidate_logits", "quantise")
    )
    assert said["right"]
    assert [row["kernel"] for row in said["kernels"]] == ["candidate_logits", "quantise"]
    assert all(0 < row["registers"] <= 255 for row in said["kernels"])


def test_a_conversion_of_fp8_is_found(tmp_path: Path) -> None:
    probe = tmp_path / "probe.py"
    probe.write_text(PROBE.format(folder=str(CHECK.parent)))
    assert "converts fp8" in run(str(probe))
