"""The step that makes the rehearsal's checkpoint: tiny, seeded, of the real structure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.errors import LauncherError
from launcher.steps.base import Context, Step, fingerprint

MODULE = "spark_overlay.rehearsal.make"
VARIANT = "taught"  # it knows its lessons, 17*19 among them
MANIFEST = "manifest.json"  # written last by the module
SOURCES = ("rehearsal", "exl3", "engram")  # folders of spark_overlay that decide its bytes


@dataclass(frozen=True)
class Checkpoint(Step):
    key: str = "checkpoint"
    title: str = "checkpoint (a tiny V4.1 from a seed)"
    needs: tuple[str, ...] = ("engine", "overlay")
    python: Path = Path()
    folder: Path = Path()  # gets checkpoint/, engram-src/ and the manifest
    package: Path = Path()  # spark_overlay, as sources

    def inputs(self, ctx: Context) -> str:
        digests = {}
        for name in SOURCES:
            files = sorted((self.package / name).rglob("*"))
            for path in (p for p in files if p.suffix in (".py", ".safetensors")):
                digest = hashlib.sha256(path.read_bytes()).hexdigest()
                digests[str(path.relative_to(self.package))] = digest
        return fingerprint(digests)

    def done(self, ctx: Context) -> bool:
        sizes = manifest_sizes(self._manifest(ctx))
        return bool(sizes) and all(
            ctx.node.size(self.folder / name) == size for name, size in sizes.items()
        )

    def do(self, ctx: Context) -> None:
        ctx.node.remove(self.folder / MANIFEST)
        since = ctx.console.now()
        now = {"text": "making tensors"}

        def line(text: str) -> None:
            ctx.record.text(self.key, text)
            now["text"] = text.strip() or now["text"]

        argv = [str(self.python), "-m", MODULE, "--variant", VARIANT, "--out", str(self.folder)]
        made = ctx.node.run(argv, line=line, tick=lambda: ctx.console.progress(now["text"], since))
        if made.status != 0:
            raise LauncherError(
                f"{MODULE} failed with exit code {made.status}:\n{made.last(12)}",
                "a finished checkpoint",
                "./start.sh rehearse again; if it stays, the log holds all of its output",
            )
        if not self.done(ctx):
            raise LauncherError(
                f"{MODULE} ended well, but {self.folder / MANIFEST} does not agree with the files",
                "every file of the manifest at its recorded size",
                f"remove {self.folder / 'checkpoint'} and run ./start.sh rehearse again",
            )

    def _manifest(self, ctx: Context) -> Mapping[str, Any]:
        try:
            value = json.loads(ctx.node.read(self.folder / MANIFEST))
        except (FileNotFoundError, ValueError):
            return {}
        return value if isinstance(value, dict) else {}


def manifest_sizes(manifest: Mapping[str, Any]) -> dict[str, int]:
    """Relative path -> bytes, from ``{"files": {path: {"size": n, …}}}``."""
    files = manifest.get("files")
    if not isinstance(files, dict):
        return {}
    return {str(name): int(entry["size"]) for name, entry in files.items()}
