"""Seeds under which the tiny model says what it would hardly ever say by itself.

vLLM samples the token whose logit plus noise is the largest, and the noise of a token is a hash of
the request's seed, the position and the token's id (``murmur3_hash32`` of
vllm/v1/worker/gpu/sample/gumbel.py). So there are seeds that make a given token win at a given
position, whatever the model thinks of it. The position is that of the token before: the first
token that is sampled after a prompt of N has N - 1.

Should vLLM's noise change, this finds others to try, in three minutes:

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
#: After this thinking prompt: one token of reasoning, ``</think>``, ``{`` and ``}``.
OBJECT_THOUGHT, OBJECT_THOUGHT_LENGTH = 3468753835, 124

_AT_ONCE = 4_000_000


def find(wanted: Sequence[tuple[int, int, float]], limit: int) -> list[int]:
    """Seeds below ``limit`` whose noise favours each (position, token id, rarity) as one seed in
    ``rarity`` does: the token wins against logits that are the logarithm of that larger."""
    found: list[int] = []
    for start in range(0, limit, _AT_ONCE):
        seeds = np.arange(start, min(start + _AT_ONCE, limit), dtype=np.uint32)
        for position, token, rarity in wanted:
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
    end, begin, close = (ids[token] for token in ("</think>", "{", "}"))
    first, then = OBJECT_LENGTH - 1, OBJECT_THOUGHT_LENGTH
    thoughts = find([(THOUGHT_LENGTH, end, 5e6)], 100_000_000)
    objects = find([(first, begin, 3e4), (first + 1, close, 3e4)], 1_000_000_000)
    both = find([(then, end, 1e6), (then + 1, begin, 8), (then + 2, close, 60)], 2**32)
    sys.stdout.write(f"THOUGHT {thoughts}\nOBJECT {objects}\nOBJECT_THOUGHT {both}\n")
