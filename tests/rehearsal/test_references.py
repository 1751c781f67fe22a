"""Our torch references against vLLM's own Triton kernels, run by the mended interpreter.

Where a record is written (key-value cache, index keys) not one byte may differ. A normalised bf16
value may: the references sum squares in float64, the kernels in float32, so a value that lies on a
rounding boundary falls to the other side now and then. The bound is one step of bf16, in fewer than
one value in a thousand.
"""

from __future__ import annotations

import importlib
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from spark_overlay.attention.format import RECORD_BYTES
from spark_overlay.indexer.format import STATE_BYTES

pytestmark = [pytest.mark.rehearsal, pytest.mark.usefixtures("vllm")]

TOKENS, BLOCKS, BLOCK = 37, 8, 16
GAP = 1000
EPS = 1e-6
SEEDS = range(4)


@pytest.fixture(scope="module")
def stock(vllm: ModuleType) -> SimpleNamespace:
    """vLLM's kernels from the modules that define them; no hook reaches these names."""
    from vllm.models.common.ops import fused_q_kv_rmsnorm
    from vllm.models.deepseek_v4.xpu.xpu_qnorm_rope_kv_fp8_insert import (
        xpu_qnorm_rope_kv_fp8_insert,
    )
    from vllm.models.deepseek_v41.attention import _fill_short_context_topk_indices
    from vllm.models.deepseek_v41.common.ops.fused_compress_quant_cache import (
        fused_save_compress_norm,
        rope_quant_insert,
    )
    from vllm.models.deepseek_v41.common.ops.indexer_k_store import indexer_k_norm_rope_store

    return SimpleNamespace(
        q_kv_norm=fused_q_kv_rmsnorm,
        window_insert=xpu_qnorm_rope_kv_fp8_insert,
        fill=_fill_short_context_topk_indices,
        pool=fused_save_compress_norm,
        insert=rope_quant_insert,
        store_keys=indexer_k_norm_rope_store,
    )


@pytest.fixture(scope="module")
def ours(vllm: ModuleType) -> Any:
    from spark_overlay.cpu import glue

    glue.prepare()
    return glue


class Draw:
    """Seeded inputs of one comparison."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        angle = self.normal(256, 32)
        self.cos_sin = torch.cat((angle.cos(), angle.sin()), -1)
        self.positions = torch.arange(5 + seed, 5 + seed + TOKENS)
        self.slots = torch.randperm(BLOCKS * BLOCK, generator=self.generator)[:TOKENS].long()
        self.slots[3] = -1

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    def latents(self) -> Tensor:
        """bf16 rows of very different sizes; one of zeros, one beyond what a scale of 1 holds."""
        rows = self.normal(TOKENS, 512) * torch.exp(3 * self.normal(TOKENS, 1))
        rows[5], rows[6] = 0.0, 1e5
        return rows.bfloat16()


def caches(width: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Two equal paged caches whose pages lie apart, as bytes and as ``[blocks, block, width]``."""
    raw = torch.full((2, BLOCKS, BLOCK * width + GAP), 0xA5, dtype=torch.uint8)
    one, other = (
        r.as_strided((BLOCKS, BLOCK, width), (r.stride(0), width, 1), r.storage_offset())
        for r in raw
    )
    return raw[0], raw[1], one, other


def assert_same_bytes(found: Tensor, expected: Tensor, written: int) -> None:
    differing = int((found != expected).sum())
    assert differing == 0, f"{differing} bytes differ"
    # The untouched value is 0xA5: a kernel that wrote nothing would be equal, too.
    assert int((expected != 0xA5).sum()) >= 0.9 * written


def group_ends(draw: Draw, ratio: int) -> int:
    return int(((draw.slots >= 0) & ((draw.positions + 1) % ratio == 0)).sum())


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("ratio", [1, 2])
def test_latent_records(stock: Any, ours: Any, ratio: int, seed: int) -> None:
    draw = Draw(seed)
    latent = draw.latents()
    theirs_raw, ours_raw, theirs, mine = caches(RECORD_BYTES)
    stock.insert(latent, draw.positions, draw.cos_sin, theirs, draw.slots, ratio)
    ours.rope_quant_insert(latent, draw.positions, draw.cos_sin, mine, draw.slots, ratio)
    assert_same_bytes(ours_raw, theirs_raw, RECORD_BYTES * group_ends(draw, ratio))


@pytest.mark.parametrize("seed", SEEDS[:2])
def test_window_records_and_rotated_queries(stock: Any, ours: Any, seed: int) -> None:
    """The op that vLLM's CPU build lacks, against vLLM's Triton version of it (made for XPU)."""
    draw = Draw(seed)
    kv, q = draw.latents(), draw.normal(TOKENS, 3, 512).bfloat16()
    # That kernel's pages are contiguous, and it normalises the query first.
    theirs = torch.full((BLOCKS, BLOCK, RECORD_BYTES), 0xA5, dtype=torch.uint8)
    mine, drafted = theirs.clone(), theirs.clone()
    normed = q.clone()
    stock.window_insert(normed, kv, theirs, draw.slots, draw.positions, draw.cos_sin, EPS, BLOCK)
    ops = torch.ops._C
    rotated = ops.fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert(
        q, kv, mine, draw.slots, draw.positions, draw.cos_sin, 4, EPS, BLOCK,
        False, False, True, False,
    )  # fmt: skip
    assert_same_bytes(mine, theirs, RECORD_BYTES * group_ends(draw, 1))
    ops.fused_deepseek_v4_kv_rope_insert(
        kv, drafted, draw.slots, draw.positions, draw.cos_sin, BLOCK, None, False
    )
    assert torch.equal(drafted, theirs)

    assert rotated.shape == (TOKENS, 4, 512) and not rotated[:, 3].any()
    assert torch.equal(rotated[:, :3, :448], q[..., :448])
    # Divided by its root mean square, our query is theirs up to the rounding in between.
    size = torch.rsqrt(q.double().square().mean(-1, keepdim=True) + EPS)
    assert_close(rotated[:, :3].double() * size, normed, 2**-7)


def assert_close(found: Tensor, expected: Tensor, bound: float) -> None:
    error = (found.double() - expected.double()).norm(dim=-1) / expected.double().norm(dim=-1)
    assert error.max() <= bound, error.max()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("ratio", [1, 2])
def test_index_keys(stock: Any, ours: Any, ratio: int, seed: int) -> None:
    draw = Draw(seed)
    key, weight = draw.normal(TOKENS, 128).bfloat16(), draw.normal(128).bfloat16()
    theirs_raw, ours_raw, theirs, mine = caches(STATE_BYTES)
    arguments = (key, draw.positions, draw.cos_sin, weight, EPS)
    stock.store_keys(*arguments, theirs, draw.slots, ratio, False)
    ours.indexer_k_norm_rope_store(*arguments, mine, draw.slots, ratio, False)
    assert_same_bytes(ours_raw, theirs_raw, STATE_BYTES * group_ends(draw, ratio))


def steps_of_bf16(found: Tensor, expected: Tensor) -> Tensor:
    """How many representable bf16 values lie between two of the same sign, elementwise."""
    assert found.dtype == expected.dtype == torch.bfloat16
    assert not ((found.sign() * expected.sign()) < 0).any()
    ordered = [t.contiguous().view(torch.int16).int() & 0x7FFF for t in (found, expected)]
    return (ordered[0] - ordered[1]).abs()


def assert_within_a_step(found: Tensor, expected: Tensor) -> None:
    steps = steps_of_bf16(found, expected)
    assert steps.max() <= 1, f"{int(steps.max())} bf16 steps apart"
    assert (steps > 0).float().mean() < 1e-3, f"{int((steps > 0).sum())} of {steps.numel()} differ"


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("ratio", [1, 2])
def test_pooled_latents_and_the_ring(stock: Any, ours: Any, ratio: int, seed: int) -> None:
    """Two requests in one batch, whose chunks begin at an odd and an even position."""
    draw = Draw(seed)
    first = 20
    start = torch.tensor([0, first, TOKENS], dtype=torch.int32)
    positions = torch.cat((torch.arange(7, 7 + first), torch.arange(4, 4 + TOKENS - first)))
    request = torch.cat((torch.zeros(first), torch.ones(TOKENS - first))).int()
    score, weight = draw.normal(TOKENS, 512 * ratio), draw.normal(512).bfloat16()
    ring = draw.normal(4, 8, 1024)
    slots = torch.where(request == 0, 1, 2).long() * 8 + positions % 8
    slots[9] = slots[TOKENS - 2] = -1
    results = []
    for pool in (stock.pool, ours.fused_save_compress_norm):
        latent, state = torch.full((TOKENS, 512), 7.0).bfloat16(), ring.clone()
        batch = (state, slots, start, request) if ratio == 2 else (None, slots, None, None)
        pool(score, positions, *batch, weight, EPS, ratio, latent)
        results.append((latent, state))
    (theirs, theirs_ring), (mine, our_ring) = results
    assert torch.equal(our_ring, theirs_ring) and torch.equal(theirs == 7.0, mine == 7.0)
    assert torch.equal(our_ring, ring) is (ratio == 1)
    assert_within_a_step(mine, theirs)


@pytest.mark.parametrize("seed", SEEDS)
def test_query_and_latent_norm(stock: Any, ours: Any, seed: int) -> None:
    draw = Draw(seed)
    q, kv = draw.normal(TOKENS, 128).bfloat16(), draw.normal(TOKENS, 512).bfloat16()
    weights = draw.normal(128).bfloat16(), draw.normal(512).bfloat16()
    theirs = stock.q_kv_norm(q, kv, *weights, EPS)
    mine = ours.fused_q_kv_rmsnorm(q, kv, *weights, EPS)
    for found, expected in zip(mine, theirs, strict=True):
        assert_within_a_step(found, expected)


@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize("count", [16, 24])
def test_short_contexts(stock: Any, ours: Any, ratio: int, count: int) -> None:
    positions = torch.arange(2 * count + 3)
    theirs, mine = torch.full((2, len(positions), count), 99, dtype=torch.int32)
    for kernel, output in ((stock.fill, theirs), (ours.fill_short_context, mine)):
        kernel[(len(positions),)](
            output, positions, TOP_K=count, COMPRESS_RATIO=ratio, PADDED_TOP_K=32, num_warps=8
        )
    assert torch.equal(mine, theirs)


@pytest.mark.parametrize("first_layer", [True, False], ids=["embedding", "streams"])
def test_hyper_connections(vllm: ModuleType, first_layer: bool) -> None:
    """vLLM's torch reference sums in float32: what differs is that."""
    from spark_overlay.mhc import glue

    stock_mhc = importlib.import_module("vllm.model_executor.kernels.mhc.torch")

    draw = Draw(0)
    streams, width = 4, 256
    residual = draw.normal(TOKENS, streams, width).bfloat16()
    x = residual[:, 0].contiguous() if first_layer else None
    fan_in = width if first_layer else streams * width
    fn = draw.normal(streams * (streams + 2), fan_in) / fan_in**0.5
    scale, base = 0.5 + 0.1 * draw.normal(3), 0.5 * draw.normal(streams * (streams + 2))
    pre_mix = None if first_layer else torch.rand(TOKENS, streams, generator=draw.generator)
    numbers = (1e-20, 1e-6, 1e-6, 2.0, 20)
    theirs = stock_mhc.mhc_pre_delayed_torch(
        residual, fn, scale, base, *numbers, pre_mix=pre_mix, x=x
    )
    mine = glue.pre_delayed(residual, fn, scale, base, *numbers, pre_mix=pre_mix, x=x)
    # Post mix, residual mix, layer input, next pre-mix.
    for place in (0, 1, 3):
        assert mine[place].shape == theirs[place].shape
        assert (mine[place] - theirs[place]).abs().max() <= 3e-6
    assert_within_a_step(mine[2], theirs[2])

    output = draw.normal(TOKENS, width).bfloat16()
    post_mix, residual_mix = theirs[0], theirs[1]
    expected = stock_mhc.mhc_post_torch(output, residual, post_mix, residual_mix)
    found = glue.post(output, residual, post_mix, residual_mix)
    # Streams cancel in places, where one step of a small sum is many of its own.
    difference = (found.double() - expected.double()).abs().max()
    assert difference <= 2**-8 * expected.abs().max()
    assert (found != expected).float().mean() < 1e-2
