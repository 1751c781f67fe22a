"""Seeds under which the tiny model says what it would hardly ever say by itself.

vLLM samples the token whose logit plus noise is the largest, and the noise of a token is a hash of
the request's seed, the position and the token's id (``murmur3_hash32`` of
vllm/v1/worker/gpu/sample/gumbel.py). So there are seeds that make a given token win at a given
position, whatever the model thinks of it. The position is that of the token before: the first
token that is sampled after a prompt of N has N - 1.

Should vLLM's noise change, this finds others:

    python tests/rehearsal/clients/seeds.py
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint32]

#: After the thinking prompt of THOUGHT's length: one token of reasoning, then ``</think>``.
THOUGHT, THOUGHT_LENGTH = 6619502, 155
#: After the prompt of OBJECT's length: ``{``, then ``}``.
OBJECT, OBJECT_LENGTH = 94092087, 69

_AT_ONCE = 4_000_000


def find(wanted: Sequence[tuple[int, int]], rarity: float, limit: int) -> list[int]:
    """Seeds below ``limit`` whose noise favours each (position, token id) as one seed in
    ``rarity`` does: a logarithm of that more than an even logit."""
    found: list[int] = []
    for start in range(0, limit, _AT_ONCE):
        seeds = np.arange(start, start + _AT_ONCE, dtype=np.uint32)
        for position, token in wanted:
            seeds = seeds[_hash(seeds, position, token) < 2**32 / rarity]
        found += seeds.tolist()
    return found


def _hash(seeds: Words, position: int, token: int) -> Words:
    state = np.zeros_like(seeds)
    with np.errstate(over="ignore"):
        for key in (seeds, 0, position, token):
            state = _mixed(state, np.asarray(key, dtype=np.uint32))
        state ^= np.uint32(16)
        for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
            state = (state ^ (state >> np.uint32(shift))) * np.uint32(factor)
        return state ^ (state >> np.uint32(16))


def _mixed(state: Words, key: Words) -> Words:
    key = _turned(key * np.uint32(0xCC9E2D51), 15) * np.uint32(0x1B873593)
    return _turned(state ^ key, 13) * np.uint32(5) + np.uint32(0xE6546B64)


def _turned(value: Words, by: int) -> Words:
    return (value << np.uint32(by)) | (value >> np.uint32(32 - by))


if __name__ == "__main__":
    from spark_overlay.rehearsal.tokenizer import vocabulary

    ids, _ = vocabulary()
    thought = find([(THOUGHT_LENGTH, ids["</think>"])], 5e6, 100_000_000)
    first = OBJECT_LENGTH - 1
    brackets = find([(first, ids["{"]), (first + 1, ids["}"])], 3e4, 1_000_000_000)
    sys.stdout.write(f"THOUGHT among {thought}\nOBJECT among {brackets}\n")
