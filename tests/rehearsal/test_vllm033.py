"""The overlay on vLLM 0.33.0, which the Sparks run: hooks, argv, and the shortest server test.

The tree is vllm033.py's: 0.33.0's Python files over the libraries of the engine's CPU build.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
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
READY = 300.0  # seconds a pair may take on a machine that does other things too
ROLES: tuple[Role, ...] = ("head", "worker")

# With a draft of k tokens 0.32 keeps k - 1 of a pass's tokens free for it and 0.33 none, so the two
# would cut a long prompt at different places, and bf16 would not add up to the same.
CHUNKS = "LONG_PREFILL_TOKEN_THRESHOLD=64\n"

# The proofs that need vLLM but no engine, on 0.33.0.
AGAIN = """
import sys, vllm, pytest
from vllm.platforms import current_platform
from spark_overlay import versions
print(vllm.__version__, versions.installed(), type(current_platform).__name__)
tests = ("test_hooks.py", "test_argv_parses.py")
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", *(f"tests/rehearsal/{t}" for t in tests)]))
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    named = os.environ.get("REHEARSAL_DIR")
    folder = Path(named).resolve() if named else tmp_path_factory.mktemp("trees")
    return vllm033.make(Path(sys.executable), folder / "vllm-0.33.0")


def test_hooks_and_argv_fit_0_33(tree: Path) -> None:
    environ = {**os.environ, "PYTHONPATH": str(tree), "TRITON_INTERPRET": "1"}
    environ["HF_HUB_OFFLINE"] = "0"  # offline, vLLM's arguments want the model's folder to exist
    environ.pop("SPARK_TEST_DEMAND", None)  # a skip in there is this test's to judge
    done = subprocess.run(
        [sys.executable, "-c", AGAIN], cwd=ROOT, env=environ, capture_output=True, text=True
    )
    said = f"{done.stdout[-4000:]}\n{done.stderr[-2000:]}"
    assert done.returncode == 0, said
    assert "0.33.0 0.33.0+cpu SparkCpuPlatform" in done.stdout.splitlines(), said
    assert " passed" in said and " skipped" not in said, said


@contextmanager
def serving(folder: Path, scratch: Path, path: str) -> Iterator[Api]:
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
        while fault := health.api_fault(api, deployment.served_model_name, 5.0, time.monotonic):
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
    checkpoint: Callable[[str], Path], tree: Path, tmp_path: Path
) -> None:
    folder = checkpoint("standard")
    with serving(folder, tmp_path / "033", str(tree)) as api:
        assert api.get("/version", 5).json() == {"version": "0.33.0"}
        newer = completion(api)
    with serving(folder, tmp_path / "032", "") as api:
        assert api.get("/version", 5).json() == {"version": "0.32.0"}
        older = completion(api)
    assert len(newer["tokens"]) == 8
    assert newer == older
