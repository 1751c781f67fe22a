"""A soak's doing: the prompt, the looks, and what the head's log says meanwhile."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from launcher.facts.base import Missing
from launcher.facts.memory import Memory
from launcher.http import Api, NoAnswer
from launcher.soak.series import Chunk, Point, Soak, chunk

LOOK = 1.0  # seconds
AFTER = 10.0  # seconds of looks after the answer
SHORT = 30.0  # seconds for a small request
LEAST = 16  # different tokens that a text must give
TEXT = (
    "A long prompt is read in chunks, and each chunk needs room: for its activations, for the "
    "scores of the indexer over all that came before, and for the blocks of the cache. What a boot "
    "leaves free is not what half a million tokens leave free; only the prompt itself can tell. "
    "Whoever changes one number of the memory, be it the pool, the length or the batch, tries it "
    "once with the longest text that he means to serve, and looks at the lowest of both machines."
)


class Refused(Exception):
    """The server cannot be soaked; the message says why."""


@dataclass(frozen=True)
class Means:
    """All that a soak touches. ``look`` gives each node's memory; ``lines`` the head's new log
    lines."""

    ask: Callable[[Sequence[int]], int]  # the prompt's ids -> tokens as counted; raises NoAnswer
    look: Callable[[], Mapping[str, Memory | Missing]]
    lines: Callable[[], Sequence[str]]
    progress: Callable[[str], None] = lambda text: None
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


def soak(ids: Sequence[int], floor: int, means: Means, after: float = AFTER) -> Soak:
    """Send the prompt and watch until it is answered, and a little longer."""
    means.lines()  # what was said before is another prompt's
    curves: dict[str, list[Point]] = {}
    chunks: list[Chunk] = []
    began = means.clock()

    def look() -> None:
        at = means.clock() - began
        for node, memory in means.look().items():
            points = curves.setdefault(node, [])
            if not isinstance(memory, Missing):
                points.append(Point(at, memory.available, memory.full))
        for line in means.lines():
            if found := chunk(line, means.clock() - began):
                chunks.append(found)
        told = f"{chunks[-1].tokens} of {chunks[-1].total} tokens" if chunks else "waiting"
        means.progress(f"{told}; {_lows(curves)}")

    look()
    answer = beside(lambda: means.ask(ids))
    while not answer.done():
        look()
        means.sleep(LOOK)
    seconds = means.clock() - began
    fault, counted = "", 0
    try:
        counted = answer.result()
    except NoAnswer as error:
        fault = str(error)
    until = means.clock() + after
    look()
    while not fault and means.clock() < until:
        means.sleep(LOOK)
        look()
    return Soak(len(ids), counted, seconds, floor, curves, chunks, fault)


def beside(do: Callable[[], int]) -> Future[int]:
    """In a thread that Ctrl-C does not wait for: the request ends with the process."""
    future: Future[int] = Future()

    def run() -> None:
        try:
            future.set_result(do())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def _lows(curves: Mapping[str, Sequence[Point]]) -> str:
    lows = {node: min(p.available for p in points) for node, points in curves.items() if points}
    return "lowest " + ", ".join(f"{node} {low / 2**30:.2f} GiB" for node, low in lows.items())


def ask(api: Api, model: str, timeout: float) -> Callable[[Sequence[int]], int]:
    """One token after the prompt: when it is there, the whole prompt was."""

    def send(ids: Sequence[int]) -> int:
        body: dict[str, Any] = {
            "model": model,
            "prompt": list(ids),
            "max_tokens": 1,
            "temperature": 0,
            "ignore_eos": True,
        }
        answer = api.post("/v1/completions", body, timeout)
        if answer.status != 200:
            raise NoAnswer(f"/v1/completions answers {answer.status}: {answer.excerpt()}")
        found = answer.json()
        try:
            return int(found["usage"]["prompt_tokens"])
        except (KeyError, TypeError, ValueError):
            raise NoAnswer(f"/v1/completions answers without usage: {answer.excerpt()}") from None

    return send


def prompt(api: Api, model: str, tokens: int, seed: int) -> list[int]:
    """Ids of ordinary text, in an order that no prompt before had: nothing of it is cached.

    Raises Refused when the server does not say what ids a text has.
    """
    try:
        answer = api.post(
            "/tokenize", {"model": model, "prompt": TEXT, "add_special_tokens": False}, SHORT
        )
    except NoAnswer as fault:
        raise Refused(str(fault)) from fault
    found = answer.json() if answer.status == 200 else None
    ids = found.get("tokens") if isinstance(found, dict) else None
    if not isinstance(ids, list) or not all(type(each) is int for each in ids):
        raise Refused(f"/tokenize answers {answer.status}: {answer.excerpt()}")
    different = sorted(set(ids))
    if len(different) < LEAST:
        raise Refused(f"/tokenize gives {len(different)} different ids for a text of {len(TEXT)}")
    return random.Random(seed).choices(different, k=tokens)


def longest(api: Api, model: str) -> int:
    """The server's longest context in tokens. Raises Refused when it does not say."""
    try:
        answer = api.get("/v1/models", SHORT)
    except NoAnswer as fault:
        raise Refused(str(fault)) from fault
    found = answer.json()
    cards = found.get("data", []) if answer.status == 200 and isinstance(found, dict) else []
    for card in cards:
        if isinstance(card, dict) and card.get("id") == model:
            length = card.get("max_model_len")
            if type(length) is int and length > 0:
                return length
    raise Refused(f"/v1/models answers {answer.status} without {model} and its max_model_len")
