"""The engine's side of the tests: vLLM in this process, checkpoints, and engines beside it."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

# Before anything imports torch, which imports triton, which reads it once.
os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

HERE = Path(__file__).resolve().parent
if str(HERE) not in sys.path:
    sys.path.insert(0, str(HERE))

from engine import Answers, Engines  # noqa: E402
from jobs import COMMON, JOBS  # noqa: E402

#: Fixtures that start engines: the jobs', the clients' server, the tree of 0.33.
ENGINES = frozenset({"engines", "server", "tree"})
_WANTED = pytest.StashKey[list[str]]()
HOW = "run these tests by the engine's Python: ./start.sh test engine"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "engines: needs a server or an engine of its own")


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if ENGINES & _fixtures(item) or _jobs(item):
            item.add_marker("engines")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Which engines the chosen tests need: they start together with the first of them."""
    wanted = {name for item in session.items for name in _jobs(item)}
    session.config.stash[_WANTED] = [name for name in JOBS if name in wanted]


def _fixtures(item: pytest.Item) -> set[str]:
    return set(getattr(item, "fixturenames", ()))


def _jobs(item: pytest.Item) -> set[str]:
    """The jobs whose answers a test reads, by fixture or by the name that is its parameter."""
    callspec = getattr(item, "callspec", None)
    named = callspec.params.values() if callspec else ()
    return JOBS.keys() & {*_fixtures(item), *(value for value in named if isinstance(value, str))}


@pytest.fixture(scope="session")
def vllm() -> ModuleType:
    """vLLM with the overlay's plugin loaded and the interpreter mended; no hook is applied."""
    try:
        found = importlib.import_module("vllm")
    except ImportError as error:
        pytest.fail(f"vLLM cannot be imported by {sys.executable} ({error}); {HOW}")
    entries = importlib.metadata.entry_points(group="vllm.general_plugins")
    if "spark_overlay" not in entries.names:
        pytest.fail(f"the overlay is not installed beside vLLM in {sys.prefix}; {HOW}")
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    return found


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a rehearsal checkpoint by variant: the launcher's where it is of that variant,
    else made once."""
    from spark_overlay.rehearsal.make import VARIANTS, make

    made: dict[str, Path] = {}
    named = os.environ.get("REHEARSAL_DIR")
    if named and (manifest := Path(named) / "manifest.json").is_file():
        made[json.loads(manifest.read_text())["variant"]] = Path(named).resolve()
    for variant in VARIANTS:
        if variant not in made:
            made[variant] = tmp_path_factory.mktemp(variant)
            make(made[variant], 0, variant)
    return made.__getitem__


@pytest.fixture(scope="session")
def engines(
    vllm: ModuleType,
    checkpoint: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
) -> Iterator[Engines]:
    if request.config.option.markexpr == "not engines":
        pytest.fail("this test needs an engine and is not marked so: see conftest.py, _jobs")
    running = Engines(JOBS, COMMON, checkpoint, tmp_path_factory.mktemp("engines"))
    running.start(request.config.stash[_WANTED])
    yield running
    running.close()


def _answers(name: str) -> Any:
    @pytest.fixture(scope="session", name=name)
    def answers(engines: Engines) -> Answers:
        return engines.answers(name)

    return answers


plain = _answers("plain")
memory = _answers("memory")
replay = _answers("replay")
draft3 = _answers("draft3")
draft5 = _answers("draft5")
constructed = _answers("constructed")
pair = _answers("pair")
lessons = _answers("lessons")
