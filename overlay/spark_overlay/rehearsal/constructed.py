"""A variant whose draft is always right: the target is a bigram model that the draft knows.

Every sublayer of target and draft adds nothing (its last matrix has ``svh`` zero), so a position's
hidden state is its token's embedding and its logits follow from that token alone. Embeddings live
in the first MARKOV_RANK of the hidden dimensions, so the draft's Markov head, of that rank, can
hold the same function: token -> embedding -> those rows of the decoded head. A draft position
other than the first sees the noise token, whose embedding is zero: it has no logits but those of
the Markov head. What stays at work is all around the mathematics: auxiliary hidden states, the
draft's context KV, its Markov chain, the rejection sampler.

An embedding points along its successor's column of the head, and all columns are of one size, so
that the successor's logit is the largest by far: the reply is known beforehand, successor() again
and again.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spark_overlay.exl3.format import dequantize

from .shape import HIDDEN, MARKOV_RANK, STAGES, VOCAB
from .shards import Raw, bf16, bf16_values
from .tensors import CODEBOOK
from .tokenizer import FIRST, LAST

#: Suffixes of the keys through which a sublayer reaches the residual.
_LAST_MATRICES = (".attn.wo_b", ".w2", ".engram.wkv")

#: Distance of successive tokens; prime to the number of ordinary tokens, so one cycle has all.
_STEP = 101


def successor(token: int) -> int:
    """The token that the model says after ``token``: all texts run through one long cycle.

    The noise token alone has none: its logits are zero.
    """
    ordinary = VOCAB - len(FIRST) - len(LAST)
    return len(FIRST) + (token - len(FIRST) + _STEP) % ordinary


def constructed(tensors: dict[str, Raw], noise_token: int) -> dict[str, Raw]:
    """``tensors`` (all of a seed's, by name) with those replaced that make the bigram model.

    Raises ValueError for a seed whose head has columns so alike that a successor would not win.
    """
    svh = _array(tensors["head.svh"], "<f2")
    # One power of two for all columns; near the spread that the standard variant's logits have.
    svh = np.where(svh < 0, -0.25, 0.25).astype(np.float16)
    trellis, suh = _array(tensors["head.trellis"], "<i2"), _array(tensors["head.suh"], "<f2")
    head = dequantize(trellis, suh, svh, CODEBOOK)[:MARKOV_RANK].astype(np.float64)
    # A root mean square of 1 over all HIDDEN dimensions: the final norm changes nothing.
    lengths = np.sqrt((head * head).sum(axis=0))
    code = (head * (math.sqrt(HIDDEN) / lengths)).T[[successor(t) for t in range(VOCAB)]]
    code[noise_token] = 0.0
    _check_winners(bf16_values(code) @ bf16_values(head), noise_token)
    embed = np.zeros((VOCAB, HIDDEN))
    embed[:, :MARKOV_RANK] = code
    markov = f"mtp.{STAGES - 1}.markov_head"
    ones = Raw.of("BF16", bf16(np.ones(HIDDEN)))
    changed = {
        "head.svh": Raw.of("F16", svh),
        "embed.weight": Raw.of("BF16", bf16(embed)),
        "norm.weight": ones,
        f"mtp.{STAGES - 1}.norm.weight": ones,
        f"{markov}.embed.weight": Raw.of("BF16", bf16(code)),
        f"{markov}.head.weight": Raw.of("BF16", bf16(head.T)),
    }
    for name, raw in tensors.items():
        if name.endswith(tuple(f"{key}.svh" for key in _LAST_MATRICES)):
            changed[name] = Raw(raw.dtype, raw.shape, bytes(len(raw.data)))
    return {**tensors, **changed}


def _check_winners(logits: NDArray[np.float32], noise_token: int) -> None:
    wrong = [
        token
        for token, best in enumerate(logits.argmax(axis=1))
        if best != successor(token) and token != noise_token
    ]
    if wrong:
        raise ValueError(
            f"the head of this seed would answer tokens {wrong} with others than their "
            "successors: its columns are too alike. Choose another seed (0 is known to work)"
        )


def _array(raw: Raw, dtype: str) -> NDArray[Any]:
    return np.frombuffer(raw.data, dtype=dtype).reshape(raw.shape)
