"""``./start.sh tune`` without nodes: what a tuner says is checked, both get the same bytes."""

from __future__ import annotations

if __name__ == "__main__":  # before the imports below, which this Python may lack
    from _standalone import main

    main(__file__)

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import spark_facts
from settings_root import settings_of

from launcher.commands.container import Mount, NodePlace
from launcher.console import Console
from launcher.deployment import Rank
from launcher.errors import LauncherError
from launcher.facts.base import Missing
from launcher.facts.tuned import TunedFact, TunedTable
from launcher.nodes.local import LocalNode
from launcher.pair import build
from launcher.preflight.tuned import tuned
from launcher.record import Secrets, open_run
from launcher.runtimes.base import RankStatus
from launcher.tuning import run, table
from launcher.tuning.run import Tuning
from spark_overlay.attention.select import wishes

PLACE = NodePlace("/srv/model", "/srv/engram-src", "/srv/cache", devices=("/dev/nvidia0",))
MEASURED: dict[str, Any] = {
    "name": "sm_121",
    "origin": "measured",
    "how": "on one GB10",
    "sms": 48,
    "shared_kb": 100,
    "group": [{"shapes": [[5120, 1280, 10]], "rows": 8, "warps": 8, "parts": [[1, 5]]}],
    "experts": [],
}


def said(value: Any) -> list[str]:
    return ["wq_a, 8 rows: 9.1 us by the rule", f"table {json.dumps(value)}", "bye"]


@dataclass
class Machine:
    """A runtime whose container says these lines and ends so."""

    lines_of: list[str]
    exit_code: int = 0
    signal: str = ""
    states: list[str] = field(default_factory=lambda: ["absent", "running", "exited"])
    started: list[Rank] = field(default_factory=list)
    stops: int = 0

    def inspect(self, role: str) -> RankStatus:
        state: Any = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        code = self.exit_code if state == "exited" else None
        return RankStatus(role, state, exit_code=code, note="noted")

    def start(self, rank: Rank, launch_id: str) -> int:
        self.started.append(rank)
        return 1

    def stop(self, role: str, grace: float) -> RankStatus:
        self.stops += 1
        return RankStatus(role, "exited")

    def lines(self, role: str) -> list[str]:
        found, self.lines_of = self.lines_of, []
        return found


def tuning(tmp_path: Path, machine: Machine) -> Tuning:
    paths = {role: PurePosixPath(tmp_path / role / "exl3.json") for role in ("head", "worker")}
    return Tuning(
        machine,  # type: ignore[arg-type]
        {role: LocalNode(role) for role in paths},
        paths,
        open_run(tmp_path / "logs", secrets=Secrets()),
        Console(),
    )


def placed(tmp_path: Path) -> Mapping[str, bytes | None]:
    paths = {role: tmp_path / role / "exl3.json" for role in ("head", "worker")}
    return {role: path.read_bytes() if path.exists() else None for role, path in paths.items()}


def test_both_nodes_get_the_same_bytes(tmp_path: Path) -> None:
    machine = Machine(said(MEASURED))
    found = tuning(tmp_path, machine).run()
    assert found is not None and "1 groups of matrices and 0 steps" in str(found)
    both = placed(tmp_path)
    assert both["head"] == both["worker"] == found.text
    assert json.loads(found.text) == MEASURED
    assert machine.started[0].argv == (
        "python3", "-m", "spark_overlay.exl3.cuda.tune", "--print", "--tp", "2",
    )  # fmt: skip
    assert machine.stops == 1, "the container is gone"


def test_a_choice_of_attention_alone_is_a_table_and_is_told(tmp_path: Path) -> None:
    value = {**MEASURED, "group": [], "attention": "portable"}
    found = tuning(tmp_path, Machine(said(value))).run()
    assert found is not None and str(found).endswith("; portable attention")
    both = placed(tmp_path)
    assert both["head"] == both["worker"] and json.loads(found.text)["attention"] == "portable"
    # A rank reads it there.
    file = tmp_path / "table.json"
    file.write_bytes(found.text)
    assert wishes({"SPARK_EXL3_TABLE": str(file)}, None).tuned == "portable"


def test_where_nothing_beats_the_rule_neither_has_a_table(tmp_path: Path) -> None:
    assert tuning(tmp_path, Machine(said(MEASURED))).run() is not None
    assert tuning(tmp_path, Machine(said(None))).run() is None
    assert placed(tmp_path) == {"head": None, "worker": None}


@pytest.mark.parametrize(
    "lines",
    [
        [],
        said(MEASURED) + said(MEASURED),
        said({**MEASURED, "origin": "modelled"}),
        said({**MEASURED, "group": []}),
        said({**MEASURED, "group": [{**MEASURED["group"][0], "warps": 64}]}),
        said({**MEASURED, "sms": "many"}),
        said({**MEASURED, "attention": "fast"}),
        said([1]),
        ["table {"],
    ],
    ids=[
        "none",
        "two",
        "modelled",
        "empty",
        "no launch",
        "no number",
        "no choice",
        "a list",
        "cut off",
    ],
)
def test_what_may_not_serve_changes_nothing(tmp_path: Path, lines: list[str]) -> None:
    tuning(tmp_path, Machine(said(MEASURED))).run()
    before = placed(tmp_path)
    with pytest.raises(LauncherError, match="ended well, but"):
        tuning(tmp_path, Machine(lines)).run()
    assert placed(tmp_path) == before


def test_a_tuner_that_fails_is_told_with_its_last_words(tmp_path: Path) -> None:
    machine = Machine(["RuntimeError: no kernel image", "bye"], exit_code=1)
    with pytest.raises(LauncherError, match="no kernel image"):
        tuning(tmp_path, machine).run()
    assert placed(tmp_path) == {"head": None, "worker": None} and machine.stops == 1


def test_a_node_that_is_lost_is_told(tmp_path: Path) -> None:
    machine = Machine([], states=["absent", "unreachable"])
    with pytest.raises(LauncherError, match="the tuner on the head cannot be seen: noted"):
        tuning(tmp_path, machine).run()


def test_the_container_gets_the_gpu_and_nothing_else(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, "VLLM_API_KEY=a-secret-of-mine\n")
    rank = Rank(0, "head", "head", table.argv(), {"SPARK_LAUNCH_ID": "ab"}, {}, {})
    made = run.tuner(rank, settings, PLACE, "me:/kit")
    assert (made.name, made.mounts, made.secret_file) == ("dsv41-exl3-head-tune", (), "")
    assert made.gpus and made.devices == ("/dev/nvidia0",) and made.aside
    assert "dsv41.owner" not in made.labels and made.labels[run.TUNER] == "me:/kit"


def test_the_fact_is_the_files_checksum(tmp_path: Path) -> None:
    file = tmp_path / "it's a table"
    node, fact = LocalNode(), TunedFact()

    def asked(path: str) -> TunedTable:
        done = node.run([*fact.argv, "", "", "", path])
        assert done.status == 0
        return fact.parse(done.text)

    assert asked(str(file)) == asked("") == TunedTable()
    file.write_bytes(b"{}")
    assert asked(str(file)).digest.startswith("44136fa355b3678a")
    assert node.run([*fact.argv, "", "", "", str(tmp_path)]).status != 0, "a directory is no table"


def test_a_pair_whose_nodes_differ_is_not_started() -> None:
    def facts(name: str, found: TunedTable | Missing) -> Any:
        made = spark_facts.survey(name, tuned=found)
        return replace(made, paths=replace(made.paths, tuned="~/cache/tuned/exl3.json"))

    none, one, other = TunedTable(), TunedTable("1" * 64), TunedTable("2" * 64)
    for same in (none, one):
        assert tuned(facts("head", same), facts("worker", same)) == []
    for found in ((one, none), (none, one), (one, other)):
        (wrong,) = tuned(facts("head", found[0]), facts("worker", found[1]))
        assert wrong.level == "wrong" and "./start.sh tune" in wrong.mend
    assert "of the worker is not there" in tuned(facts("head", one), facts("worker", none))[0].found
    hangs = facts("worker", Missing("no answer within 5 s"))
    (wrong,) = tuned(facts("head", none), hangs)
    assert "no answer within 5 s" in wrong.found


def test_the_variable_is_the_overlays() -> None:
    from spark_overlay.exl3.cuda import plan

    assert table.VARIABLE == plan.OVERRIDE


def test_both_ranks_are_told_the_table_and_find_it() -> None:
    seen: Any = type("Seen", (), {"head": spark_facts.survey("head", tuned=TunedTable("ab" * 32))})
    inside = "/tuned/exl3-abababababab.json"
    assert build.tuned_env(seen) == {"SPARK_EXL3_TABLE": inside}
    made = build.with_table(PLACE, seen.head)
    assert made.mounts == (Mount("/srv/cache/tuned/exl3.json", inside),)
    seen.head = spark_facts.survey("head")
    assert build.tuned_env(seen) == {} and build.with_table(PLACE, seen.head) == PLACE
