"""A soak: what it sends, what it sees, how it judges, and how it is drawn."""

from __future__ import annotations

if __name__ == "__main__":  # before the imports below, which this Python may lack
    from _standalone import main

    main(__file__)

import json
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import pytest

from launcher.facts.base import Missing
from launcher.facts.memory import Memory
from launcher.http import Api, NoAnswer
from launcher.soak import run, series
from launcher.soak.series import Chunk, Point, Soak

GIB = 1 << 30
FLOOR = int(1.5 * GIB)
LINE = "(Worker_TP0 pid=7) INFO [gauge.py:42] [mem] prefill {} of 4000 tokens, {} tok/s: 8 GiB …"


def memory(gib: float, full: float | None = 0.0) -> Memory:
    return Memory(121 * GIB, int(gib * GIB), 0, 0, 0, 0, full, full)


class Pair:
    """Two nodes and a prompt that takes some looks; memory by look."""

    def __init__(self, head: Sequence[float], worker: Sequence[float | None]) -> None:
        self.have = {"head": list(head), "worker": list(worker)}
        self.now, self.looks = 0.0, 0
        self.said = [LINE.format(9, 9.0)]  # of a prompt before
        self.answered = threading.Event()
        self.fault = ""
        self.counted = 4000

    def means(self) -> run.Means:
        return run.Means(self.ask, self.look, self.lines, clock=lambda: self.now, sleep=self.sleep)

    def ask(self, ids: Sequence[int]) -> int:
        assert self.answered.wait(20)
        if self.fault:
            raise NoAnswer(self.fault)
        return self.counted

    def look(self) -> dict[str, Memory | Missing]:
        self.looks += 1
        found: dict[str, Memory | Missing] = {}
        for node, have in self.have.items():
            now = have[min(self.looks, len(have)) - 1]
            found[node] = Missing("gone") if now is None else memory(now)
        return found

    def lines(self) -> list[str]:
        said, self.said = self.said, []
        return said

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        if self.now <= 4:
            self.said = ["GET /health", LINE.format(int(self.now) * 1000, 1000 + self.now)]
        if self.now >= 4:
            self.answered.set()

    def soak(self) -> Soak:
        return run.soak(range(4000), FLOOR, self.means(), after=3.0)


def test_a_prompt_is_watched_to_its_end_and_a_little_beyond() -> None:
    pair = Pair([8, 7, 6, 5, 4, 6], [9, 9, 8, 3.25, 9])
    done = pair.soak()
    assert done.verdict.word == "holds" and done.verdict.code == 0
    assert "worker went down to 3.2 GiB" in done.verdict.why and "floor 1.5 GiB" in done.verdict.why
    assert [each.tokens for each in done.chunks] == [1000, 2000, 3000, 4000]
    assert done.chunks[0].rate == 1001.0, "lines of an earlier prompt are not taken"
    assert done.lowest("worker").available == int(3.25 * GIB)
    assert done.curves["head"][-1].at >= done.seconds + 3
    report = "\n".join(series.rows(done))
    assert "lowest 3.25" in report and "lowest 4.00" in report
    assert "4000 tokens in" in report
    assert json.loads(json.dumps(series.as_json(done)))["verdict"] == "holds"


@pytest.mark.parametrize(
    ("low", "full", "word", "code"),
    [(1.4, 0.0, "falls short", 1), (1.6, 0.0, "tight", 0), (2.5, 40.0, "tight", 0),
     (2.5, None, "holds", 0), (2.1, 3.0, "holds", 0)],
)  # fmt: skip
def test_the_verdict(low: float, full: float | None, word: str, code: int) -> None:
    curves = {"head": [Point(0, 8 * GIB, 0.0), Point(9, int(low * GIB), full)]}
    verdict = Soak(10, 10, 9.0, FLOOR, curves, []).verdict
    assert (verdict.word, verdict.code) == (word, code)


def test_a_prompt_that_failed_fails_the_soak_with_the_server_s_words() -> None:
    pair = Pair([8], [8])
    pair.fault = "/v1/completions: the answer broke off"
    done = pair.soak()
    assert done.verdict == series.Verdict("failed", pair.fault)
    assert done.verdict.code == 1 and "tok/s in all" not in "\n".join(series.rows(done))


def test_a_prompt_that_was_cut_fails_it() -> None:
    pair = Pair([8], [8])
    pair.counted = 3
    assert "counted 3 tokens of prompt, not 4000" in pair.soak().verdict.why


def test_a_node_that_cannot_be_seen_fails_it() -> None:
    done = Pair([8], [None]).soak()
    assert done.verdict.code == 1 and "memory of the worker could not be read" in done.verdict.why
    assert "no look succeeded" in "\n".join(series.rows(done))


def test_without_lines_of_the_prompt_it_says_so() -> None:
    done = Soak(10, 10, 5.0, FLOOR, {"here": [Point(0, 8 * GIB)]}, [])
    report = "\n".join(series.rows(done))
    assert "no [mem] lines" in report and "10 tokens in 5.0 s: 2.0 tok/s in all" in report


def test_a_curve_keeps_the_lowest_and_is_level_where_nothing_happens() -> None:
    points = [Point(n, (20 if n != 50 else 2) * GIB) for n in range(1000)]
    drawn = series.curve(points)
    assert len(drawn) == series.WIDTH and drawn.count("▁") == 1 and set(drawn) == {"▁", "█"}
    level = series.curve([Point(n, 20 * GIB + n) for n in range(100)])
    assert set(level) == {"▁"}
    assert len(series.curve([Point(0, GIB)])) == series.WIDTH


def test_a_table_of_many_chunks_is_thinned_evenly_and_ends_with_the_last() -> None:
    chunks = [Chunk(n, n * 8192, 601_000, 800.0) for n in range(1, 74)]
    kept = series.thinned(chunks, 12)
    assert len(kept) == 12 and kept[0].tokens == 8192 and kept[-1] is chunks[-1]
    assert [each.at for each in kept] == sorted(each.at for each in kept)
    assert series.thinned(chunks[:3], 12) == chunks[:3]


# ---- the server ----


class Handler(BaseHTTPRequestHandler):
    answers: ClassVar[dict[str, tuple[int, Any]]] = {}
    asked: ClassVar[list[dict[str, Any]]] = []

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        type(self).asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self._answer()

    def _answer(self) -> None:
        status, body = self.answers[self.path]
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Api]:
    Handler.answers = {
        "/tokenize": (200, {"tokens": list(range(100, 180)), "count": 80}),
        "/v1/models": (200, {"data": [{"id": "m", "max_model_len": 600_000}]}),
        "/v1/completions": (200, {"usage": {"prompt_tokens": 7}}),
    }
    Handler.asked = []
    made = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=made.serve_forever, args=(0.01,), daemon=True).start()
    yield Api("127.0.0.1", made.server_address[1])
    made.shutdown()
    made.server_close()


def test_a_prompt_is_of_ordinary_ids_in_an_order_of_its_own(server: Api) -> None:
    one, other = (run.prompt(server, "m", 5000, seed) for seed in (1, 2))
    assert len(one) == 5000 and set(one) <= set(range(100, 180))
    assert one[:64] != other[:64], "not even the first block is shared"
    assert run.longest(server, "m") == 600_000
    assert run.ask(server, "m", 5.0)(one) == 7
    assert Handler.asked[-1]["prompt"] == one and Handler.asked[-1]["max_tokens"] == 1


@pytest.mark.parametrize(
    ("path", "answer", "told"),
    [
        ("/tokenize", (404, {"error": "closed"}), "/tokenize answers 404"),
        ("/tokenize", (200, {"tokens": "1 2 3"}), "/tokenize answers 200"),
        ("/tokenize", (200, {"tokens": [1, 2, 1, 2]}), "2 different ids"),
        ("/v1/models", (401, {}), "/v1/models answers 401"),
        ("/v1/models", (200, {"data": [{"id": "other"}]}), "without m"),
        ("/v1/models", (200, []), "without m"),
    ],
)
def test_a_server_that_cannot_be_soaked_says_why(
    server: Api, path: str, answer: tuple[int, Any], told: str
) -> None:
    Handler.answers[path] = answer
    with pytest.raises(run.Refused, match=told):
        run.longest(server, "m")
        run.prompt(server, "m", 10, 1)


def test_a_refused_prompt_is_no_answer(server: Api) -> None:
    Handler.answers["/v1/completions"] = (400, {"error": "too long"})
    with pytest.raises(NoAnswer, match=r"answers 400.*too long"):
        run.ask(server, "m", 5.0)([1])
    Handler.answers["/v1/completions"] = (200, {})
    with pytest.raises(NoAnswer, match="without usage"):
        run.ask(server, "m", 5.0)([1])
