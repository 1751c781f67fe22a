"""The CUDA kernel of sparse attention on this CPU: its source, unchanged, over a few lines that do
what its instructions are defined to do (tests/emulated). Shows where every value goes; a GPU shows
the rest."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gpu import attention_cases as cases

from spark_overlay.attention.kernels import Source, library, plan, reference, sparse

pytestmark = pytest.mark.rehearsal
ROOT = Path(__file__).resolve().parents[2]
SHARED = "    extern __shared__ __align__(16) uint8_t memory[];\n"


@pytest.fixture(scope="module")
def emulate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    tool = shutil.which("g++")
    if tool is None:
        if os.environ.get("SPARK_TEST_DEMAND"):
            pytest.fail("no g++")
        pytest.skip("no g++")
    folder = tmp_path_factory.mktemp("emulated")
    source, ours = ROOT / "overlay/csrc/attention", ROOT / "tests/emulated"
    for name in ("attend.cuh", "numbers.cuh", "launch.hpp", "api.h"):
        text = (source / name).read_text()
        assert (SHARED in text) == (name == "attend.cuh")
        (folder / name).write_text(text.replace(SHARED, ""))  # the emulated array instead
    for file in ours.iterdir():
        shutil.copy(file, folder)
    out = folder / "emulated.so"
    argv = [tool, "-std=c++20", "-O1", "-w", "-shared", "-fPIC", "-pthread", f"-I{folder}"]
    subprocess.run([*argv, str(folder / "attend.cpp"), "-o", str(out)], check=True)
    loaded = ctypes.CDLL(str(out))
    with pytest.MonkeyPatch.context() as patch:
        serves = SimpleNamespace(sparse=lambda args, _: loaded.emulate(ctypes.byref(args)))
        patch.setattr(library, "load", lambda: serves)
        patch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
        patch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=0))
        yield sparse.launch_cuda


@pytest.mark.parametrize(
    ("keys", "pair", "heads", "width", "picks", "scales"),
    [
        (32, True, 20, 40, 20, 118),
        (32, False, 20, 33, 0, 118),
        (64, False, 12, 20, 60, 118),
        (32, True, 12, 30, 0, 132),
    ],
)
def test_the_kernel(
    emulate: Any, keys: int, pair: bool, heads: int, width: int, picks: int, scales: int
) -> None:
    """Two sources, absent slots, heads that fill no tile, rotation; scales of one factor and of
    two."""
    window = cases.cache(5, 32, 1, "cpu", pad=64, scales=scales)
    slots = cases.slots(1, width, 5 * 32, 2, "cpu")
    slots[0, 3] = -1
    sources = [Source(window, slots, torch.tensor([width - 1], dtype=torch.int32))]
    if picks:
        chosen = cases.slots(1, picks, 3 * 48, 3, "cpu")
        chosen[0, ::5] = -1
        sources.append(Source(cases.cache(3, 48, 2, "cpu"), chosen))
    q = cases.queries(1, heads, 3, "cpu") * 2.0 ** (118 - scales)
    sink = torch.randn(heads)
    turn = (torch.randn(40, 64), torch.tensor([7]))
    out = torch.full_like(q, math.nan)
    emulate(q, sources, sink, 0.03, out, turn, plan.Cuda(keys, 1, pair))
    right = reference.sparse_mla(q, sources, sink, 0.03, unrotate=turn)
    assert (out.double() - right).abs().max() <= cases.tolerance(right)


def test_a_nan_code_makes_the_token_nan(emulate: Any) -> None:
    window = cases.cache(2, 32, 1, "cpu")
    window.view(2, -1)[0, 5 * 576 + 200] = 0xFF
    slots = torch.arange(10, dtype=torch.int32)[None]
    q, sink = cases.queries(1, 8, 3, "cpu"), torch.zeros(8)
    out = torch.zeros_like(q)
    emulate(q, [Source(window, slots)], sink, 0.03, out, None, plan.Cuda(32, 1))
    assert out.isnan().all()
