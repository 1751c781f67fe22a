"""Each of EXL3's kernels once on small shapes, for compute-sanitizer: ``exl3.sh --sanitize``."""

from __future__ import annotations

import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:1] = [str(TESTS), str(TESTS.parent / "overlay")]

import torch  # noqa: E402  (after the paths)

from gpu import exl3_cases as cases  # noqa: E402
from spark_overlay.exl3.cuda import library, ops, prefill  # noqa: E402
from spark_overlay.exl3.cuda.plan_prefill import VARIANTS, PrefillPlan  # noqa: E402

GPU = "cuda"


def many_rows(layer: cases.Layer) -> None:
    """A prefill of 40 tokens by each variant, and 70 rows of linears."""
    x = cases.rows(40, 384, GPU)
    ids, weights = cases.routing(40, 3, 5, GPU)
    ids[0, 0] = -1
    right = layer.right(x, ids, weights)
    for variant in range(len(VARIANTS)):
        routed = ops.Routed(
            x, ids, weights, layer.table, 5, 0, True, 256, layer.max_k2, 10.0, torch.float32
        )
        found = prefill.launch_prefill(routed, PrefillPlan(variant, 1))
        assert cases.off(found, right) < cases.EXPERTS, variant
    # Two of a rate, which one launch decodes, and others; some columns at a time, too.
    rates = ((10, "mul1"), (10, "mul1"), (7, "mul1"), (8, "mcg"))
    ms = [cases.matrix(384, 256, k2, 1, GPU, book) for k2, book in rates]
    x = cases.rows(70, 384, GPU)
    right = torch.cat([m.right(x) for m in ms], -1)
    columns = [list(tensors) for tensors in zip(*(m.tensors for m in ms), strict=True)]
    numbers = [library.CODEBOOKS[m.codebook] for m in ms]
    for some in (prefill.SUMS, 70 * 128):
        prefill.SUMS = some
        found = prefill.dense([x], *columns, numbers, torch.float32)
        assert cases.off(found, right) < cases.DENSE


def main() -> None:
    worst = 0.0
    for k2, book in ((6, "mul1"), (4, "mul1"), (10, "mul1"), (7, "mul1"), (8, "mcg"), (6, "3inst")):
        one = cases.matrix(384, 256, k2, 1, GPU, book)
        right = cases.reference.decode_torch(one.trellis, book)
        assert torch.equal(ops.decode(one.trellis, book), right)
        for count in (1, 8, 13, 33):
            x = cases.rows(count, 384, GPU)
            worst = max(
                worst, cases.off(cases.group([x], [one, one]), torch.cat([one.right(x)] * 2, -1))
            )
    assert worst < cases.DENSE, worst
    layer = cases.Layer(384, 256, 6, [6, 4, 8], GPU, shared=True)
    for tokens in (1, 5, 12):
        x = cases.rows(tokens, 384, GPU)
        ids, weights = cases.routing(tokens, 3, 5, GPU)
        ids[0, 0] = -1
        found = layer.run(x, ids, weights)
        assert cases.off(found, layer.right(x, ids, weights)) < cases.EXPERTS
    many_rows(layer)
    torch.cuda.synchronize()
    print(f"right; dense at most {worst:.2e}")


if __name__ == "__main__":
    main()
