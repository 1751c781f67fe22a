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
    and ``splits`` of the hidden size, each in steps of ``block`` columns. A
    float32 weight goes as ``limbs`` bf16 numbers. ``loads`` and ``stages``:
    depth of the pipelines of a projection's and a row's loads."""

    rows: int
    tile_n: int
    splits: int
    block: int
    warps: int
    loads: int = 3
    limbs: int = 2
    stages: int = 6

    @property
    def m(self) -> int:
        """Rows of a tile: tensor cores take 16 at least."""
        return max(16, self.rows)

    @property
    def n(self) -> int:
        least = max(16, self.tile_n)
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
class Slices:
    """The CUDA library's one launch: ``rows`` (8 or 16) share a counter, a CTA has ``columns`` (64
    or 128) of the hidden size and all 24 coefficients."""

    rows: int
    columns: int

    def groups(self, tokens: int) -> int:
        return -(-tokens // self.rows)

    def shares(self, tokens: int, hidden: int) -> int:
        """Float32 numbers of scratch."""
        return self.groups(tokens) * (hidden // self.columns) * self.rows * COLUMNS

    def check(self, hidden: int) -> None:
        if self.rows not in (8, 16) or self.columns not in (64, 128) or hidden % self.columns:
            raise PlanError(
                f"mHC geometry {self}: rows must be 8 or 16, columns 64 or 128 and divide the "
                f"hidden size {hidden}"
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


Geometry = OneLaunch | Slices | TwoLaunches

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
    """Two or four steps a program, whose loads are under way at once. More rows: larger programs,
    so that the last to arrive has fewer shares to add."""
    rows = 4 if tokens <= 4 else 8 if tokens <= 16 else 16
    block = _block(hidden, 64 if rows == 16 else 32)
    wanted = 4 if 8 < tokens <= 16 else 2
    steps = next(n for n in (wanted, 2, 1) if hidden % (n * block) == 0)
    return OneLaunch(rows, MIXES, hidden // (steps * block), block, 4, loads=max(3, steps + 1))


def two_launches(tokens: int, hidden: int) -> TwoLaunches:
    """Many shares of the hidden size while rows are few."""
    few = tokens <= 1024
    block = _block(hidden, 32 if few else 64)
    steps = hidden // block
    splits = max(s for s in range(1, min(10 if few else 2, steps) + 1) if steps % s == 0)
    return TwoLaunches(16, splits, block, 4, 3)


def slices(tokens: int) -> Slices:
    """Few rows: many CTAs, each with little to read. More: fewer shares for the last to add."""
    return Slices(8, 64) if tokens <= 8 else Slices(8, 128) if tokens <= 32 else Slices(16, 128)
