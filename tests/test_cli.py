"""The verbs as a user meets them: real launcher processes, stub ranks, exit codes and words."""

from __future__ import annotations

if __name__ == "__main__":  # before the imports below, which this Python may lack
    from _standalone import main

    main(__file__)

import contextlib
import errno
import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import stub_launcher
from settings_root import settings_of
from test_state import DEPLOYMENT

from launcher import cli, file_errors, lock, ports
from launcher.runtimes.base import RankStatus
from launcher.state import Store

HERE = Path(__file__).resolve().parent
KEY = "the-api-key-9000"


@dataclass(frozen=True)
class Ended:
    code: int
    said: str


@dataclass(frozen=True)
class Checkout:
    root: Path
    port: int

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    def begin(self, *words: str, stub: str = "{}") -> subprocess.Popen[str]:
        """As a process of its own."""
        return subprocess.Popen(
            [sys.executable, str(HERE / "stub_launcher.py"), str(self.root), *words],
            env={**os.environ, "STUB": stub},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *words: str, stub: str = "{}") -> Ended:
        """In this process, which saves the start of a Python; nothing else differs."""
        said = io.StringIO()
        environ = {**os.environ, "STUB": stub}
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            code = cli.main(words, root=self.root, environ=environ, build=stub_launcher.build)
        return Ended(code, said.getvalue())

    def configure(self, *lines: str) -> None:
        own = [f"PORT={self.port}", f"VLLM_API_KEY={KEY}"]
        (self.root / ".env").write_text("\n".join([*own, *lines]) + "\n")

    def pid(self, role: str) -> int:
        path = self.logs / "ranks" / role / "rank.json"
        return int(json.loads(path.read_text())["pid"])


@pytest.fixture
def checkout(tmp_path: Path) -> Iterator[Checkout]:
    made = Checkout(tmp_path, ports.free("127.0.0.1"))
    made.configure()
    yield made
    if made.logs.exists():
        made.run("stop")


def until(true: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.02)


def test_from_down_through_starting_to_serving_and_back(checkout: Checkout) -> None:
    down = checkout.run("status")
    assert down.code == 1, down.said
    assert "no deployment is recorded" in down.said

    slow = '{"head": {"boot": 0.5}}'
    first = checkout.begin("rehearse", stub=slow)
    store = Store(checkout.logs / "state.json")
    until(lambda: "rehearsal/watch" in store.load().steps)
    starting = checkout.run("status")
    assert starting.code == 4, starting.said
    assert f"a launcher is at work: pid {first.pid}, verb rehearse" in starting.said

    second = checkout.run("rehearse", stub=slow)
    assert second.code == 1
    assert f"pid {first.pid}, verb rehearse, since" in second.said

    first.send_signal(signal.SIGINT)
    said, _ = first.communicate(timeout=10)
    assert first.returncode == 130, said
    assert "the worker and the head run on" in said
    head = checkout.pid("head")

    went_on = checkout.run("rehearse", stub=slow)
    assert went_on.code == 0, went_on.said
    assert checkout.pid("head") == head, went_on.said
    assert f"curl -s http://127.0.0.1:{checkout.port}/v1/chat/completions" in went_on.said
    assert '-H "Authorization: Bearer $VLLM_API_KEY"' in went_on.said

    began = time.monotonic()
    serving = checkout.begin("status", "--probe", "--json")
    said, _ = serving.communicate()
    assert time.monotonic() - began < 1.5
    assert serving.returncode == 0, said
    told = json.loads(said)
    assert told["state"] == "serving"
    assert {rank["role"]: rank["state"] for rank in told["ranks"]} == {
        "head": "running",
        "worker": "running",
    }

    # The recorded deployment, with its key from .env.
    smoke = checkout.run("smoke", "--short")
    assert smoke.code == 0, smoke.said
    assert "all passed in" in smoke.said and f"http://127.0.0.1:{checkout.port}" in smoke.said
    unknown = checkout.run("smoke", "--short", "--model", "another")
    assert unknown.code == 1
    assert "next: ./start.sh status, then ./start.sh logs" in unknown.said
    assert str(checkout.logs / "head.log") in unknown.said

    again = checkout.run("rehearse", stub=slow)
    assert again.code == 0
    assert "served already and nothing has changed" in again.said

    stopped = checkout.run("stop")
    assert stopped.code == 0, stopped.said
    assert "the rehearsal is stopped" in stopped.said
    assert checkout.run("status").code == 1
    # The watcher ends without a report: this end was asked for.
    until(lambda: "stopped or replaced" in "".join(read(checkout.logs / "runs")))
    assert "rank died" not in "".join(read(checkout.logs / "runs"))
    for path in [*checkout.logs.rglob("*")]:
        assert path.is_dir() or KEY.encode() not in path.read_bytes(), path


def read(folder: Path) -> list[str]:
    return [path.read_text() for path in folder.rglob("*") if path.is_file()]


def test_a_dead_rank_while_serving_and_a_restart_that_is_refused_in_time(
    checkout: Checkout,
) -> None:
    assert checkout.run("rehearse").code == 0
    head, worker = checkout.pid("head"), checkout.pid("worker")

    # A restart that cannot succeed is refused before anything is stopped.
    checkout.configure("MAX_NUM_SEQS=0")
    refused = checkout.run("restart")
    assert refused.code == 2, refused.said
    assert "MAX_NUM_SEQS" in refused.said
    with socket.create_server(("127.0.0.1", 0)) as other:
        checkout.configure()
        refused = checkout.run("restart", "--set", f"PORT={other.getsockname()[1]}")
        assert refused.code == 1
        assert f"is taken by pid {os.getpid()}" in refused.said
    assert checkout.run("status").code == 0
    assert (checkout.pid("head"), checkout.pid("worker")) == (head, worker)

    os.kill(worker, signal.SIGKILL)
    watched = checkout.logs / "watch.log"
    until(lambda: "rank died: worker, ended by SIGKILL" in watched.read_text())
    half = checkout.run("status")
    assert half.code == 3, half.said
    assert "the worker ended by SIGKILL" in half.said
    assert "worker ended: signal SIGKILL" in half.said

    restarted = checkout.run("restart")
    assert restarted.code == 0, restarted.said
    assert checkout.pid("head") != head


def test_a_rank_that_dies_in_the_boot_ends_the_wait_at_once(checkout: Checkout) -> None:
    stub = '{"worker": {"mode": "die", "after": 0.2, "code": 9}, "head": {"boot": 60}}'
    died = checkout.run("rehearse", stub=stub)
    assert died.code == 1
    assert "the worker ended with exit code 9" in died.said
    assert "RuntimeError: the stub was told to die" in died.said
    assert "worker.log" in died.said
    assert checkout.run("status").code == 3


def test_an_api_that_tells_something_else_each_time_fails_the_check(checkout: Checkout) -> None:
    drift = checkout.run("rehearse", stub='{"head": {"mode": "drift"}}')
    assert drift.code == 1
    assert "the same request gave '323 2' and then '323 3'" in drift.said

    # Logs of the pair that still runs: the last lines, then detach by Ctrl-C.
    shown = checkout.run("logs", "head", "-n", "1", "--no-follow")
    assert (shown.code, shown.said) == (0, "Application startup complete.\n")
    following = checkout.begin("logs", "worker", "-n", "5")
    assert following.stdout is not None
    assert following.stdout.readline().startswith("worker of ")
    following.send_signal(signal.SIGINT)
    said, _ = following.communicate(timeout=10)
    assert following.returncode == 130
    assert "the worker runs on" in said


def test_a_taken_port_is_told_with_its_holder_before_anything_starts(checkout: Checkout) -> None:
    with socket.create_server(("127.0.0.1", checkout.port)):
        refused = checkout.run("rehearse")
    assert refused.code == 1
    taken = f"port {checkout.port} on 127.0.0.1 is taken by pid {os.getpid()} of user"
    assert taken in refused.said
    assert not (checkout.logs / "ranks").exists()


def test_a_stop_without_a_record_tells_of_the_pair_too(
    checkout: Checkout, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkout.configure("HEAD_IP=192.0.2.1", "WORKER_IP=192.0.2.3")  # of no machine, by RFC 5737
    stopped = checkout.run("stop")
    assert stopped.code == 0
    assert "no deployment is recorded; nothing of the rehearsal ran" in stopped.said
    assert "of the pair runs was not seen: HEAD_IP 192.0.2.1 is no address" in stopped.said
    # On the head both nodes are asked.
    monkeypatch.setattr("launcher.link.head_ip", lambda *_: [])
    asked: list[str] = []

    def inspect(role: str) -> RankStatus:
        asked.append(role)
        return RankStatus(role, "absent")

    pair = SimpleNamespace(inspect=inspect)
    monkeypatch.setattr("launcher.pair.reach.runtime", lambda *_, **__: pair)
    stopped = checkout.run("stop")
    assert stopped.code == 0
    assert "the pair has no container of this checkout on the head or the worker" in stopped.said
    assert sorted(asked) == ["head", "worker"]


REACH = {
    "endpoint": {"host": "192.0.2.3"}, "head": "h", "worker": "w", "owner": "o",
}  # fmt: skip


def test_a_recorded_pair_is_not_touched(checkout: Checkout) -> None:
    store = Store(checkout.logs / "state.json")
    store.record(replace(DEPLOYMENT, name="pair"))
    refused = checkout.run("rehearse")
    assert refused.code == 1
    assert "the pair is recorded as up" in refused.said
    for broken in (replace(DEPLOYMENT, name="pair"), replace(DEPLOYMENT, name="trio")):
        store.record(broken)
        assert checkout.run("stop").code == 2
    store.record(None)


@pytest.mark.parametrize("verb", ["start", "restart", "doctor"])
def test_nobody_is_contacted_from_a_machine_that_is_not_the_head(
    checkout: Checkout, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def contacted(*_: object, **__: object) -> None:
        raise AssertionError("the worker was contacted")

    for way in ("launcher.nodes.connection.destination", "launcher.nodes.daemon.daemon"):
        monkeypatch.setattr(way, contacted)
    Store(checkout.logs / "state.json").record(
        replace(DEPLOYMENT, name="pair", reach=REACH) if verb == "restart" else None
    )
    elsewhere = ["HEAD_IP=192.0.2.1", "WORKER_IP=192.0.2.3"]  # of no machine, by RFC 5737
    refused = checkout.run(verb, "--set", *elsewhere)
    assert refused.code == 1
    assert "HEAD_IP 192.0.2.1 is no address of this machine" in refused.said


def test_a_download_runs_once_at_a_time_and_beside_whatever_serves(checkout: Checkout) -> None:
    quiet = ["AUTO_DOWNLOAD=0", f"CACHE_ROOT={checkout.root}/cache"]
    with lock.hold(checkout.logs / "lock", "start"):  # a start is at work
        ran = checkout.run("download", "--set", *quiet)
    assert ran.code == 1
    assert "the checkpoint" in ran.said and "(MODEL_HOST), does not exist" in ran.said
    assert "log:" in ran.said
    with lock.hold(checkout.logs / "download.lock", "download"):
        assert "another launcher is at work" in checkout.run("download", "--set", *quiet).said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["stat"], "'stat' is not a verb; did you mean start?"),
        (["rehearsal"], "did you mean rehearse?"),
        (["start", "--set", "KV_BLOCK_SIZE=128"], "32 or 64"),
        (["start", "--set", "WORKER_SSH=a b"], "'a b' as the host"),
        (["download", "--set", "MODEL_HOST=./x", "ENGRAM_DIR=x/"], "MODEL_HOST too"),
        (["rehearse", "--set", "PORTT=1"], "did you mean PORT?"),
        (["logs", "third"], "invalid choice"),
        (["smoke", "--url", "https://127.0.0.1:8888"], "http://HOST:PORT"),
        (["smoke", "--timeout", "0"], "'0' is not a number of seconds"),
        (["smoke", "--timeout", "nan"], "'nan' is not a number of seconds"),
        (["smoke", "--key", "k"], "unrecognized arguments"),
    ],
)
def test_what_cannot_be_done_is_exit_2_with_a_way_on(
    checkout: Checkout, capfd: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert cli.main(words, root=checkout.root, environ={}) == 2
    out, err = capfd.readouterr()
    assert said in out + err


def test_a_directory_that_cannot_be_made_is_told_with_its_setting_and_the_log(
    checkout: Checkout,
) -> None:
    (checkout.root / "file").touch()
    where = f"CACHE_ROOT={checkout.root}/file/cache"
    ran = checkout.run("download", "--set", "AUTO_DOWNLOAD=0", where)
    assert ran.code == 1
    assert f"ls -ld {checkout.root}/file;" in ran.said and "set CACHE_ROOT in .env" in ran.said
    assert "chown" not in ran.said and f"log:     {checkout.logs}/runs/" in ran.said


@pytest.mark.parametrize(
    ("path", "number", "mend"),
    [
        ("logs/runs", errno.EACCES, "sudo chown -R $USER {0}/logs"),
        ("srv", errno.EACCES, "see ls -ld {0}; or set ENGRAM_DIR and CACHE_ROOT in .env to"),
        ("ship/a/x", errno.EROFS, "see ls -ld {0}; or set IMAGE_SHIP_DIR in .env to"),
        ("srv/c/a/b", errno.ENOSPC, "df -h {0}; or set CACHE_ROOT in .env to"),
        ("model/x", errno.EACCES, "see ls -ld {0}/model; or set MODEL_HOST in .env to"),
        ("elsewhere", errno.EACCES, "see ls -ld {0}"),
    ],
)
def test_who_may_write_where_is_asked_of_what_is_there(
    tmp_path: Path, path: str, number: int, mend: str
) -> None:
    for folder in ("logs/runs", "model"):
        (tmp_path / folder).mkdir(parents=True)
    dotenv = "CACHE_ROOT=x/../srv/c\nENGRAM_DIR=srv/e\nIMAGE_SHIP_DIR=ship/a\n"
    error = OSError(number, "why", str(tmp_path / path))
    found = file_errors.told(error, tmp_path, settings_of(tmp_path, dotenv))
    assert mend.format(tmp_path) in found.do_next
    assert ("set " in mend) == ("set " in found.do_next)


def test_help_names_every_verb(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["help"]) == 0
    out, _ = capfd.readouterr()
    for verb in cli.VERBS:
        assert f"\n  {verb} " in out
