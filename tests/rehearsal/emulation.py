"""CUDA kernels on this CPU: a folder of overlay/csrc, unchanged but for launches, over a few lines
that do what CUDA's words and instructions are defined to do (tests/emulated)."""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import gxx
import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
CSRC, OURS = ROOT / "overlay/csrc", ROOT / "tests/emulated"
#: Dynamic shared memory: common/ptx.cuh has an array instead.
SHARED = "    extern __shared__ __align__(16) uint8_t memory[];\n"
#: What no compiler of the host knows: launches, to the end of a file.
LAUNCHES = (
    r"(template <[^>]*>\n)?cudaError_t launch\w*\(const \w+ &\w+(, const \w+ &\w+)?[^;{]*\{.*"
)
#: Two emulations in one process: neither may take the other's variables for its own.
APART = ("-fno-gnu-unique", "-Wl,-Bsymbolic")
FLAGS = ("-std=c++20", "-O1", "-w", "-shared", "-fPIC", *APART)


def built(name: str, folder: Path) -> Path:
    """The library of overlay/csrc/``name`` around tests/emulated/``name``.cpp. Beside the interface
    it has ``run_backwards(int)``: a CTA's threads take turns from the last to the first."""
    around = (OURS / f"{name}.cpp").read_text()
    for file in (*CSRC.glob("common/*"), *(CSRC / name).rglob("*.*")):
        if file.suffix == ".cu" and f'"{file.name}"' not in around:
            continue
        text = file.read_text().replace(SHARED, "")
        if file.suffix == ".cu":
            text, cut = re.subn(LAUNCHES, "", text, flags=re.DOTALL)
            assert cut == 1, f"{file}: {cut} places where its launches may begin, expected one"
            text += "\n}" * (text.count("{") - text.count("}"))
        copy = folder / file.relative_to(CSRC)
        copy.parent.mkdir(exist_ok=True)
        copy.write_text(text)
    shutil.copytree(
        OURS, folder, dirs_exist_ok=True
    )  # some of its files stand in for the real ones
    flags = [*FLAGS, f"-I{folder}", f"-I{folder / name}"]
    return gxx.compiled(folder / f"{name}.cpp", folder / "emulated.so", flags)


@contextlib.contextmanager
def no_gpu() -> Iterator[pytest.MonkeyPatch]:
    """Torch's words for the current GPU and its stream, answered without one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
        patch.setattr(torch.cuda, "current_stream", lambda *_: SimpleNamespace(cuda_stream=0))
        yield patch
