"""How a prefill's experts call divides its work and what scratch it needs. Pure.

The call holds rotated inputs of a part of the rows at a time (a wave), or outputs of a part of the
columns (a strip): one pool of scratch serves both. What a row gets depends on neither."""

from __future__ import annotations

from dataclasses import dataclass

BLOCK = 128
#: As many.h and route.cuh have them.
MAX_ENTRIES, MAX_WAVES, SPARE_GROUPS, HEAD_BYTES = 2048, 60, 16, 272


@dataclass(frozen=True, slots=True)
class Variant:
    """Tiles of 16 columns a warp, k-tiles a stage, stages; groups of eight rows at most."""

    columns: int
    tiles: int
    stages: int
    most: int


#: As grouped.cuh has them.
VARIANTS = (Variant(4, 4, 3, 6), Variant(4, 4, 3, 8), Variant(4, 2, 3, 8))


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """``variant``: 0 takes up to 48 rows of an expert at once, 1 and 2 up to 64 (2 for SMs with
    little shared memory). ``pool_mib``: scratch for rotated inputs or outputs; a call needs some
    more by its rows (``prefill_need``)."""

    variant: int
    pool_mib: int


@dataclass(frozen=True, slots=True)
class PrefillNeed:
    """Bytes of scratch of one call, and how often its launches run."""

    scratch_bytes: int
    waves: int
    strips: int


def prefill_need(
    hidden: int, inter: int, experts: int, tokens: int, topk: int, shared: bool, plan: PrefillPlan
) -> PrefillNeed:
    """What exl3_prefill_need says (many.h), without the library; ValueError where it refuses."""
    pool, most = plan.pool_mib << 20, VARIANTS[plan.variant].most
    slots, hidden, inter = tokens * topk, hidden // BLOCK, inter // BLOCK
    present, rows = min(slots, experts), slots + (tokens if shared else 0)
    groups = (slots + 7 * present) // 8 + (-(-tokens // 8) if shared else 0)
    each, spare = 2 * hidden * 2048 + 64, 2 * SPARE_GROUPS * hidden * 2048
    room, strip = (pool - spare - 512) // each, pool // (rows * 512 + 1)
    if room < 1 or strip < 1 or -(-groups // room) > MAX_WAVES:
        raise ValueError(f"a pool of {plan.pool_mib} MiB is too small for {tokens} tokens")
    waves = -(-groups // room)
    wave = -(-groups // waves)
    strips = -(-hidden // strip)
    strip = -(-hidden // strips)
    if strip % 2 and strips > 1 and (strip + 1) * rows * 512 <= pool:
        strip += 1
    items = min(groups // most + present + shared + waves, groups)
    inputs = _up(2 * (wave + SPARE_GROUPS) * hidden * 2048) + _up(64 * wave)
    sizes = (
        max(inputs, _up(rows * strip * 512)), (groups + SPARE_GROUPS) * inter * 2048,
        groups * inter * 32, items * 16, groups * 4, groups * 32, HEAD_BYTES,
    )  # fmt: skip
    return PrefillNeed(sum(map(_up, sizes)), waves, -(-hidden // strip))


def prefill_shared(variant: int, k2: int, *, down: bool) -> int:
    """Dynamic shared memory of a CTA, in bytes, for rates up to ``k2``."""
    v = VARIANTS[variant]
    stage = 16 // v.columns * warp_bytes(variant, k2) + (1 if down else 2) * v.most * v.tiles * 256
    return max(v.stages * stage, 2 * 16 * (BLOCK + 4) * 4)


def warp_bytes(variant: int, k2: int) -> int:
    """A warp's part of a stage: its tiles, and room for one that a fast rate (``k2`` at most 10)
    reads ahead and never uses."""
    tiles = VARIANTS[variant].tiles * VARIANTS[variant].columns
    return 16 * max(tiles * k2, (tiles + 1) * min(k2, 10))


def _up(size: int) -> int:
    return -(-size // 256) * 256
