"""What a server takes by POST: its own OpenAPI description, and what each path is to us."""

from __future__ import annotations

from collections.abc import Mapping

from launcher.http import Api

OURS = {
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/tokenize",
}
#: Those of vLLM's that stay open, and why they may.
HARMLESS: Mapping[str, str] = {
    "/v1/completions": "bare text or tokens, with a key: whoever asks writes the prompt itself",
    "/v1/responses/{response_id}/cancel": "with a key; no response is kept, so none is found",
    "/detokenize": "text of tokens; the model is not asked",
    "/is_scaling_elastic_ep": "says false",
    "/ping": "the health of the engine",
}


def posts(api: Api) -> set[str]:
    answer = api.get("/openapi.json", 30)
    assert answer.status == 200, answer.excerpt()
    return {path for path, methods in answer.json()["paths"].items() if "post" in methods}
