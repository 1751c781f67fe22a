"""Which ways to spread the model over GPUs exist, and what forbids the others.

Tensor parallelism (TP) cuts every layer over the GPUs of a stage; pipeline parallelism (PP) gives
each stage a range of layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, combinations, pairwise

from spark_overlay.budget.checkpoint import Contents
from spark_overlay.budget.shape import BudgetError, ModelShape
from spark_overlay.budget.weights import Part, total, weigh
from spark_overlay.exl3.layout import HADAMARD, Exl3FormatError
from spark_overlay.exl3.shares import share, split_of


@dataclass(frozen=True)
class Layout:
    """``layers`` of each stage. Faults say why it cannot run (a layer that ``tp`` ranks cannot
    share, stages that vLLM cannot part), ``notes`` what it costs."""

    tp: int
    layers: tuple[int, ...]
    tp_faults: tuple[str, ...] = ()
    stage_faults: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def faults(self) -> tuple[str, ...]:
        return self.tp_faults + self.stage_faults

    @property
    def pp(self) -> int:
        return len(self.layers)

    @property
    def name(self) -> str:
        return f"TP{self.tp}" + (f" x PP{self.pp}" if self.pp > 1 else "")

    def parts(self, *, draft: bool, vision: bool) -> list[Part]:
        """What a rank of each stage holds."""
        found, start = [], 0
        for stage, count in enumerate(self.layers):
            held = range(start, start + count)
            found.append(Part(held, stage == 0, stage == self.pp - 1, draft, vision))
            start += count
        return found


def layouts(
    shape: ModelShape, contents: Contents, gpus: int, *, draft: bool = True, vision: bool = False
) -> list[Layout]:
    """Every TP x PP = ``gpus`` that gives each stage a layer, in its best partition; widest TP
    first."""
    found = []
    for tp in range(gpus, 0, -1):
        if gpus % tp or gpus // tp > shape.layers:
            continue
        layers = best_partition(shape, contents, gpus // tp, draft=draft, vision=vision)
        found.append(layout(shape, contents, tp, layers, draft=draft))
    return found


def layout(
    shape: ModelShape, contents: Contents, tp: int, layers: Sequence[int], *, draft: bool = True
) -> Layout:
    """One way, judged. Raises BudgetError where ``layers`` are no partition of the model's."""
    if any(count < 1 for count in layers) or sum(layers) != shape.layers:
        raise BudgetError(
            f"stages of {', '.join(map(str, layers)) or 'no'} layers; needed numbers above 0 that "
            f"sum to {shape.layers}"
        )
    faults: list[str] = []
    notes: list[str] = []
    starts = [0, *accumulate(layers[:-1])]
    bad = [fault for start in starts[1:] for fault in cut_faults(shape, start)]
    if len(layers) > len(legal := legal_cuts(shape)) + 1:
        bad[:-1] = [f"{len(layers)} stages: only {len(legal) + 1} can be made"]
    if bad:
        faults += [*bad[:-1], f"{bad[-1]}; a stage may begin with layer {_few(legal)}"]
    start = starts[-1]
    last = range(start, shape.layers)
    if draft and any(target not in last for target in shape.draft_targets):
        faults.append(
            f"the draft reads layers {_few(shape.draft_targets)}, which must be on the last stage"
        )
    if start > max(shape.kv_sources, default=0):
        notes.append(
            f"no bounded replay: the last stage begins after layer {max(shape.kv_sources)}, so a "
            "prefill computes every layer for every token"
        )
    wide = tuple(tp_faults(shape, contents, tp))
    return Layout(tp, tuple(layers), wide, tuple(faults), tuple(notes))


def tp_faults(shape: ModelShape, contents: Contents, tp: int) -> list[str]:
    """Why ``tp`` ranks cannot share a layer, one line a reason; none if they can."""
    return [*_tp_faults(shape, contents, tp)]


@lru_cache(128)
def _tp_faults(shape: ModelShape, contents: Contents, tp: int) -> tuple[str, ...]:
    faults = []
    for what, count in (("attention heads", shape.heads), ("output groups", shape.o_groups)):
        if count % tp:
            faults.append(f"{count} {what} cannot be shared by {tp} ranks")
    for facts in contents.kinds:
        split = split_of(facts.key)
        if split not in ("columns", "rows"):
            continue
        try:
            share(facts, 0, tp, shape.o_groups)
        except Exl3FormatError:
            size = facts.out_features if split == "columns" else facts.in_features
            faults.append(_blocks(facts.key, size, tp))
    if tp > 1 and (tp - 1) * -(-shape.engram_columns // tp) >= shape.engram_columns:
        faults.append(f"{shape.engram_columns} Engram columns leave one of {tp} ranks without any")
    return tuple(dict.fromkeys(faults))


def _blocks(key: str, size: int, tp: int) -> str:
    below = key if key == "head" else key.split(".", 2)[2]
    what = {"head": "the vocabulary"}.get(below, below)
    if "experts." in below:
        what = "the experts' intermediate"
    each = f"{size / tp:g}" if size % tp else f"{size // tp}"
    return (
        f"{what}: {size} channels over {tp} ranks is {each}, {size / tp / HADAMARD:.4g} blocks of "
        f"{HADAMARD}; EXL3 allows whole blocks only"
    )


def cut_faults(shape: ModelShape, cut: int) -> list[str]:
    """Why no stage may begin with layer ``cut``."""
    for what, source_of in (
        ("compressed KV cache", shape.kv_source),
        ("indexer's choice", shape.index_source),
    ):
        readers = [
            layer
            for layer in range(cut, shape.layers)
            if (source := source_of(layer)) is not None and source < cut
        ]
        if readers:
            source = source_of(readers[0])
            return [
                f"a stage cannot begin with layer {cut}: layers {_few(readers)} read the {what} of "
                f"layer {source}, which vLLM 0.33.0 shares within a stage only"
            ]
    return []


def legal_cuts(shape: ModelShape) -> list[int]:
    """Layers that a stage may begin with."""
    return [cut for cut in range(1, shape.layers) if not cut_faults(shape, cut)]


def best_partition(
    shape: ModelShape, contents: Contents, pp: int, *, draft: bool = True, vision: bool = False
) -> tuple[int, ...]:
    """Legal stages whose heaviest is lightest; even ones where ``pp`` legal stages do not exist."""
    if pp == 1:
        return (shape.layers,)
    legal = legal_cuts(shape)
    if pp > len(legal) + 1:
        more = shape.layers % pp
        return tuple(shape.layers // pp + (stage < more) for stage in range(pp))
    # Between two neighbouring cuts nothing is ever parted: each such run is weighed once.
    bounds = [0, *legal, shape.layers]
    runs = [Part(range(*pair), first=False, last=False) for pair in pairwise(bounds)]
    weight = dict(
        zip(bounds, (total(weigh(contents, shape, run, 1)) for run in runs), strict=False)
    )
    tail = Part(range(0), first=False, draft=draft, vision=vision)
    weight[bounds[-2]] += total(weigh(contents, shape, tail, 1))

    def heaviest_first(cuts: tuple[int, ...]) -> list[int]:
        stages = pairwise((0, *cuts, shape.layers))
        return sorted(
            (sum(weight[b] for b in bounds[:-1] if low <= b < high) for low, high in stages),
            reverse=True,
        )

    chosen = min(combinations(legal, pp - 1), key=heaviest_first)
    return tuple(high - low for low, high in pairwise((0, *chosen, shape.layers)))


def _few(layers: Sequence[int]) -> str:
    if len(layers) > 2 and layers[-1] - layers[0] == len(layers) - 1:
        return f"{layers[0]}-{layers[-1]}"
    return ", ".join(map(str, layers))
