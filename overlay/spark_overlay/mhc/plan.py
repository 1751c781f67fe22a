"""How mHC's kernels are launched, by rows and hidden size. No torch, no Triton."""

from __future__ import annotations

from dataclasses import dataclass

STREAMS, MIXES, COLUMNS = 4, 24, 32
#: Up to here everything is one launch.
ONE_LAUNCH = 64


class PlanError(ValueError):
    """A shape or a geometry that the kernels cannot compute."""


@dataclass(frozen=True)
class OneLaunch:
    """``rows`` share a counter; the weight is cut into tiles of ``tile_n`` of its 24 coefficients
    and ``splits`` of the hidden size, each in steps of ``block`` columns. ``dot``: on tensor
    cores, a float32 weight as ``limbs`` bf16 numbers. ``stages``: of a row program's loads."""

    rows: int
    tile_n: int
    splits: int
    block: int
    warps: int
    dot: bool = True
    limbs: int = 2
    stages: int = 4

    @property
    def m(self) -> int:
        """Rows of a tile: tensor cores take 16 at least."""
        return max(16, self.rows) if self.dot else self.rows

    @property
    def n(self) -> int:
        least = max(16 if self.dot else 1, self.tile_n)
        return 1 << (least - 1).bit_length()

    @property
    def fold(self) -> int:
        """Shares that are added at once by the last to arrive."""
        fold = 1
        while self.splits % (2 * fold) == 0 and 2 * fold * self.rows * COLUMNS <= 4096:
            fold *= 2
        return fold

    def groups(self, tokens: int) -> int:
        return -(-tokens // self.rows)

    def programs(self, tokens: int) -> int:
        return self.groups(tokens) * self.splits * (MIXES // self.tile_n) + tokens

    def check(self, hidden: int) -> None:
        """Raise PlanError where the geometry leaves anything out."""
        powers = all(_power(value) for value in (self.rows, self.block, self.warps))
        if not powers or MIXES % self.tile_n or hidden % (self.splits * self.block):
            raise PlanError(
                f"mHC geometry {self}: rows, block and warps must be powers of two, tile_n divide "
                f"{MIXES}, and splits x block the hidden size {hidden}"
            )


@dataclass(frozen=True)
class TwoLaunches:
    """``rows`` by ``block`` is a tile; a program has ``1 / splits`` of the hidden size."""

    rows: int
    splits: int
    block: int
    warps: int
    stages: int
    limbs: int = 2

    def check(self, hidden: int) -> None:
        powers = all(_power(value) for value in (self.rows, self.block, self.warps))
        if not powers or self.rows < 16 or hidden % (self.splits * self.block):
            raise PlanError(
                f"mHC geometry {self}: rows, block and warps must be powers of two, rows 16 at "
                f"least, and splits x block divide the hidden size {hidden}"
            )


#: vLLM's own split of 16 to 32 rows: tiles of 6 coefficients, 8 slices of the hidden size, 128
#: threads. Kept to reproduce its partial sums; our own is faster.
TILES_6_8_128 = OneLaunch(rows=16, tile_n=6, splits=8, block=128, warps=4)


def _power(value: int) -> bool:
    return value > 0 and value & (value - 1) == 0


def _block(hidden: int, most: int) -> int:
    """The largest power of two up to ``most`` that divides ``hidden``."""
    block = most
    while hidden % block:
        block //= 2
    if block < 16:
        raise PlanError(f"mHC: a hidden size of {hidden} is no multiple of 16")
    return block


def one_launch(tokens: int, hidden: int) -> OneLaunch:
    rows = 4 if tokens <= 4 else 8
    block = _block(hidden, 64)
    return OneLaunch(rows, MIXES, hidden // block, block, 4)


def two_launches(tokens: int, hidden: int) -> TwoLaunches:
    rows = 16 if tokens <= 512 else 32
    block = _block(hidden, 64)
    steps = hidden // block
    # Two programs an SM of a large GPU, where there are rows enough.
    wanted = max(1, 264 // -(-tokens // rows))
    splits = max(s for s in range(1, min(wanted, steps, 16) + 1) if steps % s == 0)
    return TwoLaunches(rows, splits, block, 4, 2)
