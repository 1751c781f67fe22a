"""The official API's paths, keys of both kinds of clients, and the words for a wrong one."""

from __future__ import annotations

if __name__ == "__main__":  # before the imports below, which this Python may lack
    from _standalone import main

    main(__file__, "deepseek_recipe", "starlette")

import json

import pytest
from asgi_calls import Got, call, run
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from spark_overlay.serving.door import Door

MESSAGES, CHAT = "/v1/messages", "/v1/chat/completions"
RIGHT = "Bearer right"


async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
    """A server that asks for a key as vLLM's does, by one header and in words of its own."""
    keys = [value.decode() for name, value in scope["headers"] if name == b"authorization"]
    known = keys == [RIGHT]
    headers = {"x-seen": ",".join(keys), "content-type": "text/plain"}
    answer = Response("come in" if known else "Unauthorized, says vLLM", 200 if known else 401)
    answer.headers.update({**headers, "x-path": scope["path"]})
    await answer(scope, receive, send)


def knock(path: str, **headers: str) -> Got:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    got: Got = run(lambda: call(Door(guarded), path=path, headers=named))
    assert got.complete
    return got


@pytest.mark.parametrize(
    ("official", "path"),
    [
        ("/chat/completions", CHAT),
        ("/responses", "/v1/responses"),
        ("/models", "/v1/models"),
        ("/anthropic/v1/messages", MESSAGES),
        ("/anthropic/v1/messages/count_tokens", f"{MESSAGES}/count_tokens"),
        *((path, path) for path in (CHAT, MESSAGES, "/health", "/metrics", "/chat", "/")),
    ],
)
def test_the_official_paths_are_those_of_the_server(official: str, path: str) -> None:
    """Before a key is asked for: under another name no door is open."""
    got = knock(official, authorization=RIGHT)
    assert (got.status, got.headers["x-path"]) == (200, path)
    assert knock(official).status == 401


@pytest.mark.parametrize("path", [MESSAGES, "/anthropic/v1/messages", f"{MESSAGES}/count_tokens"])
def test_anthropics_header_opens_the_messages_api(path: str) -> None:
    got = knock(path, x_api_key="right")
    assert (got.status, got.body, got.headers["x-seen"]) == (200, b"come in", RIGHT)


def test_openais_header_opens_both() -> None:
    for path in (MESSAGES, CHAT):
        assert knock(path, authorization=RIGHT).status == 200


def test_where_both_are_given_authorization_counts() -> None:
    assert knock(MESSAGES, authorization=RIGHT, x_api_key="wrong").status == 200
    assert knock(MESSAGES, authorization="Bearer wrong", x_api_key="right").status == 401


def test_anthropics_header_opens_nothing_else() -> None:
    for path in (CHAT, "/v1/responses", "/metrics", "/v1"):
        assert knock(path, x_api_key="right").status == 401


def test_the_headers_of_the_request_itself_stay_as_they_are() -> None:
    headers = [(b"x-api-key", b"right")]
    scope = {"type": "http", "path": MESSAGES, "root_path": "", "headers": headers}

    async def nothing(message: object = None) -> dict[str, object]:
        return {"type": "http.disconnect"}

    async def calls() -> None:
        await Door(guarded)(scope, nothing, nothing)  # type: ignore[arg-type]

    run(calls)
    assert scope["headers"] == [(b"x-api-key", b"right")]


def test_a_wrong_key_gets_the_official_words() -> None:
    told = "Authentication Fails: no valid API key was given"
    expected = {
        "message": told,
        "type": "authentication_error",
        "param": None,
        "code": "invalid_request_error",
    }
    for path, shape in (
        (CHAT, {"error": expected}),
        ("/v1/responses", {"error": expected}),
        (MESSAGES, {"type": "error", "error": expected}),
        ("/anthropic/v1/messages", {"type": "error", "error": expected}),
    ):
        for headers in ({}, {"authorization": "Bearer wrong"}, {"x_api_key": "wrong"}):
            got = knock(path, **headers)
            assert got.status == 401
            assert json.loads(got.body) == shape
            assert got.headers["content-type"] == "application/json"
            assert got.headers["content-length"] == str(len(got.body))
            assert "x-seen" in got.headers, "what else stood there, such as CORS, stays"


def test_what_is_no_request_passes() -> None:
    seen: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope["type"])

    async def calls() -> None:
        await Door(app)({"type": "lifespan"}, None, None)  # type: ignore[arg-type]

    run(calls)
    assert seen == ["lifespan"]


def test_a_server_below_a_path_of_its_own_is_opened_too() -> None:
    async def below(scope: Scope, receive: Receive, send: Send) -> None:
        inner = {**scope, "root_path": "/api", "path": f"/api{MESSAGES}"}
        await Door(guarded)(inner, receive, send)

    got = run(lambda: call(below, path=MESSAGES, headers={"x-api-key": "right"}))
    assert got.status == 200
