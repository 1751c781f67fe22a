"""The step runner: what it skips, what it redoes, and that it can be killed anywhere."""

from __future__ import annotations

if __name__ == "__main__":  # before the imports below, which this Python may lack
    from _standalone import main

    main(__file__)

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any, cast

import pytest
import stub_launcher

from launcher import cli, ports, processes
from launcher.console import Console
from launcher.errors import LauncherError
from launcher.nodes.base import named
from launcher.nodes.local import LocalNode
from launcher.record import open_run
from launcher.state import Store
from launcher.steps import runner
from launcher.steps.base import Context, Step

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Recorded(Step):
    """A step that notes what is done to it; ``world`` holds its input and whether it is there."""

    world: dict[str, Any] = field(default_factory=dict)

    def inputs(self, ctx: Context) -> str:
        return str(self.world.get(f"{self.key} input", 0))

    def done(self, ctx: Context) -> bool:
        return bool(self.world.get(f"{self.key} there"))

    def look_ahead(self, ctx: Context) -> None:
        if self.world.get(f"{self.key} cannot"):
            raise LauncherError("no way", "one", "mend it")

    def do(self, ctx: Context) -> None:
        self.world["calls"].append(f"do {self.key}")
        if self.world.get(f"{self.key} fails"):
            raise LauncherError("a fault", "none", "mend it")
        self.world[f"{self.key} there"] = True

    def undo(self, ctx: Context) -> None:
        self.world["calls"].append(f"undo {self.key}")


@pytest.fixture
def ctx(tmp_path: Path) -> Context:
    nothing: Any = None
    return Context(
        name="rehearsal",
        root=tmp_path,
        logs=tmp_path,
        settings=nothing,
        node=LocalNode(),
        runtime=nothing,
        store=Store(tmp_path / "state.json"),
        record=open_run(tmp_path),
        console=Console(StringIO(), StringIO()),
        plan=nothing,
    )


def chain(world: dict[str, Any]) -> list[Step]:
    """engine <- overlay <- launch, and a check that rests on nothing."""
    world.setdefault("calls", [])
    return [
        Recorded("engine", "engine", (), world),
        Recorded("overlay", "overlay", ("engine",), world),
        Recorded("launch", "launch", ("overlay",), world),
        Recorded("look", "look", (), world),
    ]


def test_the_second_run_does_nothing(ctx: Context) -> None:
    world: dict[str, Any] = {}
    steps = chain(world)
    assert runner.run(steps, ctx) == ["engine", "overlay", "launch", "look"]
    assert runner.run(steps, ctx) == []
    # What rests on a step is undone before that step is first done.
    assert world["calls"][:3] == ["undo launch", "undo overlay", "do engine"]


def test_a_changed_input_redoes_the_step_and_what_rests_on_it(ctx: Context) -> None:
    world: dict[str, Any] = {}
    steps = chain(world)
    runner.run(steps, ctx)
    world["calls"].clear()
    world["overlay input"] = 1
    assert runner.run(steps, ctx) == ["overlay", "launch"]
    assert world["calls"] == ["undo launch", "do overlay", "do launch"]


def test_a_result_that_went_away_is_made_again(ctx: Context) -> None:
    world: dict[str, Any] = {}
    steps = chain(world)
    runner.run(steps, ctx)
    world["launch there"] = False
    assert runner.run(steps, ctx) == ["launch"]


def test_a_failed_step_is_not_recorded_nor_is_what_rests_on_it(ctx: Context) -> None:
    world: dict[str, Any] = {}
    steps = chain(world)
    runner.run(steps, ctx)
    world |= {"engine input": 1, "engine fails": True}
    with pytest.raises(LauncherError) as error:
        runner.run(steps, ctx)
    assert error.value.log == ctx.record.folder / "log.txt"
    assert set(ctx.store.load().steps) == {"rehearsal/look"}
    world["engine fails"] = False
    # The old results still lie there; they must not be taken for those of the new input.
    assert runner.run(steps, ctx) == ["engine", "overlay", "launch"]
    events = (ctx.record.folder / "events.jsonl").read_text()
    assert '"event": "failed", "found": "a fault"' in events


def test_nothing_is_undone_before_every_later_step_has_looked_ahead(ctx: Context) -> None:
    world: dict[str, Any] = {}
    steps = chain(world)
    runner.run(steps, ctx)
    world["calls"].clear()
    before = ctx.store.load().steps
    for key in ("overlay", "launch"):  # the step that has changed, and one after it
        with pytest.raises(LauncherError, match="no way"):
            world |= {"overlay input": 1, f"{key} cannot": True}
            runner.run(steps, ctx)
        assert world["calls"] == [] and ctx.store.load().steps == before
        world[f"{key} cannot"] = False
    world["look cannot"] = True  # but what stands and stays needs no look
    assert runner.run(steps, ctx) == ["overlay", "launch"]
    world |= {"overlay input": 2, "look there": False}
    with pytest.raises(LauncherError, match="no way"):
        runner.run(steps, ctx)


def test_what_is_asked_for_anew_is_done_though_it_is_done(ctx: Context) -> None:
    world: dict[str, Any] = {}
    steps = chain(world)
    runner.run(steps, ctx)
    world["calls"].clear()
    assert runner.run(steps, ctx, anew=("overlay",)) == ["overlay", "launch"]
    assert world["calls"] == ["undo launch", "do overlay", "do launch"]


def checkout(tmp_path: Path) -> tuple[Path, Path]:
    root, steps = tmp_path / "checkout", tmp_path / "steps"
    root.mkdir()
    steps.mkdir()
    (root / ".env").write_text(f"PORT={ports.free('127.0.0.1')}\nREADY_TIMEOUT=20\n")
    return root, steps


def verb(root: Path, word: str, env: Mapping[str, str]) -> tuple[int, str]:
    """A verb to its end, in this process: exit status and words."""
    said = StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        environ = {**os.environ, **env}
        code = cli.main([word], root=root, environ=environ, build=stub_launcher.build)
    return code, said.getvalue()


def launcher(root: Path, word: str, env: Mapping[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(HERE / "stub_launcher.py"), str(root), word],
        env={**os.environ, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def stubs(root: Path) -> list[int]:
    """Pids of the stub ranks of this checkout."""
    found = []
    for process in processes.everyone():
        try:
            words = Path(f"/proc/{process.pid}/cmdline").read_bytes().decode().split("\0")
        except OSError:
            continue
        if str(HERE / "stub_rank.py") in words and f"{root}/.rehearsal/checkpoint" in words:
            found.append(process.pid)
    return found


def test_kill_9_of_the_launcher_anywhere_and_the_next_run_ends_well(tmp_path: Path) -> None:
    root, steps = checkout(tmp_path)
    env = {"STUB_STEPS": str(steps), "STUB": '{"head": {"boot": 0.1}}'}
    dice = random.Random(7)
    try:
        for _ in range(3):
            child = launcher(root, "rehearse", env)
            time.sleep(dice.uniform(0.2, 1.0))
            child.send_signal(signal.SIGKILL)
            child.communicate()
            before = {path: path.stat().st_mtime_ns for path in steps.iterdir()}
            time.sleep(0.05)
            after = {path: path.stat().st_mtime_ns for path in steps.iterdir()}
            assert before == after, "a child of the killed launcher went on writing"
            assert len(stubs(root)) <= 2
        assert verb(root, "rehearse", env)[0] == 0
        assert len(stubs(root)) == 2
        made = {path.name for path in steps.iterdir()} - {"did"}
        assert made == {"engine.a", "engine.b", "checkpoint.a", "checkpoint.b"}

        # A changed input under the serving pair ends the pair before it is touched.
        first = stubs(root)
        (steps / "engine.in").write_text("new")
        code, said = verb(root, "rehearse", env)
        assert code == 0, said
        assert said.index("ending the head") < said.index("engine: done")
        assert len(stubs(root)) == 2
        assert not set(first) & set(stubs(root))
    finally:
        assert verb(root, "stop", {})[0] == 0
    assert stubs(root) == []


def test_a_command_dies_with_the_launcher(tmp_path: Path) -> None:
    code = (
        "from launcher.nodes.local import LocalNode\n"
        "import sys\n"
        "LocalNode().run([sys.executable, '-S', '-c', "
        "'import os, time; print(os.getpid(), flush=True); time.sleep(60)'], "
        "line=lambda text: print(text, flush=True))"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=HERE.parent
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert processes.find(child) is not None
    parent.kill()
    parent.communicate()
    deadline = time.monotonic() + 3
    while (found := processes.find(child)) is not None and not found.zombie:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_command_gives_lines_status_and_takes_input() -> None:
    lines: list[str] = []
    code = "import sys; print(sys.stdin.read()[::-1]); print('x', file=sys.stderr); sys.exit(4)"
    done = LocalNode().run(
        [sys.executable, "-S", "-c", code], stdin=b"abc", line=lines.append, timeout=10
    )
    assert (done.status, done.text, done.err) == (4, "cba\n", b"x\n")
    assert sorted(lines) == ["cba", "x"]
    assert done.last() == "cba\nx"


def test_a_command_that_lasts_too_long_is_ended() -> None:
    sleep = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]
    began = time.monotonic()
    with pytest.raises(LauncherError, match=r"still ran after 0\.2 s"):
        LocalNode().run(sleep, timeout=0.2)
    assert time.monotonic() - began < 3
    with pytest.raises(LauncherError, match="could not be started"):
        LocalNode().run(["/no/such/program"])


def test_dependents_are_found_through_others() -> None:
    found = runner.dependents(chain({}), ["engine"])
    assert [step.key for step in found] == ["overlay", "launch"]
    assert runner.dependents(cast("list[Step]", []), ["engine"]) == []


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("docker", "ps"), "docker ps"),
        (("rsync", "-a", "b", "c", "d"), "rsync -a b c …"),
        (("sh", "-c", "x=1\nwhile true; do :; done", "sh", "1"), "sh -c x=1… sh …"),
        (("sh", "-c", "y" * 90), "sh -c " + "y" * 40 + "…"),
    ],
)
def test_a_script_that_ran_too_long_is_named_in_one_line(argv: tuple[str, ...], said: str) -> None:
    assert named(argv) == said
