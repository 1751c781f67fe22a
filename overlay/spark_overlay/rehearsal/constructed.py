"""A variant whose draft is always right: the target is a bigram model that the draft knows.

Every sublayer of target and draft adds nothing (its last matrix has ``svh`` zero), so a position's
hidden state is its token's embedding, and the logits are a function of the last token alone. All
embeddings live in the first MARKOV_RANK of the hidden dimensions, so the draft's Markov head, of
that rank, can hold the same function: token -> embedding -> the rows of the decoded head.
A draft position other than the first sees the noise token, whose embedding is zero, and has no
logits but those of the Markov head. What stays at work is everything around the mathematics:
auxiliary hidden states, context KV of the draft, its Markov chain, the rejection sampler.
"""

from __future__ import annotations

import numpy as np

from spark_overlay.exl3.format import dequantize

from .shape import HIDDEN, MARKOV_RANK, STAGES, VOCAB
from .shards import Raw, bf16
from .streams import Stream
from .tensors import CODEBOOK

#: Suffixes of the keys through which a sublayer reaches the residual.
_LAST_MATRICES = (".attn.wo_b", ".w2", ".engram.wkv")

#: Size of an embedding's entries: sqrt(HIDDEN / MARKOV_RANK), rounded to bfloat16, so that the
#: root mean square over all HIDDEN dimensions is 1 and the final norm changes nothing.
_ENTRY = 2.828125


def constructed(tensors: dict[str, Raw], noise_token: int, seed: int) -> dict[str, Raw]:
    """``tensors`` (all of a seed's, by name) with those replaced that make the bigram model."""
    bits = Stream(seed, "constructed.embed").u16(VOCAB * MARKOV_RANK) & 1
    code = _ENTRY * (1 - 2 * bits.astype(np.float64)).reshape(VOCAB, MARKOV_RANK)
    code[noise_token] = 0.0
    embed = np.zeros((VOCAB, HIDDEN))
    embed[:, :MARKOV_RANK] = code
    markov = f"mtp.{STAGES - 1}.markov_head"
    ones = Raw.of("BF16", bf16(np.ones(HIDDEN)))
    changed = {
        "embed.weight": Raw.of("BF16", bf16(embed)),
        "norm.weight": ones,
        f"mtp.{STAGES - 1}.norm.weight": ones,
        f"{markov}.embed.weight": Raw.of("BF16", bf16(code)),
        f"{markov}.head.weight": Raw.of("BF16", bf16(_head(tensors)[:MARKOV_RANK].T)),
    }
    for name, raw in tensors.items():
        if name.endswith(tuple(f"{key}.svh" for key in _LAST_MATRICES)):
            changed[name] = Raw(raw.dtype, raw.shape, bytes(len(raw.data)))
    return {**tensors, **changed}


def _head(tensors: dict[str, Raw]) -> np.ndarray:
    """The decoded head, float32 [HIDDEN, VOCAB]."""

    def array(leaf: str, dtype: str) -> np.ndarray:
        raw = tensors[f"head.{leaf}"]
        return np.frombuffer(raw.data, dtype=dtype).reshape(raw.shape)

    return dequantize(array("trellis", "<i2"), array("suh", "<f2"), array("svh", "<f2"), CODEBOOK)
