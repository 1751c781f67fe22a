"""A stand-in for the overlay's self-check: its command line and lines, checks that compute nothing.

The hash of the checkpoint's index is real. MODEL/verify.json tells it, for its node:

    {"fails": "exl3 matrices", "dies": 3, "seconds": 2.0}

fails    the check that fails
dies     the exit code with which it ends before its last line
seconds  how long it takes
index    a hash instead of the right one
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from pathlib import Path
from typing import Any

CHECKS = ("exl3 decode, known answers", "exl3 matrices", "engram row store", "attention records")


def main() -> int:
    parser = argparse.ArgumentParser("spark_overlay.verify")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--built", nargs="*")
    asked = parser.parse_args()
    told: dict[str, Any] = {}
    count = 0
    if asked.model is not None:
        note = asked.model / "verify.json"
        told = json.loads(note.read_text()) if note.exists() else {}
        index = (asked.model / "model.safetensors.index.json").read_bytes()
        digest = told.get("index") or hashlib.sha256(index).hexdigest()
        say({"check": "checkpoint index", "on": "cpu", "ok": True,
             "found": digest, "limit": "equal"})  # fmt: skip
        count = 1
    print("a library's chatter", flush=True)
    time.sleep(told.get("seconds", 0))
    if told.get("dies"):
        print("Segmentation fault, or so", flush=True)
        return int(told["dies"])
    on = "cpu" if asked.device == "cpu" else "NVIDIA GB10"
    for name in CHECKS:
        ok = name != told.get("fails")
        say({"check": name, "on": on, "ok": ok, "found": 0.0 if ok else 0.31, "limit": 0.001})
    failed = int(told.get("fails") in CHECKS)
    say({"done": count + len(CHECKS), "failed": failed})
    return failed


def say(line: dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)


sys.exit(main())
