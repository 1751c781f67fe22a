"""./start.sh smoke against a real server of the official shape: it passes, and each fault is seen.

The server is on loopback and speaks the three formats; a fault is named in its ``faults``.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the imports below, which this Python may lack
    from _standalone import main

    main(__file__)

import contextlib
import io
import itertools
import json
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
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import official
import pytest

from launcher import cli
from launcher.errors import UsageError
from launcher.smoke import checks, run
from launcher.smoke.chat import ANSWER, QUESTION, said
from launcher.smoke.server import Fault, Server
from launcher.smoke.target import api_at

HERE = Path(__file__).resolve().parent
MODEL = "the model"
KEY = "smoke-key-4711"
EVERY = [check.key for check in run.ALL]


class Fake(ThreadingHTTPServer):
    """``faults`` are what it does wrong; ``seen`` are the requests it was sent."""

    daemon_threads = True
    request_queue_size = 64  # or the crowd would wait for a second try at the door

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.faults: set[str] = set()
        self.key = ""
        self.seen: list[tuple[str, dict[str, Any]]] = []
        self.crowd = itertools.count()
        self.end = threading.Event()  # ends what hangs

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):  # clients may go away
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    server: Fake
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.allowed():
            names = ["another"] if self.wrong("not named") else [MODEL, "another"]
            self.send(official.models(*names))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append((self.path, body))
        if not self.allowed():
            return
        if self.wrong(f"{self.path} hangs"):
            self.server.end.wait()
        elif self.path == "/v1/chat/completions":
            self.chat(body)
        elif self.path == "/v1/responses":
            self.respond(body)
        else:
            self.message(body)

    def chat(self, body: dict[str, Any]) -> None:
        if body["model"] != MODEL and not self.wrong("unknown model served"):
            refused = official.refusal("no such model", "model")
            if self.wrong("error without param"):
                del refused["error"]["param"]
            self.send(refused, 404 if self.wrong("unknown model is 404") else 400)
        elif body.get("n", 1) != 1 and not self.wrong("n served"):
            self.send(official.refusal("one only", "n"), 400)
        elif body["max_tokens"] == checks.CROWD_TOKENS:
            self.one_of_the_crowd(body)
        elif body.get("tool_choice") == "required":
            self.call()
        else:
            self.say(body)

    def one_of_the_crowd(self, body: dict[str, Any]) -> None:
        number = next(self.server.crowd)
        if self.wrong("the crowd hangs"):
            self.server.end.wait()
        elif number == 7 and self.wrong("one of the crowd fails"):
            self.send(official.refusal("overloaded"), 503)
        elif number == 7 and self.wrong("one of the crowd gets no text"):
            self.send(official.chat({"content": ""}, official.usage(9, 0)))
        else:
            self.say(body)

    def say(self, body: dict[str, Any]) -> None:
        message = {"content": ANSWER}
        tokens, finish = 3, "stop"
        if body.get("thinking") != {"type": "disabled"}:
            message = {"reasoning_content": "17*20 - 17 " * 5}
            tokens, finish = body["max_tokens"], "length"
            if self.wrong("vLLM's name for thinking"):
                message = {"reasoning": message["reasoning_content"]}
            if self.wrong("no thinking"):
                message = {"reasoning_content": "", "content": ANSWER}
            if self.wrong("cut before max_tokens"):
                tokens -= 1
        elif self.wrong("thinks when told not to"):
            message["reasoning_content"] = "hm"
        if self.wrong("empty content"):
            message["content"] = ""
        used = official.usage(9, tokens, cached=4)
        if self.wrong("wrong total"):
            used["total_tokens"] += 1
        if self.wrong("wrong misses"):
            used["prompt_cache_miss_tokens"] += 1
        if self.wrong("no cached_tokens"):
            used["prompt_tokens_details"] = None
        if not body.get("stream"):
            self.send(official.chat(message, used, finish))
            return
        if self.wrong("text lost in the stream"):
            message["content"] = ANSWER[:-1]
        if self.wrong("a token lost in the stream"):
            used = official.usage(9, tokens - 1)
        payloads = official.chat_stream(message, used, finish)
        if self.wrong("no [DONE]"):
            payloads.pop()
        if self.wrong("no usage in the stream"):
            del payloads[-2]
        if self.wrong("a piece that is no JSON"):
            payloads.insert(1, "{")
        self.stream(official.sent(payloads))

    def call(self) -> None:
        name = "time" if self.wrong("wrong tool") else "weather"
        arguments = '{"city": "Oslo"}'
        if self.wrong("arguments are no JSON"):
            arguments = '{"city": "Oslo'
        if self.wrong("arguments against the schema"):
            arguments = '{"city": 7}'
        message = {"content": "", "tool_calls": [official.call(name, arguments)]}
        if self.wrong("no call"):
            message["tool_calls"] = []
        finish = "stop" if self.wrong("a call that ends with stop") else "tool_calls"
        self.send(official.chat(message, official.usage(9, 5), finish))

    def respond(self, body: dict[str, Any]) -> None:
        status = "failed" if self.wrong("a failed response") else "incomplete"
        text = "" if self.wrong("a response without text") else ANSWER
        if not body.get("stream"):
            self.send(official.response(text, status))
            return
        events = official.response_events(text, status)
        if self.wrong("a gap in the sequence"):
            events = [*events[:2], *events[3:]]
        if self.wrong("text lost in a response"):
            events = [e for e in events if e.get("delta") != "2"]
            events = [{**event, "sequence_number": n} for n, event in enumerate(events)]
        if self.wrong("a response without end"):
            events.pop()
        self.stream(official.named(events))

    def message(self, body: dict[str, Any]) -> None:
        reason = "refusal" if self.wrong("another stop_reason") else "end_turn"
        text = "" if self.wrong("a message without text") else ANSWER
        if not body.get("stream"):
            self.send(official.message(text, reason))
            return
        events = official.message_events("" if self.wrong("no text streamed") else text, reason)
        if self.wrong("no message_stop"):
            events.pop()
        if self.wrong("no message_start"):
            del events[0]
        sent = official.named(events)
        if self.wrong("events without names"):
            sent = official.sent(json.dumps(event) for event in events)
        self.stream(sent)

    def wrong(self, fault: str) -> bool:
        return fault in self.server.faults

    def allowed(self) -> bool:
        sent = self.headers.get("Authorization", "")
        if self.server.key and sent != f"Bearer {self.server.key}":
            self.send(official.refusal(f"not a key: {sent}"), 401)
            return False
        return True

    def send(self, body: dict[str, Any], status: int = 200) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data[:-5] if self.wrong("cut short") else data)
        self.close_connection = True

    def stream(self, data: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        if self.wrong("an odd stream"):  # allowed: other line ends, comments, no space, any pieces
            data = b": hello\r\nretry: 5\r\n\r\n" + data.replace(b"\n", b"\r\n")
            data = data.replace(b"data: ", b"data:").replace(b"data:{", b"data:{\r\ndata: ")
        pieces = [data[at : at + 7] for at in range(0, len(data), 7)]
        for piece in pieces:
            self.chunk(piece)
            if self.wrong("cut short"):
                return
            while self.wrong("only pings") and self.path == "/v1/responses":
                if self.server.end.wait(0.02):
                    return
                self.chunk(b": ping\n\n")
        self.chunk(b"")
        self.close_connection = True

    def chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def log_message(self, *_: Any) -> None:
        pass


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
