"""Makes the overlay's modules without torch importable from the checkout."""

from __future__ import annotations

import sys
from pathlib import Path

PLACE = str(Path(__file__).resolve().parents[2] / "overlay")
if PLACE not in sys.path:
    sys.path.append(PLACE)
