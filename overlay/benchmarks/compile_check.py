#!/usr/bin/env python3
"""Every CUDA file for every GPU it is written for: ``compile_check.py [--json] [--all]``.

    registers, spills, static shared memory     as ptxas reports them, a kernel each
    instructions that no kernel may hold        read off the PTX: what exists on one family of GPUs
                                                only, what waits for another CTA
    room for two CTAs on an SM                  by their 64K registers

Needs nvcc 13 and no GPU. What was compiled is kept by the hash of sources, flags and compiler in
overlay/build/compile_check. ``--all`` adds sm_89 and sm_120a. Exit status 1: something is not as it
must be; it is printed.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

OVERLAY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(OVERLAY / "csrc"))

import build_cuda  # noqa: E402

CACHE = OVERLAY / "build" / "compile_check"
KEPT = 24  # compiled states that stay in the cache
#: CTAs that must fit on an SM at once, by registers. Shared memory is asked for at the launch: the
#: launch tables' own test (tests/test_exl3_plan.py) bounds it.
CTAS, SM_REGISTERS = 2, 65536
#: Sparse attention keeps its sums and a part of the query in registers: one CTA of 256 threads.
#: The indexer's choice is one of 1024, its scores of several rows one of 384.
ALONE = ("attend.cu", "many.cu", "choose.cu", "scores_rows.cu")
#: Raised when what is kept of a kernel, or how it is read, changes.
READS = 1
#: Regular expressions over PTX, and why each is no instruction of ours.
FORBIDDEN: Mapping[str, str] = {
    r"\bwgmma\.": "exists on sm_90a only",
    r"\btcgen05\.": "exists on sm_100 only",
    r"\bcp\.async\.bulk|\bcp\.reduce\.async\.bulk": "the copy engine of sm_90 and later",
    r"\btensormap\.": "the copy engine of sm_90 and later",
    r"\bmapa[.\s]|\bbarrier\.cluster|%cluster_|\.reqnctapercluster": "clusters: sm_90 and later",
    r"\bsetmaxnreg\.": "exists on sm_90a and later",
    r"\bmultimem\.": "multicast over NVLink",
    r"\batom\.[a-z.:]*cas\b|\bnanosleep\.": "a wait for another CTA can last for ever",
    r"%envreg": "a cooperative launch needs every CTA on the GPU at once",
}


@dataclass(frozen=True)
class Kernel:
    """One kernel of one file for one GPU, by ptxas and PTX. Sizes in bytes; ``threads`` 0: the
    kernel does not say how many it is launched with."""

    file: str
    arch: str
    name: str
    registers: int
    spill_stores: int
    spill_loads: int
    stack: int
    shared: int
    threads: int
    forbidden: tuple[str, ...]

    def faults(self) -> list[str]:
        """What is not as it must be."""
        found = [f"holds {text}" for text in self.forbidden]
        if self.spill_stores + self.spill_loads:
            found.append(f"spills {self.spill_stores} bytes and loads {self.spill_loads}")
        granted = -(-self.registers // 8) * 8 * self.threads
        ctas = 1 if self.file in ALONE else CTAS
        if self.threads and granted * ctas > SM_REGISTERS:
            found.append(
                f"{self.registers} registers of {self.threads} threads: {ctas} CTAs need "
                f"{granted * ctas} of {SM_REGISTERS} on an SM"
            )
        return found


def read_ptxas(text: str) -> dict[str, dict[str, int]]:
    """By mangled name, from what ``ptxas -v`` prints."""
    found: dict[str, dict[str, int]] = {}
    name = ""
    for line in text.splitlines():
        if begun := re.search(r"Compiling entry function '(\S+)'", line):
            name = begun[1]
            found[name] = dict.fromkeys(("stack", "spill_stores", "spill_loads", "shared"), 0)
        elif begun := re.search(r"Function properties for (\S+)", line):
            name = begun[1]  # of a function that is no kernel: read, and left out below
        elif frame := re.search(
            r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line
        ):
            sizes = zip(("stack", "spill_stores", "spill_loads"), frame.groups(), strict=True)
            found.setdefault(name, {}).update({key: int(value) for key, value in sizes})
        elif used := re.search(r"Used (\d+) registers", line):
            found[name]["registers"] = int(used[1])
            if shared := re.search(r"(\d+) bytes smem", line):
                found[name]["shared"] = int(shared[1])
    return {name: values for name, values in found.items() if "registers" in values}


def read_ptx(text: str) -> dict[str, tuple[int, tuple[str, ...]]]:
    """Threads and forbidden instructions of each kernel, by mangled name. What a function of its
    own holds is held against every kernel of the file."""
    parts = re.split(r"^(?=[^\n]*\.(?:entry|func)\b)", text, flags=re.MULTILINE)
    shared: set[str] = set()
    found: dict[str, tuple[int, tuple[str, ...]]] = {}
    for part in parts:
        held = {f"{_shown(p, part)} ({why})" for p, why in FORBIDDEN.items() if re.search(p, part)}
        entry = re.match(r"[^\n]*\.entry\s+([\w$]+)", part)
        if entry is None:
            shared |= held
            continue
        threads = 1
        limit = re.search(r"\.(?:maxntid|reqntid)\s+([\d, ]+)", part)
        for count in limit[1].split(",") if limit else ["0"]:
            threads *= int(count)
        found[entry[1]] = (threads, tuple(sorted(held)))
    return {
        name: (threads, tuple(sorted({*held, *shared}))) for name, (threads, held) in found.items()
    }


def _shown(pattern: str, text: str) -> str:
    found = re.search(rf"[^\s;]*(?:{pattern})[^\s;]*", text)
    return found[0] if found else pattern


def compile_one(nvcc: Path, file: Path, arch: str) -> list[Kernel]:
    """Raises build_cuda.BuildError with the compiler's words."""
    with tempfile.TemporaryDirectory() as folder:
        argv = [str(nvcc), *build_cuda.FLAGS, *build_cuda.code_for(arch), "-cubin", "-Xptxas=-v"]
        argv += ["--keep", "--keep-dir", folder, "-o", f"{folder}/out.cubin", str(file)]
        said = build_cuda.run(argv)
        (ptx,) = Path(folder).glob("*.ptx")
        by_ptx = read_ptx(ptx.read_text())
    by_ptxas = read_ptxas(said)
    if by_ptx.keys() != by_ptxas.keys():
        raise build_cuda.BuildError(
            f"{file.name}, sm_{arch}: ptxas tells of {len(by_ptxas)} kernels, the PTX has "
            f"{len(by_ptx)}: this nvcc reports in another way than 13.0"
        )
    return [
        Kernel(file.name, arch, name, threads=threads, forbidden=held, **by_ptxas[name])
        for name, (threads, held) in by_ptx.items()
    ]


def digest(nvcc: Path, file: Path, arch: str) -> str:
    """Of everything that decides what is compiled and how it is read."""
    asked = (build_cuda.version(nvcc), build_cuda.FLAGS, arch, READS, sorted(FORBIDDEN))
    said = hashlib.sha256(repr(asked).encode())
    for path in [file, *build_cuda.headers(file.parent)]:
        said.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return said.hexdigest()[:24]


def kernels_of(nvcc: Path, file: Path, arch: str, cache: Path) -> list[Kernel]:
    place = cache / f"{file.stem}-{arch}-{digest(nvcc, file, arch)}.json"
    if place.is_file():
        place.touch()
        kept = json.loads(place.read_text())
        return [Kernel(**{**one, "forbidden": tuple(one["forbidden"])}) for one in kept]
    found = compile_one(nvcc, file, arch)
    cache.mkdir(parents=True, exist_ok=True)
    partial = place.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps([asdict(kernel) for kernel in found]))
    partial.replace(place)
    return found


def forget(cache: Path, keep: int) -> None:
    """Drop the states of the cache that were used longest ago."""
    kept = sorted(cache.glob("*.json"), key=lambda p: p.stat().st_mtime, reverse=True)
    for old in kept[keep:]:
        old.unlink(missing_ok=True)


def check(
    archs: Sequence[str], files: Sequence[Path] = (), cache: Path = CACHE, jobs: int | None = None
) -> list[Kernel]:
    """Every kernel of ``files`` (none: all of overlay/csrc) for every architecture.

    Raises build_cuda.BuildError: no nvcc, or one that refuses a file."""
    nvcc = build_cuda.compiler()
    files = list(files) or sorted((OVERLAY / "csrc").rglob("*.cu"))
    work = [(nvcc, file, arch, cache) for file in files for arch in archs]
    with concurrent.futures.ThreadPoolExecutor(jobs or os.cpu_count() or 1) as pool:
        found = list(pool.map(lambda one: kernels_of(*one), work))
    forget(cache, max(KEPT, 3 * len(work)))
    return [kernel for kernels in found for kernel in kernels]


def plain_names(names: Iterable[str]) -> dict[str, str]:
    """C++ names by mangled ones; the mangled ones where no c++filt is."""
    names = list(dict.fromkeys(names))
    tool = shutil.which("c++filt")
    if tool is None or not names:
        return {name: name for name in names}
    said = subprocess.run(
        [tool], input="\n".join(names), capture_output=True, text=True, check=True
    )
    return dict(zip(names, said.stdout.splitlines(), strict=True))


def table(kernels: Sequence[Kernel]) -> str:
    names = plain_names(kernel.name for kernel in kernels)
    lines = [
        f"{'sm':5} {'regs':>4} {'threads':>7} {'shared':>6} {'stack':>5} {'spills':>6}  kernel"
    ]
    for one in kernels:
        name = re.sub(r"\(.*", "", names[one.name].replace("(anonymous namespace)::", ""))
        spills = one.spill_stores + one.spill_loads
        lines.append(
            f"{one.arch:5} {one.registers:>4} {one.threads or '-':>7} {one.shared:>6} "
            f"{one.stack:>5} {spills:>6}  {one.file}: {name}"
        )
        lines += [f"{'':6}NOT RIGHT: {text}" for text in one.faults()]
    return "\n".join(lines)


def report(kernels: Sequence[Kernel], seconds: float) -> dict[str, Any]:
    names = plain_names(kernel.name for kernel in kernels)
    rows = [{**asdict(k), "name": names[k.name], "faults": k.faults()} for k in kernels]
    return {
        "seconds": round(seconds, 1),
        "right": not any(r["faults"] for r in rows),
        "kernels": rows,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--all", action="store_true", help="sm_89 and sm_120a, too")
    parser.add_argument("--arch", action="append", help="only this one; may be repeated")
    parser.add_argument("--jobs", type=int)
    given = parser.parse_args()
    archs = given.arch or [*build_cuda.ARCHITECTURES]
    if given.all:
        archs += [arch for arch in build_cuda.MORE_ARCHITECTURES if arch not in archs]
    began = time.monotonic()
    try:
        found = check(archs, jobs=given.jobs)
    except build_cuda.BuildError as error:
        print(error, file=sys.stderr)
        return 1
    seconds = time.monotonic() - began
    if given.json:
        print(json.dumps(report(found, seconds), indent=1))
    else:
        print(table(found))
        wrong = sum(bool(kernel.faults()) for kernel in found)
        print(f"{len(found)} kernels for {', '.join(archs)} in {seconds:.0f} s, {wrong} not right")
    return int(not found or any(kernel.faults() for kernel in found))


if __name__ == "__main__":
    sys.exit(main())
