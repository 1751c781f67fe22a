"""The overlay on vLLM 0.33.0, which the Sparks run: hooks, argv, and the shortest server test.

The tree is vllm033.py's: 0.33.0's Python files over the libraries of the engine's CPU build.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import vllm033
from settings_root import settings_of

from launcher import health, ports
from launcher.deployment import Place, Role, Site, deploy
from launcher.http import Api
from launcher.rehearsal import HOST, INTERFACE, SERVE
from launcher.runtimes.process import ProcessRuntime
from launcher.settings.rehearsal import NAME, PROFILE

pytestmark = pytest.mark.rehearsal

ROOT = Path(__file__).resolve().parents[2]
READY = 180.0  # seconds a pair may take on a machine that does other things too
ROLES: tuple[Role, ...] = ("head", "worker")

# With a draft of k tokens 0.32 keeps k - 1 of a pass's tokens free for it and 0.33 none, so the two
# would cut a long prompt at different places, and bf16 would not add up to the same.
CHUNKS = "LONG_PREFILL_TOKEN_THRESHOLD=64\n"

CHECK_HOOKS = """
import vllm, spark_overlay.plugin as plugin
from vllm.platforms import current_platform
from spark_overlay import hooks, versions
plugin.register()
for hook in hooks.HOOKS:
    hook.check()
import spark_overlay.model
print(vllm.__version__, versions.installed(), type(current_platform).__name__, len(hooks.HOOKS))
"""


@pytest.fixture(scope="module")
def folder() -> Path:
    """The rehearsal's folder: engine, checkpoint and Engram tables."""
    named = os.environ.get("REHEARSAL_DIR")
    if not named:
        pytest.skip("REHEARSAL_DIR names no rehearsal: ./start.sh test engine")
    return Path(named)


@pytest.fixture(scope="module")
def tree(folder: Path) -> Path:
    return vllm033.make(Path(sys.executable), folder / "vllm-0.33.0")


def on(tree: Path, arguments: Sequence[str]) -> str:
    """What the engine's Python says with 0.33.0 in place of its own vLLM."""
    environ = {**os.environ, "PYTHONPATH": str(tree), "TRITON_INTERPRET": "1"}
    environ["HF_HUB_OFFLINE"] = "0"  # offline, vLLM's arguments want the model's folder to exist
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environ, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def test_every_hook_finds_its_place_in_0_33(tree: Path) -> None:
    last = on(tree, ["-c", CHECK_HOOKS]).splitlines()[-1].split()
    assert last[:3] == ["0.33.0", "0.33.0+cpu", "SparkCpuPlatform"]
    assert int(last[3]) > 0


def test_0_33_reads_the_argv_of_both_ranks(tree: Path) -> None:
    said = on(tree, ["-m", "pytest", "-q", "-rs", "tests/rehearsal/test_argv_parses.py"])
    assert "passed" in said and "skipped" not in said


@contextmanager
def pair(folder: Path, scratch: Path, path: str) -> Iterator[Api]:
    """Both ranks as the launcher starts them, with ``path`` as PYTHONPATH; yields when they serve.

    On failure the end of both logs is in the error.
    """
    scratch.mkdir()

    def place(role: Role) -> Place:
        model, engram = str(folder / "checkpoint"), str(folder / "engram-src")
        program = (sys.executable, "-m", SERVE)
        return Place("local", role, HOST, INTERFACE, model, engram, program)

    api_port = ports.free(HOST)
    site = Site(
        name="rehearsal",
        device="cpu",
        head=place("head"),
        worker=place("worker"),
        master_port=ports.free(HOST, avoid=(api_port,)),
        api_host=HOST,
        api_port=api_port,
        cache_dir=str(scratch / "cache"),
        extra_env={"PYTHONPATH": path} if path else {},
    )
    settings = settings_of(scratch, CHUNKS).with_profile(NAME, PROFILE)
    deployment = deploy(settings, site, f"test-{scratch.name}")
    runtime = ProcessRuntime(ROOT, scratch / "logs", os.environ)
    api = Api(HOST, api_port)
    try:
        for rank in deployment.ranks:
            runtime.start(rank, deployment.launch_id)
        deadline = time.monotonic() + READY
        while fault := health.api_fault(
            api, deployment.served_model_name, 5.0, time.monotonic
        ):
            found = [runtime.inspect(role) for role in ROLES]
            dead = health.ranks_verdict(deployment.launch_id, found)
            assert dead is None, f"{dead}\n{ends(runtime)}"
            assert time.monotonic() < deadline, f"{fault}\n{ends(runtime)}"
            time.sleep(0.3)
        yield api
    finally:
        for role in ROLES:
            runtime.stop(role, grace=1.0)


def ends(runtime: ProcessRuntime) -> str:
    lines: list[str] = []
    for role in ROLES:
        lines.append(f"-- {role}")
        runtime.tail(role, 25, lines.append)
    return "\n".join(lines)


def completion(api: Api) -> dict[str, Any]:
    """Tokens and log-probabilities of a greedy reply to a prompt of two prefill chunks."""
    body = {
        "prompt": [(37 * place + 11) % 500 + 5 for place in range(100)],
        "max_tokens": 8,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 1,
        "return_token_ids": True,
    }
    answer = api.post("/v1/completions", body, timeout=60)
    assert answer.status == 200, answer.excerpt()
    choice = answer.json()["choices"][0]
    return {"tokens": choice["token_ids"], "logprobs": choice["logprobs"]["token_logprobs"]}


def test_two_ranks_of_0_33_answer_as_those_of_0_32(
    folder: Path, tree: Path, tmp_path: Path
) -> None:
    with pair(folder, tmp_path / "033", str(tree)) as api:
        assert api.get("/version", 5).json() == {"version": "0.33.0"}
        newer = completion(api)
    with pair(folder, tmp_path / "032", "") as api:
        assert api.get("/version", 5).json() == {"version": "0.32.0"}
        older = completion(api)
    assert len(newer["tokens"]) == 8
    assert newer == older
