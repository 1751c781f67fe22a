"""How fast copies to the worker are: ``sudo .venv/bin/python tests/rig/bench_copy.py OUT.json``.

On a link shaped to 1 Gbit/s: the parallel rsync of the weights and the one rsync of the image,
beside a plain socket copy of the same bytes in the same run. On the same link without a limit: the
weights' rsync with 1, 2, 4 and 8 streams. Both ends share this machine's cores, and files are in
memory on both, so the unshaped figures are of ciphers and processes, not of drives.
"""

from __future__ import annotations

import json
import os
import platform
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "story"), str(HERE.parents[1])]

from rig import MTU, USER, WORKER, Rig, obstacle  # noqa: E402

from launcher.commands import rsync  # noqa: E402
from launcher.nodes.endpoint import Endpoint  # noqa: E402
from launcher.weights.lanes import calls, lanes  # noqa: E402
from launcher.weights.manifest import Entry  # noqa: E402

# Each above what travels together with others. Real shards are 40 times as large: the second that
# ssh and rsync take to begin must not count for more than the bytes.
FILES, EACH = 8, 384 << 20
TOTAL = FILES * EACH
RATE = "1gbit"
ROUNDS = 2
BAR = 0.90
PORT = 7777
SOURCE, TARGET = "/var/tmp/source", "/var/tmp/target"
CONFIG = Path("/tmp/bench-config")
ENDPOINT = Endpoint(WORKER.address, USER.name, key=f"{USER.home}/.ssh/id_ed25519")
RECEIVE = (
    "import socket, sys\n"
    "s = socket.create_server((sys.argv[1], int(sys.argv[2]))); c, _ = s.accept()\n"
    "b = memoryview(bytearray(1 << 20)); f = open(sys.argv[3], 'wb', buffering=0)\n"
    "while n := c.recv_into(b): f.write(b[:n])\n"
)
SEND = (
    "import socket, sys\n"
    "s = socket.create_connection((sys.argv[1], int(sys.argv[2])))\n"
    "for name in sys.argv[3:]: s.sendfile(open(name, 'rb'))\n"
    "s.shutdown(socket.SHUT_WR); s.recv(1)\n"
)


def main(argv: Sequence[str]) -> int:
    if why := obstacle():
        print(why, file=sys.stderr)
        return 1
    rig = Rig().up()
    began = time.monotonic()
    try:
        rows = measure(rig)
        cipher = _cipher(rig)
    finally:
        rig.down()
    told = {
        "schema": 1,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": f"{_processor()}, {os.cpu_count()} cores; both ends of a veth, MTU {MTU}",
        "driver": "none",
        "commit": _commit(),
        "versions": {
            "python": platform.python_version(),
            "kernel": platform.release(),
            "rsync": _said("rsync", "--version").split()[2],
            "ssh": _said("ssh", "-V").split(",")[0],
            "cipher": cipher,
        },
        "seconds": round(time.monotonic() - began, 1),
        "rows": rows,
    }
    text = json.dumps(told, indent=1) + "\n"
    print(text)
    if argv:
        Path(argv[0]).write_text(text)
    return 0 if all(row["ok"] for row in rows) else 1


def measure(rig: Rig) -> list[dict[str, Any]]:
    make = (
        'mkdir -p "$1"; for n in $(seq "$2"); do head -c "$3" /dev/urandom >"$1/f$n.bin"; done;'
        ' cat "$1"/f*.bin >"$1/one.tar"'
    )
    rig.head.run("sh", "-c", make, "sh", SOURCE, str(FILES), str(EACH), user=USER.name)
    rig.head.write(CONFIG, ENDPOINT.config(include=""), user=USER.name)
    port = rig.port(rig.worker)
    shape = ("root", "tbf", "rate", RATE, "burst", "1m", "latency", "50ms")
    rig.driver("tc", "qdisc", "add", "dev", port, *shape)
    ways = {
        "plain socket": plain,
        "weights: rsync, 4 streams": lambda of: streams(of, 4),
        "image: rsync": image,
    }
    took: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):  # in turns: what else the machine does hits all alike
        for name, way in ways.items():
            took[name].append(_timed(rig, way))
    best = TOTAL / statistics.median(took["plain socket"]) / 1e6
    rows: list[dict[str, Any]] = []
    for name, seconds in took.items():
        share = TOTAL / statistics.median(seconds) / 1e6 / best
        rows.append(row(f"{RATE}: {name}", seconds, share >= BAR, share=round(share, 3)))
    rig.driver("tc", "qdisc", "del", "dev", port, "root")
    for count in (1, 2, 4, 8):
        seconds = [_timed(rig, lambda of, n=count: streams(of, n)) for _ in range(ROUNDS)]
        rows.append(row(f"no limit: weights: rsync, {count} streams", seconds, True))
    return rows


def row(name: str, seconds: list[float], ok: bool, **more: float) -> dict[str, Any]:
    """Of the schema that tests/gpu/results.py reads."""
    rate = round(TOTAL / statistics.median(seconds) / 1e6, 1)
    took = [round(each, 2) for each in seconds]
    values = {"bytes": TOTAL, "megabytes_per_second": rate, "took_seconds": took, **more}
    return {"name": name, "ok": ok, "seconds": round(sum(seconds), 2), "values": values}


def _timed(rig: Rig, way: Any) -> float:
    rig.worker.run("sh", "-c", f"rm -rf {TARGET}; mkdir -m 777 {TARGET}")
    began = time.monotonic()
    way(rig)
    took = time.monotonic() - began
    there = rig.worker.run("sh", "-c", f"cat {TARGET}/* | wc -c").out.strip()
    assert there == str(TOTAL), f"{there} of {TOTAL} bytes arrived"
    print(f"{took:.2f} s", file=sys.stderr, flush=True)
    return took


def plain(rig: Rig) -> None:
    receive = ("/usr/bin/python3", "-c", RECEIVE, WORKER.address, str(PORT), f"{TARGET}/one.tar")
    with rig.worker.background(*receive, listens=PORT):
        send = ("/usr/bin/python3", "-c", SEND, WORKER.address, str(PORT), f"{SOURCE}/one.tar")
        rig.head.run(*send)


def streams(rig: Rig, count: int) -> None:
    entries = [Entry(f"f{n}.bin", EACH) for n in range(1, FILES + 1)]
    failed: list[int] = []

    def lane(mine: tuple[Entry, ...]) -> None:
        for some in calls(mine):
            names = [entry.name for entry in some]
            words = rsync.bulk(ENDPOINT, CONFIG, SOURCE, names, TARGET)
            failed.append(rig.head.run(*words, user=USER.name, check=False).status)

    threads = [threading.Thread(target=lane, args=(mine,)) for mine in lanes(entries, count)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not any(failed), failed


def image(rig: Rig) -> None:
    """As launcher.image.ship has it."""
    words = rsync.push(
        ENDPOINT, CONFIG, [f"{SOURCE}/one.tar"], f"{TARGET}/one.tar", "--times", "--partial",
        "--inplace", "--timeout=30", "--chmod=F600", "--outbuf=N", "--info=progress2", fast=True,
    )  # fmt: skip
    rig.head.run(*words, user=USER.name)


def _cipher(rig: Rig) -> str:
    """What ssh and the worker's sshd agree on."""
    words = ["ssh", "-v", "-o", "LogLevel=DEBUG1", "-F", str(CONFIG), *rsync.FAST, WORKER.address]
    said = rig.head.run(*words, "true", user=USER.name).said
    (found,) = re.findall(r"kex: client->server cipher: (\S+)", said)
    return str(found)


def _processor() -> str:
    rows = Path("/proc/cpuinfo").read_text().splitlines()
    return next((row.partition(":")[2].strip() for row in rows if row.startswith("model name")), "")


def _commit() -> str:
    found = _said("git", "-C", str(HERE), "describe", "--always", "--dirty", "--abbrev=12")
    return found or "unknown"


def _said(*argv: str) -> str:
    ran = subprocess.run(argv, capture_output=True, text=True, check=False)
    return (ran.stdout or ran.stderr).strip()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
