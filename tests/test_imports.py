"""A launcher loads what its verb uses and no more: the rule of launcher.verbs."""

from __future__ import annotations

if __name__ == "__main__":  # before the imports below, which this Python may lack
    from _standalone import main

    main(__file__)

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from launcher import cli

ROOT = Path(__file__).resolve().parents[1]
HEAVY = {"docker", "paramiko", "requests", "urllib3", "httpx2", "huggingface_hub", "yaml", "psutil"}
RUN = """\
import json, sys
from pathlib import Path
from launcher import cli
status = cli.main(sys.argv[2:], root=Path(sys.argv[1]), environ={})
print(json.dumps([status, sorted(sys.modules)]))
"""


def loaded(code: str, *words: str, docker: str = "") -> tuple[int, set[str]]:
    """The status that a program printed last, and the modules that it had loaded by then."""
    argv = [sys.executable, "-c", code, *words]
    environ = {**os.environ, "DOCKER_HOST": docker}
    ran = subprocess.run(argv, cwd=ROOT, env=environ, capture_output=True, text=True, check=True)
    status, modules = json.loads(ran.stdout.splitlines()[-1])
    return status, set(modules)


@pytest.mark.parametrize(
    ("words", "status", "verb"),
    [
        ("--help", 0, ""),
        ("config", 0, ""),
        ("start --help", 0, ""),
        ("plan --help", 0, ""),
        ("doctor --help", 0, ""),
        ("status", 1, "state"),
        ("logs", 1, "state"),
        ("stop", 0, "stop"),
        ("start", 2, "up"),  # settings that cannot be right
    ],
)
def test_a_command_that_reaches_nobody_loads_no_library(
    tmp_path: Path, words: str, status: int, verb: str
) -> None:
    text = "HEAD_IP=192.0.2.1\nWORKER_IP=192.0.2.3\n"  # of no machine, by RFC 5737
    (tmp_path / ".env").write_text(text + ("MTP=-9\n" if status == 2 else ""))
    came, modules = loaded(RUN, str(tmp_path), *words.split())
    assert came == status
    assert not modules & HEAVY
    verbs = {name for name in modules if name.startswith("launcher.verbs.")}
    assert verbs == ({f"launcher.verbs.{verb}"} if verb else set())
    if verb != "up":
        assert "launcher.rehearsal" not in modules


def test_the_pairs_containers_are_reached_without_paramiko_and_its_node_without_invoke() -> None:
    code = """\
import json, sys
from pathlib import Path
from launcher.nodes.endpoint import Endpoint
from launcher.pair import reach
at = reach.Reach(Endpoint("worker"), "h", "w", "o")
reach.runtime(at, Path())
first = sorted(sys.modules)
reach.worker(at, Path())
print(json.dumps([0, first] if sys.argv[1] == "first" else [0, sorted(sys.modules)]))
"""
    daemons, node = (loaded(code, which)[1] for which in ("first", "then"))
    assert "docker" in daemons and "paramiko" not in daemons
    assert "paramiko" in node and "invoke" not in node
    # The head's own daemon may be asked by the SDK's ssh, where the user says so.
    assert "paramiko" in loaded(code, "first", docker="ssh://head")[1]


def test_the_libraries_come_from_one_place() -> None:
    """Whoever else imported them would load them whole."""
    for path in sorted((ROOT / "launcher").rglob("*.py")):
        if path.parent.name != "libraries":
            found = re.search(r"^ *(import|from) (docker|paramiko)\b.*", path.read_text(), re.M)
            assert found is None, f"{path}: {found}"


def test_every_verb_is_where_the_table_says() -> None:
    for verb, (_, module) in cli.VERBS.items():
        assert not module or callable(cli.function(verb))
        assert bool(module) == (verb not in ("config", "test", "help"))
