"""The stub's API: enough of vLLM's for health, models, completions and chats."""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import official

TEXT = "323"  # 17 * 19, which the launcher asks
CHUNK = 512  # tokens that a step takes: what is longer takes several, and its progress is told


def serve(args: argparse.Namespace, mode: str, generate: Callable[[], None]) -> None:
    """Listen, in threads; what this process dies of ends it too."""
    Api.model = args.served_model_name
    Api.key = os.environ.get("VLLM_API_KEY", "")
    Api.mode = mode
    Api.longest = args.max_model_len
    Api.generate = staticmethod(generate)
    server = Server((args.host, args.port), Api)
    threading.Thread(target=server.serve_forever, daemon=True).start()


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64


class Api(BaseHTTPRequestHandler):
    model = ""
    key = ""
    mode = "serve"
    longest = 0
    generate: Callable[[], None]

    def do_GET(self) -> None:
        if self.path == "/health":
            self.answer(200, b"")
        elif self.path == "/v1/models" and self.allowed():
            listed = official.models(self.model)
            for each in listed["data"]:
                each["max_model_len"] = self.longest
            self.send(listed)
        elif self.path != "/v1/models":
            self.answer(404, b"{}")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize":  # as vLLM's, which asks for no key
            self.send({"tokens": [ord(each) for each in body["prompt"]]})
            return
        if not self.allowed():
            return
        if body.get("model") != self.model:
            self.send(official.refusal("no such model", "model"), 400)
            return
        type(self).generate()
        tokens = int(body.get("max_tokens") or 16)
        prompt = body.get("prompt")
        usage = official.usage(3, tokens)
        if isinstance(prompt, list):
            usage = official.usage(len(prompt), tokens)
            if len(prompt) > CHUNK:
                self.prefill(len(prompt))
        if self.path == "/v1/completions":
            self.send({"choices": [{"text": TEXT, "index": 0}], "usage": usage})
        elif self.path != "/v1/chat/completions":
            self.answer(404, b"{}")
        elif body.get("stream"):
            pieces = official.chat_stream({"content": TEXT}, usage)
            self.answer(200, official.sent(pieces), "text/event-stream")
        else:
            self.send(official.chat({"content": TEXT}, usage))

    def prefill(self, tokens: int) -> None:
        """The lines that the overlay's worker writes of a long prompt."""
        for part in (1, 2, 3, 4):
            time.sleep(0.5)
            done = tokens * part // 4
            print(f"INFO [gauge.py:42] [mem] prefill {done} of {tokens} tokens, 512.0 tok/s: …",
                  flush=True)  # fmt: skip

    def allowed(self) -> bool:
        if self.key and self.headers.get("Authorization") != f"Bearer {self.key}":
            self.answer(401, b"{}")
            return False
        return True

    def send(self, value: dict[str, Any], status: int = 200) -> None:
        self.answer(status, json.dumps(value).encode())

    def answer(self, status: int, body: bytes, kind: str = "application/json") -> None:
        if self.mode == "mute":
            time.sleep(1e6)
        if self.mode == "garbage":
            body = b"<html>"
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        pass
