"""The wait for a pair: what counts as progress, a hang, a dead rank, a node that is gone."""

from __future__ import annotations

if __name__ == "__main__":  # before the imports below, which this Python may lack
    from _standalone import main

    main(__file__)

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from settings_root import settings_of
from test_health import DEAD, HEAD, WORKER
from test_state import DEPLOYMENT

from launcher import ports
from launcher.console import Console
from launcher.errors import LauncherError
from launcher.nodes.local import LocalNode
from launcher.record import open_run
from launcher.runtimes.base import Activity, RankStatus
from launcher.state import Store
from launcher.steps.base import Context
from launcher.steps.launch import stop_all
from launcher.steps.ready import UNREACHABLE, Ready
from launcher.steps.stages import FIRST, Stages
from spark_overlay.loading.progress import Progress

GONE = RankStatus("worker", "unreachable", note="no route to host")


@dataclass
class Script:
    """Two ranks whose fate is a function of the time; sleeping lets it pass."""

    ranks: Callable[[float], tuple[RankStatus, RankStatus]]
    lines_of: Callable[[float, str], list[str]] = lambda now, role: []
    compiling: Callable[[float, str], float] = lambda now, role: 0.0
    now: float = 0.0
    count: dict[str, int] = field(default_factory=dict)
    stopped: list[str] = field(default_factory=list)

    def inspect(self, role: str) -> RankStatus:
        head, worker = self.ranks(self.now)
        return head if role == "head" else worker

    def lines(self, role: str) -> list[str]:
        new = self.lines_of(self.now, role)
        self.count[role] = self.count.get(role, 0) + len(new)
        return new

    def activity(self, role: str) -> Activity | None:
        if self.inspect(role).state == "unreachable":
            return None
        return Activity(self.count.get(role, 0), self.compiling(self.now, role))

    def stacks(self, role: str, path: Path) -> str:
        path.write_text(f"stacks of {role}")
        return "asked 1 process"

    def save_log(self, role: str, path: Path) -> bool:
        path.write_text(f"log of {role}")
        return True

    def log_path(self, role: str) -> Path:
        return Path(f"/logs/{role}.log")

    def stop(self, role: str, grace: float) -> RankStatus:
        self.stopped.append(role)
        return self.inspect(role)

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert self.now < 3000, "the wait does not end"
        self.now += 5.0


@pytest.fixture
def wait(tmp_path: Path) -> Callable[[Script], Context]:
    """Runs the step on a script to its error; the API's port is closed, so it never serves."""

    def run(script: Script, text: str = "") -> Context:
        runtime: Any = script
        nothing: Any = None
        store = Store(tmp_path / "state.json")
        port = ports.free("127.0.0.1")
        store.record(replace(DEPLOYMENT, api_port=port, ready=None, launch_id="abc"))
        (tmp_path / "root").mkdir()
        ctx = Context(
            name="pair",
            root=tmp_path,
            logs=tmp_path,
            settings=settings_of(tmp_path / "root", text),
            node=LocalNode(),
            runtime=runtime,
            store=store,
            record=open_run(tmp_path),
            console=Console(StringIO(), StringIO()),
            plan=nothing,
        )
        Ready(clock=script.clock, sleep=script.sleep).do(ctx)
        return ctx

    return run


def both(now: float) -> tuple[RankStatus, RankStatus]:
    return HEAD, WORKER


def test_420_seconds_without_a_word_dump_both_stacks_and_tell_the_last_stages(
    wait: Callable[[Script], Context], tmp_path: Path
) -> None:
    said = {"head": "Loading safetensors checkpoint", "worker": "distributed_init_method=tcp"}
    script = Script(both, lambda now, role: [said[role]] if now == 10.0 else [])
    with pytest.raises(LauncherError) as error:
        wait(script)
    assert 430 <= script.now <= 450
    found = error.value.found
    assert "head: weights are loaded" in found and "worker: the ranks have met" in found
    assert "doctor" in error.value.do_next
    (run,) = (tmp_path / "runs").iterdir()
    stacks = {path.name: path.read_text() for path in run.glob("*-stacks.txt")}
    assert stacks == {
        "head-stacks.txt": "stacks of head", "worker-stacks.txt": "stacks of worker",
    }  # fmt: skip


def test_a_compiler_at_work_is_no_hang(wait: Callable[[Script], Context]) -> None:
    script = Script(both, compiling=lambda now, role: now if role == "worker" else 0.0)
    with pytest.raises(LauncherError, match="no token within 25 min"):
        wait(script)
    assert script.now >= 1500


def test_lines_of_one_rank_are_enough(wait: Callable[[Script], Context]) -> None:
    script = Script(both, lambda now, role: [f"line {now}"] if role == "worker" else [])
    with pytest.raises(LauncherError, match="no token within 25 min"):
        wait(script)


def test_a_dead_rank_ends_the_wait_with_the_end_of_its_log(
    wait: Callable[[Script], Context], tmp_path: Path
) -> None:
    consequence = replace(DEAD, role="head", ended=9.0, last_lines=("only a consequence",))
    script = Script(lambda now: (HEAD, WORKER) if now < 20 else (consequence, DEAD))
    with pytest.raises(LauncherError) as error:
        wait(script)
    assert script.now == 20
    assert "the worker ended with exit code 3" in error.value.found
    assert "last lines of the worker:\n    boom" in error.value.found
    assert error.value.log is not None and Path(error.value.log).read_text() == "log of worker"


def test_a_node_may_be_away_for_a_moment_but_not_for_long(
    wait: Callable[[Script], Context],
) -> None:
    back = Script(lambda now: (HEAD, GONE if 10 <= now < 30 else WORKER))
    with pytest.raises(LauncherError, match="no progress"):
        wait(back)


def test_a_node_that_stays_away_ends_the_wait(wait: Callable[[Script], Context]) -> None:
    away = Script(lambda now: (HEAD, GONE if now >= 10 else WORKER))
    with pytest.raises(LauncherError, match="node does not answer: no route to host"):
        wait(away)
    assert away.now <= 10 + UNREACHABLE + 5


def test_what_cannot_be_ended_stays_recorded_and_the_other_rank_is_ended(tmp_path: Path) -> None:
    script: Any = Script(lambda now: (HEAD, GONE))
    store = Store(tmp_path / "state.json")
    store.record(DEPLOYMENT)
    with pytest.raises(LauncherError, match="the worker could not be ended: no route to host"):
        stop_all(store, script, open_run(tmp_path), Console(StringIO(), StringIO()))
    assert sorted(script.stopped) == ["head", "worker"]
    left = store.load().deployment
    assert left is not None and left.stopping


def test_the_stage_is_the_last_one_told() -> None:
    stages = Stages()
    assert stages.now == FIRST
    stages.feed(["INFO Loading model from scratch..."])
    assert stages.now == "the model is built"
    stages.feed(["nothing known", "INFO: Application startup complete."])
    assert stages.now == "the API is up"
    stages.feed(["a new log"])
    assert stages.now == "the API is up"


def test_loading_is_told_as_the_loader_writes_it() -> None:
    now, lines = [0.0], list[str]()
    progress = Progress("rank 1 of 2", 100 << 30, 60 << 30, lines.append, lambda: now[0])
    now[0] = 10.0
    progress.add(25 << 30)
    stages = Stages()
    stages.feed(f"INFO 11-30 [progress.py:60] {line}" for line in lines)
    assert stages.now == "weights are loaded (25 %, 2.50 GiB/s, 30 s left)"
    progress.end()
    stages.feed(lines[-1:])
    assert stages.now == "weights are loaded"
