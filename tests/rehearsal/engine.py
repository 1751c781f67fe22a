"""Runs engines for the tests: one process and one start for each job, two at a time.

vLLM allows one engine per process, and a start takes a good part of a job's time. So a job holds
everything that is asked of one configuration, its answers are shared by all tests of a session, and
jobs start as soon as it is known which tests will run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
LIMIT = 1200  # seconds for one job on a machine that does other things too
AT_ONCE = 2

#: One thread per process is what two cores bear; the interpreter is chosen before Python starts;
#: the engine stays in the job's own process, where a step may set the scheduler's budget.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TRITON_INTERPRET": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "HF_HUB_OFFLINE": "1",
}

Answers = Mapping[str, Any]
Step = Mapping[str, Any]


class EngineFailed(RuntimeError):
    """A job ended without its answers."""


@dataclass(frozen=True)
class Job:
    """``options`` are arguments of ``vllm.LLM`` beside the common ones (jobs.py); ``variant`` is
    the checkpoint's, ``store`` the overlay's engram_store. ``after`` names a job whose tape this
    one reads: ``{tape}`` in a step's arguments is one path for all jobs of a session."""

    variant: str = "standard"
    store: str = "file"
    options: Mapping[str, Any] = field(default_factory=dict)
    steps: tuple[Step, ...] = ()
    after: str | None = None
    overlay: Mapping[str, Any] = field(default_factory=dict)


class Engines:
    """The answers of jobs by name. ``place`` gives the folder of a checkpoint's variant."""

    def __init__(
        self,
        jobs: Mapping[str, Job],
        common: Mapping[str, Any],
        place: Callable[[str], Path],
        scratch: Path,
    ) -> None:
        self._jobs, self._common, self._place, self._scratch = jobs, common, place, scratch
        self._pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="engine")
        self._running: dict[str, Future[Answers]] = {}
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, names: Iterable[str]) -> None:
        for name in names:
            if name in self._running:
                continue
            job = self._jobs[name]
            if job.after is not None:
                # Submitted first, it is never behind a job that waits for it.
                self.start([job.after])
            self._running[name] = self._pool.submit(self._run, name, job)

    def answers(self, name: str) -> Answers:
        """Waits for the job. Raises EngineFailed."""
        self.start([name])
        return self._running[name].result()

    def log(self, name: str) -> str:
        """What the job's processes wrote."""
        return (self._scratch / f"{name}.log").read_text(errors="replace")

    @property
    def tape(self) -> Path:
        """What the job that records wrote, and others read."""
        return self._scratch / "tape.safetensors"

    def close(self) -> None:
        """End what still runs (a session that was interrupted)."""
        for future in self._running.values():
            future.cancel()
        for process in self._processes:
            if process.poll() is None:
                process.terminate()
        self._pool.shutdown(wait=True)

    def _run(self, name: str, job: Job) -> Answers:
        if job.after is not None:
            self._running[job.after].result()
        root = self._place(job.variant)
        overlay = {"engram_dir": str(root / "engram-src"), "engram_store": job.store}
        overlay |= job.overlay
        engine = {
            **self._common,
            **job.options,
            "model": str(root / "checkpoint"),
            "additional_config": {"spark_overlay": overlay},
        }
        tape = str(self.tape)
        steps = [
            {**step, "args": [tape if a == "{tape}" else a for a in step.get("args", ())]}
            for step in job.steps
        ]
        task, result, log = (self._scratch / f"{name}.{kind}" for kind in ("job", "json", "log"))
        task.write_text(json.dumps({"engine": engine, "steps": steps}))
        argv = [sys.executable, str(HERE / "engine_worker.py"), str(task), str(result)]
        environ = environment(cache(self._scratch))
        with log.open("wb") as out:
            process = subprocess.Popen(
                argv, stdout=out, stderr=subprocess.STDOUT, env=environ, cwd=self._scratch
            )
            self._processes.append(process)
            try:
                status: int | str = process.wait(LIMIT)
            except subprocess.TimeoutExpired:
                process.terminate()
                process.wait()
                status = f"nothing within {LIMIT} s"
        if status != 0:
            raise EngineFailed(f"engine {name!r} ended with {status}; {log} ends with\n{tail(log)}")
        answers: Answers = json.loads(result.read_text())
        return answers


def cache(scratch: Path, tree: str = "") -> Path:
    """The rehearsal's: a new one costs each rank processes that look at the model's classes. What
    one vLLM kept there another throws away, so that each ``tree`` has its own."""
    named = os.environ.get("REHEARSAL_DIR")
    return (Path(named).resolve() if named else scratch) / "cache" / tree


def environment(kept: Path) -> dict[str, str]:
    """Ours, with this checkout's overlay and the probe importable in every process of a job."""
    paths = [str(HERE), str(ROOT / "overlay"), os.environ.get("PYTHONPATH", "")]
    ours = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "VLLM_CACHE_ROOT": f"{kept}/vllm"}
    return {**os.environ, **ENVIRONMENT, **ours}


def tail(log: Path, lines: int = 40) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
