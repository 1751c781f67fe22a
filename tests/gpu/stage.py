#!/usr/bin/env python3
"""Pack vLLM and its dependencies into chunks, for a GPU host that reaches no registry.

    python3 tests/gpu/stage.py        # writes .gpu/c1 .gpu/c2 … and .gpu/common, prints the calls

Downloads stay in .gpu/cache and the compressed vLLM in .gpu/parts; a second run packs again only if
the list of packages, the pieces of vLLM or the chunk size changed. The project itself is never
packed: it travels as a working tree. Kernels that keep.sh brought back from an earlier run lie in
.gpu/kept and are packed with the rest; they save about two minutes.

The host has Python 3.12, torch 2.11 for CUDA 13, triton, transformers and the usual scientific
packages. The compiled pieces of vLLM 0.33.0 named below load there: they use torch's stable ABI.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpu.chunks import plan

HERE = Path(__file__).resolve().parent
MIB = 1 << 20
VLLM = "vllm==0.33.0"
#: What V4.1 loads. FlashAttention 2 stays behind: 293 MiB that V4.1 never calls.
PIECES = (
    "vllm/_C_stable_libtorch.abi3.so",
    "vllm/_moe_C_stable_libtorch.abi3.so",
    "vllm/_flashmla_C.abi3.so",
    "vllm/_flashmla_extension_C.abi3.so",
    "vllm/_deepselect_C.abi3.so",
    "vllm/cumem_allocator.abi3.so",
    "vllm/spinloop.abi3.so",
    "vllm/fs_io_C.abi3.so",
    "vllm/third_party/deep_gemm/_C_extension.abi3.so",
    "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so",
)
GLIBC = (39, 35, 34, 31, 28, 27, 24, 17)
PLATFORMS = [f"manylinux_2_{n}_x86_64" for n in GLIBC] + ["manylinux2014_x86_64"]
PLATFORMS += ["manylinux1_x86_64"]

TAKE = """\
# Keep a chunk that was carried here until all are: take.sh FOLDER
set -e
mkdir -p /tmp/spark-gpu/taken
cp "$1"/* /tmp/spark-gpu/taken/
echo "taken: $(ls /tmp/spark-gpu/taken | wc -l) files, $(du -sm /tmp/spark-gpu/taken | cut -f1) MiB"
"""
FINISH = """\
# Unpack what was taken. Needs every chunk that manifest.json beside this names.
set -e
here=$(cd "$(dirname "$0")" && pwd)
cd /tmp/spark-gpu/taken
sha256sum --quiet -c "$here/SHA256SUMS"
for first in *.whl.part.00; do cat "${first%.00}".* >"${first%.part.00}"; done
mkdir -p /tmp/spark-gpu/site
cat vllm.part.* | xz -dc -T0 | tar -xf - -C /tmp/spark-gpu/site &
python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade \\
    --target /tmp/spark-gpu/wheels ./*.whl
wait $!
if ls kept.part.* >/dev/null 2>&1; then cat kept.part.* | xz -dc -T0 | tar -xf - -C "$HOME"; fi
. "$here/env.sh"
python3 - <<'PYTHON'
import torch, vllm
print("vLLM", vllm.__version__, "torch", torch.__version__, torch.cuda.get_device_name())
PYTHON
"""
ENV = """\
# Source this before anything that imports vLLM.
export PYTHONPATH=/tmp/spark-gpu/site:/tmp/spark-gpu/wheels${PYTHONPATH:+:$PYTHONPATH}
export VLLM_USE_FLASHINFER_SAMPLER=0 HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1
"""
KEEP = """\
# Pack what was compiled here for the next time: keep.sh OUT (then put the parts into .gpu/kept)
set -e
cd "$HOME"
found=$(ls -d .triton .tilelang .cache/vllm 2>/dev/null || true)
mkdir -p "$1"
tar -cf - $found | xz -T0 -6 | split -b 15M -d - "$1/kept.part."
ls -l "$1"
"""
SCRIPTS = {"take.sh": TAKE, "finish.sh": FINISH, "env.sh": ENV, "keep.sh": KEEP}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=HERE.parents[1] / ".gpu")
    parser.add_argument("--limit-mib", type=int, default=48, help="largest chunk (default 48)")
    args = parser.parse_args()
    out, limit = args.out, args.limit_mib * MIB
    requirements = (HERE / "requirements.txt").read_text().split()
    key = digest([VLLM, *requirements, *PIECES, str(limit), *kept(out), *SCRIPTS.values()])
    manifest = read_manifest(out)
    if manifest.get("key") != key or not complete(out, manifest):
        manifest = pack(out, limit, requirements, key)
    print_calls(out, manifest)


def digest(parts: list[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def kept(out: Path) -> list[str]:
    """Compiled kernels of an earlier run (keep.sh), by name and size."""
    return [f"{p.name}:{p.stat().st_size}" for p in sorted((out / "kept").glob("kept.part.*"))]


def read_manifest(out: Path) -> dict[str, object]:
    file = out / "common" / "manifest.json"
    found: dict[str, object] = json.loads(file.read_text()) if file.is_file() else {}
    return found


def complete(out: Path, manifest: dict[str, object]) -> bool:
    """Whether every file of the manifest's chunks lies where it says, in its size."""
    chunks = manifest.get("chunks")
    return isinstance(chunks, dict) and all(
        (out / chunk / name).is_file() and (out / chunk / name).stat().st_size == size
        for chunk, files in chunks.items()
        for name, size in files.items()
    )


def pack(out: Path, limit: int, requirements: list[str], key: str) -> dict[str, object]:
    wheels = out / "cache" / "wheels"
    wheels.mkdir(parents=True, exist_ok=True)
    download(out / "cache", [VLLM])
    download(wheels, requirements)
    files = [*compress(out, limit), *(out / "kept").glob("kept.part.*")]
    files += [part for wheel in sorted(wheels.glob("*.whl")) for part in fitting(wheel, out, limit)]
    by_name = {file.name: file for file in files}
    for old in [*out.glob("c[0-9]*"), out / "common"]:
        if old.name != "cache":
            shutil.rmtree(old, ignore_errors=True)
    chunks: dict[str, dict[str, int]] = {}
    sums = []
    planned = plan({name: file.stat().st_size for name, file in by_name.items()}, limit)
    for number, names in enumerate(planned, 1):
        folder = out / f"c{number}"
        folder.mkdir()
        for name in names:
            os.link(by_name[name], folder / name)
            sums.append(f"{hashlib.sha256(by_name[name].read_bytes()).hexdigest()}  {name}")
        chunks[folder.name] = {name: by_name[name].stat().st_size for name in names}
    common = out / "common"
    common.mkdir()
    for name, text in SCRIPTS.items():
        (common / name).write_text(text)
    (common / "SHA256SUMS").write_text("\n".join(sorted(sums)) + "\n")
    manifest: dict[str, object] = {"key": key, "vllm": VLLM, "chunks": chunks}
    (common / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    return manifest


def download(folder: Path, requirements: list[str]) -> None:
    """Wheels for the host, those that are not there yet."""
    argv = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
    argv += ["--python-version", "3.12", "--implementation", "cp", "-d", str(folder)]
    argv += [word for name in PLATFORMS for word in ("--platform", name)]
    have = {wheel_name(file.name) for file in folder.glob("*.whl")}
    missing = [line for line in requirements if wheel_name(line.replace("==", "-")) not in have]
    if missing:
        subprocess.run([*argv, *missing], check=True)


def wheel_name(text: str) -> tuple[str, str]:
    """Name and version of ``some.Name-1.2-py3-none-any.whl`` or ``some-name-1.2``, comparable."""
    if text.endswith(".whl"):
        name, version = text.split("-")[:2]
    else:
        name, _, version = text.rpartition("-")
    return name.lower().replace("-", "_").replace(".", "_"), version


def compress(out: Path, limit: int) -> list[Path]:
    """vLLM's tree with the pieces V4.1 loads, as parts that leave room beside them in a chunk."""
    wheel = next((out / "cache").glob(f"{VLLM.replace('==', '-')}-*.whl"))
    parts, mark = out / "parts", digest([wheel.name, *PIECES, str(limit)])
    done = parts / "done"
    if not (done.is_file() and done.read_text() == mark):
        shutil.rmtree(parts, ignore_errors=True)
        parts.mkdir()
        tree = parts / "tree"
        with zipfile.ZipFile(wheel) as source:
            names = source.namelist()
            source.extractall(tree, [n for n in names if not n.endswith(".so") or n in PIECES])
        lost = sorted(set(PIECES) - set(names))
        if lost:
            raise SystemExit(f"{wheel.name} has no {', '.join(lost)}: PIECES is of another vLLM")
        packing = f"tar -C {tree} -cf - . | xz -T0 -3 | split -b {limit - 4 * MIB} -d - {parts}/"
        subprocess.run(f"set -o pipefail; {packing}vllm.part.", shell=True, check=True,
                       executable="/bin/bash")  # fmt: skip
        shutil.rmtree(tree)
        done.write_text(mark)
    return sorted(parts.glob("vllm.part.*"))


def fitting(wheel: Path, out: Path, limit: int) -> list[Path]:
    """The wheel itself, or the parts of one that is larger than a chunk."""
    if wheel.stat().st_size <= limit:
        return [wheel]
    prefix = out / "parts" / f"{wheel.name}.part."
    subprocess.run(["split", "-b", str(limit // 2), "-d", str(wheel), str(prefix)], check=True)
    return sorted(prefix.parent.glob(f"{prefix.name}*"))


def print_calls(out: Path, manifest: dict[str, object]) -> None:
    chunks = manifest["chunks"]
    assert isinstance(chunks, dict)
    place = os.path.relpath(out, HERE.parents[1])
    print("On the GPU host, in the project's root, one after the other without a pause:")
    *first, last = chunks
    for name in first:
        size = sum(chunks[name].values()) / MIB
        print(f"  carry {place}/common {place}/{name} ({size:.0f} MiB):  "
              f"bash {place}/common/take.sh {place}/{name}")  # fmt: skip
    print(f"  carry {place}/common {place}/{last} ({sum(chunks[last].values()) / MIB:.0f} MiB):  "
          f"bash {place}/common/take.sh {place}/{last} && bash {place}/common/finish.sh && "
          f". {place}/common/env.sh && python3 tests/gpu/run.py --out RESULT.json")  # fmt: skip


if __name__ == "__main__":
    main()
