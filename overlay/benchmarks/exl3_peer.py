"""exllamav3 1.6.5 beside our kernels: built from its own sources, measured in the same run.

The repository holds none of it. ``EXLLAMAV3`` (or exl3.py --peer) names its wheel, as
``pip download --no-deps exllamav3==1.6.5`` brings it; of that, only what V4.1's pack needs is
compiled (mul1; experts of 2 and 3 bits, matrices of 5 and 6), with ``exl3_peer.cu`` for torch to
call. Some 12 minutes of one core; the library stays in overlay/build/peer and serves until wheel,
wrapper, torch or GPU change.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import hashlib
import os
import re
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
OVERLAY = HERE.parent
sys.path.insert(1, str(OVERLAY / "csrc"))

import build_cuda  # noqa: E402

VERSION = "1.6.5"
WRAPPER = HERE / "exl3_peer.cu"
CACHE = OVERLAY / "build" / "peer"
EXTENSION = "exllamav3/exllamav3_ext"
UNITS = (
    *(f"quant/comp_units/exl3_comp_unit_{k}_cb2.cu" for k in (5, 6)),
    *(f"quant/comp_units/exl3_moe_coop_inst_k{k}.cu" for k in (3, 2)),
    *(f"quant/comp_units/exl3_gemv_int8_inst_{w}_k{k}.cu" for w in ("sq", "coop") for k in (5, 6)),
    *(f"quant/exl3_{n}.cu" for n in ("moe_coop", "gemm", "gemv_int8", "kernel_map", "devctx")),
    "quant/coop_autotune.cu",
)  # fmt: skip
#: exllamav3's own (util/cuda_flags.py) and those that torch adds to every extension.
FLAGS = (
    "-std=c++17", "-O3", "--use_fast_math", "--expt-relaxed-constexpr", "-Xcompiler=-fPIC",
    "-Xcudafe", "--diag_suppress=177", "-Xcudafe", "--diag_suppress=20012",
    "-D__CUDA_NO_HALF_OPERATORS__", "-D__CUDA_NO_HALF_CONVERSIONS__",
    "-D__CUDA_NO_BFLOAT16_CONVERSIONS__", "-D__CUDA_NO_HALF2_OPERATORS__",
)  # fmt: skip
#: Headers of which its declarations name a type or two, and that a host need not have.
STANDINS = {
    "pybind11/pybind11.h": "#pragma once\nnamespace pybind11 {}\n",
    "ATen/cuda/CUDAContext.h": """#pragma once
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
namespace at::cuda { using namespace c10::cuda; }
""",
    "cublas_v2.h": """#pragma once
enum cublasStatus_t {
    CUBLAS_STATUS_SUCCESS, CUBLAS_STATUS_NOT_INITIALIZED, CUBLAS_STATUS_ALLOC_FAILED,
    CUBLAS_STATUS_INVALID_VALUE, CUBLAS_STATUS_ARCH_MISMATCH, CUBLAS_STATUS_MAPPING_ERROR,
    CUBLAS_STATUS_EXECUTION_FAILED, CUBLAS_STATUS_INTERNAL_ERROR, CUBLAS_STATUS_NOT_SUPPORTED,
    CUBLAS_STATUS_LICENSE_ERROR
};
""",
}
Call = Callable[[], Any]


class PeerError(RuntimeError):
    """The peer is not what was named, or does not build."""


def built(
    wheel: Path,
    torch_root: Path,
    torch_version: str,
    arch: str,
    cache: Path = CACHE,
    *,
    units: Sequence[str] = UNITS,
    wrapper: Path = WRAPPER,
) -> Path:
    """The library of ``wheel`` for one GPU architecture, compiled unless it is in ``cache``.

    Raises PeerError for another file than the wheel of VERSION, build_cuda.BuildError for what
    the compiler says."""
    if not wheel.is_file() or wheel.name != f"exllamav3-{VERSION}-py3-none-any.whl":
        raise PeerError(
            f"{wheel}: the peer is exllamav3-{VERSION}-py3-none-any.whl, of "
            f"`pip download --no-deps exllamav3=={VERSION}`"
        )
    said = hashlib.sha256(repr((units, FLAGS, STANDINS, torch_version, arch)).encode())
    said.update(wheel.read_bytes() + wrapper.read_bytes())
    out = cache / f"exllamav3-{VERSION}-{arch}-{said.hexdigest()[:16]}.so"
    if out.is_file():
        return out
    cache.mkdir(parents=True, exist_ok=True)
    nvcc = build_cuda.compiler()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        with zipfile.ZipFile(wheel) as packed:
            packed.extractall(folder, [n for n in packed.namelist() if n.startswith(EXTENSION)])
        for name, text in STANDINS.items():
            (folder / "standins" / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / "standins" / name).write_text(text)
        include = torch_root / "include"
        seen = [folder / "standins", include, include / "torch/csrc/api/include"]
        base = [str(nvcc), *FLAGS, *build_cuda.code_for(arch)]
        base += [f"-I{path}" for path in (*seen, folder / EXTENSION)]
        files = [folder / EXTENSION / unit for unit in units] + [wrapper]
        made = [folder / f"{file.stem}.o" for file in files]
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            argvs = [[*base, "-c", str(f), "-o", str(o)] for f, o in zip(files, made, strict=True)]
            list(pool.map(build_cuda.run, argvs))
        libraries = torch_root / "lib"
        whole = folder / out.name
        build_cuda.run(
            [str(nvcc), "-shared", "-cudart=static", *map(str, made), "-o", str(whole),
             f"-L{libraries}", f"-L{nvcc.resolve().parent.parent / 'lib'}",
             *(f"-l{name}" for name in ("c10", "c10_cuda", "torch_cpu"))]
        )  # fmt: skip
        shutil.copy(whole, partial := out.with_suffix(f".{os.getpid()}"))
        partial.replace(out)
    return out


class Peer:
    """Its calls on the present GPU, on random tensors of ours. Outputs are fp16, the experts' fp32
    (it has no other); inputs were made fp16 before: no cast is in a call."""

    def __init__(self, wheel: Path, cache: Path = CACHE) -> None:
        import torch

        self.torch = torch
        major, minor = torch.cuda.get_device_capability()
        arch = build_cuda.architecture(f"{major}.{minor}")
        root = Path(torch.__file__).parent
        # What its autotuner finds; as it is by itself, but beside the library.
        os.environ.setdefault("EXLLAMAV3_TUNE_CACHE", str(cache / "tuned"))
        self.path = built(wheel, root, torch.__version__, arch, cache)
        torch.ops.load_library(str(self.path))
        self.ops = torch.ops.spark_peer
        self.ops.int8_mode(0)

    def int8(self, mode: int) -> None:
        self.ops.int8_mode(mode)

    # -- dense ----------------------------------------------------------------------------------

    def separate(self, xs: Sequence[Any], matrices: Sequence[Any]) -> tuple[Call, list[Any]]:
        """exl3_gemm, one call a matrix; and the outputs."""
        torch = self.torch
        every = [x.half().contiguous() for x in xs]
        every = every if len(every) == len(matrices) else every * len(matrices)
        outs = [
            torch.empty((len(x), m.svh.numel()), dtype=torch.half, device=x.device)
            for x, m in zip(every, matrices, strict=True)
        ]
        rotated = [torch.empty_like(x) for x in every]

        def run() -> None:
            for x, m, out, place in zip(every, matrices, outs, rotated, strict=True):
                self.ops.gemm(x, m.trellis, out, m.suh, place, m.svh)

        return run, outs

    def together(self, xs: Sequence[Any], matrices: Sequence[Any]) -> tuple[Call, list[Any]]:
        """exl3_mgemm, one call for all of a rate, as its own model code does; the widest first."""
        torch, device = self.torch, xs[0].device
        x = torch.stack([x.half() for x in xs]).contiguous()
        rows, count = x.shape[1], len(matrices)
        widths = [m.svh.numel() for m in matrices]
        if max(widths) != widths[0]:
            raise PeerError("exl3_mgemm wants the widest matrix first")
        columns = zip(*((m.trellis, m.suh, m.svh) for m in matrices), strict=True)
        trellis, suh, svh = (
            torch.tensor([t.data_ptr() for t in column], device=device) for column in columns
        )
        indices = torch.arange(count, device=device)[None]
        rotated = torch.empty((count, *x.shape[1:]), dtype=torch.half, device=device)
        rate = matrices[0].trellis.shape[2] / 16
        if len(set(widths)) == 1:
            whole = torch.empty((count, rows, widths[0]), dtype=torch.half, device=device)
            outs, sizes, places = list(whole), None, None
        else:
            outs = [torch.empty((rows, w), dtype=torch.half, device=device) for w in widths]
            whole = outs[0][None]
            sizes = torch.tensor(widths, dtype=torch.int32, device=device)
            places = torch.tensor([out.data_ptr() for out in outs], device=device)

        def run(_kept: Any = outs) -> None:  # `places` are their addresses
            self.ops.mgemm(x, trellis, whole, suh, rotated, svh, indices, rate, sizes, places)

        return run, outs

    # -- experts --------------------------------------------------------------------------------

    def experts(
        self, table: Any, k2: int, inter: int, x: Any, ids: Any, weights: Any, shared: bool = False
    ) -> tuple[Call, Any]:
        """exl3_moe_coop by our table of addresses; ``shared``: the table's last expert for every
        token by a call of its own before, as its own model code does. And the output, fp32."""
        torch = self.torch
        x, weights = x.half().contiguous(), weights.half().contiguous()
        (rows, hidden), device, slots = x.shape, x.device, 256

        def half(*size: int) -> Any:
            return torch.empty(size, dtype=torch.half, device=device)

        def scratch() -> list[Any]:
            down = torch.empty((slots, hidden), dtype=torch.float32, device=device)
            counters = self.ops.counters(slots, rows, inter, hidden)
            parts = [half(slots, width) for width in (hidden, hidden, inter, inter, inter)]
            return [*parts, down, torch.zeros(counters, dtype=torch.int32, device=device)]

        entries = [table[which, :, part].contiguous() for which in range(3) for part in range(3)]
        out = torch.empty((rows, hidden), dtype=torch.float32, device=device)
        own, other = scratch(), scratch() if shared else []
        last = torch.full((rows, 1), table.shape[1] - 1, device=device)
        ones, mine = torch.ones((rows, 1), dtype=torch.half, device=device), torch.empty_like(out)
        rate = k2 / 2

        def run() -> None:
            if shared:
                self.ops.moe(x, last, ones, entries, other, rate, rate, 10.0, mine, None)
            self.ops.moe(
                x, ids, weights, entries, own, rate, rate, 10.0, out, mine if shared else None
            )

        return run, out


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--torch", type=Path, help="torch's folder (default: this Python's)")
    parser.add_argument("--arch", default="90a")
    parser.add_argument("--cache", type=Path, default=CACHE)
    given = parser.parse_args()
    root = given.torch
    if root is None:
        import torch

        root = Path(torch.__file__).parent
    version = re.search(r"^__version__ = '(.*)'", (root / "version.py").read_text(), re.MULTILINE)
    if version is None:
        sys.exit(f"{root}: no torch of which version.py tells the version")
    print(built(given.wheel, root, version[1], given.arch, given.cache))


if __name__ == "__main__":
    try:
        main()
    except (PeerError, build_cuda.BuildError) as error:
        sys.exit(str(error))
