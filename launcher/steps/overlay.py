"""The step that puts the overlay into the engine: an editable install, so edits count.

Its native code is compiled then; a later edit of that, or a compiler that was missing, installs it
again.
"""

from __future__ import annotations

import hashlib
import shutil
from dataclasses import dataclass
from pathlib import Path

from launcher.steps.base import Context, Step, fingerprint
from launcher.steps.engine import mark, marker, pip

MARKER = ".spark-overlay.json"  # in the environment; written last
COMPILED = (".cpp", ".hpp", ".h", ".cu", ".cuh", ".py")


@dataclass(frozen=True)
class Overlay(Step):
    key: str = "overlay"
    title: str = "overlay (spark_overlay in the engine)"
    needs: tuple[str, ...] = ("engine",)
    engine: Path = Path()
    source: Path = Path()

    def inputs(self, ctx: Context) -> str:
        project = ctx.node.read(self.source / "pyproject.toml").decode()
        native = {}
        for path in sorted(p for p in (self.source / "csrc").rglob("*") if p.suffix in COMPILED):
            native[str(path.relative_to(self.source))] = hashlib.sha256(
                path.read_bytes()
            ).hexdigest()
        said = {"source": self.source.resolve(), "project": project}
        if native:
            said |= {"native": native, "compiler": bool(shutil.which("g++"))}
        return fingerprint(said)

    def done(self, ctx: Context) -> bool:
        return marker(ctx, self.engine / MARKER) == self.inputs(ctx)

    def do(self, ctx: Context) -> None:
        wanted = self.inputs(ctx)
        ctx.node.remove(self.engine / MARKER)
        python = self.engine / "bin" / "python"
        arguments = ["--no-deps", "--no-build-isolation", "-e", str(self.source)]
        pip(ctx, self.key, python, "the overlay", arguments)
        mark(ctx, self.engine / MARKER, wanted)
