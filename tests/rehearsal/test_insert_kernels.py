"""The cache inserts under the interpreter: byte for byte the references' pages."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import triton
import triton.language as tl

from spark_overlay.attention.inserts import ops
from spark_overlay.attention.inserts.encode import encode_e4m3, scale_exponent
from spark_overlay.attention.inserts.ops import InsertError
from spark_overlay.attention.reference import e4m3_exponent

pytestmark = pytest.mark.rehearsal
BLOCK, BLOCKS = 16, 3


@pytest.fixture(scope="module")
def cases() -> ModuleType:
    from spark_overlay.cpu.interpreter import mend, require_interpreter

    require_interpreter()
    mend()
    path = Path(__file__).resolve().parents[1] / "gpu" / "insert_cases.py"
    spec = importlib.util.spec_from_file_location("insert_cases", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["insert_cases"] = module
    spec.loader.exec_module(module)
    return module


@triton.jit
def _encode_kernel(x, out, exponents, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    value = tl.load(x + at)
    tl.store(out + at, encode_e4m3(tl.minimum(tl.maximum(value, -448.0), 448.0)).to(tl.uint8))
    tl.store(exponents + at, scale_exponent(tl.abs(value)))


def test_every_code_its_neighbours_and_the_borders_between(cases: ModuleType) -> None:
    """Each e4m3 value, the middle to the next one, and the float32 numbers on both sides."""
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = (codes[1:] + codes[:-1]) / 2
    exact = torch.cat(
        (codes, middles, 2.0 ** torch.arange(-30, 60), 448 * 2.0 ** torch.arange(-20, 20))
    )
    bits = exact.view(torch.int32)
    near = torch.cat((bits, bits + 1, (bits - 1).clamp_min(0))).view(torch.float32)
    values = torch.cat((near, -near))
    size = triton.next_power_of_2(len(values))
    values = torch.cat((values, torch.ones(size - len(values))))
    found = torch.empty(size, dtype=torch.uint8)
    exponents = torch.empty(size, dtype=torch.int32)
    _encode_kernel[(1,)](values, found, exponents, SIZE=size)
    right = values.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(found, right)
    assert torch.equal(exponents, e4m3_exponent(values.abs().double()).int())


@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize("rows", [0, 1, 19])
def test_latents_and_index_keys(cases: ModuleType, rows: int, ratio: int) -> None:
    given = cases.draw(rows, BLOCKS * BLOCK)
    for write, width in ((cases.latents, 584), (cases.keys, 132)):
        found, right = (
            write(given, cases.cache(BLOCKS, BLOCK, width), ratio, ours) for ours in (True, False)
        )
        assert torch.equal(found, right)
        assert rows < 19 or (right != cases.POISON).any()


@pytest.mark.parametrize(("rows", "heads", "padded"), [(0, 3, 8), (9, 3, 8), (2, 1, 1)])
def test_queries_and_the_windows_records(
    cases: ModuleType, rows: int, heads: int, padded: int
) -> None:
    given = cases.draw(rows, BLOCKS * BLOCK, heads)
    (found_q, found), (right_q, right) = (
        cases.window(given, cases.cache(BLOCKS, BLOCK, 584), padded, ours) for ours in (True, False)
    )
    assert torch.equal(found, right)
    assert torch.equal(found_q.view(torch.int16), right_q.view(torch.int16))


def test_another_format_is_refused(cases: ModuleType) -> None:
    given = cases.draw(4, BLOCK)
    at = (given.positions, given.cos_sin)
    with pytest.raises(InsertError, match="528 bytes"):
        ops.rope_quant_insert(given.rows, *at, cases.cache(1, BLOCK, 528), given.slots, 1)
    with pytest.raises(InsertError, match="ratio 4"):
        ops.rope_quant_insert(given.rows, *at, cases.cache(1, BLOCK, 584), given.slots, 4)
    with pytest.raises(InsertError, match="scale"):
        ops.rope_quant_insert(
            given.rows, *at, cases.cache(1, BLOCK, 584), given.slots, 1, torch.ones(1)
        )
    with pytest.raises(InsertError, match="FP8"):
        ops.indexer_k_norm_rope_store(
            given.keys, *at, given.weight, 1e-6, cases.cache(1, BLOCK, 132), given.slots, 1, True
        )
    with pytest.raises(InsertError, match="3 rows for 4 slots"):
        ops.insert_kv(given.rows[:3], cases.cache(1, BLOCK, 584), given.slots, *at, BLOCK)
