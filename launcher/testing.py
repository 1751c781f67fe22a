"""``./start.sh test [LEVEL …]``: what this machine can run is run, what it cannot is named.

A level is a folder of tests with the tools it needs. Nothing is installed outside the checkout.
Where CI=true a level that should have run and did not is a failure, and so is a skipped test.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from launcher import lock, rehearsal
from launcher.app import App
from launcher.clock import span
from launcher.console import Console
from launcher.errors import LauncherError
from launcher.record import Secrets
from launcher.steps import runner
from launcher.steps.nvcc import Nvcc
from launcher.steps.tools import Tools

ENGINE_STEPS = ("engine", "overlay", "checkpoint")
DEMAND = "SPARK_TEST_DEMAND"  # tests/conftest.py: a skipped test fails the run


@dataclass(frozen=True)
class Bench:
    """Where the tests run: the checkout, its .venv's Python, the environment, and the console."""

    root: Path
    python: str
    environ: Mapping[str, str]
    console: Console

    @property
    def demanding(self) -> bool:
        return self.environ.get("CI", "").lower() in ("true", "1")

    def call(self, argv: Sequence[str], **more: str) -> int:
        """Run one command in the checkout, its output as it comes; the exit status."""
        sys.stdout.flush()
        return subprocess.run(argv, cwd=self.root, env=self._for(more), check=False).returncode

    @contextmanager
    def beside(self, argv: Sequence[str], **more: str) -> Iterator[Callable[[], int]]:
        """Run one command in the checkout beside others. What is yielded waits for its end, tells
        its output as a whole and gives its exit status; what still runs afterwards is ended."""
        with tempfile.TemporaryFile() as told:
            process = subprocess.Popen(
                argv, cwd=self.root, env=self._for(more), stdout=told, stderr=subprocess.STDOUT
            )

            def end() -> int:
                status = process.wait()
                told.seek(0)
                self.console.plain(told.read().decode(errors="replace").rstrip())
                return status

            try:
                yield end
            finally:
                if process.poll() is None:
                    process.terminate()
                process.wait()

    def _for(self, more: Mapping[str, str]) -> dict[str, str]:
        demand = {DEMAND: "1"} if self.demanding else {}
        return {**self.environ, **more, **demand}


@dataclass(frozen=True)
class Level:
    """One kind of proof. ``run`` gives an exit status; ``obstacle`` why this machine cannot."""

    key: str
    told: str
    run: Callable[[Bench], int]
    obstacle: Callable[[Bench], str | None]
    in_ci: bool = True
    by_name: str = ""  # why it runs only when it is asked for


def run(argv: Sequence[str], *, root: Path, environ: Mapping[str, str] | None = None) -> int:
    """The levels asked for, or all; 0 if none failed."""
    made = argparse.ArgumentParser(
        prog="./start.sh test",
        allow_abbrev=False,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    told = "\n".join(f"{level.key}: {level.told}" for level in LEVELS)
    made.add_argument("levels", nargs="*", metavar="LEVEL", help=told)
    wanted = made.parse_args(list(argv)).levels
    unknown = sorted(set(wanted) - {level.key for level in LEVELS})
    if unknown:
        known = ", ".join(level.key for level in LEVELS)
        made.error(f"no level {', '.join(unknown)}; there are {known}")
    environ = os.environ if environ is None else environ
    bench = Bench(root, _tools_python(root), environ, Console())
    chosen = [level for level in LEVELS if not wanted or level.key in wanted]
    return _report(bench, [(level, *_outcome(bench, level, bool(wanted))) for level in chosen])


def _outcome(bench: Bench, level: Level, named: bool) -> tuple[str, str]:
    """("passed" | "failed" | "skipped", a word about it)."""
    why = level.obstacle(bench)
    if why is None and level.by_name and not named:
        why = f"it takes {level.by_name}; ./start.sh test {level.key}"
    if why is not None:
        bench.console.warn(f"level {level.key} is skipped: {why}")
        return ("failed" if bench.demanding and level.in_ci else "skipped"), why
    bench.console.say(f"level {level.key}: {level.told} …")
    began = time.monotonic()
    try:
        status = level.run(bench)
    except LauncherError as error:
        bench.console.error(str(error))
        return "failed", "its preparation failed"
    took = span(time.monotonic() - began)
    return ("passed", took) if status == 0 else ("failed", f"{took}, exit status {status}")


def _report(bench: Bench, outcomes: Sequence[tuple[Level, str, str]]) -> int:
    for level, outcome, word in outcomes:
        bench.console.plain(f"  {level.key:<9} {outcome:<8} {word}")
    count = {
        kind: sum(o == kind for _, o, _ in outcomes) for kind in ("passed", "failed", "skipped")
    }
    bench.console.plain("levels: " + ", ".join(f"{n} {kind}" for kind, n in count.items()))
    return 1 if count["failed"] or not count["passed"] else 0


def _tools_python(root: Path) -> str:
    """.venv's Python, with the test tools in it."""
    made = subprocess.run(
        [str(root / "start.sh"), "--prepare", "dev"], stdout=subprocess.PIPE, text=True, check=False
    )
    if made.returncode:
        raise LauncherError(
            "the test tools could not be installed into .venv (the lines above say why)",
            "pip's package registry within reach",
            "./start.sh test again",
            root / "logs" / "venv.log",
        )
    return made.stdout.strip()


def _always(bench: Bench) -> str | None:
    return None


def _checks(bench: Bench) -> int:
    tool = Path(bench.python).parent
    scripts = ["start.sh", "download.sh", ".ci/run", *map(str, _shell(bench.root))]
    commands = (
        [str(tool / "ruff"), "check", "."],
        [str(tool / "ruff"), "format", "--check", "."],
        [str(tool / "mypy")],
        [str(tool / "shellcheck"), *scripts],
        [str(tool / "shfmt"), "-i", "4", "-d", *scripts],
    )
    return max(bench.call(command) for command in commands)


def _shell(root: Path) -> list[Path]:
    found = [*(root / "scripts").glob("*.sh"), *(root / "tests").glob("*.sh")]
    return [path.relative_to(root) for path in sorted(found)]


def _source(bench: Bench) -> int:
    workers = ["-n", "2", "--dist", "worksteal"]  # the tests of real processes mostly wait
    return bench.call(
        [bench.python, "-m", "pytest", "-q", *workers, "--ignore-glob=tests/*/*", "tests"]
    )


def _engine(bench: Bench) -> int:
    folder = prepare_engine(bench, compiler=True)
    tests = [str(folder / "engine" / "bin" / "python"), "-m", "pytest", "-q", "tests/rehearsal"]
    # The interpreter is chosen before Python starts; a thread per process is what two cores bear.
    environ = {
        "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "REHEARSAL_DIR": str(folder),
        "CUDA_HOME": str(_nvcc(bench, folder).home),
    }
    # Tests of engines mostly wait for them, the others for nothing.
    with bench.beside([*tests, "-m", "not engines"], **environ) as others:
        status = bench.call([*tests, "-m", "engines"], **environ)
        return max(status, others())


def _story(bench: Bench) -> int:
    folder = prepare_engine(bench)
    return bench.call(
        [bench.python, "-m", "pytest", "-q", "tests/story"], REHEARSAL_DIR=str(folder)
    )


def _nvcc(bench: Bench, folder: Path) -> Nvcc:
    return Nvcc(
        python=folder / "engine" / "bin" / "python",
        folder=folder / "nvcc",
        lock=bench.root / "launcher" / "locks" / "nvcc.lock",
    )


def prepare_engine(bench: Bench, compiler: bool = False) -> Path:
    """The rehearsal's folder with engine, overlay, checkpoint and test tools in place, and with
    ``compiler`` the one for CUDA."""
    app = App(bench.root, bench.environ, bench.console, Secrets(), rehearsal.build)
    with lock.hold(app.lock, "test"):
        settings = app.settings(())
        ctx, steps = app.build(app, settings, app.open_run())
        folder = settings.path("REHEARSAL_DIR").resolve()
        tools = Tools(
            engine=folder / "engine", lock=bench.root / "launcher" / "locks" / "engine-test.lock"
        )
        more = [tools, *([_nvcc(bench, folder)] if compiler else [])]
        runner.run([*(step for step in steps if step.key in ENGINE_STEPS), *more], ctx)
    return folder


def _no_gpu(bench: Bench) -> str | None:
    if not shutil.which("nvidia-smi"):
        return "no NVIDIA driver on this machine"
    asked = subprocess.run([bench.python, "-c", "import torch, vllm"], capture_output=True)
    return None if asked.returncode == 0 else "it needs torch and vLLM: see tests/gpu/README.md"


def _rig(bench: Bench) -> int:
    workers = ["-n", "3", "--dist", "loadfile"]  # each with a rig of its own; they mostly wait
    return bench.call([bench.python, "-m", "pytest", "-q", *workers, "tests/rig"])


RIG_TOOLS = ("ip", "dockerd", "sshd", "ssh", "rsync", "ping", "tar", "unshare", "nsenter")


def _no_rig(bench: Bench) -> str | None:
    if os.geteuid() != 0:
        return "it makes network namespaces and mounts: run it as root (sudo ./start.sh test rig)"
    path = bench.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin"
    missing = [tool for tool in RIG_TOOLS if not shutil.which(tool, path=path)]
    return f"this machine lacks {', '.join(missing)}" if missing else None


# As tests/vm/base.py has them, with Debian's package of each.
VM_TOOLS = ("qemu-system-x86_64", "debootstrap", "busybox", "cpio", "modprobe", "dpkg-deb",
            "apt-get", "mkfs.ext4", "ip", "ssh", "unshare", "nsenter", "ldd")  # fmt: skip


def _no_vm(bench: Bench) -> str | None:
    if os.geteuid() != 0:
        return "it makes a disk image and a network namespace: run it as root"
    if os.uname().machine != "x86_64":
        return f"its guests are x86-64 machines, as this one must be ({os.uname().machine})"
    path = bench.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin"
    missing = [tool for tool in VM_TOOLS if not shutil.which(tool, path=path)]
    return f"this machine lacks {', '.join(missing)}" if missing else None


def _pytest(folder: str) -> Callable[[Bench], int]:
    return lambda bench: bench.call([bench.python, "-m", "pytest", "-q", f"tests/{folder}"])


LEVELS: tuple[Level, ...] = (
    Level("checks", "style, types and shell", _checks, _always),
    Level("source", "formats, settings and launcher, without torch", _source, _always),
    Level("engine", "the overlay in vLLM on the CPU", _engine, _always),
    Level("story", "the launcher from outside, with two real ranks", _story, _always),
    Level("rig", "the launcher on two nodes: ssh, Docker, a link", _rig, _no_rig),
    Level("gpu", "kernels on a GPU", _pytest("gpu"), _no_gpu, False),
    Level(
        "vm", "two virtual machines: a real GID table", _pytest("vm"), _no_vm, False, "ten minutes"
    ),
)
