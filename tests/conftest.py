"""Makes `launcher` and `spark_overlay` importable from the checkout, however pytest is started.

Where SPARK_TEST_DEMAND is set (CI), a skipped test fails the run: nothing passes by skipping.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
from pathlib import Path

# numpy's BLAS would start a thread per core in each process; the tests' matrices are small.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import pytest

if importlib.util.find_spec("hypothesis"):  # the GPU host has none
    import hypothesis

    # What else the machine does is not what a test of values is about.
    hypothesis.settings.register_profile("spark", deadline=None)
    hypothesis.settings.load_profile("spark")

# A shell without job control starts its background jobs with SIGINT ignored, and so would all that
# the tests start and interrupt. A handler here is the default again after exec.
signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).resolve().parents[1]
for place in (ROOT / "tests", ROOT / "overlay", ROOT):
    if str(place) not in sys.path:
        sys.path.insert(0, str(place))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--src",
        metavar="DIR",
        help="folder whose tokenizer.json tests/test_chat_template.py uses; without it the "
        "rehearsal's",
    )


def pytest_sessionfinish(session: pytest.Session) -> None:
    if not os.environ.get("SPARK_TEST_DEMAND"):
        return
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    skipped = len(reporter.stats.get("skipped", ())) if reporter else 0
    if skipped and session.exitstatus == pytest.ExitCode.OK:
        reporter.write_line(f"{skipped} skipped, and nothing may be skipped here", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
