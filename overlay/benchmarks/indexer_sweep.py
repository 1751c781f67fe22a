#!/usr/bin/env python3
"""Which launch shapes of the indexer's kernels are fastest on the GPU at hand:

    python overlay/benchmarks/indexer_sweep.py [--json PATH] [--jobs N] [PART…]

Parts: dense (scores of all keys), limited (of candidate blocks), choice. Every variant's result is
held against that of the first. Variants are compiled by N processes beforehand; --compile I/N is
one of them. us as in indexer.py.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(1, str(HERE.parent))

import indexer_inputs as made  # noqa: E402
import timing  # noqa: E402
from indexer_inputs import Inputs, Shape  # noqa: E402

DENSE = [
    Shape("1 row, 128K", 1, 1, 1 << 17),
    Shape("4 rows, 128K", 1, 4, 1 << 17),
    Shape("6 rows, 128K", 1, 6, 1 << 17),
    Shape("8 x 1, 32K", 8, 1, 1 << 15),
    Shape("4 x 4, 32K", 4, 4, 1 << 15),
    Shape("2048 rows, 16K", 1, 2048, 1 << 14),
]
LIMITED = [
    Shape("1 row, 128K", 1, 1, 1 << 17),
    Shape("16 rows, 32K", 4, 4, 1 << 15),
    Shape("1024 rows, 64K", 1, 1024, 1 << 16),
]
CHOICE = [
    Shape("1 row, 16K", 1, 1, 1 << 14),
    Shape("4 rows, 128K", 1, 4, 1 << 17),
    Shape("4 rows, 600K", 1, 4, 600_000),
    Shape("2048 rows, 16K", 1, 2048, 1 << 14),
]
Changes = dict[str, int]


def dense_variants(shape: Shape) -> Iterator[Changes]:
    groups = [1] if shape.rows == 1 else [4, 8]
    waves = [2] if shape.total > 256 else [2, 4]
    for group, (keys, warps), stages in product(groups, [(64, 4), (128, 4)], [2, 3, 5]):
        columns = 32 * group
        if columns * keys > 32768 or columns * keys // (32 * warps) > 128:
            continue  # more sums than registers
        for wave in waves:
            yield {
                "group": group,
                "keys": keys,
                "warps": warps,
                "stages": stages,
                "waves": wave,
            }


def limited_variants(shape: Shape) -> Iterator[Changes]:
    for (keys, warps), stages in product([(64, 4), (128, 4), (128, 8)], [2, 3, 4]):
        for wave in [2, 4, 8]:
            yield {
                "candidate_keys": keys,
                "candidate_warps": warps,
                "candidate_stages": stages,
                "waves": wave,
            }


def choice_variants(shape: Shape) -> Iterator[Changes]:
    for (fan, last), warps in product([(8, 4096), (8, 8192), (16, 8192), (16, 16384)], [4, 8, 16]):
        if last < 512 * warps * 4:
            yield {"fan": fan, "last": last, "choice_warps": warps}


class Part:
    """``scores`` of a set by a variant, or its choice; both through the layer's own launches."""

    def __init__(self, name: str) -> None:
        import torch

        from spark_overlay.indexer.kernels.launch import Selection

        self.name = name
        shapes, self.variants = {
            "dense": (DENSE, dense_variants),
            "limited": (LIMITED, limited_variants),
            "choice": (CHOICE, choice_variants),
        }[name]
        self.shapes = shapes
        self.layer = Selection(
            1, made.COUNT, torch.empty(256 << 18, dtype=torch.int32, device="cuda")
        )

    def call(self, inputs: Inputs, changes: Changes) -> Any:
        """A function of no arguments, and the tensor it fills."""
        import torch

        from spark_overlay.indexer.kernels import launch, sizes

        layer = launch.with_tuning(self.layer, **changes)
        rows, width, fan = inputs.final.shape[0], inputs.step.bound, layer.tuning.fan
        limited = self.name == "limited"
        scored = made.BLOCKS * made.SIZE if limited else width
        used = sizes.plan(scored, fan)
        held = launch.Rows(inputs.step, 0, rows, width, *layer._parts(used, rows))
        arguments = (inputs.q.view(torch.uint8), inputs.weights, inputs.cache, held)
        if self.name == "dense":
            return lambda: layer._scores(*arguments, fan), held.scores
        if limited:
            candidates = launch.Candidates(inputs.chosen, made.SIZE, False)
            return (
                lambda: layer._candidate_scores(*arguments, candidates, fan),
                held.scores[:, : min(width, scored)],
            )
        layer._scores(*arguments, fan)
        return lambda: layer._choose(held, inputs.final, 0, width, fan, None), inputs.final

    def compile(self, index: int, of: int) -> None:
        """One call of every ``of``-th variant, small."""
        seen: set[str] = set()
        todo = []
        for shape in self.shapes:
            for changes in self.variants(shape):
                key = json.dumps({k: v for k, v in changes.items() if k != "waves"})
                key += str(shape.context if self.name == "choice" else shape.rows)
                if key not in seen:
                    seen.add(key)
                    todo.append((shape, changes))
        for shape, changes in todo[index::of]:
            small = replace(shape, requests=1, rows=min(shape.rows, 8))
            call, _ = self.call(made.inputs(small, 0), changes)
            try:
                call()
            except Exception as error:  # a shape that does not fit is not a variant
                print(shape.name, changes, type(error).__name__, str(error)[:80])

    def measure(self, shape: Shape, until: float) -> Iterator[tuple[Changes, float, bool]]:
        import torch

        sets = made.sets_of(shape)
        right = None
        for changes in self.variants(shape):
            if time.monotonic() > until:
                return
            try:
                call, out = self.call(sets[0], changes)
                out.fill_(0)
                call()
                torch.cuda.synchronize()
            except Exception as error:
                print(f"  {shape.name} {changes}: {type(error).__name__} {str(error)[:60]}")
                continue
            found = out.float().nan_to_num(9e9, neginf=0.0)
            right = found.clone() if right is None else right
            ok = bool(((found - right).abs() <= 1e-4 * right.abs().amax()).all())
            # A choice reads the scores that the workspace holds: one set of them.
            used = sets[:1] * 4 if self.name == "choice" else sets
            calls = [call if one is sets[0] else self.call(one, changes)[0] for one in used]
            yield changes, statistics.median(timing.graph_us(calls, 5)), ok


def main() -> int:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("parts", nargs="*", default=["dense", "limited", "choice"])
    options.add_argument("--json", type=Path)
    options.add_argument("--jobs", type=int, default=0, help="processes that compile beforehand")
    options.add_argument("--compile", help=argparse.SUPPRESS)
    options.add_argument("--seconds", type=float, default=600.0)
    given = options.parse_args()
    until = time.monotonic() + given.seconds
    if given.compile:
        index, of = map(int, given.compile.split("/"))
        for part in given.parts:
            Part(part).compile(index, of)
        return 0
    argv = [sys.executable, __file__, *given.parts, "--compile"]
    jobs = [subprocess.Popen([*argv, f"{n}/{given.jobs}"]) for n in range(given.jobs)]
    for job in jobs:
        job.wait()
    print(
        f"compiled by {given.jobs} in {given.seconds - until + time.monotonic():.0f} s", flush=True
    )
    rows, wrong = [], 0
    for part in given.parts:
        it = Part(part)
        for shape in it.shapes:
            found = sorted(it.measure(shape, until), key=lambda one: one[1])
            for changes, us, ok in found:
                rows.append({"part": part, "shape": shape.name, **changes, "us": us, "ok": ok})
                wrong += not ok
            if given.json:
                given.json.write_text(json.dumps(rows))
            floor = shape.limited_bytes() if part == "limited" else shape.key_bytes
            for changes, us, ok in found[:3]:
                print(
                    f"{part:8}{shape.name:15}{us:8.1f} us {floor / us / 1e6:6.2f} TB/s "
                    f"{shape.flops / us / 1e6:5.0f} TF {'' if ok else 'WRONG '}"
                    f"{' '.join(f'{k}={v}' for k, v in changes.items())}",
                    flush=True,
                )
    print(f"{len(rows)} variants, {wrong} wrong")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
