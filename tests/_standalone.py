"""Lets one test file run by itself: `python3 tests/test_x.py [pytest options]`.

The tests need pytest, hypothesis and numpy. Where this Python lacks them, the same file is run by
the repository's own .venv, which start.sh makes when it is not there yet. A test file therefore
calls `main` before its other imports:

    if __name__ == "__main__":
        from _standalone import main

        main(__file__)
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NEEDED = ("pytest", "hypothesis", "numpy")
_MARK = "SPARK_STANDALONE_TEST"


def main(file: str, *more: str) -> None:
    """Runs the tests of `file` and exits with pytest's status. `more`: modules it needs beside."""
    missing = [name for name in (*NEEDED, *more) if importlib.util.find_spec(name) is None]
    if sys.version_info < (3, 11):  # noqa: UP036 - this file also meets older Pythons
        missing.append("Python >= 3.11")
    if missing:
        if os.environ.get(_MARK):
            sys.exit(f"{sys.executable} still lacks {', '.join(missing)}; see {ROOT}/logs/venv.log")
        made = subprocess.run(
            [str(ROOT / "start.sh"), "--prepare", "dev"], stdout=subprocess.PIPE, text=True
        )
        if made.returncode:
            sys.exit(made.returncode)
        os.environ[_MARK] = "1"
        python = made.stdout.strip()
        os.execv(python, [python, os.path.abspath(file), *sys.argv[1:]])
    import pytest

    sys.exit(pytest.main([os.path.abspath(file), "-q", *sys.argv[1:]]))
