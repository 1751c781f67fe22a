"""A token's result does not depend on how many others are computed with it.

Torch computes the end of a tensor by other code than its middle, and a float32 sigmoid may differ
there in its last bit: enough to flip a rounding, and in a routed model a token. Each operation of
the CPU path is held to the same bits for a row alone, at the end of a batch, and in its middle.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from spark_overlay.arithmetic import matmul
from spark_overlay.attention.reference import rms_norm, rotate_tail, sparse_attention
from spark_overlay.compressor.reference import pool_and_norm
from spark_overlay.engram.reference import gate_values
from spark_overlay.indexer.reference import scores, top_positions
from spark_overlay.mhc.reference import collapse, expand, mixes
from spark_overlay.router.reference import sqrt_softplus_top_k

pytestmark = pytest.mark.rehearsal

ROWS = 203
#: Ends of batches: inside and outside the width of a vector register, and its multiples.
ENDS = (1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 33, 47, 63, 64, 70, 101, 127, 180, 202)

Operation = Callable[[slice], tuple[Tensor, ...]]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def norm() -> Operation:
    x, weight = normal(ROWS, 128), normal(128)
    return lambda rows: (rms_norm(x[rows], weight, 1e-6),)


def rope() -> Operation:
    x, table, positions = normal(ROWS, 3, 512).bfloat16(), normal(300, 64), torch.arange(ROWS)
    return lambda rows: (rotate_tail(x[rows], table, positions[rows]),)


def product() -> Operation:
    x, weight = normal(ROWS, 256).bfloat16(), normal(256, 128).double()
    return lambda rows: (matmul(x[rows], weight, torch.bfloat16),)


def attention() -> Operation:
    q, kv, sink = normal(ROWS, 2, 64), normal(ROWS, 20, 64), normal(2)
    valid = normal(ROWS, 20, seed=1) > -0.5
    return lambda rows: (sparse_attention(q[rows], kv[rows], valid[rows], sink, 0.125).bfloat16(),)


def indexer() -> Operation:
    q, weights, keys = normal(ROWS, 8, 128), normal(ROWS, 8), normal(40, 128)

    def run(rows: slice) -> tuple[Tensor, ...]:
        score = scores(q[rows], weights[rows], keys)
        return score, top_positions(score, 16)

    return run


def router() -> Operation:
    logits, bias = normal(ROWS, 32), 3 * normal(32)
    return lambda rows: sqrt_softplus_top_k(logits[rows], bias, 6, 1.5)


def hyper_connections() -> Operation:
    x, fn, scale, base = normal(ROWS, 4, 256).bfloat16(), normal(24, 1024), normal(3), normal(24)
    output = normal(ROWS, 256).bfloat16()

    def run(rows: slice) -> tuple[Tensor, ...]:
        mix = mixes(
            x[rows].flatten(1), fn / 32, scale, base,
            rms_eps=1e-20, pre_eps=1e-6, sinkhorn_eps=1e-6, post_gain=2.0, iterations=20,
        )  # fmt: skip
        written = expand(output[rows], x[rows], mix.post, mix.residual)
        return (*mix, written, collapse(x[rows], mix.next_pre))

    return run


def engram_gate() -> Operation:
    hidden, kv = normal(ROWS, 4, 256).bfloat16(), normal(ROWS, 5 * 256).bfloat16()
    q, k = normal(4, 256).bfloat16(), normal(4, 256, seed=1).bfloat16()
    return lambda rows: (gate_values(hidden[rows], kv[rows], q, k, 1e-20),)


def pooling() -> Operation:
    """Rows of a request that begins at an even position: pairs close within the batch."""
    score, weight = normal(ROWS, 1024), normal(512)

    def run(rows: slice) -> tuple[Tensor, ...]:
        first, last, _ = rows.indices(ROWS)
        first -= first % 2
        part, count = score[first:last], last - first
        latent = torch.zeros(count, 512).bfloat16()
        pool_and_norm(
            part, torch.arange(first, last), torch.zeros(1, 8, 1024), torch.arange(first, last) % 8,
            torch.tensor([0, count]), torch.zeros(count).int(), weight, 1e-6, 2, latent,
        )  # fmt: skip
        return (latent[rows.indices(ROWS)[0] - first :],)

    return run


OPERATIONS = [
    norm, rope, product, attention, indexer, router, hyper_connections, engram_gate, pooling,
]  # fmt: skip


@pytest.mark.parametrize("make", OPERATIONS, ids=[o.__name__ for o in OPERATIONS])
def test_a_row_is_the_same_in_every_batch(make: Callable[[], Operation]) -> None:
    run = make()
    whole = run(slice(0, ROWS))
    assert all(len(result) == ROWS for result in whole)
    for end in ENDS:
        for begin in (0, max(0, end - 1), end // 3):
            for found, expected in zip(run(slice(begin, end)), whole, strict=True):
                differing = (found != expected[begin:end]).flatten(1).any(1).nonzero()[:, 0]
                assert not len(differing), f"rows {differing.tolist()} of {begin}:{end}"
