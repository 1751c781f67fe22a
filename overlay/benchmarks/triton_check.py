#!/usr/bin/env python3
"""Every Triton kernel for every GPU it is written for: ``triton_check.py [--json] [--arch N]…``.

    registers, spills, shared memory            as ptxas reports them, a kernel each
    instructions that no kernel may hold        read off the PTX: conversions of fp8, which GPUs
                                                before sm_89 have not, and what exists on one family
                                                of GPUs only (but wgmma, Triton's own choice)

Needs Triton and no GPU: Triton's compiler and the ptxas that comes with it. Kernels are what each
package's ``compiled.py`` lists. Exit status 1: something is not as it must be; it is printed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spark_overlay.compiled import Compiled

OVERLAY = Path(__file__).resolve().parents[1]
sys.path.insert(1, str(OVERLAY))

ARCHITECTURES = (80, 86, 90, 120, 121)
#: Shared memory that one CTA may have on the smallest of them.
SHARED = 99 << 10
FORBIDDEN = {
    r"\bcvt\.[a-z0-9.]*e[45]m[23]": "converts fp8: from sm_89 on",
    r"\btcgen05\.": "exists on sm_100 only",
    r"\bcp\.async\.bulk|\btensormap\.": "the copy engine of sm_90 and later",
    r"\bmapa[.\s]|\bbarrier\.cluster": "clusters: sm_90 and later",
    r"\bnanosleep\.": "a wait for another CTA can last for ever",
}


@dataclass(frozen=True)
class Found:
    """One kernel for one GPU. Bytes; ``shared`` with what a launch asks for."""

    kernel: str
    arch: int
    registers: int
    spills: int
    shared: int
    threads: int
    forbidden: tuple[str, ...]
    allowed: int = 0

    def faults(self) -> list[str]:
        found = [f"holds {text}" for text in self.forbidden]
        if self.spills > self.allowed:
            found.append(f"spills {self.spills} bytes")
        if self.shared > SHARED:
            found.append(f"needs {self.shared} bytes of shared memory, sm_86 has {SHARED}")
        return found


def packages() -> Iterator[str]:
    for path in sorted((OVERLAY / "spark_overlay").rglob("compiled.py")):
        name = ".".join(path.relative_to(OVERLAY).with_suffix("").parts)
        if name != "spark_overlay.compiled":
            yield name


def assembled(tools: Path, ptx: str) -> str:
    """What ptxas reports. Triton brings several; which one knows a target differs."""
    target = re.search(r"\.target (\w+)", ptx)
    assert target is not None
    errors = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.ptx")
        file.write_text(ptx)
        for tool in sorted(tools.glob("ptxas*")):
            argv = [str(tool), "-v", f"-arch={target[1]}", "-o", f"{folder}/out", str(file)]
            done = subprocess.run(argv, capture_output=True, text=True)
            if done.returncode == 0:
                return done.stderr
            errors.append(f"{tool.name}: {done.stderr.strip()}")
    raise RuntimeError(f"no ptxas of {tools} takes {target[1]}: {'; '.join(errors)}")


def build(one: Compiled, arch: int) -> Any:
    """What Triton makes of a kernel; ``asm["ptx"]`` is its PTX."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = one.kernel.arg_names
    types = {name: one.signature.get(name, "constexpr") for name in names}
    source = ASTSource(
        fn=one.kernel,
        signature=types,
        constexprs={(names.index(name),): value for name, value in one.constants.items()},
        attrs={
            (names.index(name),): [["tt.divisibility", 16]]
            for name in one.signature
            if name not in one.plain
        },
    )
    options = {"num_warps": one.warps, "num_stages": one.stages}
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def compile_one(package: str, index: int, arch: int) -> Found:
    import triton

    one = importlib.import_module(package).kernels()[index]
    built = build(one, arch)
    ptx = built.asm["ptx"]
    held = tuple(
        f"{match[0]} ({why})" for p, why in FORBIDDEN.items() if (match := re.search(p, ptx))
    )
    said = assembled(Path(triton.__file__).parent / "backends/nvidia/bin", ptx)
    spilled = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said)
    used = re.search(r"Used (\d+) registers", said)
    if used is None or spilled is None:
        raise RuntimeError(f"ptxas reports in another way than expected: {said}")
    return Found(
        one.name,
        arch,
        int(used[1]),
        int(spilled[1]) + int(spilled[2]),
        int(built.metadata.shared),
        32 * one.warps,
        held,
        one.spills,
    )


def check(archs: Sequence[int], only: Sequence[str] = (), jobs: int | None = None) -> list[Found]:
    """Every kernel (whose package's or own name holds one of ``only``) for every architecture."""
    work = [
        (package, index, arch)
        for package in packages()
        for index, one in enumerate(importlib.import_module(package).kernels())
        if not only or any(name in package or name in one.name for name in only)
        for arch in archs
        if arch >= one.since
    ]
    if not work:
        raise SystemExit(f"no kernel is named {', '.join(only) or 'at all'}")
    with ProcessPoolExecutor(jobs or os.cpu_count() or 1) as pool:
        return list(pool.map(compile_one, *zip(*work, strict=True)))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="parts of packages' or kernels' names")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--arch", action="append", type=int, help="only this one; may be repeated")
    parser.add_argument("--jobs", type=int)
    given = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET") == "1":
        parser.error("nothing is compiled under TRITON_INTERPRET=1")
    began = time.monotonic()
    found = check(given.arch or ARCHITECTURES, given.names, given.jobs)
    wrong = sum(bool(one.faults()) for one in found)
    if given.json:
        rows = [{**asdict(one), "faults": one.faults()} for one in found]
        print(json.dumps({"right": not wrong, "kernels": rows}, indent=1))
        return int(bool(wrong))
    print(f"{'sm':>4} {'regs':>4} {'threads':>7} {'shared':>6} {'spills':>6}  kernel")
    for one in found:
        print(
            f"{one.arch:>4} {one.registers:>4} {one.threads:>7} {one.shared:>6} {one.spills:>6}  "
            f"{one.kernel}"
        )
        for text in one.faults():
            print(f"{'':6}NOT RIGHT: {text}")
    print(f"{len(found)} kernels in {time.monotonic() - began:.0f} s, {wrong} not right")
    return int(not found or bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
