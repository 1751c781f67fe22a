"""The inserts add and round as vLLM's own kernels, compiled by the same Triton for a GPU that is
not there: a byte that differs on a GPU is an operation that differs here.

vLLM's window is CUDA: its machine code (0.33.0's, sm_80, sm_90 and sm_120) multiplies the odd value
by the sine or the cosine, rounds, and adds the even value's product unrounded.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ptx import Program, alike, unrounded

from spark_overlay.arithmetic import fma
from spark_overlay.attention.reference import e4m3_exponent

pytestmark = pytest.mark.rehearsal

ROOT = Path(__file__).resolve().parents[2]
BUILD = """
import ast, importlib.util, json, sys
from pathlib import Path
sys.path[:0] = [{root!r} + "/overlay/benchmarks", {root!r} + "/overlay"]
import triton_check
from spark_overlay.attention.inserts import compiled
from spark_overlay.compiled import Compiled

here = Path(importlib.util.find_spec("vllm").origin).parent / "models/deepseek_v41/common/ops"

def stock(file, name):
    text = (here / file).read_text()
    tree = ast.parse(text)
    node = next(n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == name)
    alone = Path({folder!r}, file)
    body = ast.get_source_segment(text, node)
    alone.write_text("import triton\\nimport triton.language as tl\\n@triton.jit\\n" + body)
    spec = importlib.util.spec_from_file_location(alone.stem, alone)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)

types = dict(
    latent="*bf16", positions="*i64", cos_sin="*fp32", cache="*u8", cache_slots="*i64",
    k_pre_ptr="*bf16", k_pre_stride="i32", positions_ptr="*i64", rms_norm_weight_ptr="*bf16",
    rms_norm_eps="fp32", cos_sin_cache_ptr="*fp32", cos_sin_stride="i32", k_cache_ptr="*u8",
    kv_slot_mapping_ptr="*i64", kv_cache_block_size="i32",
)
def made(kernel, warps, **constants):
    names = kernel.arg_names
    given = {{name: types[name] for name in names if name in types}}
    constants = {{name: value for name, value in constants.items() if name in names}}
    return Compiled("", kernel, given, constants, warps, plain=("rms_norm_eps",))

ours = {{one.name.split("_")[-1]: one for one in compiled.kernels()}}
ours["stock latents"] = made(
    stock("fused_compress_quant_cache.py", "_rope_quant_insert_kernel"), 4, COS_STRIDE=64,
    CACHE_STRIDE=64 * 584, CACHE_BLOCK=64, COMPRESS_RATIO=2, SANITIZE_CACHE_NANS=False)
ours["stock keys"] = made(
    stock("indexer_k_store.py", "_indexer_k_norm_rope_quant_store_kernel"), 1, HEAD_SIZE=128,
    ROPE_HEAD_DIM=64, COMPRESS_RATIO=2, TOKEN_STRIDE=128, SCALE_DIM=4, KV_BLOCK_STRIDE=64 * 132,
    FP8_MAX=448.0, USE_FP4=False, SHUFFLE=False, BLOCK_TILE_SIZE=16, HEAD_TILE_SIZE=16,
    MX_SCALE=False)
print(json.dumps({{name: triton_check.build(one, 90).asm["ptx"] for name, one in ours.items()}}))
"""


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Program]:
    folder = tmp_path_factory.mktemp("stock")
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environ["TRITON_CACHE_DIR"] = str(folder / "cache")
    script = BUILD.format(root=str(ROOT), folder=str(folder))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], env=environ, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return {name: Program(text) for name, text in json.loads(done.stdout).items()}


def test_pairs_are_turned_as_there(programs: dict[str, Program]) -> None:
    right = {name: {"cosine"} for name in programs}
    right["write"] = {"even"}
    assert {name: unrounded(one) for name, one in programs.items()} == right


def test_squares_are_added_in_the_same_order(programs: dict[str, Program]) -> None:
    (ours,), (right,) = (programs[name].of("rsqrt") for name in ("keys", "stock keys"))
    assert alike(ours) == alike(right)
    assert repr(right).count("'lane'") > 5, "the norm's sum was not found"


def test_keys_are_normed_by_the_same_products(programs: dict[str, Program]) -> None:
    def products(program: Program) -> list[str]:
        (norm,) = program.of("rsqrt")
        found = [one for one in program.of("mul.f32") if norm in one[1:]]
        twice = [one for one in program.of("mul.f32") if any(part in found for part in one[1:])]
        assert len(found) == len(twice) == 4
        return sorted(repr(alike(one)) for one in twice)

    assert products(programs["keys"]) == products(programs["stock keys"])


def log2_of_libdevice(x: torch.Tensor) -> torch.Tensor:
    """What ``tl.log2`` computes on a GPU for float32 above zero that is no subnormal."""
    polynomial = (
        0x3DC6B27F, -0x41D380D0, 0x3E2FCF2A, -0x41C8B1BD, 0x3E520BF4, -0x4189C375, 0x3E93BF99,
        -0x414755B7, 0x3EF6384A, -0x40C755C5,
    )  # fmt: skip
    bits = x.view(torch.int32)
    away = (bits - 0x3F2AAAAB) & ~0x7FFFFF
    near = (bits - away).view(torch.float32) - 1
    exponent = away.float() * 2.0**-23

    first, *rest = (torch.tensor(one, dtype=torch.int32).view(torch.float32) for one in polynomial)
    total = first.expand_as(x)
    for coefficient in rest:
        total = fma(total, near, coefficient)
    return exponent + fma(near, torch.tensor(1.4426950216293335), near * (near * total))


def test_every_bf16_has_the_scale_that_vllm_computes_by_a_logarithm() -> None:
    amax = torch.arange(0, 0x7F80, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    by_log = torch.ceil(log2_of_libdevice(amax.clamp_min(1e-4) * (1.0 / 448.0)))
    assert torch.equal(by_log, e4m3_exponent(amax.double()).float())
    divided = torch.ceil(log2_of_libdevice(amax.clamp_min(1e-4) / 448.0))
    assert torch.equal(by_log, divided), "the window's kernel divides"


def test_fma_rounds_once() -> None:
    """Against exact fractions where the sum nearly cancels, and where float64 alone is wrong."""
    from fractions import Fraction

    g = torch.Generator().manual_seed(5)
    a, b = torch.randn(2, 2000, generator=g)
    shift = torch.randint(0, 30, (2000,), generator=g)
    c = -(a * b) * (1 + torch.randn(2000, generator=g) * 2.0**-shift)
    tie = torch.tensor([1.0, 1 + 2.0**-23, 2.0**-24, -(2.0**-60)])
    a = torch.cat((a, tie[1:2], tie[:1]))
    b = torch.cat((b, tie[:1], tie[2:3] * (1 + 2.0**-23)))
    c = torch.cat((c, tie[3:4], tie[:1]))
    found = fma(a, b, c)
    for x, y, z, r in zip(a.tolist(), b.tolist(), c.tolist(), found, strict=True):
        exact = Fraction(x) * Fraction(y) + Fraction(z)
        off = abs(Fraction(r.item()) - exact)
        for way in (torch.inf, -torch.inf):
            beside = torch.nextafter(r, torch.tensor(way)).item()
            assert off <= abs(Fraction(beside) - exact)
