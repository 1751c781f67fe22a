"""The step that puts the overlay into the engine: an editable install, so edits count."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from launcher.steps.base import Context, Step, fingerprint
from launcher.steps.engine import mark, marker, pip

MARKER = ".spark-overlay.json"  # in the environment; written last


@dataclass(frozen=True)
class Overlay(Step):
    key: str = "overlay"
    title: str = "overlay (spark_overlay in the engine)"
    needs: tuple[str, ...] = ("engine",)
    engine: Path = Path()
    source: Path = Path()

    def inputs(self, ctx: Context) -> str:
        project = ctx.node.read(self.source / "pyproject.toml").decode()
        return fingerprint({"source": self.source.resolve(), "project": project})

    def done(self, ctx: Context) -> bool:
        return marker(ctx, self.engine / MARKER) == self.inputs(ctx)

    def do(self, ctx: Context) -> None:
        wanted = self.inputs(ctx)
        ctx.node.remove(self.engine / MARKER)
        python = self.engine / "bin" / "python"
        arguments = ["--no-deps", "--no-build-isolation", "-e", str(self.source)]
        pip(ctx, self.key, python, "the overlay", arguments)
        mark(ctx, self.engine / MARKER, wanted)
