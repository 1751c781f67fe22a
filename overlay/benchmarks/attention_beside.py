"""vLLM's kernels for attention.py's cases, each kind in a process of its own with a limit: what
compiles for minutes, hangs or crashes costs its own figures alone, and what it measured stands."""

from __future__ import annotations

import argparse
import importlib.util
import json
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
for place in (HERE.parents[1] / "overlay", HERE.parents[1] / "tests", HERE):
    sys.path.insert(1, str(place))

import attention_rows as rows  # noqa: E402

#: Peers by process: its name, theirs, and the parts they are in.
KINDS = {
    "flashmla": (("flashmla", "flashmla64"), ("decode", "prefill")),
    "operations": (("bounded", "unbounded", "triton"), ("gather", "combine", "chosen")),
    "triton": (("triton",), ("decode", "prefill")),
}
#: Seconds that all of them may import, and what one says then.
IMPORTS, READY = 120, "ready to measure\n"
Found = tuple[str, str, dict[str, Any]]


class Peers:
    """All kinds' processes. They import at once, from the beginning; each measures in its turn."""

    def __init__(self, parts: Sequence[str], quick: bool, limit: float) -> None:
        self.limit, self.absent, self._began = limit, "", time.monotonic()
        self._logs = tempfile.TemporaryDirectory()
        self._running: dict[str, subprocess.Popen[str]] = {}
        if importlib.util.find_spec("vllm") is None:
            self.absent = "vLLM is not installed"
            return
        for kind, (_, theirs) in KINDS.items():
            mine = [part for part in parts if part in theirs]
            if mine:
                argv = [sys.executable, __file__, kind, *mine, *(["--quick"] if quick else [])]
                log = (Path(self._logs.name) / kind).open("w")
                self._running[kind] = subprocess.Popen(
                    argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
                )

    def found(self) -> Iterator[Found]:
        """A case's name, a peer's, its values, as they come."""
        for kind, process in self._running.items():
            log = Path(self._logs.name) / kind
            yield from watched(kind, process, log, self._began + IMPORTS, self.limit)


def watched(
    kind: str, process: subprocess.Popen[str], log: Path, ready_by: float, limit: float
) -> Iterator[Found]:
    """What a process measures, once it is ready (until ``ready_by`` of the monotonic clock) and for
    ``limit`` seconds; then it is ended. What it did not come to, and why, is one more row under its
    own name, without a peer's."""
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        assert process.stdout
        for line in process.stdout:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    ends, current, why = ready_by, "imports", "ended"
    try:
        while True:
            line = lines.get(timeout=max(0.1, ends - time.monotonic()))
            if line is None:
                process.wait(timeout=5)
                break
            if line == READY:
                assert process.stdin
                process.stdin.write("go\n")
                process.stdin.flush()
                ends, current = time.monotonic() + limit, ""
            if not line.startswith('["case"'):
                continue  # others print, too
            _, name, peer, values = json.loads(line)
            if values is None:
                current = f"{name} ({peer})"
            else:
                current = ""
                yield name, peer, values
    except (queue.Empty, subprocess.TimeoutExpired):
        why = "took too long"
    except BrokenPipeError:
        pass
    finally:
        process.kill()
        status = process.wait()
    if current or status not in (0, -9) or why != "ended":
        said = log.read_text().strip().splitlines()
        at = current or "no case"
        text = f"{why} with status {status} at {at}: {said[-1] if said else 'nothing said'}"
        yield kind, "", {"absent": text[:300]}


def measured(
    make: Callable[[], tuple[rows.Calls, Callable[[], rows.Values]]], quick: bool
) -> rows.Values:
    """A peer's time and error, or why there is none."""
    try:
        calls, look = make()
        found: rows.Values = {"us": round(rows.median_us(calls, quick), 2)}
        calls[0]()
        return found | look()
    except Exception as error:  # not for this GPU, other shapes: said, not hidden
        return {"absent": f"{type(error).__name__}: {error}".splitlines()[0][:200]}


def main() -> None:
    """Of one kind: waits for a line before it touches the GPU."""
    options = argparse.ArgumentParser()
    options.add_argument("kind", choices=KINDS)
    options.add_argument("parts", nargs="*")
    options.add_argument("--quick", action="store_true")
    given = options.parse_args()
    import attention_peers

    attention_peers.load(given.kind)
    print(READY, end="", flush=True)
    if not sys.stdin.readline():
        return
    wanted = KINDS[given.kind][0]
    for part in given.parts:
        for case in rows.PARTS[part]():
            for peer, make in case.peers.items():
                if peer in wanted:
                    print(json.dumps(["case", case.name, peer, None]), flush=True)
                    values = measured(make, given.quick)
                    print(json.dumps(["case", case.name, peer, values]), flush=True)


if __name__ == "__main__":
    main()
