"""What is left open of inserts, indexer and mHC, by variant: ``rest_sweep.py PART OUT``.

inserts  bytes beside vLLM's kernels (every bf16 as a group's largest, and 80 million values at
         random), then a record's warps timed. indexer: the choice of SPARK_INDEXER_LIBRARY timed at
         decode's shapes, with and without its early start, held against Triton's choice; NAME
         names the library, --stock times vLLM's, too.

scores   the indexer's scores of several rows alone, by how many the library takes at once and how
         many CTAs a multiprocessor holds then, and Triton's; whether each gives the bits that one
         row at a time gives.

JSON into OUT. Times: median of a CUDA graph's replays by its calls, as in overlay/benchmarks.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
for place in (ROOT / "overlay/benchmarks", ROOT / "overlay", ROOT / "tests"):
    sys.path.insert(1, str(place))

import torch  # noqa: E402

BLOCK, SETS = 64, 32
WARPS, ROWS = (4, 2, 1), (1, 32, 256, 2048)
DRAWS = 40


def differing(write: Callable[[Any, Any, bool], Any], rows: Any, width: int) -> tuple[int, int]:
    """Bytes that vLLM's kernel (``write(rows, cache, False)``) and ours leave otherwise."""
    from gpu import insert_cases as cases

    blocks = -(-rows.slots.numel() // BLOCK) + 1
    found = []
    for ours in (True, False):
        pages = cases.cache(blocks, BLOCK, width, "cuda")
        write(rows, pages, ours)
        found.append(cases.whole(pages))
    return int((found[0] != found[1]).sum()), int((found[1] != cases.POISON).sum())


def inserts() -> dict[str, Any]:
    import inserts as bench
    import timing

    from gpu import insert_cases as cases
    from spark_overlay.attention.inserts import ops

    theirs, mine = bench.stock(), bench.ours()

    def writer(kind: str, ratio: int) -> Callable[[Any, Any, bool], Any]:
        def write(rows: Any, pages: Any, ours: bool) -> None:
            call = (mine if ours else theirs)[kind]
            bench.calls(kind, call, [rows], [pages], ratio)[0]()

        return write

    # Every positive finite bf16 as the largest of a group of 64, whose other values are spread.
    every = torch.arange(1, 0x7F80, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    count = -(-every.numel() // 7)
    rows = cases.draw(count, (-(-count // BLOCK) + 1) * BLOCK, 1, 5)
    rows.slots = torch.arange(count)
    largest = torch.ones(count * 7).bfloat16()
    largest[: every.numel()] = every
    spread = torch.rand(count, 7, 64) * 2 - 1
    spread[:, :, 0] = 1
    given = largest.float().view(count, 7, 1) * spread
    rows.rows = torch.cat((given.flatten(1), rows.rows[:, 448:].float()), 1).bfloat16()
    one = rows.to("cuda")
    said: dict[str, Any] = {
        f"every scale, {kind}": differing(writer(kind, 1), one, 584)
        for kind in ("latents", "window")
    }
    for kind, ratio in (("latents", 1), ("latents", 2), ("keys", 1), ("keys", 2), ("window", 1)):
        total = [0, 0]
        for draw in range(DRAWS):
            rows = cases.draw(2048, 33 * BLOCK, 4, draw).to("cuda")
            found = differing(writer(kind, ratio), rows, 132 if kind == "keys" else 584)
            total = [a + b for a, b in zip(total, found, strict=True)]
        said[f"random, {kind} 1/{ratio}"] = total
    for ratio in (1, 2):
        for count in ROWS:
            blocks = -(-count // BLOCK) + 1
            sets = [cases.draw(count, blocks * BLOCK, 1, seed).to("cuda") for seed in range(SETS)]
            pages = [cases.cache(blocks, BLOCK, 584, "cuda") for _ in sets]
            us = {}
            for warps in WARPS:
                ops.LATENT_WARPS = warps
                calls = bench.calls("latents", mine["latents"], sets, pages, ratio)
                us[f"{warps} warps"] = round(statistics.median(timing.graph_us(calls, 5)), 2)
            calls = bench.calls("latents", theirs["latents"], sets, pages, ratio)
            us["stock"] = round(statistics.median(timing.graph_us(calls, 5)), 2)
            said[f"latents 1/{ratio}, {count} rows, us"] = us
    return said


def indexer(stock: bool, seconds: float) -> dict[str, Any]:
    import indexer_inputs as made
    import timing

    import indexer as bench
    from spark_overlay.indexer.kernels.launch import with_tuning
    from spark_overlay.indexer.kernels.sizes import NEVER

    until = time.monotonic() + seconds
    it = bench.Bench()
    triton = with_tuning(it.layer, enough=NEVER)
    layers = {"": it.layer, " Triton": triton, " Triton early": with_tuning(triton, early=True)}
    said: dict[str, Any] = {}
    for shape in bench.DECODE:
        sets = made.sets_of(shape, 12)
        for kind in ("plain", "limited"):
            if kind == "limited" and shape.context <= made.BLOCKS * made.SIZE:
                continue
            if time.monotonic() > until:
                said["no time for"] = f"{shape.name}, {kind}"
                return said
            us: dict[str, Any] = {}
            it.ours(sets[0], "write", it.by_triton)()
            it.ours(sets[0], kind, it.by_triton)()
            right = sets[0].final.clone()
            for name, layer in layers.items():
                if name and (kind == "limited" or shape.rows == 1):
                    continue  # the library's scores all the same
                calls = [it.ours(one, kind, layer) for one in sets]
                us["us" + name] = round(statistics.median(timing.graph_us(calls, 5)), 2)
                sets[0].final.fill_(99)
                calls[0]()
                same = sets[0].final == right
                us["agrees" + name] = round(float(same.float().mean()), 4)
            if stock:
                import indexer_stock

                calls = [indexer_stock.decode(shape, one, kind) for one in sets]
                us["stock"] = round(statistics.median(timing.graph_us(calls, 5)), 2)
            said[f"{shape.name}, {kind}"] = us
            print(shape.name, kind, us, flush=True)
    return said


#: Rows at once, CTAs of a multiprocessor; rows at once 0: Triton.
SHARED = ((1, 3), (4, 1), (4, 3), (4, 2), (8, 1), (8, 3), (8, 2), (0, 3))


def scores(seconds: float) -> dict[str, Any]:
    import indexer_inputs as made
    import timing

    import indexer as bench
    from spark_overlay.indexer.kernels.launch import with_tuning
    from spark_overlay.indexer.kernels.sizes import NEVER

    until = time.monotonic() + seconds
    it = bench.Bench()
    plain = it.layer
    said: dict[str, Any] = {}
    for shape in (*(one for one in bench.DECODE if one.rows > 1), *bench.PREFILL[:1]):
        sets = made.sets_of(shape, 12 if shape in bench.DECODE else 2)
        us: dict[str, Any] = {"floor": round(it.floor(shape, "plain")[0], 2)}
        right = None
        for together, held in SHARED:
            if time.monotonic() > until:
                said["no time for"] = f"{shape.name}, {together}"
                break
            least = 0 if together else NEVER
            changes = {"together": max(together, 1), "held": held}
            changes |= {"enough": least, "prompt_width": least}
            it.layer = with_tuning(plain, **changes)
            calls = [it.scores(one, "plain") for one in sets]
            name = f"{together} at once, {held} CTAs" if together else "Triton"
            us[name] = round(statistics.median(timing.graph_us(calls, 5)), 2)
            it.workspace.zero_()
            calls[0]()
            found = it.workspace[: shape.total * shape.context].clone()
            if right is None:
                right = found
            elif together and not torch.equal(found, right):
                us[name] = f"{us[name]}, but other bits"
        said[f"{shape.name}, scores"] = us
        print(shape.name, us, flush=True)
    return said


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("part", choices=("inserts", "indexer", "scores"))
    options.add_argument("out", type=Path)
    options.add_argument("name", nargs="?", default="")
    options.add_argument("--stock", action="store_true")
    options.add_argument("--seconds", type=float, default=30.0)
    given = options.parse_args()
    if given.part == "inserts":
        said = inserts()
    elif given.part == "indexer":
        said = indexer(given.stock, given.seconds)
    else:
        said = scores(given.seconds)
    for name, value in said.items():
        print(name, value)
    file = given.out / f"rest_{given.part}{given.name and '_' + given.name}.json"
    file.write_text(json.dumps(said, indent=0))


if __name__ == "__main__":
    main()
