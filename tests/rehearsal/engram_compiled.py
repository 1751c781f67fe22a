"""Compiles the dequantisation kernel for four GPUs and prints what it takes there, as JSON.

A process of its own: Triton must not be its interpreter. Registers are ptxas' word.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from spark_overlay.engram import dequant
from spark_overlay.engram.layout import SCALE_GROUP

TARGETS = (80, 86, 90, 121)
POINTERS = {"codes": "*u8", "scales": "*u8", "out": "*i16"}
#: Triton's own assemblers; which one knows a target, and the PTX that was written for it, differs.
ASSEMBLERS = sorted((Path(triton.__file__).parent / "backends" / "nvidia" / "bin").glob("ptxas*"))


def compiled(capability: int) -> dict[str, Any]:
    constants = {"GROUPS": dequant.GROUPS, "WIDTH": SCALE_GROUP}
    source = ASTSource(
        fn=dequant._dequantize_kernel,
        signature={**POINTERS, "groups": "i32", **dict.fromkeys(constants, "constexpr")},
        constexprs=constants,
        attrs={(place,): [["tt.divisibility", 16]] for place in range(len(POINTERS))},
    )
    target = GPUTarget("cuda", capability, 32)
    kernel = triton.compile(source, target=target, options={"num_warps": dequant.WARPS})
    ptx = kernel.asm["ptx"]
    arch = re.search(r"\.target (\w+)", ptx)
    assert arch is not None
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        argv = ["-v", f"-arch={arch[1]}", file.name, "-o", "/dev/null"]
        runs = [
            subprocess.run([tool, *argv], capture_output=True, text=True) for tool in ASSEMBLERS
        ]
    told = next((run.stderr for run in runs if run.returncode == 0), "")
    registers = re.search(r"Used (\d+) registers", told)
    assert registers is not None, [run.stderr for run in runs]
    return {
        "shared": kernel.metadata.shared,
        "registers": int(registers[1]),
        "spilled": sum(map(int, re.findall(r"(\d+) bytes spill", told))),
        "fp8": re.findall(r"\S*(?:e4m3|e5m2)\S*", ptx),
        "wide": "ld.global.v2" in ptx and "st.global.v4" in ptx,
    }


if __name__ == "__main__":
    print(json.dumps({str(target): compiled(target) for target in TARGETS}))
