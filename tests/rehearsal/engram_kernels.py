"""Compares our Engram with vLLM's own Triton kernels under the interpreter; run by a test.

Needs TRITON_INTERPRET=1 in the environment. Exits non-zero at the first difference.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from spark_overlay.cpu.interpreter import announce_cpu_backend, mend, require_interpreter

announce_cpu_backend()
require_interpreter()
mend()

from vllm.models.deepseek_v41.common import engram as stock  # noqa: E402

from spark_overlay.engram.layout import EngramLayout  # noqa: E402
from spark_overlay.engram.reference import dequantize_rows, gate_values  # noqa: E402

#: layer ids, vocab size, heads, compressed ids
CONFIGS = [([1, 14], 16000000, 8, 99092), ([1, 3], 500, 8, 101), ([0, 5, 9], 62, 1, 7)]
PAD_TOKEN = 2


def layouts(layers: list[int], vocab: int, heads: int, compressed: int) -> tuple[Any, EngramLayout]:
    config = SimpleNamespace(
        engram_layer_ids=layers,
        engram_num_embeddings=[0] * len(layers),
        engram_vocab_size=vocab,
        engram_n_heads=heads,
        engram_max_ngram_size=4,
        engram_head_dim=32,
        engram_pad_token_id=PAD_TOKEN,
        engram_compressed_vocab_size=compressed,
    )
    theirs = stock.EngramLayout(config)
    flat = [[p for order in layer for p in order] for layer in theirs.primes]
    config.engram_num_embeddings = [sum(sizes) for sizes in flat]
    ours = EngramLayout.from_config(config)
    assert ours is not None
    assert [list(sizes) for sizes in ours.primes] == flat
    assert [list(begins) for begins in ours.offsets] == theirs.offsets.tolist()
    return theirs, ours


def check_hashes(layers: list[int], vocab: int, heads: int, compressed: int) -> None:
    """Three requests in one batch: a whole text, a later chunk, one with unknown lookback."""
    theirs, ours = layouts(layers, vocab, heads, compressed)
    rng = np.random.default_rng(vocab)
    token_map = rng.permutation(np.arange(compressed + 30) % compressed)
    multipliers = stock.compute_hash_multipliers(tuple(layers), 4, compressed)
    assert ours.multipliers.tolist() == multipliers.tolist()
    texts = [rng.integers(0, len(token_map), n) for n in (9, 12, 10)]
    deads = [rng.random(len(text)) < 0.2 for text in texts]
    starts = [0, 7, 2]
    lookback = np.full((3, 3), -1)
    lookback_dead = np.zeros((3, 3), bool)
    expected, chunks, masks, positions = [], [], [], []
    for i, (text, dead, start) in enumerate(zip(texts, deads, starts, strict=True)):
        first = max(0, start - 3)
        before = text[first:start].copy()
        if i == 2:
            before[0] = -1
            dead[first] = False
        # vLLM's window counts backward: column 0 is the token just before the chunk.
        lookback[i, : len(before)] = before[::-1]
        lookback_dead[i, : len(before)] = dead[first:start][::-1]
        chunks.append(text[start:])
        masks.append(dead[start:])
        positions.append(np.arange(start, len(text)))
        expected.append(
            ours.hash_ids(text[start:], token_map, dead[start:], before, dead[first:start])
        )
    state = SimpleNamespace(
        use_slot_cache=False,
        _cache=None,
        block_size=1,
        pad_id=int(token_map[PAD_TOKEN]),
        token_map=torch.tensor(token_map, dtype=torch.int32),
        primes=torch.tensor(theirs.primes),
        offsets=theirs.offsets,
        multipliers=multipliers,
    )
    found = stock.NgramHashState.forward(
        state,
        torch.tensor(np.concatenate(chunks), dtype=torch.int32),
        torch.tensor(np.concatenate(positions)),
        torch.tensor([0, *np.cumsum([len(c) for c in chunks])], dtype=torch.int32),
        torch.tensor(np.concatenate(masks)),
        torch.tensor(lookback, dtype=torch.int32),
        torch.tensor(lookback_dead),
        None,
        None,
    )
    assert np.array_equal(found.numpy(), np.concatenate(expected)), (layers, vocab)


def check_gate(masked: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    tokens, streams, dim = 5, 4, 128
    shapes = [(tokens, streams, dim), (tokens, (streams + 1) * dim), *[(streams, dim)] * 2]
    hidden, kv, q, k = (torch.randn(*s, generator=generator).bfloat16() for s in shapes)
    mask = torch.tensor([1, 0, 1, 1, 0]).bool() if masked else None
    eps, floor = 1e-20, 1e-6
    found = torch.empty_like(hidden)
    stock._fused_engram_post_wkv_kernel[(tokens * streams,)](
        hidden, kv, q, k, mask if masked else hidden, found, tokens,
        *hidden.stride(), *kv.stride(), *q.stride(), *k.stride(),
        mask.stride(0) if mask is not None else 0, *found.stride(), eps, floor,
        DIM=dim, HC_MULT=streams, BLOCK_SIZE=dim, HAS_MASK=masked,
    )  # fmt: skip
    ours = gate_values(hidden, kv, q, k, eps, mask)
    # The sums of a row are added in another order: at most one bf16 step, seldom.
    steps = (found.view(torch.int16).int() - ours.view(torch.int16).int()).abs()
    assert steps.max() <= 1 and (steps > 0).float().mean() < 0.01, (masked, steps.max())


def check_rows() -> None:
    """Every finite e4m3 byte under many scales, through vLLM's lookup."""
    rng = np.random.default_rng(3)
    finite = np.array([b for b in range(256) if b & 0x7F != 0x7F], np.uint8)
    weights = torch.from_numpy(rng.choice(finite, (48, 64)))
    scales = torch.from_numpy(rng.integers(0, 255, (48, 2)).astype(np.uint8))
    typed = weights.view(torch.float8_e4m3fn)
    columns, lo, hi = 6, 10, 40
    ids = torch.from_numpy(rng.integers(-1, 48, (20, columns)).astype(np.int32))
    found = torch.empty(20, 3, 64, dtype=torch.bfloat16)
    stock._engram_lookup_kernel[(2,)](
        typed[lo:hi].contiguous(), scales[lo:hi].contiguous(), ids, ids, found,
        lo, hi, 60, *ids.stride(),
        HEAD_START=3, LOCAL_HEADS=3, TOTAL_HEADS=columns, DIM=64, QUANT_BLOCK=32, BLOCK_R=16,
        GRID=2, SORTED=False, PACKED=False, OUT_STRIDE=found.stride(0),
    )  # fmt: skip
    mine = ids[:, 3:].long()
    owned = (mine >= lo) & (mine < hi)
    at = mine.clamp(0)
    ours = dequantize_rows(typed[at], scales[at]).masked_fill(~owned[..., None], 0)
    assert torch.equal(found, ours)


for config in CONFIGS:
    check_hashes(*config)
check_gate(False)
check_gate(True)
check_rows()
print(f"layouts {len(CONFIGS)}, hashes {len(CONFIGS)}, gates 2, rows 1: equal")
