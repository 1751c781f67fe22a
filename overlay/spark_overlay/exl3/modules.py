"""Which linears of a checkpoint are EXL3, and what each is: from the safetensors headers alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

from spark_overlay.collector import paused
from spark_overlay.exl3 import layout as fmt
from spark_overlay.exl3.layout import Codebook, Exl3FormatError, Exl3Slice
from spark_overlay.headers import TensorHeader

#: Leaf names that only EXL3 tensors have. ``bias`` and the obsolete ``scale`` (ignored) may also
#: follow an EXL3 key, but native modules have them too.
OWN_LEAVES = ("trellis", "suh", "svh", "su", "sv", "mul1", "mcg")


@dataclass(frozen=True, slots=True)
class Exl3Facts:
    """One packed linear. ``k2`` is its rate in half bits; sizes are channels."""

    key: str
    in_features: int
    out_features: int
    k2: int
    codebook: Codebook
    has_bias: bool = False
    #: Signs come as bitfields ``su``/``sv`` (see format.signs_from_bits), one per side.
    legacy_su: bool = False
    legacy_sv: bool = False

    @property
    def bits(self) -> float:
        return self.k2 / 2

    @property
    def words(self) -> int:
        """Words T of a tile."""
        return 8 * self.k2

    @property
    def trellis_shape(self) -> tuple[int, int, int]:
        return (self.in_features // fmt.TILE, self.out_features // fmt.TILE, self.words)

    @property
    def trellis_bytes(self) -> int:
        return self.in_features * self.out_features * self.k2 // 16

    def column_slice(self, lo: int, hi: int) -> Exl3Slice:
        return fmt.column_slice(lo, hi, self.out_features, self.key)

    def row_slice(self, lo: int, hi: int) -> Exl3Slice:
        return fmt.row_slice(lo, hi, self.in_features, self.key)

    def column_ranges(self, tp: int) -> list[tuple[int, int]]:
        return fmt.shard_ranges(self.out_features, tp, self.key)

    def row_ranges(self, tp: int) -> list[tuple[int, int]]:
        return fmt.shard_ranges(self.in_features, tp, self.key)


@paused()
def scan_modules(headers: Mapping[str, TensorHeader]) -> dict[str, Exl3Facts]:
    """Every EXL3 linear by key. Raises Exl3FormatError where tensors contradict each other."""
    leaves: dict[str, set[str]] = {}
    for name in headers:
        key, _, leaf = name.rpartition(".")
        if leaf in OWN_LEAVES:
            leaves.setdefault(key, set()).add(leaf)
    return {key: _facts(key, found, headers) for key, found in sorted(leaves.items())}


def _facts(key: str, leaves: set[str], headers: Mapping[str, TensorHeader]) -> Exl3Facts:
    def tensor(leaf: str) -> TensorHeader:
        return headers[f"{key}.{leaf}"]

    if "trellis" not in leaves:
        leaf = min(leaves)
        _contradiction(key, leaf, tensor(leaf), f"has no {key}.trellis beside it")
    trellis = tensor("trellis")
    if trellis.dtype != "I16" or len(trellis.shape) != 3:
        _contradiction(key, "trellis", trellis, "expected I16 [in/16, out/16, T]")
    if f"{key}.weight" in headers:
        _contradiction(key, "weight", tensor("weight"), f"{key} is packed as well as plain")
    rows, columns = fmt.TILE * trellis.shape[0], fmt.TILE * trellis.shape[1]
    if not rows or not columns or rows % fmt.HADAMARD or columns % fmt.HADAMARD:
        need = f"[{rows}, {columns}] weights are not multiples of {fmt.HADAMARD}"
        _contradiction(key, "trellis", trellis, need)
    where = f"{key}.trellis in {trellis.file.name}"
    k2 = fmt.bits_from_words(trellis.shape[2], where)
    codebook = _codebook(key, leaves, headers)
    fmt.check_rate(k2, codebook, where)
    sides = (("suh", "su", rows), ("svh", "sv", columns))
    legacy = [_is_legacy(key, leaves, headers, *side) for side in sides]
    bias = headers.get(f"{key}.bias")
    if bias is not None and (bias.shape != (columns,) or bias.dtype not in ("F16", "F32")):
        _contradiction(key, "bias", bias, f"expected F16 or F32 [{columns}]")
    return Exl3Facts(key, rows, columns, k2, codebook, bias is not None, *legacy)


def _codebook(key: str, leaves: set[str], headers: Mapping[str, TensorHeader]) -> Codebook:
    marked: list[Codebook] = [c for c in fmt.MARKERS if c in leaves]
    for codebook in marked:
        header = headers[f"{key}.{codebook}"]
        if header.dtype != "I32" or header.shape not in ((), (1,)):
            _contradiction(key, codebook, header, "expected one I32")
    if len(marked) > 1:
        header = headers[f"{key}.{marked[0]}"]
        _contradiction(key, marked[0], header, f"stands beside {key}.{marked[1]}")
    return marked[0] if marked else "3inst"


def _is_legacy(
    key: str,
    leaves: set[str],
    headers: Mapping[str, TensorHeader],
    scale: str,
    bits: str,
    size: int,
) -> bool:
    """Check one side's scales; True if they are a sign bitfield."""
    found = [leaf for leaf in (scale, bits) if leaf in leaves]
    if not found:
        trellis = headers[f"{key}.trellis"]
        _contradiction(key, "trellis", trellis, f"has no {key}.{scale} (or .{bits}) beside it")
    leaf = found[0]
    header = headers[f"{key}.{leaf}"]
    if len(found) > 1:
        _contradiction(key, leaf, header, f"stands beside {key}.{found[1]}")
    dtype, length = ("F16", size) if leaf == scale else ("I16", size // 16)
    if header.dtype != dtype or header.shape != (length,):
        _contradiction(key, leaf, header, f"expected {dtype} [{length}] beside its trellis")
    return leaf == bits


def _contradiction(key: str, leaf: str, header: TensorHeader, what: str) -> NoReturn:
    raise Exl3FormatError(
        f"{key}.{leaf} in {header.file.name} is {header.dtype} {list(header.shape)}: {what}. "
        "The pack is damaged or incomplete: download it again"
    )
