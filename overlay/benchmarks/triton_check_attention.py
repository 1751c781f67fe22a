#!/usr/bin/env python3
"""The attention kernels in Triton for every GPU they are written for: ``triton_check.py [--json]``.

Registers, spills and shared memory as ptxas reports them; no fp8 conversion may be in the PTX, and
shared memory must fit an SM86's or SM12x's CTA (99 KB). Needs triton, no GPU, and no interpreter
(TRITON_INTERPRET unset). Exit status 1: something is not as it must be.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

import triton  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from spark_overlay.attention.kernels import indices, plan, records, tiles  # noqa: E402

TARGETS = (80, 86, 90, 120, 121)
MOST_SHARED = 99 * 1024
MOST_SPILLED = 64
#: Triton's own assemblers; which one knows a target, and the PTX that was written for it, differs.
ASSEMBLERS = sorted((Path(triton.__file__).parent / "backends" / "nvidia" / "bin").glob("ptxas*"))

BF16 = {"q": "*bf16", "out": "*bf16"}
FLOATS = dict.fromkeys(("sink", "partial", "peaks", "cos_sin"), "*fp32")
WORDS = dict.fromkeys(
    ("slots0", "slots1", "lengths0", "lengths1", "topk", "block_table", "requests", "combined",
     "lengths", "starts", "seq_lens", "gather_lens"),
    "*i32",
)  # fmt: skip
TYPES = {
    **BF16, **FLOATS, **WORDS, "positions": "*i64", "scale": "fp32",
    **dict.fromkeys(("cache", "cache0", "cache1"), "*u8"),
}  # fmt: skip
#: Scalars of any value; the others are multiples of 16 where vLLM calls.
PLAIN = ("scale", "tokens", "heads", "offset", "requests", "rows", "compressed", "pages")


def forms() -> Iterator[tuple[Any, dict[str, Any], dict[str, str], int, int]]:
    """Kernel, constants, types that differ from TYPES, warps and stages of what V4.1 launches."""
    pages = dict(PAGE0=32, PAGE1=64, WIDTH0=128, WIDTH1=512, LENGTHS0=True, LENGTHS1=False,
                 ALIGN0=16, ALIGN1=16, TURN=True, PTX=True)  # fmt: skip
    for tokens in (4, 2048):
        one = plan.shape((8, 0), tokens, 32, 640, False)
        assert isinstance(one, plan.Shape)
        constants = dict(pages, SPLITS=one.splits, HEADS=one.heads, KEYS=one.keys)
        yield tiles.attend, constants, {}, one.warps, one.stages
    shape = dict(SPLITS=20, HEADS=plan.REDUCE_HEADS, TURN=True)
    yield tiles.reduce, shape, {}, plan.REDUCE_WARPS, 1
    rows = dict(HAS_LENGTHS=True, BLOCK=64, ALIGN=16, OUT_ALIGN=8, ROWS=records.ROWS, STORE="")
    yield records._gather, rows, {}, records.WARPS, 1
    row = dict(TOPK=512, RATIO=1, WINDOW=128, WIDTH=640, REQUESTS=4, TOKENS=indices.TOKENS)
    yield indices._combine, row, {"requests": "i32"}, indices.WARPS, 1
    states = dict(STATES=64, WIDTH=512, PADDED=512)
    yield indices._chosen, states, {"out": "*i32"}, 4, 1


def compiled(
    kernel: Any,
    constants: dict[str, Any],
    types: dict[str, str],
    warps: int,
    stages: int,
    arch: int,
) -> dict[str, Any]:
    names = kernel.arg_names
    types = {**TYPES, **types}
    signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in names}
    even = [i for i, n in enumerate(names) if n not in constants and n not in PLAIN]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(n),): v for n, v in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i in even},
    )
    made = triton.compile(
        source,
        target=GPUTarget("cuda", arch, 32),
        options={"num_warps": warps, "num_stages": stages},
    )
    ptx = made.asm["ptx"]
    target = re.search(r"\.target (\w+)", ptx)
    assert target is not None
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        argv = ["-v", f"-arch={target[1]}", file.name, "-o", "/dev/null"]
        runs = [
            subprocess.run([tool, *argv], capture_output=True, text=True) for tool in ASSEMBLERS
        ]
    told = next((run.stderr for run in runs if run.returncode == 0), "")
    registers = re.search(r"Used (\d+) registers", told)
    assert registers is not None, [run.stderr for run in runs]
    found: dict[str, Any] = {
        "kernel": kernel.__name__, "arch": arch, "warps": warps,
        "shared": made.metadata.shared,
        "registers": int(registers[1]),
        "spilled": sum(map(int, re.findall(r"(\d+) bytes spill", told))),
        "mma": len(re.findall(r"\bmma\.sync", ptx)),
    }  # fmt: skip
    faults = sorted(set(re.findall(r"\S*(?:e4m3|e5m2|wgmma|tcgen05)\S*", ptx)))
    if found["shared"] > MOST_SHARED:
        faults.append(f"{found['shared']} bytes of shared memory; {MOST_SHARED} at most")
    if found["spilled"] > MOST_SPILLED:
        faults.append(f"{found['spilled']} bytes spilled")
    return found | {"faults": faults}


def main() -> int:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--json", action="store_true", help="print JSON")
    options.add_argument("--arch", type=int, action="append", help="only this one")
    given = options.parse_args()
    found = [compiled(*form, arch) for arch in given.arch or TARGETS for form in forms()]
    if given.json:
        print(json.dumps(found, indent=1))
    else:
        print(f"{'sm':>3} {'regs':>4} {'warps':>5} {'shared':>6} {'spills':>6}  kernel")
        for one in found:
            print(
                f"{one['arch']:>3} {one['registers']:>4} {one['warps']:>5} {one['shared']:>6} "
                f"{one['spilled']:>6}  {one['kernel']}"
            )
            for fault in one["faults"]:
                print(f"{'':6}NOT RIGHT: {fault}")
    return int(any(one["faults"] for one in found))


if __name__ == "__main__":
    sys.exit(main())
