"""A process that is held to an older GPU: what is refused there, and by which words."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spark_overlay import arch, holding
from spark_overlay.arch import ArchError

pytestmark = [pytest.mark.rehearsal, pytest.mark.usefixtures("vllm")]
ROOT = Path(__file__).resolve().parents[2]

FP8 = """
import json, sys
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from spark_overlay import holding

@triton.jit
def kernel(x, out):
    tl.store(out, tl.load(x).to(tl.float8e4nv).to(tl.uint8, bitcast=True))

def compiles():
    source = ASTSource(fn=kernel, signature={"x": "*fp32", "out": "*u8"}, constexprs={})
    try:
        triton.compile(source, target=GPUTarget("cuda", 90, 32))
    except Exception as error:
        return str(error.__cause__ or error)
    return ""

before = compiles()
holding.without_fp8_type()
print(json.dumps([before, compiles()]))
"""


def test_triton_says_of_e4m3_what_it_says_on_an_sm80(tmp_path: Path) -> None:
    """On an SM90, in a process of its own: Triton must not be its interpreter."""
    script = tmp_path / "fp8.py"
    script.write_text(FP8)
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env |= {"PYTHONPATH": str(ROOT / "overlay"), "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", str(script)],
        env=env, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-3000:]
    before, after = json.loads(ran.stdout)
    assert before == "" and "fp8e4nv not supported" in after


def test_a_refused_path_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(arch.VARIABLE, "80")
    module = SimpleNamespace(__name__="theirs", call=lambda: 1, other=lambda: 2)
    holding.refuse(arch.DEEP_GEMM, module, ("call",))
    with pytest.raises(ArchError, match=r"DeepGEMM was called under OVERLAY_FORCE_ARCH=80"):
        module.call(3, more=4)
    assert module.other() == 2
    with pytest.raises(ArchError, match="theirs has no gone"):
        holding.refuse(arch.DEEP_GEMM, module, ("gone",))


@pytest.mark.parametrize(("to", "refused"), [((8, 0), 2), ((8, 9), 2), ((9, 0), 0), ((12, 1), 0)])
def test_only_what_begins_later_is_refused(
    monkeypatch: pytest.MonkeyPatch, to: tuple[int, int], refused: int
) -> None:
    found: list[Any] = []
    monkeypatch.setattr(holding, "refuse", lambda path, *_: found.append(path))
    monkeypatch.setattr(holding, "without_fp8_type", lambda: found.append("type"))
    monkeypatch.setitem(holding.CALLS, arch.FLASH_MLA, ("os", ("getcwd",), "no.such.module"))
    environment: dict[str, str] = {}
    holding.hold(to, environment)
    types = ["type"] if to < (8, 9) else []
    assert len(found) == refused + len(types) and found[refused:] == types
    assert environment == ({"VLLM_USE_DEEP_GEMM": "0"} if refused else {})


def test_a_module_that_took_the_calls_already_cannot_be_held() -> None:
    path = arch.FLASH_MLA
    module, names, _ = holding.CALLS[path]
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(holding.CALLS, arch.DEEP_GEMM, ("os", (), ""))
        patched.setitem(holding.CALLS, path, (module, names, "json"))
        with pytest.raises(ArchError, match="json was imported before FlashMLA"):
            holding.hold((8, 0), {})


def test_the_installed_vllm_has_the_names_that_are_refused() -> None:
    import importlib

    for module, names, _ in holding.CALLS.values():
        assert all(hasattr(importlib.import_module(module), name) for name in names), module


def test_a_cpu_is_held_to_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert holding.capability() is None and holding.device() == "cpu"
    monkeypatch.setenv(arch.VARIABLE, "80")
    monkeypatch.setattr(holding, "hold", lambda *_: pytest.fail("held"))
    holding.start()
    monkeypatch.setenv(arch.VARIABLE, "eighty")
    with pytest.raises(ArchError, match="eighty"):
        holding.start()
