"""Every CUDA file compiles for the four GPUs it is written for, and the check sees what is wrong.

No GPU is needed; nvcc comes with ``./start.sh test engine``."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
for place in (ROOT / "overlay" / "csrc", ROOT / "overlay" / "benchmarks"):
    if str(place) not in sys.path:
        sys.path.insert(0, str(place))

import compile_check  # noqa: E402

import build_cuda  # noqa: E402

pytestmark = pytest.mark.rehearsal

#: One kernel a fault; each must be found, and the right one must be left alone.
FAULTY = """
__global__ void __launch_bounds__(128) right(float* x) { x[threadIdx.x] *= 2; }
__global__ void waits(int* x) { while (atomicCAS(x, 0, 1) != 0) {} x[1]++; atomicExch(x, 0); }
__global__ void sleeps(volatile int* x) { while (*x == 0) __nanosleep(20); }
__global__ void __launch_bounds__(1024) spills(float* x) {
  float v[80];
  for (int i = 0; i < 80; i++) v[i] = x[i * threadIdx.x];
  for (int k = 0; k < 100; k++)
    for (int i = 0; i < 80; i++) v[i] = v[i] * v[(i * 7 + 3) % 80] + 1;
  for (int i = 0; i < 80; i++) x[i * threadIdx.x + 1] = v[i];
}
"""


@pytest.fixture(autouse=True)
def compiler() -> None:
    try:
        build_cuda.compiler()
    except build_cuda.BuildError as error:
        if os.environ.get("SPARK_TEST_DEMAND"):
            pytest.fail(str(error))
        pytest.skip(str(error))


def test_each_fault_is_found_where_it_is(tmp_path: Path) -> None:
    file = tmp_path / "faulty.cu"
    file.write_text(FAULTY)
    faults = {}
    for kernel in compile_check.check(["80"], [file], tmp_path / "cache"):
        (name,) = (n for n in ("right", "waits", "sleeps", "spills") if n in kernel.name)
        faults[name] = "; ".join(kernel.faults())
    assert faults.pop("right") == ""
    assert faults.keys() == {"waits", "sleeps", "spills"}
    assert "cas" in faults["waits"] and "nanosleep" in faults["sleeps"]
    assert "spills" in faults["spills"] and "2 CTAs" in faults["spills"]


def test_what_was_compiled_is_kept_until_something_changes(tmp_path: Path) -> None:
    file, cache = tmp_path / "small.cu", tmp_path / "cache"
    file.write_text("__global__ void __launch_bounds__(32) one(int* x) { x[0] = 1; }\n")
    first = compile_check.check(["80"], [file], cache)
    (kept,) = cache.glob("*.json")
    stamp = kept.read_text()
    kept.write_text(stamp.replace('"registers": ', '"registers": 100'))
    assert compile_check.check(["80"], [file], cache)[0].registers > 100 >= first[0].registers
    (tmp_path / "common.cuh").write_text("// a header beside it\n")
    assert compile_check.check(["80"], [file], cache) == first
    assert len(list(cache.glob("*.json"))) == 2


def test_what_is_kept_depends_on_all_that_is_included() -> None:
    for folder in (build_cuda.EXL3, build_cuda.ATTENTION, build_cuda.INDEXER, build_cuda.MHC):
        held = set(build_cuda.headers(folder))
        for file in (*build_cuda.sources(folder), *held):
            for name in re.findall(r'#include "(.*)"', file.read_text()):
                assert (file.parent / name).resolve() in held, (file, name)


def test_a_file_that_does_not_compile_is_told_in_the_compilers_words(tmp_path: Path) -> None:
    file = tmp_path / "wrong.cu"
    file.write_text("__global__ void one(int* x) { x[0] = y; }\n")
    with pytest.raises(build_cuda.BuildError, match=r'identifier "y" is undefined'):
        compile_check.check(["80"], [file], tmp_path / "cache")


def test_every_kernel_is_right_on_every_gpu() -> None:
    found = compile_check.check(build_cuda.ARCHITECTURES)
    assert {kernel.arch for kernel in found} == set(build_cuda.ARCHITECTURES)
    assert {kernel.file for kernel in found} >= {"decode.cu", "dense.cu", "experts_a.cu"}
    wrong = {f"sm_{k.arch} {k.file} {k.name}": k.faults() for k in found if k.faults()}
    assert wrong == {}
