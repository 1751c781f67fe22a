"""Each of EXL3's kernels once on small shapes, for compute-sanitizer: ``exl3.sh --sanitize``."""

from __future__ import annotations

import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:1] = [str(TESTS), str(TESTS.parent / "overlay")]

import torch  # noqa: E402  (after the paths)

from gpu import exl3_cases as cases  # noqa: E402
from spark_overlay.exl3.cuda import ops  # noqa: E402

GPU = "cuda"


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
    torch.cuda.synchronize()
    print(f"right; dense at most {worst:.2e}")


if __name__ == "__main__":
    main()
