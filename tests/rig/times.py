"""How long the launcher's own work takes: ``sudo .venv/bin/python tests/rig/times.py``.

Brings the rig up, starts a pair whose server needs a second, and prints seconds of ``status`` and
of a second start, beside what the first start needed.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "story"), str(HERE.parents[1])]

from head_clone import HeadClone  # noqa: E402
from rig import Rig, obstacle  # noqa: E402

LOOKS = 5
START = 120.0


def main() -> int:
    if why := obstacle():
        print(why, file=sys.stderr)
        return 1
    rig = Rig()
    rig.up()
    try:
        clone = HeadClone.make(rig)
        clone.env()
        clone.stub()
        first = clone.start("start", timeout=START)
        if first.status:
            print(first.said, file=sys.stderr)
            return 1
        status = [clone.start("status").seconds for _ in range(LOOKS)]
        again = [clone.start("start", timeout=START).seconds for _ in range(LOOKS)]
        stop = clone.start("stop", timeout=START).seconds
    finally:
        rig.down()
    print(f"first start    {first.seconds:5.1f} s")
    for told, found in (("status", status), ("second start", again)):
        middle = statistics.median(found)
        print(f"{told:<14} {middle:5.2f} s ({min(found):.2f} to {max(found):.2f}, {LOOKS} times)")
    print(f"stop           {stop:5.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
