"""The checks of a GPU host, one test each; the engines are shared. ``pytest -m gpu tests/gpu``."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gpu.checks import CHECKS

pytestmark = pytest.mark.gpu
RUN = Path(__file__).with_name("run.py")
LIMIT = 1500  # seconds; a host with time has no reason to hurry the first compilation


@pytest.fixture(scope="session")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    if importlib.util.find_spec("torch") is None or importlib.util.find_spec("vllm") is None:
        pytest.skip("needs torch and vLLM")
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    out = tmp_path_factory.mktemp("gpu") / "result.json"
    argv = [sys.executable, str(RUN), "--out", str(out), "--limit", str(LIMIT)]
    done = subprocess.run(argv, capture_output=True, text=True)
    assert out.is_file(), done.stdout + done.stderr
    print(done.stdout)
    return {row["name"]: row for row in json.loads(out.read_text())["rows"]}


@pytest.mark.parametrize("name", [check.name for check in CHECKS])
def test_check(rows: dict[str, dict[str, Any]], name: str) -> None:
    assert name in rows, "not run; the engine's log is in the output above"
    assert rows[name]["ok"], rows[name]["values"]
