"""The step that puts CUDA's compiler beside the engine; only ``./start.sh test`` asks for it.

Not into the engine: torch brings CUDA libraries of its own versions there.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from launcher.steps.base import Context, Step, fingerprint
from launcher.steps.engine import mark, marker, pip

MARKER = ".spark-nvcc.json"  # in the folder; written last


@dataclass(frozen=True)
class Nvcc(Step):
    """``python`` has pip; ``folder`` is this step's alone."""

    key: str = "nvcc"
    title: str = "nvcc (compiles the kernels without a GPU)"
    needs: tuple[str, ...] = ("engine",)
    python: Path = Path()
    folder: Path = Path()
    lock: Path = Path()

    @property
    def home(self) -> Path:
        """What CUDA_HOME means."""
        return self.folder / "nvidia" / "cu13"

    def inputs(self, ctx: Context) -> str:
        return fingerprint({"lock": ctx.node.read(self.lock).decode()})

    def done(self, ctx: Context) -> bool:
        return marker(ctx, self.folder / MARKER) == self.inputs(ctx)

    def do(self, ctx: Context) -> None:
        wanted = self.inputs(ctx)
        ctx.node.remove(self.folder)
        arguments = ["--no-deps", "--target", str(self.folder), "-r", str(self.lock)]
        pip(ctx, self.key, self.python, "CUDA's compiler", arguments)
        mark(ctx, self.folder / MARKER, wanted)
