import statistics, sys
from pathlib import Path
ROOT = Path(__file__).resolve().parents[2]
for p in (ROOT / "overlay/benchmarks", ROOT / "overlay", ROOT / "tests"): sys.path.insert(1, str(p))
import torch, timing
from gpu import insert_cases as cases
from spark_overlay.attention.inserts import ops
for v in ((4, 4), (2, 2), (1, 1), (2, 4), (1, 2)):
    ops._rows_each = lambda count, v=v: v
    for count in (2048, 256):
        blocks = -(-count // 64) + 1
        first = cases.draw(count, blocks * 64, 32, 3).to("cuda")
        given = []
        for _ in range(32):
            given.append(cases.Rows(**vars(first))); given[-1].rows = torch.randn_like(first.rows)
        pages = [cases.cache(blocks, 64, 584, "cuda") for _ in given]
        calls = [lambda r=r, c=c: ops.rope_quant_insert(r.rows, r.positions, r.cos_sin, c, r.slots, 2) for r, c in zip(given, pages)]
        print("latents 1/2", v, count, round(statistics.median(timing.graph_us(calls, 5)), 2), flush=True)
