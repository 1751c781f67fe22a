#!/usr/bin/env python3
"""Resident bytes of each rank from safetensors headers alone; see --help. Any Python >= 3.11."""

import os
import sys
from pathlib import Path

if sys.version_info < (3, 11):  # noqa: UP036 - this file also meets older Pythons
    sys.exit(f"found Python {sys.version.split()[0]}; needed 3.11 or newer: python3.11 {__file__}")

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from launcher.plan.weight_budget import main  # noqa: E402

if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:], ROOT))
    except BrokenPipeError:  # the reader left (| head)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
