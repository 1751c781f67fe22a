"""The CUDA kernels of sparse attention on this CPU: their source, unchanged, over a few lines that
do what their instructions are defined to do (tests/emulated). Shows where every value goes; a GPU
shows the rest."""

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
APART = ("-fno-gnu-unique", "-Wl,-Bsymbolic")


@pytest.fixture(scope="module")
def emulate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    tool = shutil.which("g++")
    if tool is None:
        if os.environ.get("SPARK_TEST_DEMAND"):
            pytest.fail("no g++")
        pytest.skip("no g++")
    folder = tmp_path_factory.mktemp("emulated")
    source, ours = ROOT / "overlay/csrc/attention", ROOT / "tests/emulated"
    for name in (
        "attend.cuh", "many.cuh", "unpack.cuh", "finish.cuh", "numbers.cuh", "launch.hpp", "api.h",
    ):  # fmt: skip
        text = (source / name).read_text()
        assert (SHARED in text) == (name in ("attend.cuh", "many.cuh"))
        (folder / name).write_text(text.replace(SHARED, ""))  # the emulated array instead
    for file in filter(Path.is_file, ours.iterdir()):
        shutil.copy(file, folder)
    out = folder / "emulated.so"
    # Two emulations in one process: neither may take the other's variables for its own.
    argv = [tool, "-std=c++20", "-O1", "-w", "-shared", "-fPIC", *APART, "-pthread", f"-I{folder}"]
    subprocess.run([*argv, str(folder / "attend.cpp"), "-o", str(out)], check=True)
    loaded = ctypes.CDLL(str(out))
    with pytest.MonkeyPatch.context() as patch:
        serves = SimpleNamespace(sparse=lambda args, _: loaded.emulate(ctypes.byref(args)))
        patch.setattr(library, "load", lambda: serves)
        patch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
        patch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=0))
        yield sparse.launch_cuda


@pytest.mark.parametrize(
    ("keys", "many", "heads", "width", "picks", "scales"),
    [
        (32, False, 20, 33, 0, 118),
        (64, False, 12, 20, 60, 118),
        (32, False, 12, 30, 0, 132),
        (64, True, 20, 40, 90, 118),
        (64, True, 36, 30, 0, 132),
    ],
)
def test_the_kernel(
    emulate: Any, keys: int, many: bool, heads: int, width: int, picks: int, scales: int
) -> None:
    """Two sources, absent slots, heads that fill no tile, rotation; scales of one factor and of
    two. With ``many``, a CTA takes a token of several tiles, then one without records."""
    tokens = 3 if many else 1
    window = cases.cache(5, 32, 1, "cpu", pad=64, scales=scales)
    slots = cases.slots(tokens, width, 5 * 32, 2, "cpu")
    slots[0, 3] = -1
    lengths = torch.tensor([width - 1, 7, 0], dtype=torch.int32)[:tokens]
    sources = [Source(window, slots, lengths)]
    if picks:
        chosen = cases.slots(tokens, picks, 3 * 48, 3, "cpu")
        chosen[0, ::5] = -1
        chosen[2:] = -1
        sources.append(Source(cases.cache(3, 48, 2, "cpu"), chosen))
    q = cases.queries(tokens, heads, 3, "cpu") * 2.0 ** (118 - scales)
    sink = torch.randn(heads)
    turn = (torch.randn(40, 64), torch.tensor([7, 0, 39]))
    out = torch.full_like(q, math.nan)
    emulate(q, sources, sink, 0.03, out, turn, plan.Cuda(keys, 1, many))
    right = reference.sparse_mla(q, sources, sink, 0.03, unrotate=turn)
    assert (out.double() - right).abs().max() <= cases.tolerance(right)
    assert not out[2:].any()


@pytest.mark.parametrize("many", [False, True])
def test_a_nan_code_makes_the_token_nan(emulate: Any, many: bool) -> None:
    window = cases.cache(2, 32, 1, "cpu")
    window.view(2, -1)[0, 5 * 576 + 200] = 0xFF
    slots = torch.arange(10, dtype=torch.int32)[None]
    q, sink = cases.queries(1, 8, 3, "cpu"), torch.zeros(8)
    out = torch.zeros_like(q)
    emulate(
        q, [Source(window, slots)], sink, 0.03, out, None, plan.Cuda(64 if many else 32, 1, many)
    )
    assert out.isnan().all()


@pytest.mark.parametrize("many", [False, True])
def test_records_beyond_two_gibibytes(emulate: Any, many: bool) -> None:
    """A page that far from the first; of what lies between nothing is touched."""
    near, stride = cases.cache(2, 32, 1, "cpu"), (1 << 31) + (1 << 20)
    whole = torch.empty(stride + 32 * 584, dtype=torch.uint8)
    far = whole.as_strided((2, 32, 584), (stride, 584, 1))
    far.copy_(near)
    slots = torch.arange(0, 64, 3, dtype=torch.int32)[None]
    q, sink = cases.queries(1, 20, 3, "cpu"), torch.zeros(20)
    out = [torch.full_like(q, math.nan) for _ in range(2)]
    for cache, to in zip((near, far), out, strict=True):
        shape = plan.Cuda(64 if many else 32, 1, many)
        emulate(q, [Source(cache, slots)], sink, 0.03, to, None, shape)
    assert out[0].isfinite().all() and torch.equal(*out)
