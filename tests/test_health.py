"""When a pair counts as serving, and what is said when it does not."""

from __future__ import annotations

if __name__ == "__main__":  # before the imports below, which this Python may lack
    from _standalone import main

    main(__file__)

import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from http.server import ThreadingHTTPServer

import pytest
from stub_rank import Api as StubApi
from test_state import DEPLOYMENT

from launcher import health, ports
from launcher.health import Standing
from launcher.http import Api
from launcher.runtimes.base import RankStatus
from launcher.smoke import chat
from launcher.smoke.server import Fault, Server
from launcher.watch import pair

HEAD = RankStatus("head", "running", "abc", 10)
WORKER = RankStatus("worker", "running", "abc", 11)
DEAD = RankStatus("worker", "exited", "abc", 11, exit_code=3, ended=5.0, last_lines=("boom",))
ABSENT = RankStatus("worker", "absent")


@pytest.fixture
def stub() -> Iterator[type[StubApi]]:
    """A handler class of its own, served on ``stub.port``; tests set mode, model and key."""
    handler = type("Handler", (StubApi,), {"model": "m", "mode": "serve", "key": ""})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    handler.port = server.server_address[1]  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield handler
    server.shutdown()
    server.server_close()


def api(stub: type[StubApi], key: str = "") -> Api:
    return Api("127.0.0.1", stub.port, key)  # type: ignore[attr-defined]


def judged(
    stub: type[StubApi], *ranks: RankStatus, was_ready: bool = True, probe: float | None = None
) -> tuple[Standing, str]:
    deployment = replace(DEPLOYMENT, ready=1.0 if was_ready else None)
    verdict = health.judge(deployment, ranks, api(stub), boot_id="b", within=0.5, probe=probe)
    return verdict.standing, verdict.reason


def test_serving_needs_both_ranks_the_api_and_the_name(stub: type[StubApi]) -> None:
    assert judged(stub, HEAD, WORKER)[0] is Standing.SERVING
    assert judged(stub, HEAD, WORKER, probe=1.0)[0] is Standing.SERVING
    stub.model = "another"
    standing, reason = judged(stub, HEAD, WORKER)
    assert standing is Standing.HALF_UP
    assert "names another, not m" in reason


def test_health_200_with_a_dead_rank_is_half_up(stub: type[StubApi]) -> None:
    assert judged(stub, HEAD, DEAD) == (
        Standing.HALF_UP,
        "the worker ended with exit code 3",
    )
    assert judged(stub, HEAD, ABSENT)[0] is Standing.HALF_UP
    other = replace(WORKER, launch_id="old")
    standing, reason = judged(stub, HEAD, other)
    assert standing is Standing.HALF_UP
    assert "another launch id (old)" in reason


def test_no_rank_is_down_and_so_is_a_rebooted_machine(stub: type[StubApi]) -> None:
    assert judged(stub, replace(DEAD, role="head"), DEAD)[0] is Standing.DOWN
    verdict = health.judge(DEPLOYMENT, [HEAD, WORKER], api(stub), boot_id="later")
    assert verdict.standing is Standing.DOWN


def test_before_it_was_ever_ready_it_is_starting_afterwards_it_is_broken(
    stub: type[StubApi],
) -> None:
    stub.mode = "garbage"
    assert judged(stub, HEAD, WORKER, was_ready=False)[0] is Standing.STARTING
    standing, reason = judged(stub, HEAD, WORKER)
    assert standing is Standing.HALF_UP
    assert "something else than a list of models: <html>" in reason


def test_an_api_that_never_answers_costs_no_more_than_the_time_given() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        where = Api("127.0.0.1", mute.getsockname()[1])
        fault = health.api_fault(where, "m", 0.2, time.monotonic)
    assert fault == "/health: no answer in time"
    closed = Api("127.0.0.1", ports.free("127.0.0.1"))
    assert health.token_fault(closed, "m", 1.0) == "/v1/completions: Connection refused"


def test_the_key_goes_to_v1_only_and_its_lack_is_named(stub: type[StubApi]) -> None:
    stub.key = "k"
    assert health.api_fault(api(stub, "k"), "m", 1.0, lambda: 0.0) is None
    fault = health.api_fault(api(stub), "m", 1.0, lambda: 0.0)
    assert fault is not None and "VLLM_API_KEY" in fault


def test_no_proxy_is_asked(stub: type[StubApi], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    assert api(stub).get("/health", 1.0).status == 200


def test_the_check_counts_tokens_and_refuses_nonsense(stub: type[StubApi]) -> None:
    server = Server(api(stub), "m", 1.0)
    for asked in (chat.ask, chat.stream):
        reply = asked(server, chat.question())
        assert (reply.text, reply.tokens) == ("323", chat.TOKENS)
    with pytest.raises(Fault, match="HTTP 404"):
        chat.ask(replace(server, model="not served"), chat.question())
    stub.mode = "garbage"
    with pytest.raises(Fault, match="something else: <html>"):
        chat.ask(server, chat.question())
    with pytest.raises(Fault, match=r"without \[DONE\]"):
        chat.stream(server, chat.question())


def test_the_address_to_connect_to_is_never_a_wildcard() -> None:
    assert Api("0.0.0.0", 1).url == "http://127.0.0.1:1"
    assert Api("::1", 1).url == "http://[::1]:1"


def test_a_node_that_does_not_answer_leaves_the_pair_half_up(stub: type[StubApi]) -> None:
    gone = RankStatus("worker", "unreachable", note="no route to host")
    standing, reason = judged(stub, HEAD, gone)
    assert standing is Standing.HALF_UP
    assert reason == "the worker's node does not answer: no route to host"
    assert judged(stub, replace(DEAD, role="head"), gone)[0] is Standing.HALF_UP


def test_containers_outlive_the_boot_that_started_them_in_their_daemons_word_only(
    stub: type[StubApi],
) -> None:
    far = replace(DEPLOYMENT, reach={"owner": "o"})
    verdict = health.judge(far, [HEAD, WORKER], api(stub), boot_id="later", within=0.5)
    assert verdict.standing is Standing.SERVING


TABLE = """\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:22B8 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 4242 1
   1: 0100007F:22B8 0100007F:D431 01 00000000:00000000 00:00000000 00000000     0        0 4243 1
   2: 0100007F:22B8 0100007F:D432 06 00000000:00000000 00:00000000 00000000     0        0 0 3
"""


def test_only_listening_sockets_hold_a_port() -> None:
    assert ports.parse(TABLE) == [ports.Listener(8888, 1000, 4242)]


def test_the_holder_of_a_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert ports.taken("127.0.0.1", port) == "is taken"
        (holder,) = ports.holders(port)
        assert str(holder).startswith(f"pid {os.getpid()} of user ")
    assert ports.taken("127.0.0.1", port) is None
    assert "cannot be used" in str(ports.taken("192.0.2.1", port))


class World:
    """A pair whose fate is written by second; sleeping lets the time pass."""

    def __init__(self, fate: dict[int, dict[str, RankStatus]], stopped_at: int = 99) -> None:
        self.time = 0
        self.fate = fate
        self.stopped_at = stopped_at
        self.now: dict[str, RankStatus] = {}
        self.reports: list[tuple[int, str]] = []

    def inspect(self, role: str) -> RankStatus:
        for at, change in self.fate.items():
            if at <= self.time:
                self.now |= change
        return self.now.get(role, RankStatus(role, "absent"))

    def sleep(self, seconds: float) -> None:
        assert self.time < 100, "the watch does not end"
        self.time += 1

    def run(self, ran: Sequence[str] = ()) -> str:
        return pair.watch(
            pair.ROLES,
            inspect=self.inspect,
            ours=lambda: self.time < self.stopped_at,
            report=lambda status: self.reports.append((self.time, status.role)),
            sleep=self.sleep,
            clock=lambda: self.time,
            ran=ran,
        )


UP = {"head": HEAD, "worker": WORKER}


def test_the_watch_reports_each_death_once_and_goes_on_with_the_survivor() -> None:
    world = World({3: UP, 7: {"worker": DEAD}, 20: {"head": replace(DEAD, role="head")}})
    assert world.run() == "every rank has ended"
    assert world.reports == [(7, "worker"), (20, "head")]


def test_the_watch_tells_of_a_node_that_stays_away_and_of_its_return() -> None:
    gone = RankStatus("worker", "unreachable", note="no route to host")
    world = World({0: UP, 3: {"worker": gone}, 8: UP, 10: {"worker": gone}, 40: UP}, stopped_at=60)
    assert world.run() == "the deployment was stopped or replaced"
    assert world.reports == [(30, "worker"), (40, "worker")]


def test_the_watch_tells_of_a_rank_that_was_removed_but_not_of_one_that_is_to_come() -> None:
    gone = {"worker": ABSENT}
    world = World({3: UP, 7: gone}, stopped_at=20)
    assert world.run() == "the deployment was stopped or replaced"
    assert world.reports == [(7, "worker")]
    assert pair.told(ABSENT, 0.0).endswith(
        "rank is gone: worker, is not there: not started, or removed since\n"
    )


def test_the_watch_tells_of_a_rank_that_was_removed_before_its_first_look() -> None:
    world = World({0: {"head": HEAD}}, stopped_at=9)
    assert world.run(ran=pair.ROLES) == "the deployment was stopped or replaced"
    assert world.reports == [(0, "worker")]


def test_a_paused_rank_does_not_serve(stub: type[StubApi]) -> None:
    standing, reason = judged(stub, HEAD, replace(WORKER, paused=True))
    assert standing is Standing.HALF_UP
    assert reason == "the worker is paused (docker unpause its container)"


def test_the_watch_is_silent_about_an_end_that_was_asked_for() -> None:
    world = World({0: UP, 5: {"worker": DEAD, "head": replace(DEAD, role="head")}}, stopped_at=5)
    assert world.run() == "the deployment was stopped or replaced"
    assert world.reports == []


def test_the_watch_tells_the_end_with_code_and_lines() -> None:
    assert pair.told(DEAD, 0.0) == (
        "1970-01-01T00:00:00Z rank died: worker, ended with exit code 3, last lines:\n    boom\n"
    )
    assert pair.told(replace(DEAD, last_lines=()), 0.0) == (
        "1970-01-01T00:00:00Z rank died: worker, ended with exit code 3; "
        "no line of its log is to be had\n"
    )
