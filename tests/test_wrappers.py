"""start.sh and download.sh: which Python, when .venv is made again, what is said when it cannot be.

A stand-in for Python records what it is asked, so nothing is installed here.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the imports below, which this Python may lack
    from _standalone import main

    main(__file__)

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TOOLS = (
    "sh",
    "dirname",
    "cut",
    "sha256sum",
    "cat",
    "rm",
    "mkdir",
    "mv",
    "tail",
    "flock",
    "cp",
    "chmod",
    "env",
)
STAND_IN = """\
#!/bin/sh
echo "$(cat "$0.version") $*" >>"$JOURNAL"
case "$1 $2" in
"-c import sys; print"*) cat "$0.version" ;;
"-c import sys; sys.exit"*) case $(cat "$0.version") in 3.8 | 3.10) exit 1 ;; esac ;;
"-c import ensurepip"*) [ ! -e "$0.bare" ] ;;
"-m venv")
    mkdir -p "$3/bin"
    cp "$0" "$3/bin/python"
    cp "$0.version" "$3/bin/python.version" ;;
"-m pip") [ ! -e "$JOURNAL.offline" ] || { echo no route to the registry; exit 1; } ;;
"-m launcher")
    shift 2
    printf "<%s>" "$@"
    echo " in $PWD, ${PYTHONPATH-${PYTHONDONTWRITEBYTECODE-clean}}" ;;
esac
"""


@dataclass
class Checkout:
    root: Path
    bin: Path
    journal: Path

    def python(self, name: str, version: str, *, bare: bool = False) -> None:
        path = self.bin / name
        path.write_text(STAND_IN)
        path.chmod(0o755)
        Path(f"{path}.version").write_text(version)
        if bare:
            Path(f"{path}.bare").touch()

    def run(
        self, *arguments: str, script: str = "start.sh", cwd: str = "/"
    ) -> subprocess.CompletedProcess[str]:
        env = {"PATH": str(self.bin), "JOURNAL": str(self.journal), "PYTHONPATH": "/evil"}
        env["PYTHONDONTWRITEBYTECODE"] = "1"
        return subprocess.run([str(self.root / script), *arguments], cwd=cwd, env=env, text=True,
                              capture_output=True, timeout=20)  # fmt: skip

    def made(self) -> int:
        """How often .venv was made since the last question."""
        text = self.journal.read_text() if self.journal.exists() else ""
        self.journal.unlink(missing_ok=True)
        return text.count(" -m venv ")


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    root = tmp_path / "my kit's $(dir)"
    (root / "launcher/locks").mkdir(parents=True)
    for name in ("start.sh", "download.sh"):
        shutil.copy2(ROOT / name, root / name)
    for group in ("launcher", "dev"):
        shutil.copy2(ROOT / f"launcher/locks/{group}.lock", root / "launcher/locks")
    tools = tmp_path / "bin"
    tools.mkdir()
    for tool in TOOLS:
        found = shutil.which(tool)
        if found:
            (tools / tool).symlink_to(found)
    return Checkout(root, tools, tmp_path / "journal")


def test_arguments_arrive_whole_from_any_directory(checkout: Checkout) -> None:
    checkout.python("python3", "3.12")
    done = checkout.run("config", "--set", "A=b c $(x)", "", cwd="/usr")
    assert done.returncode == 0
    assert done.stdout == f"<config><--set><A=b c $(x)><> in {checkout.root}, clean\n"
    assert checkout.run("x", script="download.sh").stdout.startswith("<download><x>")
    assert checkout.made() == 1


def test_the_first_python_that_is_new_enough_and_whole_is_taken(checkout: Checkout) -> None:
    checkout.python("python3", "3.8")
    checkout.python("python3.11", "3.11", bare=True)
    checkout.python("python3.13", "3.13")
    assert "making .venv with python3.13" in checkout.run().stderr


def test_no_python_is_said_plainly(checkout: Checkout) -> None:
    done = checkout.run()
    assert done.returncode == 1
    assert "found:   on PATH: no python3 at all" in done.stderr
    assert "needed:  Python >= 3.11" in done.stderr
    checkout.python("python3", "3.10")
    assert "found:   on PATH: python3=3.10" in checkout.run().stderr


def test_a_python_without_venv_names_its_package(checkout: Checkout) -> None:
    checkout.python("python3", "3.12", bare=True)
    done = checkout.run()
    assert done.returncode == 1
    assert "sudo apt-get install python3.12-venv" in done.stderr
    assert not (checkout.root / ".venv").exists()


def test_a_finished_environment_is_used_as_it_is(checkout: Checkout) -> None:
    checkout.python("python3", "3.12")
    checkout.run()
    assert checkout.made() == 1
    (checkout.bin / "python3").unlink()
    done = checkout.run("status")
    assert (done.returncode, done.stderr) == (0, "")
    assert checkout.made() == 0


@pytest.mark.parametrize("damage", ["marker gone", "lock changed", "python gone"])
def test_an_interrupted_or_outdated_environment_is_made_again(
    checkout: Checkout, damage: str
) -> None:
    checkout.python("python3", "3.12")
    checkout.run()
    checkout.made()
    leftover = checkout.root / ".venv/leftover"
    leftover.touch()
    if damage == "marker gone":
        (checkout.root / ".venv/launcher.lock.sha256").unlink()
    elif damage == "python gone":
        (checkout.root / ".venv/bin/python").unlink()
    else:
        with (checkout.root / "launcher/locks/launcher.lock").open("a") as lock:
            lock.write("another==1\n")
    assert checkout.run().returncode == 0
    assert checkout.made() == 1
    assert not leftover.exists()


def test_a_failed_install_leaves_nothing_that_counts_as_done(checkout: Checkout) -> None:
    checkout.python("python3", "3.12")
    offline = Path(f"{checkout.journal}.offline")
    offline.touch()
    done = checkout.run()
    assert done.returncode == 1
    assert "no route to the registry" in done.stderr
    assert f"log: {checkout.root}/logs/venv.log" in done.stderr
    offline.unlink()
    assert checkout.run("status").returncode == 0


def test_prepare_prints_the_python_and_adds_a_group_once(checkout: Checkout) -> None:
    checkout.python("python3", "3.12")
    for _ in range(2):
        done = checkout.run("--prepare", "dev")
        assert done.stdout == f"{checkout.root}/.venv/bin/python\n"
    journal = checkout.journal.read_text()
    assert journal.count("locks/launcher.lock") == journal.count("locks/dev.lock") == 1
    assert checkout.run("--prepare", "nonsense").returncode == 1


def test_two_first_runs_at_once_make_one_environment(checkout: Checkout) -> None:
    if not shutil.which("flock"):
        pytest.skip("no flock on this machine")
    checkout.python("python3", "3.12")
    env = {"PATH": str(checkout.bin), "JOURNAL": str(checkout.journal)}
    runs = [
        subprocess.Popen(
            [str(checkout.root / "start.sh")],
            env=env,
            stderr=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        for _ in range(4)
    ]
    assert [run.wait(20) for run in runs] == [0, 0, 0, 0]
    assert checkout.made() == 1


def test_shellcheck_has_nothing_to_say() -> None:
    beside = Path(sys.executable).with_name("shellcheck")
    program = str(beside) if beside.exists() else shutil.which("shellcheck")
    assert program, "shellcheck is in launcher/locks/dev.lock: ./start.sh --prepare dev"
    done = subprocess.run([program, "start.sh", "download.sh"], cwd=ROOT, capture_output=True,
                          text=True, env={"PATH": os.environ["PATH"]})  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "")


def test_through_a_link_nothing_is_made_or_removed(checkout: Checkout, tmp_path: Path) -> None:
    other = tmp_path / "bin"
    (other / ".venv").mkdir(parents=True)
    (other / ".venv/precious").write_text("mine")
    (other / "spark").symlink_to(checkout.root / "start.sh")
    done = subprocess.run([str(other / "spark"), "status"], capture_output=True, text=True)
    assert done.returncode == 1
    assert "by its own path" in done.stderr
    assert (other / ".venv/precious").read_text() == "mine"
