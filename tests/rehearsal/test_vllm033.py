"""The overlay on vLLM 0.33.0, which the Sparks run: hooks, argv, and a server with our API.

The tree is vllm033.py's: 0.33.0's Python files over the libraries of the engine's CPU build.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import vllm033
from clients.server import MODEL, OFF, PATIENCE, user
from clients.tools import CALL_TOKENS, GO, WAY
from doors import HARMLESS, OURS, posts
from pairs import ROOT, serving

from launcher.http import Api
from spark_overlay.serving.routes import CLOSED

pytestmark = pytest.mark.rehearsal

CHAT = "/v1/chat/completions"
NO_REASONING = {"effort": "none"}

# With a draft of k tokens 0.32 keeps k - 1 of a pass's tokens free for it and 0.33 none, so the two
# would cut a long prompt at different places, and bf16 would not add up to the same.
CHUNKS = "LONG_PREFILL_TOKEN_THRESHOLD=64\n"

# The proofs that need vLLM but no engine, on 0.33.0.
AGAIN = """
import sys, vllm, pytest
from vllm.platforms import current_platform
from spark_overlay import versions
print(vllm.__version__, versions.installed(), type(current_platform).__name__)
tests = ("test_hooks.py", "test_argv_parses.py", "test_batches.py", "test_launches.py")
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
    choice = found(api, "/v1/completions", body)["choices"][0]
    return {"tokens": choice["token_ids"], "logprobs": choice["logprobs"]["token_logprobs"]}


def found(api: Api, path: str, body: dict[str, Any]) -> Any:
    answer = api.post(path, body, PATIENCE)
    assert answer.status == 200, answer.excerpt()
    return answer.json()


def require_our_api(api: Api) -> None:
    """The three APIs are the overlay's: a lesson in each, a constrained call, official errors."""
    common = {"model": MODEL, "temperature": 0}
    asked = {**common, **OFF, "messages": [user("Say hi")], "max_tokens": 8}
    assert found(api, CHAT, asked)["choices"][0]["message"]["content"] == "hi"
    assert streamed(api, asked) == "hi"
    assert found(api, "/v1/messages", asked)["content"] == [{"type": "text", "text": "hi"}]
    response = {**common, "input": "Say hi", "max_output_tokens": 8, "reasoning": NO_REASONING}
    (item,) = found(api, "/v1/responses", response)["output"]
    assert [part["text"] for part in item["content"]] == ["hi"]
    demanded = {"tools": [GO], "tool_choice": "required", "max_tokens": CALL_TOKENS}
    choice = found(api, CHAT, {**asked, **demanded})["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls" and call["function"]["name"] == "go"
    assert json.loads(call["function"]["arguments"])["to"] in WAY["to"]["enum"]
    refused = api.post(CHAT, {**asked, "model": "no-such-model"}, PATIENCE)
    assert refused.status == 400
    assert "but you passed no-such-model" in refused.json()["error"]["message"]
    assert posts(api) <= {*OURS, *CLOSED, *HARMLESS}, "new doors: see clients/test_doors.py"


def streamed(api: Api, asked: dict[str, Any]) -> str:
    """The content of a stream that comes to its end."""
    *events, end = api.events(CHAT, {**asked, "stream": True}, PATIENCE)
    assert end.data == "[DONE]"
    choices = [json.loads(event.data)["choices"][0] for event in events]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def test_two_ranks_of_0_33_answer_as_those_of_0_32(
    checkpoint: Callable[[str], Path], tree: Path, tmp_path: Path
) -> None:
    folder = checkpoint("taught")
    with serving(folder, tmp_path / "033", path=str(tree), dotenv=CHUNKS) as api:
        assert api.get("/version", 5).json() == {"version": "0.33.0"}
        newer = completion(api)
        require_our_api(api)
    with serving(folder, tmp_path / "032", dotenv=CHUNKS) as api:
        assert api.get("/version", 5).json() == {"version": "0.32.0"}
        older = completion(api)
    assert len(newer["tokens"]) == 8
    assert newer == older
