"""./start.sh smoke against a real server of the official shape: it passes, and each fault is seen.

The server is on loopback and speaks the three formats; a fault is named in its ``faults``.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the imports below, which this Python may lack
    from _standalone import main

    main(__file__)

import contextlib
import io
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from official_server import MODEL, Fake

from launcher import cli
from launcher.errors import UsageError
from launcher.smoke import checks, run
from launcher.smoke.chat import ANSWER, QUESTION, said
from launcher.smoke.server import Fault, Server
from launcher.smoke.target import api_at

HERE = Path(__file__).resolve().parent
KEY = "smoke-key-4711"
EVERY = [check.key for check in run.ALL]


@pytest.fixture
def fake() -> Iterator[Fake]:
    made = Fake()
    threading.Thread(target=made.serve_forever, args=(0.01,), daemon=True).start()
    yield made
    made.end.set()
    made.shutdown()
    made.server_close()


@dataclass(frozen=True)
class Ended:
    code: int
    said: str

    def keys(self, outcome: str) -> list[str]:
        words = [line.removeprefix("[spark] ").split() for line in self.said.splitlines()]
        return [line[0] for line in words if line[1:2] == [outcome] and line[0] in EVERY]


def smoke(root: Path, *words: str, **environ: str) -> Ended:
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = cli.main(["smoke", *words], root=root, environ=environ)
    return Ended(code, said.getvalue())


def test_the_official_shape_passes_in_full_and_short(fake: Fake, tmp_path: Path) -> None:
    fake.faults = {"an odd stream"}
    ended = smoke(tmp_path, "--url", fake.url)
    assert ended.code == 0, ended.said
    assert ended.keys("passed") == EVERY
    assert "20 chats, 60 tokens" in ended.said and "tokens/s" in ended.said
    assert re.search(rf"smoke: all passed in [\d.]+ s: {MODEL} at {fake.url}\n$", ended.said)
    assert not list(tmp_path.iterdir()), "it only asks"

    fake.seen.clear()
    ended = smoke(tmp_path, "--url", f"{fake.url}/v1/", "--short", "--answer")
    assert (ended.code, ended.keys("passed")) == (0, ["models", "chat", "stream"])
    assert len(fake.seen) == 5


def test_what_is_asked_is_bounded_and_kept_apart(fake: Fake, tmp_path: Path) -> None:
    assert smoke(tmp_path, "--url", fake.url, "--answer").code == 0
    chats = [body for path, body in fake.seen if path.endswith("completions")]
    assert len({body["cache_salt"] for body in chats}) >= len(chats) - 1  # both halves of a round
    for _, body in fake.seen:
        tokens = [body[name] for name in ("max_tokens", "max_output_tokens") if name in body]
        assert tokens and 1 <= tokens[0] <= 64
    assert [body for body in chats if "thinking" not in body] != []
    last = next(body for body in chats if body.get("tool_choice") == "none")
    assert [each["role"] for each in last["messages"]] == ["user", "assistant", "tool"]
    assert last["messages"][2]["tool_call_id"] == last["messages"][1]["tool_calls"][0]["id"]


ASKING = ["chat", "thinking", "stream", "tools", "crowd"]  # all that read a chat's usage


@pytest.mark.parametrize(
    ("fault", "failing", "words"),
    [
        ("not named", ["models"], "/v1/models names another"),
        ("empty content", ["chat", "crowd"], "content that is not empty"),
        ("thinks when told not to", ["chat"], "no reasoning_content"),
        ("wrong total", ASKING, "total_tokens = prompt_tokens + completion_tokens"),
        ("wrong misses", ASKING, "+ prompt_cache_miss_tokens = prompt_tokens"),
        ("no cached_tokens", ASKING, "prompt_tokens_details.cached_tokens, of type int"),
        ("no thinking", ["thinking"], "reasoning_content that is not empty"),
        ("vLLM's name for thinking", ["thinking"], "reasoning_content that is not empty"),
        ("cut before max_tokens", ["thinking"], "finish_reason length after 63 tokens"),
        ("no [DONE]", ["stream"], "ended without [DONE]"),
        ("text lost in the stream", ["stream"], 'said "32", the answer in one piece "323"'),
        ("a token lost in the stream", ["stream"], "had 2 tokens, the answer in one piece 3"),
        ("no usage in the stream", ["stream"], "the last piece of the stream"),
        ("a piece that is no JSON", ["stream"], "a JSON object in each event"),
        ("wrong tool", ["tools"], "a call of 'time'"),
        ("arguments are no JSON", ["tools"], '\\"Oslo"\n'),
        ("arguments against the schema", ["tools"], "as its schema says"),
        ("no call", ["tools"], "a call in tool_calls"),
        ("a call that ends with stop", ["tools"], "finish_reason stop"),
        ("a failed response", ["responses"], "status failed"),
        ("a response without text", ["responses"], "output_text that is not empty"),
        ("a gap in the sequence", ["responses"], "is number 3, after number 1"),
        ("text lost in a response", ["responses"], 'say "33", its end says "323"'),
        ("a response without end", ["responses"], "ended with response.output_text.done"),
        ("another stop_reason", ["messages"], 'stop_reason "refusal"'),
        ("a message without text", ["messages"], "text that is not empty"),
        ("no text streamed", ["messages"], "a stream without text"),
        ("no message_stop", ["messages"], "message_start first and message_stop last"),
        ("no message_start", ["messages"], "message_start first and message_stop last"),
        ("events without names", ["messages"], "an event named '' of type 'message_start'"),
        ("unknown model served", ["errors"], "an unknown model is answered with HTTP 200"),
        ("unknown model is 404", ["errors"], "an unknown model is answered with HTTP 404"),
        ("n served", ["errors"], "n=2 is answered with HTTP 200"),
        ("error without param", ["errors"], '{"error": {"message", "type", "param", "code"}}'),
        ("one of the crowd fails", ["crowd"], "1 of 20 failed; the first: HTTP 503"),
        ("one of the crowd gets no text", ["crowd"], "1 of 20 failed; the first: the message"),
    ],
)
def test_a_fault_fails_its_checks_and_no_other(
    fake: Fake, tmp_path: Path, fault: str, failing: list[str], words: str
) -> None:
    fake.faults = {fault}
    ended = smoke(tmp_path, "--url", fake.url, "--model", MODEL)
    assert ended.code == 1, ended.said
    assert ended.keys("failed") == failing, ended.said
    assert ended.keys("passed") == [key for key in EVERY if key not in failing]
    assert words in ended.said
    assert ended.said.count("  found:  ") == ended.said.count("  needed: ") == len(failing)
    assert f"smoke: {len(EVERY) - len(failing)} of {len(EVERY)} passed" in ended.said


@pytest.mark.parametrize(
    ("fault", "failing", "words"),
    [
        ("/v1/messages hangs", "messages", "/v1/messages: no answer in time"),
        ("the crowd hangs", "crowd", "20 of 20 failed; the first: /v1/chat/completions: no answer"),
        # Something arrives all the while, yet never an answer.
        ("only pings", "responses", "/v1/responses: the answer broke off: no answer in time"),
    ],
)
def test_a_server_that_hangs_costs_no_more_than_the_time_given(
    fake: Fake, tmp_path: Path, fault: str, failing: str, words: str
) -> None:
    fake.faults = {fault}
    ended = smoke(tmp_path, "--url", fake.url, "--model", MODEL, "--timeout", "0.3")
    # Other checks may be late too where the machine is busy.
    assert ended.code == 1 and failing in ended.keys("failed"), ended.said
    assert words in ended.said and "a whole answer within 0.3 s" in ended.said
    took = re.search(rf"{failing} +failed +([\d.]+) s", ended.said)
    assert took is not None and float(took[1]) < 3.0


def test_an_answer_cut_short_is_none(fake: Fake, tmp_path: Path) -> None:
    fake.faults = {"cut short"}
    ended = smoke(tmp_path, "--url", fake.url, "--model", MODEL)
    assert (ended.code, ended.keys("failed")) == (1, EVERY), ended.said
    assert ended.said.count("broke off") == len(EVERY)


def test_the_key_of_another_server_comes_from_the_environment(fake: Fake, tmp_path: Path) -> None:
    (tmp_path / ".env").write_text(f"VLLM_API_KEY={KEY}\n")
    fake.key = KEY
    ended = smoke(tmp_path, "--url", fake.url)
    assert ended.code == 1
    assert "the server's key in VLLM_API_KEY" in ended.said
    assert "not a key: " in ended.said and "Bearer" not in ended.said
    assert smoke(tmp_path, "--url", fake.url, VLLM_API_KEY=KEY).code == 0

    ended = smoke(tmp_path, "--url", fake.url, "--model", MODEL, VLLM_API_KEY="the wrong one")
    assert "not a key: Bearer ***" in ended.said and "the wrong one" not in ended.said


def test_without_a_server_it_says_what_to_do(fake: Fake, tmp_path: Path) -> None:
    ended = smoke(tmp_path)
    assert ended.code == 1
    assert "no deployment is recorded" in ended.said and "./start.sh rehearse" in ended.said
    url = fake.url
    fake.shutdown()
    fake.server_close()
    ended = smoke(tmp_path, "--url", url)
    assert ended.code == 1
    assert "/v1/models: Connection refused" in ended.said and "--model" in ended.said


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("https://h:1", "it asks for https"),
        ("127.0.0.1:8888", "it is no http:// URL"),
        ("http://", "it is no http:// URL"),
        ("http://h:99999", "it is no URL"),
        ("http://[::1", "it is no URL"),
        ("http://a..b:1", "it is no URL"),
        ("http://me:secret@h:1", "it holds a user name"),
        ("http://h:1/other", "more than a host and a port"),
    ],
)
def test_a_url_that_cannot_be_used_is_refused_and_not_repeated(url: str, words: str) -> None:
    with pytest.raises(UsageError) as refused:
        api_at(url, "")
    assert words in refused.value.found
    assert "secret" not in str(refused.value)


def test_urls_and_keys_that_can_be_used() -> None:
    assert api_at("http://h", "").url == "http://h:80"
    assert api_at("http://[::1]:8888/v1", "k").url == "http://[::1]:8888"
    with pytest.raises(UsageError, match="VLLM_API_KEY"):
        api_at("http://h", "a\nb")


def test_ctrl_c_ends_it_at_once_even_in_the_crowd(fake: Fake, tmp_path: Path) -> None:
    fake.faults = {"the crowd hangs"}
    words = [str(tmp_path), "smoke", "--url", fake.url, "--model", MODEL]
    begun = subprocess.Popen(
        [sys.executable, str(HERE / "stub_launcher.py"), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    deadline = time.monotonic() + 10
    while [body.get("max_tokens") for _, body in fake.seen].count(
        checks.CROWD_TOKENS
    ) < checks.CROWD:
        assert time.monotonic() < deadline and begun.poll() is None
        time.sleep(0.01)
    began = time.monotonic()
    begun.send_signal(signal.SIGINT)
    said, _ = begun.communicate(timeout=10)
    assert begun.returncode == 130, said
    assert time.monotonic() - began < 5.0  # where each answer may take 300
    assert "broken off; it only asked" in said
    assert "Traceback" not in said and "\x1b" not in said and "\r" not in said


def test_the_sum_is_to_be_right_and_the_same_twice(fake: Fake) -> None:
    server = Server(api_at(fake.url, ""), MODEL, 5.0)
    assert checks.answer(server) == "'323' twice"
    fake.faults = {"empty content"}
    with pytest.raises(Fault) as wrong:
        checks.answer(server)
    assert QUESTION in wrong.value.found and wrong.value.needed.startswith(ANSWER)


def test_all_the_text_of_a_message_under_either_name_of_thinking() -> None:
    assert said({"reasoning_content": "a", "content": "b"}) == "ab"
    assert said({"reasoning": "a", "content": None}) == "a"
    assert said({"reasoning": "a", "reasoning_content": "a", "content": "b"}) == "ab"


def test_the_old_script_is_the_verb(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    script = shutil.copy2(HERE / "test_smoke.sh", tmp_path / "tests")
    door = tmp_path / "start.sh"
    door.write_text('#!/bin/sh\nprintf "<%s>" "$@"\nexit 7\n')
    door.chmod(0o755)
    environ = {**os.environ, "HOST": "h", "PORT": "1", "MODEL": "a model", "VLLM_API_KEY": KEY}
    done = subprocess.run(["bash", script], env=environ, capture_output=True, text=True, cwd="/")
    assert done.returncode == 7
    assert done.stdout == "<smoke><--short><--answer><--url><http://h:1><--model><a model>"
