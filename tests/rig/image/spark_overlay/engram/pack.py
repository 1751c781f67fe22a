"""A stand-in for the packer: its command line, files and words; rows that mean nothing.

It needs no numpy, which the rig's image lacks. SOURCE/pack.json tells it by rank:

    {"0": {"mib": 2, "seconds": 3.0}, "1": {"fails": "row 7 …", "after": 0.5}}

mib      size of each of the two files (1)
seconds  how long both take (0)
stale    the words with which a plan ends
fails    the words with which packing ends once a share of ``after`` (0) is written
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from spark_overlay.engram.meter import Meter

LAYERS = (1, 14)
PIECE = 1 << 16
SPARE = 1 << 20


def say(text: str) -> None:
    print(text, flush=True)


def files(asked: argparse.Namespace) -> list[Path]:
    return [asked.out / f"engram-l{n}-r{asked.rank}of{asked.tp}.bin" for n in LAYERS]


def beside(path: Path, kind: str) -> Path:
    return path.with_name(f"{path.name}.{kind}")


def written(path: Path) -> int:
    progress = beside(path, "progress")
    return int(json.loads(progress.read_text())["rows"]) if progress.exists() else 0


def plan(asked: argparse.Namespace, size: int) -> None:
    absent = [path for path in files(asked) if not path.exists()]
    left = sum(size - written(path) for path in absent)
    stat = os.statvfs(asked.out)
    told = {
        "folder": str(asked.out),
        "total": size * len(LAYERS),
        "left": left,
        "free": stat.f_bavail * stat.f_frsize,
        "needed": left + SPARE if absent else 0,
        "absent": [path.name for path in absent],
    }
    say(json.dumps(told))


def pack(asked: argparse.Namespace, size: int, told: dict[str, Any]) -> None:
    absent = [path for path in files(asked) if not path.exists()]
    meter = Meter(say, "packed", size * len(absent))
    pieces = max(1, size * len(LAYERS) // PIECE)
    last = int(float(told.get("after", 0.0)) * size) if "fails" in told else size + 1
    for path in absent:
        done = written(path)
        if done:
            say(f"{path.name}: goes on after {done} rows")
        meter.skip(done)
        with open(beside(path, "tmp"), "r+b" if done else "wb") as out:
            while done < size:
                if done >= last:
                    sys.exit(told["fails"])
                out.seek(done)
                out.write(bytes([asked.rank + 1]) * PIECE)
                out.flush()
                done += PIECE
                beside(path, "progress").write_text(json.dumps({"rows": done}))
                meter.add(PIECE)
                time.sleep(float(told.get("seconds", 0.0)) / pieces)
        os.replace(beside(path, "tmp"), path)
        beside(path, "progress").unlink()
        say(f"{path}: whole")


def verify(asked: argparse.Namespace, size: int) -> None:
    meter = Meter(say, "verified", size * len(LAYERS))
    for path in files(asked):
        if path.read_bytes() != bytes([asked.rank + 1]) * size:
            sys.exit(f"{path}: row 0 at byte 0 is not the shard's")
        meter.add(size)
        say(f"{path}: equal to the shard")


def main() -> None:
    made = argparse.ArgumentParser()
    made.add_argument("--source", type=Path, required=True)
    made.add_argument("--out", type=Path, required=True)
    made.add_argument("--rank", type=int, required=True)
    made.add_argument("--tp", type=int, required=True)
    made.add_argument("--plan", action="store_true")
    made.add_argument("--verify", action="store_true")
    asked = made.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    for name in ("config.json", "model.safetensors.index.json"):
        json.loads((asked.source / name).read_text())
    path = asked.source / "pack.json"
    told = json.loads(path.read_text()).get(str(asked.rank), {}) if path.exists() else {}
    size = int(told.get("mib", 1)) << 20
    if "stale" in told:
        sys.exit(told["stale"])
    if asked.plan:
        plan(asked, size)
    elif asked.verify:
        verify(asked, size)
    else:
        pack(asked, size, told)


if __name__ == "__main__":
    main()
