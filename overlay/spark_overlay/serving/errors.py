"""What the API says of a request it refuses, in the official API's shape. Pure.

Chat Completions and Responses: ``{"error": {"message", "type", "param", "code"}}``. Messages: the
same with ``"type": "error"`` beside it, as Anthropic's clients expect.
"""

from __future__ import annotations

import json
from typing import Any

INVALID = "invalid_request_error"
_TYPES = {
    400: INVALID,
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}


class ApiError(Exception):
    """A request that gets an error instead of an answer."""

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message.encode(errors="replace").decode()  # half a surrogate pair, say
        self.param = param

    @classmethod
    def of_recipe(cls, error: Exception) -> ApiError:
        """From deepseek-recipe's ConversionError (the official words) or ValueError (a body that
        is no such request)."""
        body = getattr(error, "body", None)
        if body is None:
            return cls(400, str(error))
        told = json.loads(body)["error"]
        return cls(int(getattr(error, "status_code", 400)), told["message"], told["param"])

    def body(self, messages: bool = False) -> dict[str, Any]:
        """The JSON body; ``messages`` for the Messages API."""
        kind = _TYPES.get(self.status, INVALID if self.status < 500 else "server_error")
        # The official API calls what the caller got wrong, a wrong key too, an invalid request.
        code = INVALID if self.status < 500 and self.status != 429 else kind
        error = {"message": self.message, "type": kind, "param": self.param, "code": code}
        return {"type": "error", "error": error} if messages else {"error": error}

    def json(self, messages: bool = False) -> bytes:
        return json.dumps(self.body(messages), ensure_ascii=False).encode()
