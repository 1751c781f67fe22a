"""The three APIs over ASGI: answers, official errors, and what happens when someone leaves."""

from __future__ import annotations

if __name__ == "__main__":  # before the imports below, which this Python may lack
    from _standalone import main

    main(__file__, "deepseek_recipe", "starlette")

import asyncio
import json
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import pytest
from answer_readers import Told, heard, told
from asgi_calls import Act, Got, ScriptedEngine, call, endpoint, run
from starlette.requests import Request

from spark_overlay.rehearsal.tokenizer import tokenizer_json
from spark_overlay.serving import api as api_module
from spark_overlay.serving.answer import Reason
from spark_overlay.serving.api import Api
from spark_overlay.serving.dialect import Protocol
from spark_overlay.serving.errors import ApiError
from spark_overlay.serving.prompt import Prompts
from spark_overlay.serving.reply import Reply
from spark_overlay.serving.step import Step

Body = dict[str, Any]
PROTOCOLS: tuple[Protocol, ...] = ("chat", "responses", "messages")
PROMPTS = Prompts(json.dumps(tokenizer_json()), ["kit"])
HELLO = {"role": "user", "content": "hello"}
LEAST: dict[Protocol, Body] = {
    "chat": {"messages": [HELLO]},
    "responses": {"input": [HELLO]},
    "messages": {"messages": [HELLO], "max_tokens": 100},
}

every_protocol = pytest.mark.parametrize("protocol", PROTOCOLS)
both_ways = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


def request(protocol: Protocol, **fields: Any) -> bytes:
    return json.dumps({"model": "kit", **LEAST[protocol], **fields}).encode()


def says(*texts: str, cached: int = 0) -> Callable[[], Iterable[Act]]:
    """A step for each text; the last one ends."""

    def script() -> Iterator[Act]:
        for number, text in enumerate(texts, 1):
            reason: Reason | None = "stop" if number == len(texts) else None
            yield Step(PROMPTS.tokenizer.encode(text), cached=cached, reason=reason)

    return script


THOUGHT = says("2 and", " 3</think>", "\n\nmake", " 5.", cached=4)


def ask(engine: ScriptedEngine, protocol: Protocol, body: bytes, **how: Any) -> Got:
    app = endpoint(PROMPTS, engine, protocol)
    got: Got = run(lambda: call(app, body, **how))
    return got


def read(protocol: Protocol, got: Got, stream: bool) -> Told:
    """What the client has been told."""
    assert (got.status, got.complete) == (200, True), got
    if not stream:
        assert got.headers["content-type"] == "application/json"
        return told(protocol, got.body.decode())
    assert got.headers["content-type"].startswith("text/event-stream")
    events = got.events
    if protocol == "chat":
        assert events.pop() == "data: [DONE]\n\n"
    return heard(protocol, events)


def error(protocol: Protocol, got: Got) -> Body:
    """The official error in a reply."""
    assert got.headers["content-type"] == "application/json"
    body: Body = got.json
    if protocol == "messages":
        assert body.pop("type") == "error"
    assert list(body) == ["error"]
    found: Body = body["error"]
    assert list(found) == ["message", "type", "param", "code"]
    return found


@every_protocol
@both_ways
def test_an_answer_is_told_with_its_usage(protocol: Protocol, stream: bool) -> None:
    engine = ScriptedEngine(THOUGHT)
    got = ask(engine, protocol, request(protocol, stream=stream))
    one = read(protocol, got, stream)
    assert (one.reasoning, one.content, one.reason) == ("2 and 3", "make 5.", "stop")
    spoken = sum(len(step.ids) for step in THOUGHT() if isinstance(step, Step))
    assert (one.tokens, one.cached) == (spoken, 4)


def test_usage_names_the_prompt_and_what_of_it_was_cached() -> None:
    found = {}
    for protocol in PROTOCOLS:
        engine = ScriptedEngine(THOUGHT, image_tokens=100)
        found[protocol] = ask(engine, protocol, request(protocol)).json["usage"]
        prompt = len(engine.requests[0].ids) + 100
    chat, responses, messages = (found[protocol] for protocol in PROTOCOLS)
    assert chat["prompt_tokens"] == responses["input_tokens"] == prompt
    assert chat["prompt_tokens_details"]["cached_tokens"] == chat["prompt_cache_hit_tokens"] == 4
    assert chat["prompt_cache_miss_tokens"] == prompt - 4
    assert responses["input_tokens_details"]["cached_tokens"] == 4
    assert messages["cache_read_input_tokens"] == 4
    assert messages["input_tokens"] == prompt - 4


@pytest.mark.parametrize("options", [None, {"include_usage": True}])
def test_a_streamed_chat_tells_its_usage_with_its_last_chunk(options: Body | None) -> None:
    got = ask(ScriptedEngine(THOUGHT), "chat", request("chat", stream=True, stream_options=options))
    assert got.events[-1] == "data: [DONE]\n\n"
    *before, last = (json.loads(event.removeprefix("data: ")) for event in got.events[:-1])
    assert (last["choices"][0]["finish_reason"], last["usage"]["prompt_cache_hit_tokens"]) == (
        "stop",
        4,
    )
    assert all(chunk.get("usage") is None for chunk in before)


@pytest.mark.parametrize(
    ("protocol", "prefix"), [("chat", ""), ("responses", "resp_"), ("messages", "msg_")]
)
def test_each_answer_has_an_id_of_its_own(protocol: Protocol, prefix: str) -> None:
    engine = ScriptedEngine(THOUGHT)
    ids = {ask(engine, protocol, request(protocol)).json["id"] for _ in range(3)}
    assert len(ids) == 3
    assert all(id.startswith(prefix) for id in ids)


@every_protocol
def test_the_engine_is_asked_with_the_prompt_and_the_rest_of_the_request(
    protocol: Protocol,
) -> None:
    body = request(protocol, cache_salt="mine", min_p=0.5)
    engine = ScriptedEngine(THOUGHT)
    ask(engine, protocol, body)
    (asked,) = engine.requests
    assert asked.ids == PROMPTS.read(body, protocol).ids
    assert (asked.salt, asked.sampling.more) == ("mine", {"min_p": 0.5})
    assert asked.reasons_first
    off = {"chat_template_kwargs": {"thinking": False}}
    ask(engine, protocol, request(protocol, **off))
    assert not engine.requests[1].reasons_first


def test_twenty_at_once_get_each_its_own_answer() -> None:
    async def calls() -> list[Got]:
        apps = [
            endpoint(PROMPTS, ScriptedEngine(says(f"</think>{n}", f"-{n}")), p)
            for n in range(20)
            for p in PROTOCOLS
        ]
        bodies = [request(p, stream=n % 2 == 1) for n in range(20) for p in PROTOCOLS]
        return await asyncio.gather(*map(call, apps, bodies))

    for place, got in enumerate(run(calls)):
        number, protocol = place // 3, PROTOCOLS[place % 3]
        assert read(protocol, got, number % 2 == 1).content == f"{number}-{number}"


BROKEN_TOOL = {
    "chat": {"type": "function", "function": {"name": "f", "parameters": {"type": 7}}},
    "responses": {"type": "function", "name": "f", "parameters": {"type": 7}},
    "messages": {"name": "f", "input_schema": 7},
}
IMAGE = "data:image/png;base64,iVBORw0KGgo="
PICTURE: dict[Protocol, Body] = {
    "chat": {"type": "image_url", "image_url": {"url": IMAGE}},
    "responses": {"type": "input_image", "image_url": IMAGE},
    "messages": {
        "type": "image",
        "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="},
    },
}


def wrong_requests() -> Iterator[tuple[Protocol, str, bytes, str]]:
    for p in PROTOCOLS:
        turns = "input" if p == "responses" else "messages"
        picture = {turns: [{"role": "user", "content": [PICTURE[p]]}]}
        yield p, "no JSON", request(p)[:-2], "invalid JSON request"
        yield p, "nothing", b"", "invalid JSON request"
        yield p, "a list", b"[]", "invalid request body"
        yield p, "hot", request(p, temperature=2.5), "valid range of temperature is [0, 2]"
        yield p, "unknown model", request(p, model="gpt"), "but you passed gpt"
        yield p, "broken tool", request(p, tools=[BROKEN_TOOL[p]]), ""
        yield p, "image", request(p, **picture), "text only"
        yield p, "deep", request(p, x=1)[:-2] + b"[" * 600 + b"]" * 600 + b"}", "recursion limit"
        yield p, "abyss", b"[" * 1_000_000, "recursion limit"
        yield p, "huge number", request(p)[:-1] + b', "top_p": 1' + b"0" * 999 + b"}", "range"
        yield p, "half a pair", request(p, chat_template_kwargs={"\ud800": 1}), "unknown ?;"
    yield "chat", "two answers", request("chat", n=2), "only n = 1"


WRONG = list(wrong_requests())


@pytest.mark.parametrize(
    ("protocol", "body", "told"),
    [(protocol, body, told) for protocol, _, body, told in WRONG],
    ids=[f"{protocol} {name}" for protocol, name, *_ in WRONG],
)
def test_a_wrong_request_gets_the_official_error(
    protocol: Protocol, body: bytes, told: str
) -> None:
    engine = ScriptedEngine(THOUGHT)
    got = ask(engine, protocol, body)
    found = error(protocol, got)
    assert got.status == 400
    assert (found["type"], found["code"]) == ("invalid_request_error", "invalid_request_error")
    assert told in found["message"]
    assert not engine.requests, "the engine was asked"


@every_protocol
@both_ways
def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers(
    protocol: Protocol, stream: bool
) -> None:
    body = request(protocol, stream=stream)
    prompt = len(PROMPTS.read(body, protocol).ids)
    for context in (prompt, prompt - 1, 8):
        got = ask(ScriptedEngine(THOUGHT, context), protocol, body)
        message = error(protocol, got)["message"]
        assert got.status == 400
        assert f"maximum context length is {context} tokens" in message
        assert f"{prompt} in the messages" in message


@pytest.mark.parametrize("protocol", ["chat", "responses"])
def test_what_is_left_of_the_context_is_the_answers(protocol: Protocol) -> None:
    prompt = len(PROMPTS.read(request(protocol), protocol).ids)
    engine = ScriptedEngine(THOUGHT, prompt + 1)
    assert ask(engine, protocol, request(protocol)).status == 200
    assert engine.requests[0].sampling.max_tokens == 1
    limit = "max_tokens" if protocol == "chat" else "max_output_tokens"
    got = ask(engine, protocol, request(protocol, **{limit: 2}))
    assert got.status == 400
    assert f"{prompt + 2} tokens" in error(protocol, got)["message"]
    assert len(engine.requests) == 1


def test_a_huge_conversation_is_refused_by_its_length() -> None:
    body = request("chat", messages=[{"role": "user", "content": "word " * 200_000}])
    got = ask(ScriptedEngine(THOUGHT), "chat", body)
    assert got.status == 400
    assert "maximum context length is 4096 tokens" in error("chat", got)["message"]


@every_protocol
def test_what_no_context_could_hold_is_refused_before_it_is_read(
    protocol: Protocol, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Prompts, "read", None)  # not even tried
    got = ask(ScriptedEngine(THOUGHT, context=100), protocol, b" " * (3200 + (1 << 20) + 1))
    assert got.status == 413
    assert "no prompt of 100 tokens needs" in error(protocol, got)["message"]


@every_protocol
@both_ways
def test_a_fault_before_the_first_byte_is_a_status(protocol: Protocol, stream: bool) -> None:
    body = request(protocol, stream=stream)
    for fault, status, words in (
        (ApiError(503, "the engine has died"), 503, "the engine has died"),
        (RuntimeError("secret"), 500, "the server failed; its log says why"),
    ):
        got = ask(ScriptedEngine([fault].copy), protocol, body)
        found = error(protocol, got)
        assert (got.status, found["message"]) == (status, words)
        assert b"secret" not in got.body


@every_protocol
def test_a_fault_within_a_stream_is_an_event(protocol: Protocol) -> None:
    def script() -> Iterator[Act]:
        yield Step(PROMPTS.tokenizer.encode("so"))
        yield ApiError(503, "the engine has died")

    got = ask(ScriptedEngine(script), protocol, request(protocol, stream=True))
    assert (got.status, got.complete) == (200, True)
    last = got.events[-1]
    name, _, data = last.rpartition("data: ")
    assert name == ("event: error\n" if protocol == "messages" else "")
    body = json.loads(data)
    assert body["error"]["message"] == "the engine has died"
    assert body.get("type") == ("error" if protocol == "messages" else None)
    assert b"[DONE]" not in got.body


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reply that says something to keep the connection after 20 ms of silence."""
    monkeypatch.setattr(api_module, "Reply", partial(Reply, idle=0.02))


def silent(*acts: Act) -> Callable[[], Iterator[Act]]:
    def script() -> Iterator[Act]:
        yield lambda: asyncio.sleep(0.2)
        yield from acts or THOUGHT()

    return script


@every_protocol
@both_ways
@pytest.mark.usefixtures("impatient")
def test_a_silent_reply_keeps_its_connection(protocol: Protocol, stream: bool) -> None:
    got = ask(ScriptedEngine(silent()), protocol, request(protocol, stream=stream))
    filler = b": keep-alive\n\n" if stream else b"\n"
    assert got.parts[0] == filler
    assert read(protocol, got, stream).content == "make 5."


@every_protocol
@both_ways
@pytest.mark.usefixtures("impatient")
def test_a_fault_after_silence_is_told_in_the_body(protocol: Protocol, stream: bool) -> None:
    engine = ScriptedEngine(silent(ApiError(400, "no such grammar")))
    got = ask(engine, protocol, request(protocol, stream=stream))
    assert (got.status, got.complete) == (200, True)
    body = json.loads(got.events[-1].rpartition("data: ")[2]) if stream else got.json
    assert body["error"]["message"] == "no such grammar"


@every_protocol
@pytest.mark.parametrize("steps", [[], [Step([80])]], ids=["at once", "after a token"])
def test_an_answer_that_is_broken_off_is_no_answer(protocol: Protocol, steps: list[Step]) -> None:
    got = ask(ScriptedEngine(lambda: steps), protocol, request(protocol))
    assert got.status == 500
    assert "broke the answer off" in got.json["error"]["message"]


@every_protocol
@both_ways
@pytest.mark.parametrize("spoken", [0, 2], ids=["waiting", "speaking"])
def test_a_client_that_leaves_ends_its_request_in_the_engine(
    protocol: Protocol, stream: bool, spoken: int
) -> None:
    async def calls() -> tuple[ScriptedEngine, Got]:
        leaves = asyncio.Event()

        async def for_ever() -> None:
            leaves.set()
            await asyncio.Event().wait()

        def script() -> Iterator[Act]:
            yield from [Step(PROMPTS.tokenizer.encode("so"))] * spoken
            yield for_ever

        engine = ScriptedEngine(script)
        app = endpoint(PROMPTS, engine, protocol)
        got = await call(app, request(protocol, stream=stream), leaves=leaves)
        return engine, got

    engine, got = run(calls)
    (asked,) = engine.requests
    assert asked.steps == spoken
    assert not got.complete


@pytest.mark.parametrize("protocol", ["chat", "messages"])
@both_ways
def test_a_stop_sequence_ends_the_request_in_the_engine(protocol: Protocol, stream: bool) -> None:
    def endless() -> Iterator[Act]:
        yield Step(PROMPTS.tokenizer.encode("STOP here? no</think>"))
        while True:
            yield Step(PROMPTS.tokenizer.encode("and so on "))
            yield Step(PROMPTS.tokenizer.encode("ST"))
            yield Step(PROMPTS.tokenizer.encode("OP and more"))

    stop = {"stop" if protocol == "chat" else "stop_sequences": ["STOP"]}
    engine = ScriptedEngine(endless)
    got = ask(engine, protocol, request(protocol, stream=stream, **stop))
    one = read(protocol, got, stream)
    assert (one.content, one.reason) == ("and so on ", "stop")
    (asked,) = engine.requests
    assert asked.steps == 4


def test_an_answer_cut_by_its_limit_says_so() -> None:
    def script() -> Iterator[Act]:
        yield Step(PROMPTS.tokenizer.encode("so"), reason="length")

    for protocol in PROTOCOLS:
        got = ask(ScriptedEngine(script), protocol, request(protocol))
        assert read(protocol, got, False).reason == "length"


def test_tokens_of_a_conversation_are_counted_as_they_would_be_asked() -> None:
    api = Api(PROMPTS, ScriptedEngine(THOUGHT, context=99), "official")

    async def count(scope: Any, receive: Any, send: Any) -> None:
        await (await api.count(Request(scope, receive)))(scope, receive, send)

    body = request("messages", system="Be brief.")
    expected = PROMPTS.read(body, "messages").ids
    assert run(lambda: call(count, body)).json == {"input_tokens": len(expected)}
    assert error("messages", run(lambda: call(count, b"{")))["type"] == "invalid_request_error"
    body = request("chat")
    found = json.loads(bytes(asyncio.run(api.tokens(body)).body))
    ids = PROMPTS.read(body, "chat").ids
    assert found == {"count": len(ids), "max_model_len": 99, "tokens": ids, "token_strs": None}
    assert asyncio.run(api.tokens(b"{")).status_code == 400
