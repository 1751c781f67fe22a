"""A real server on loopback that speaks the official API's three formats; a fault is named in its
``faults``."""

from __future__ import annotations

import itertools
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import official

from launcher.smoke import checks
from launcher.smoke.chat import ANSWER

MODEL = "the model"


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
    disable_nagle_algorithm = True  # a header and its body are two packets

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
