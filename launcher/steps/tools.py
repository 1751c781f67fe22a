"""The step that puts the test tools into the engine; only ``./start.sh test`` asks for it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from launcher.steps.base import Context, Step, fingerprint
from launcher.steps.engine import mark, marker, pip

MARKER = ".spark-tools.json"  # in the environment; written last


@dataclass(frozen=True)
class Tools(Step):
    key: str = "tools"
    title: str = "test tools (pytest and hypothesis in the engine)"
    needs: tuple[str, ...] = ("engine",)
    engine: Path = Path()
    lock: Path = Path()

    def inputs(self, ctx: Context) -> str:
        return fingerprint({"lock": ctx.node.read(self.lock).decode()})

    def done(self, ctx: Context) -> bool:
        return marker(ctx, self.engine / MARKER) == self.inputs(ctx)

    def do(self, ctx: Context) -> None:
        wanted = self.inputs(ctx)
        ctx.node.remove(self.engine / MARKER)  # an install cut short must not look like the old one
        python = self.engine / "bin" / "python"
        pip(ctx, self.key, python, "the test tools", ["--no-deps", "-r", str(self.lock)])
        mark(ctx, self.engine / MARKER, wanted)
