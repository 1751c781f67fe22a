"""The paths of the server: each is ours, closed, or known to be harmless."""

from __future__ import annotations

import pytest
from doors import HARMLESS, OURS, posts

from clients.server import MODEL, PATIENCE, Server, user
from launcher.http import Api
from spark_overlay.serving.routes import CLOSED

pytestmark = pytest.mark.rehearsal

CHAT = {"model": MODEL, "messages": [user("Say hi")], "max_tokens": 4, "stream": False}


def test_no_door_is_unknown(server: Server) -> None:
    found = posts(server.api)
    known = {*OURS, *CLOSED, *HARMLESS}
    assert found - known == set(), "new doors of vLLM: close them, or write down why they may stay"
    assert known - found == set(), "no such doors any more"


@pytest.mark.parametrize("path", CLOSED)
def test_a_closed_door_says_where_to_go(server: Server, path: str) -> None:
    answer = server.api.post(path, CHAT, PATIENCE)
    assert answer.status == 404
    assert "/v1/chat/completions" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", sorted(OURS - {"/tokenize"}))
def test_our_doors_ask_for_the_key(server: Server, path: str) -> None:
    """And none of vLLM's own is behind them: its words for an unknown model are others."""
    stranger = Api(server.api.host, server.api.port)
    assert stranger.post(path, CHAT, PATIENCE).status == 401
    wrong = {**CHAT, "model": "no-such-model", "input": "Say hi"}
    answer = server.api.post(path, wrong, PATIENCE)
    assert answer.status == 400
    assert "but you passed no-such-model" in answer.json()["error"]["message"]


def test_a_response_is_not_kept(server: Server) -> None:
    answer = server.api.get("/v1/responses/resp_1", PATIENCE)
    assert answer.status == 404 and answer.json()["error"]["message"]
    assert server.api.post("/v1/responses/resp_1/cancel", {}, PATIENCE).status == 404


def test_nothing_is_generated_without_the_key(server: Server) -> None:
    stranger = Api(server.api.host, server.api.port)
    body = {"model": MODEL, "prompt": "1 2 3", "max_tokens": 1}
    scored = {"model": MODEL, "query": "1", "items": ["2"], "label_token_ids": [10, 11]}
    for path, asked in (
        ("/v1/completions", body),
        ("/generative_scoring", scored),
        ("/scale_elastic_ep", {"new_data_parallel_size": 2}),
    ):
        assert stranger.post(path, asked, PATIENCE).status in (401, 404), path
