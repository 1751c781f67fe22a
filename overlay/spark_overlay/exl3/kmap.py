"""The rate K of every packed linear by class: as headers say, and as a published pack has it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, get_args

from spark_overlay.exl3.layout import Codebook
from spark_overlay.exl3.modules import Exl3Facts
from spark_overlay.exl3.names import parse

WeightClass = Literal["routed", "shared", "attention", "indexer.wk", "engram.wkv", "head", "mtp"]
CLASSES: tuple[WeightClass, ...] = get_args(WeightClass)

#: Class and layer (None for the head; the stage for the draft).
Cell = tuple[WeightClass, int | None]


def classify(key: str) -> Cell:
    """Class and layer of a packed linear. Raises Exl3NameError for an unknown name."""
    target = parse(key)
    if target.stage == "mtp":
        return "mtp", target.layer
    if target.stage == "top":
        return "head", None
    if target.module == "ffn.experts":
        return "routed", target.layer
    if target.module.startswith("ffn.shared_experts."):
        return "shared", target.layer
    if target.module == "engram.wkv":
        return "engram.wkv", target.layer
    return ("indexer.wk" if target.module == "attn.indexer.wk" else "attention"), target.layer


def measure(facts: Mapping[str, Exl3Facts]) -> dict[Cell, Counter[float]]:
    """How many linears of each class and layer have which K (in bits)."""
    cells: dict[Cell, Counter[float]] = {}
    for key, module in facts.items():
        cells.setdefault(classify(key), Counter())[module.bits] += 1
    return cells


@dataclass(frozen=True)
class KMap:
    """What a pack should hold. K in bits; ``routed`` and ``shared`` by layer, ``engram`` by id."""

    codebook: Codebook
    routed: tuple[float, ...]
    shared: tuple[float, ...]
    attention: float
    indexer_wk: float
    head: float
    mtp: float
    mtp_stages: int
    engram: Mapping[int, float]
    #: Linears that differ from the rest of their cell.
    exceptions: Mapping[str, float] = field(default_factory=dict)

    @cached_property
    def cells(self) -> dict[Cell, float]:
        """K of every class and layer; ``indexer.wk`` exists in some layers only and has one K."""
        layers = range(len(self.routed))
        cells: dict[Cell, float] = {("head", None): self.head}
        cells |= {("routed", i): self.routed[i] for i in layers}
        cells |= {("shared", i): self.shared[i] for i in layers}
        cells |= {("attention", i): self.attention for i in layers}
        cells |= {("engram.wkv", i): bits for i, bits in self.engram.items()}
        cells |= {("mtp", i): self.mtp for i in range(self.mtp_stages)}
        return cells

    def expected(self, key: str) -> float | None:
        """K of one linear; None if the pack has no such class in that layer."""
        if key in self.exceptions:
            return self.exceptions[key]
        cell = classify(key)
        return self.indexer_wk if cell[0] == "indexer.wk" else self.cells.get(cell)


#: Mia-AiLab/DeepSeek-V4.1-Flash-EXL3-2.9bpw: 2.9 bits on average, in no single tensor.
PUBLISHED_2_9 = KMap(
    codebook="mul1",
    routed=(3,) * 18 + (2,) * 5 + (3,) * 17,
    shared=(5,) * 11 + (4,) * 19 + (5,) * 10,
    attention=5,
    indexer_wk=8,
    head=6,
    mtp=4,
    mtp_stages=3,
    engram={1: 5, 14: 4},
    exceptions={"layers.29.ffn.shared_experts.w2": 5},
)


def differences(facts: Mapping[str, Exl3Facts], expected: KMap) -> list[str]:
    """One line for each linear or cell that is not as expected, none if the pack is that one."""
    lines = []
    for key, module in sorted(facts.items()):
        bits = expected.expected(key)
        if bits is None:
            lines.append(f"{key}: not part of the expected pack (K={module.bits:g} found)")
        elif module.bits != bits:
            lines.append(f"{key}: K={module.bits:g}, expected {bits:g}")
        if module.codebook != expected.codebook:
            lines.append(f"{key}: codebook {module.codebook}, expected {expected.codebook}")
    present = {classify(key) for key in facts}
    for name, layer in expected.cells.keys() - present:
        where = "" if layer is None else f" of {'stage' if name == 'mtp' else 'layer'} {layer}"
        lines.append(f"{name}{where}: no packed linear found")
    if not any(name == "indexer.wk" for name, _ in present):
        lines.append("indexer.wk: no packed linear found")
    return sorted(lines)
