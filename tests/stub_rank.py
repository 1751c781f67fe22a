"""A stand-in for one rank of vLLM: real processes and a real socket, behaviour by STUB_* variables.

It takes vLLM's own arguments. The head (no --headless) serves /health, /v1/models, /v1/completions
and /v1/chat/completions; a worker only lives. STUB is JSON, by role:

    {"head": {"boot": 0.1, "mode": "serve"}, "worker": {"mode": "die", "after": 0.5, "code": 3}}

boot    seconds before the API listens
mode    serve | die (after ``after`` s with ``code``) | garbage (200 with nonsense) | hang (accepts,
        never answers) | drift (another text each time)
deaf    ignores SIGTERM
child   starts a process of its own, as vLLM does, and writes its pid to the log; "apart" puts it in
        a session of its own
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import official


class Api(BaseHTTPRequestHandler):
    model = ""
    key = ""
    mode = "serve"
    count = 0

    def do_GET(self) -> None:
        if self.path == "/health":
            self.answer(200, b"")
        elif self.path == "/v1/models" and self.allowed():
            self.send(official.models(self.model))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self.allowed():
            return
        if body.get("model") != self.model:
            self.answer(404, b'{"error": "no such model"}')
            return
        Api.count += 1
        text = f"323 {Api.count}" if self.mode == "drift" else "323"
        tokens = int(body["max_tokens"])
        usage = official.usage(3, tokens)
        if self.path == "/v1/completions":
            self.send({"choices": [{"text": "x", "index": 0}], "usage": usage})
        elif body.get("stream"):
            pieces = official.chat_stream({"content": text}, usage)
            self.answer(200, official.sent(pieces), "text/event-stream")
        else:
            self.send(official.chat({"content": text}, usage))

    def allowed(self) -> bool:
        if self.key and self.headers.get("Authorization") != f"Bearer {self.key}":
            self.answer(401, b"{}")
            return False
        return True

    def send(self, value: dict[str, Any]) -> None:
        self.answer(200, json.dumps(value).encode())

    def answer(self, status: int, body: bytes, kind: str = "application/json") -> None:
        if self.mode == "hang":
            time.sleep(3600)
        if self.mode == "garbage":
            body = b"<html>"
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("verb")
    parser.add_argument("model")
    parser.add_argument("--served-model-name")
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--headless", action="store_true")
    args, _ = parser.parse_known_args()
    role = "worker" if args.headless else "head"
    stub = json.loads(os.environ.get("STUB", "{}")).get(role, {})
    if stub.get("deaf"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print(f"{role} of {args.model} starts, pid {os.getpid()}", flush=True)
    print("environment:", " ".join(sorted(os.environ)), flush=True)
    if "child" in stub:
        child = subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(600)"],
            start_new_session=stub["child"] == "apart",
        )
        print(f"child {child.pid}", flush=True)
    mode = stub.get("mode", "serve")
    if mode == "die":
        time.sleep(stub.get("after", 0.0))
        print("RuntimeError: the stub was told to die", flush=True)
        os._exit(stub.get("code", 1))
    if role == "head":
        time.sleep(stub.get("boot", 0.0))
        Api.model = args.served_model_name
        Api.key = os.environ.get("VLLM_API_KEY", "")
        Api.mode = mode
        server = ThreadingHTTPServer((args.host, args.port), Api)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        print("Application startup complete.", flush=True)
    while True:
        time.sleep(3600)


if __name__ == "__main__":
    main()
