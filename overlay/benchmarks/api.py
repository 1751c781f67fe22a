#!/usr/bin/env python3
"""What the API costs the processor, ours beside vLLM's own on the same inputs, in one run:

    .rehearsal/engine/bin/python overlay/benchmarks/api.py [--json PATH] [--patience 1800]

Each part runs with the rehearsal's tokenizer (512 tokens) and with one of real size (131072, see
``api_inputs.larger_tokenizer``); ours and vLLM's take turns. api_servers.py says what both are.

read      a request's bytes to its prompt's ids. Ours: ``Prompts.read`` (JSON, dialect, conversion,
          rendering, encoding), in the calling thread. vLLM's: ``json.loads``,
          ``ChatCompletionRequest.model_validate`` and ``render_chat_request``, which renders by the
          tokenizer mode deepseek_v41 and encodes, both in the renderer's thread.
held      the same through the server, from the request's first byte to ``EngineClient.generate``:
          seconds, and the longest time between two ticks of a task on the event loop that sleeps
          1 ms. ``idle`` is the same gap over a second without a request: the machine's own.
parse     processor time a token, from ids to the bytes of server-sent events: STREAMS streams of
          about LENGTH tokens, one step of each in turn, to their end. Ours: ``Answer.feed``,
          ``finish`` and ``events``. vLLM's: the incremental detokenizer, ``parse_delta`` of its
          deepseek_v41 parser, and the chunk's JSON as its chat handler makes it.
request   a whole request with a prompt of a few tokens, one after the other.

CPU seconds are those of the whole process. ``ok``: both gave the same ids, or the same text but for
white space, of which vLLM drops some at the end of reasoning. ``others`` in a row: how many
processors other programs kept busy meanwhile; with --patience a row with more than QUIET is
measured again, and the least disturbed try counts.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import importlib.metadata
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parents[2] / "tests"))

import api_inputs as inputs
import uvloop
from api_servers import SIDES, VLLM, Bench, Run, ask, make_bench, write_larger_tokenizer
from gpu import results

ROOT = Path(__file__).resolve().parents[2]
CHARACTERS, TURNS = 1_000_000, 100
STREAMS, LENGTH = 64, 512  # tokens of a stream
RUNS, REQUESTS, ANSWER = 7, 40, 100  # ANSWER: tokens
QUIET = 0.15  # processors that other programs may keep busy
KINDS = ("reasoning", "content", "tool call", "east asian")
PACKAGES = ("deepseek-recipe", "tokenizers", "transformers", "pydantic")
TALK = [{"role": "user", "content": "What is 17*19?"}]
NO_THINKING = {"chat_template_kwargs": {"thinking": False}}

Values = dict[str, Any]


def read_row(bench: Bench, raw: bytes, run: Run) -> Values:
    made: dict[str, list[int]] = {}
    wall, cpu = _lists(SIDES), _lists(SIDES)
    for side, read in _turns(**bench.readers(raw, run)):
        began, before = time.perf_counter(), time.process_time()
        made[side] = read()
        cpu[side].append(time.process_time() - before)
        wall[side].append(time.perf_counter() - began)
    return {
        "same": made["ours"] == made["vllm"],
        "prompt": {side: len(ids) for side, ids in made.items()},
        "wall": _figures(wall, "s"),
        "cpu": _figures(cpu, "s"),
        "speed": _figures({s: [CHARACTERS / t for t in wall[s]] for s in SIDES}, "characters/s"),
    }


def held_row(bench: Bench, raw: bytes, run: Run) -> Values:
    async def once(side: str) -> tuple[float, float]:
        ticker = Ticker()
        ticking = asyncio.create_task(ticker.run())
        await asyncio.sleep(0.05)
        ticker.longest, began = 0.0, time.perf_counter()
        await (asyncio.sleep(1) if side == "idle" else ask(bench.apps[side], raw))
        await asyncio.sleep(0.01)
        ticking.cancel()
        return bench.client.asked - began, ticker.longest * 1e3

    bench.client.tokens = bench.ids("Done.")
    made: dict[str, list[int]] = {}
    until, gap = _lists(SIDES), _lists((*SIDES, "idle"))
    for side, _ in _turns(**gap):
        seconds, longest = run(once(side))
        gap[side].append(longest)
        if side in SIDES:
            until[side].append(seconds)
            made[side] = bench.client.prompt
    return {
        "same": made["ours"] == made["vllm"],
        "until generate": _figures(until, "s"),
        "longest gap": _figures(gap, "ms"),
    }


class Ticker:
    """``longest``: the most seconds between two ticks."""

    longest = 0.0

    async def run(self) -> None:
        last = time.perf_counter()
        while True:
            await asyncio.sleep(0.001)
            now = time.perf_counter()
            self.longest, last = max(self.longest, now - last), now


def parse_row(bench: Bench, kind: str, step: int, run: Run) -> Values:
    raw, streams = streams_of(bench, kind)
    rounds = [
        [(n, ids[at : at + step], at + step >= len(ids)) for n, ids in enumerate(streams)]
        for at in range(0, max(map(len, streams)), step)
    ]
    count = sum(map(len, streams))
    cpu, texts = _lists(SIDES), {}
    for side, begin in _turns(**bench.feeders(raw, run)):
        feeds = [begin() for _ in streams]
        sent: list[list[bytes]] = [[] for _ in streams]
        before = time.process_time()
        for turn in rounds:
            for n, ids, last in turn:
                if ids:
                    sent[n].append(feeds[n](ids, last))
        cpu[side].append((time.process_time() - before) / count * 1e6)
        texts[side] = [b"".join(pieces).decode() for pieces in sent]
    said = {side: [inputs.said(text) for text in texts[side]] for side in SIDES}
    return {
        "same": said["ours"] == said["vllm"],
        "tokens": count,
        "events": {side: "".join(texts[side]).count("data: ") for side in SIDES},
        "cpu a token": _figures(cpu, "us"),
    }


def streams_of(bench: Bench, kind: str) -> tuple[bytes, list[list[int]]]:
    """A request, and STREAMS answers to it of about LENGTH tokens, no two alike."""
    count = STREAMS * LENGTH
    text = {
        "tool call": inputs.source_text(count * 8),
        "east asian": inputs.east_asian(count * 3),
    }.get(kind, inputs.prose())
    parts = inputs.parts(bench.text(bench.ids(text)[:count]).rstrip("\ufffd"), STREAMS)
    more = {} if kind == "reasoning" else NO_THINKING
    if kind == "tool call":
        parts, more = [inputs.tool_call(part) for part in parts], {**more, "tools": inputs.TOOLS}
    return inputs.body(TALK, **more), [bench.ids(part) for part in parts]


def request_row(bench: Bench, stream: bool, length: int, step: int, run: Run) -> Values:
    """``length``: tokens of the answer, the end of reasoning in their middle."""
    text, end = bench.ids(inputs.prose())[: length - 1], bench.ids("</think>")
    bench.client.tokens = [*text[: length // 2], *end, *text[length // 2 :]]
    bench.client.step = step
    raw = inputs.body(TALK, stream=stream)

    async def several(app: Any) -> str:
        for _ in range(REQUESTS):
            reply = await ask(app, raw)
        return reply

    rate, cpu, told = _lists(SIDES), _lists(SIDES), {}
    for side, app in _turns(**bench.apps):
        began, before = time.perf_counter(), time.process_time()
        told[side] = inputs.said(run(several(app)))
        cpu[side].append((time.process_time() - before) / REQUESTS * 1e3)
        rate[side].append(REQUESTS / (time.perf_counter() - began))
    bench.client.step = 1
    return {
        "same": told["ours"] == told["vllm"],
        "rate": _figures(rate, "requests/s"),
        "cpu a request": _figures(cpu, "ms"),
    }


@dataclass
class Row:
    """``measure`` gives its values, ``same`` among them."""

    name: str
    measure: Callable[..., Values]
    given: tuple[Any, ...]
    values: Values = field(default_factory=dict)


def measure_all(rows: Sequence[Row], patience: float, done: Callable[[Row], None]) -> None:
    """Measures each row once and then, for ``patience`` seconds, again those that other programs
    disturbed, whenever the machine is quiet. The least disturbed try counts."""
    for row in rows:
        _try(row)
        done(row)
    end = time.perf_counter() + patience
    while disturbed := [row for row in rows if row.values["others"] > QUIET]:
        for row in disturbed:
            if not _quiet_before(end):
                return
            if _try(row):
                done(row)


def _try(row: Row) -> bool:
    """Whether this try is the best so far, and counts."""
    gc.collect()
    gc.freeze()  # as vLLM's server does before it serves
    began, others = time.perf_counter(), Others()
    values = row.measure(*row.given)
    seconds = time.perf_counter() - began
    values |= {"others": round(others.since(), 2), "seconds": round(seconds, 1)}
    best = not row.values or values["others"] < row.values["others"]
    row.values = values if best else row.values
    return best


def _quiet_before(end: float) -> bool:
    """Waits for a quiet machine; False at ``end``, by the performance counter."""
    while time.perf_counter() < end:
        others = Others()
        time.sleep(1)
        if others.since() <= QUIET:
            return True
    return False


class Others:
    """How many processors other programs have kept busy since this was made."""

    def __init__(self) -> None:
        self._began, self._then = time.perf_counter(), self._seconds()

    def since(self) -> float:
        busy = (self._seconds() - self._then) / (time.perf_counter() - self._began)
        return max(busy, 0.0)

    def _seconds(self) -> float:
        first = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:8]
        user, nice, system, _, _, *interrupts = map(int, first)
        busy = user + nice + system + sum(interrupts)
        return busy / os.sysconf("SC_CLK_TCK") - time.process_time()


def rows_of(bench: Bench, run: Run) -> list[Row]:
    made = []
    for what, raw in (
        ("1 message", inputs.one_message(CHARACTERS)),
        (f"{4 * TURNS + 1} messages", inputs.many_messages(CHARACTERS, TURNS)),
    ):
        made.append(Row(f"read, {what}, {bench.name}", read_row, (bench, raw, run)))
        made.append(Row(f"held, {what}, {bench.name}", held_row, (bench, raw, run)))
    for kind in KINDS:
        for step in (1, 4):
            name = f"parse, {kind}, step {step}, {bench.name}"
            made.append(Row(name, parse_row, (bench, kind, step, run)))
    for how, length, step in (
        ("stream", ANSWER, 1), ("stream", ANSWER, 4), ("stream", 2, 1), ("whole", ANSWER, 1)
    ):  # fmt: skip
        name = f"request, {how} of {length}, step {step}, {bench.name}"
        made.append(Row(name, request_row, (bench, how == "stream", length, step, run)))
    return made


def show(row: Row) -> None:
    values = row.values
    print(f"{row.name}: {'the same' if values['same'] else 'DIFFERENT'}, others {values['others']}")
    for what, sides in values.items():
        for side, one in sides.items() if isinstance(sides, dict) else ():
            if isinstance(one, dict):
                spread = f"{one['min']:g} to {one['max']:g}"
                print(f"    {what:16} {side:5} {one['median']:>9g} {one['unit']:13} {spread}")
    sys.stdout.flush()


def host() -> results.Result:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    device = f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores"
    versions = {"python": platform.python_version(), "vllm": VLLM}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "absent"
    argv = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    commit = subprocess.run(argv, capture_output=True, text=True).stdout.strip() or "unknown"
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return results.Result(now, device, "none", versions, commit)


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--json", type=Path, help="where the result goes")
    options.add_argument(
        "--rehearsal", type=Path, default=ROOT / ".rehearsal", help="made by ./start.sh rehearse"
    )
    options.add_argument(
        "--patience", type=float, default=0, metavar="SECONDS",
        help="to measure again, on a quiet machine, the rows that other programs disturbed",
    )  # fmt: skip
    given = options.parse_args()
    result, began = host(), time.perf_counter()

    def done(row: Row) -> None:
        show(row)
        values = dict(row.values)
        same, seconds = values.pop("same"), values.pop("seconds")
        result.add({"name": row.name, "ok": same, "seconds": seconds, "values": values})
        result.seconds = round(time.perf_counter() - began, 1)
        if given.json:
            result.write(given.json)

    checkpoint = given.rehearsal / "checkpoint"
    with (
        tempfile.TemporaryDirectory() as scratch,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        write_larger_tokenizer(checkpoint, Path(scratch))
        rows = []
        for name, tokenizer in (("512", checkpoint), ("131072", Path(scratch))):
            bench = runner.run(make_bench(name, checkpoint, tokenizer))
            rows += rows_of(bench, runner.run)
        measure_all(rows, given.patience, done)
    if given.patience:
        for row in rows:  # all of them again, in their order
            done(row)


def _turns(**sides: Any) -> Iterator[tuple[str, Any]]:
    """Each in turn, RUNS times and once to warm up."""
    for _ in range(RUNS + 1):
        yield from sides.items()


def _lists(sides: tuple[str, ...]) -> dict[str, list[float]]:
    return {side: [] for side in sides}


def _figures(found: dict[str, list[float]], unit: str) -> Values:
    """Without the first of each, which warmed up."""
    return {side: inputs.figure(values[1:], unit) for side, values in found.items()}


if __name__ == "__main__":
    main()
