"""The native row store under AddressSanitizer and ThreadSanitizer: right rows, and no finding."""

from __future__ import annotations

if __name__ == "__main__":  # before the imports that a bare Python lacks
    from _standalone import main

    main(__file__)

import os
import platform
import subprocess
from pathlib import Path

import pytest
from _native import CSRC, built

SANITIZERS = {
    "address": ("-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
    "thread": ("-fsanitize=thread",),
}


def run(*argv: str) -> subprocess.CompletedProcess[str]:
    environ = os.environ | {"TSAN_OPTIONS": "halt_on_error=1", "ASAN_OPTIONS": "detect_leaks=1"}
    return subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("kind", SANITIZERS)
def test_the_store_runs_clean(kind: str, tmp_path: Path) -> None:
    flags = (*SANITIZERS[kind], "-fno-omit-frame-pointer", "-O1", "-g")
    program = built(f"store-{kind}", flags, CSRC / "engram" / "test_store.cpp")
    ran = run(str(program), str(tmp_path))
    if "unexpected memory mapping" in ran.stderr:  # a kernel that spreads addresses too far for it
        ran = run("setarch", platform.machine(), "-R", str(program), str(tmp_path))
    assert ran.returncode == 0 and ran.stdout.endswith("ok\n"), ran.stderr[-6000:] + ran.stdout
