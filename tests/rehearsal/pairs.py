"""Both ranks on this machine, started as the launcher starts the rehearsal's."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from engine import cache
from settings_root import settings_of

from launcher import health, ports
from launcher.deployment import Deployment, Place, Role, Site, deploy
from launcher.http import Api
from launcher.rehearsal import HOST, INTERFACE, SERVE
from launcher.runtimes.process import ProcessRuntime
from launcher.settings.rehearsal import NAME, PROFILE

ROOT = Path(__file__).resolve().parents[2]
READY = 300.0  # seconds a pair may take on a machine that does other things too
ROLES: tuple[Role, ...] = ("head", "worker")


@contextmanager
def serving(
    folder: Path,
    scratch: Path,
    *,
    path: str = "",
    dotenv: str = "",
    overrides: Sequence[str] = (),
) -> Iterator[Api]:
    """Yields when both ranks serve the checkpoint in ``folder``.

    ``path`` is their PYTHONPATH, ``overrides`` are the KEY=VALUE of ``--set``. A rank that dies,
    then or later, is an error with the end of both logs in it.
    """
    scratch.mkdir()
    settings = settings_of(scratch, dotenv, overrides=overrides).with_profile(NAME, PROFILE)
    deployment = deploy(settings, _site(folder, scratch, path), f"test-{scratch.name}")
    runtime = ProcessRuntime(ROOT, scratch / "logs", os.environ)
    key = settings.secret("VLLM_API_KEY")
    api = Api(HOST, deployment.api_port, key.reveal() if key else "")
    try:
        for rank in deployment.ranks:
            runtime.start(rank, deployment.launch_id)
        deadline = time.monotonic() + READY
        while fault := health.api_fault(api, deployment.served_model_name, 5.0, time.monotonic):
            _require_ranks(runtime, deployment)
            assert time.monotonic() < deadline, f"{fault}\n{_ends(runtime)}"
            time.sleep(0.3)
        yield api
        _require_ranks(runtime, deployment)
    finally:
        for role in ROLES:
            runtime.stop(role, grace=1.0)


def _site(folder: Path, scratch: Path, path: str) -> Site:
    def place(role: Role) -> Place:
        model, engram = str(folder / "checkpoint"), str(folder / "engram-src")
        program = (sys.executable, "-m", SERVE)
        return Place("local", role, HOST, INTERFACE, model, engram, program)

    api_port = ports.free(HOST)
    return Site(
        name="rehearsal",
        device="cpu",
        head=place("head"),
        worker=place("worker"),
        master_port=ports.free(HOST, avoid=(api_port,)),
        api_host=HOST,
        api_port=api_port,
        cache_dir=str(cache(scratch, Path(path).name)),
        extra_env={"PYTHONPATH": path} if path else {},
    )


def _require_ranks(runtime: ProcessRuntime, deployment: Deployment) -> None:
    dead = health.ranks_verdict(deployment.launch_id, [runtime.inspect(role) for role in ROLES])
    assert dead is None, f"{dead}\n{_ends(runtime)}"


def _ends(runtime: ProcessRuntime) -> str:
    lines: list[str] = []
    for role in ROLES:
        lines.append(f"-- {role}")
        runtime.tail(role, 25, lines.append)
    return "\n".join(lines)
