"""The pair of ranks, and its tests at once.

A test here mostly waits for the server, whose steps cost little more for many requests than for
one. So the first of the chosen tests starts all of them, each in a thread, and pytest reports each
in its turn. One marked ``alone`` is run in its turn, when those have ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest

pytest.register_assert_rewrite("clients.server", "clients.tools", "doors", "pairs")

from pairs import serving  # noqa: E402

from clients.server import KEY, Server  # noqa: E402

HERE = Path(__file__).resolve().parent
#: Tests at once, and requests that the engine decodes at once.
AT_ONCE = 8
#: No speculation: the draft of the tiny checkpoint is untrained and doubles the time of a token. It
#: is at work in the other tests of real ranks.
SETTINGS = (f"MAX_NUM_SEQS={AT_ONCE}", "SPEC_METHOD=none")


class Together:
    """Runs tests beside each other that need no fixture but ``server``."""

    def __init__(self, items: list[pytest.Function], server: Server) -> None:
        self._pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="client")
        self._runs: dict[str, Future[None]] = {
            item.nodeid: self._pool.submit(item.obj, **_arguments(item, server)) for item in items
        }

    def result(self, item: pytest.Function) -> None:
        """Waits for the test, and raises what it raised."""
        self._runs[item.nodeid].result()

    def wait(self) -> None:
        wait(self._runs.values())

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "alone: of tests/rehearsal/clients: runs after the others")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Ours in one run, those that want to be alone last."""
    ours = [i for i, item in enumerate(items) if HERE in item.path.parents]
    ordered = sorted((items[i] for i in ours), key=_is_alone)
    for place, item in zip(ours, ordered, strict=True):
        items[place] = item


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    together: Together = pyfuncitem.funcargs["together"]
    if _is_alone(pyfuncitem):
        together.wait()
        return None
    together.result(pyfuncitem)
    return True


@pytest.fixture(scope="package")
def server(
    checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    scratch = tmp_path_factory.mktemp("clients") / "pair"
    dotenv = f"VLLM_API_KEY={KEY}\n"
    folder = checkpoint("taught")
    with (
        serving(folder, scratch, dotenv=dotenv, overrides=SETTINGS) as api,
        Server.at(api, folder) as server,
    ):
        yield server


@pytest.fixture(scope="package", autouse=True)
def together(request: pytest.FixtureRequest, server: Server) -> Iterator[Together]:
    chosen = [
        item
        for item in request.session.items
        if isinstance(item, pytest.Function) and HERE in item.path.parents and not _is_alone(item)
    ]
    running = Together(chosen, server)
    yield running
    running.close()


def _is_alone(item: pytest.Item) -> bool:
    return item.get_closest_marker("alone") is not None


def _arguments(item: pytest.Function, server: Server) -> dict[str, Any]:
    callspec = getattr(item, "callspec", None)
    return {"server": server, **(callspec.params if callspec else {})}
