"""Makes `launcher` and `spark_overlay` importable from the checkout, however pytest is started."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
for place in (ROOT / "tests", ROOT / "overlay", ROOT):
    if str(place) not in sys.path:
        sys.path.insert(0, str(place))
