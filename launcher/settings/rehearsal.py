"""The few settings that a tiny model on a small machine cannot take from `.env`.

They stand above `.env` and below `--set`, and `config --explain --rehearsal` shows them.
"""

from __future__ import annotations

from collections.abc import Mapping

NAME = "rehearsal"

_MIB = 1 << 20

# key, value, reason
_PROFILE: tuple[tuple[str, str, str], ...] = (
    ("MAX_MODEL_LEN", "4096", "the tiny checkpoint's longest position"),
    ("MAX_NUM_BATCHED_TOKENS", "128", "a prompt of a few hundred tokens is prefilled in chunks"),
    ("MAX_NUM_SEQS", "4", "enough to see batching on two cores"),
    ("KV_CACHE_MEMORY_BYTES", str(64 * _MIB), "a pool that fits beside two ranks in small memory"),
    ("KV_BLOCK_SIZE", "64", "the block of the real pair"),
    ("SWA_BOUNDED_REPLAY", "0", "the same request gives the same tokens, cached or not"),
    ("GLM53_SPINWAIT_MS", "1", "three processes that spin leave two cores nothing to work with"),
    ("ENFORCE_EAGER", "1", "there are no CUDA graphs on a CPU"),
)

PROFILE: Mapping[str, str] = {key: value for key, value, _ in _PROFILE}
REASONS: Mapping[str, str] = {key: reason for key, _, reason in _PROFILE}
