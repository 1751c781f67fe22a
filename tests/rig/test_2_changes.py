"""Settings, names and records that change while a pair serves: nothing is lost or doubled."""

from __future__ import annotations

import re
import time

import pytest
from head_clone import HeadClone
from pair import Pair
from rig import USER

pytestmark = pytest.mark.rig

START = 90.0
NAMES = {"CONTAINER_HEAD": "other-head", "CONTAINER_WORKER": "other-worker"}


@pytest.fixture
def up(clean: HeadClone) -> HeadClone:
    ran = clean.start("start", timeout=START)
    assert ran.status == 0, ran.said
    return clean


def test_other_names_of_the_containers_replace_the_pair_and_do_not_add_one(up: HeadClone) -> None:
    up.env(NAMES)
    assert up.start("status").status == 0, "it is found where it was started"
    ran = up.start("start", timeout=START)
    assert ran.status == 0, ran.said
    assert sorted(up.containers().values()) == ["running", "running"]
    assert {name for name in up.containers() if "other-" in name} == set(up.containers())
    ran = up.start("stop", timeout=START)
    assert ran.status == 0 and up.containers() == {}, ran.said


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("BIND=10.99.0.99", "BIND is 10.99.0.99"),
        ("CONTAINER_ULIMITS=nofile=9:5", "CONTAINER_ULIMITS"),
        ("CONTAINER_HEAD=bad name!", "CONTAINER_HEAD"),
        ("TRITON_HOST_CACHE=/root/y", "may not write to /root/y"),
        ("MASTER_PORT=8888", "which is PORT too"),
    ],
)
def test_what_cannot_start_does_not_stop_what_serves(up: HeadClone, change: str, said: str) -> None:
    pair = Pair.of(up)
    allowed = ["ALLOW_NO_AUTH=1"] if change.startswith("BIND") else []
    for verb in ("restart", "start"):
        ran = up.start(verb, "--set", change, *allowed, timeout=START)
        assert ran.status != 0 and said in ran.said, ran.said
        assert Pair.of(up) == pair and pair.completes()


def test_a_way_that_cannot_work_does_not_stop_what_serves(up: HeadClone) -> None:
    pair = Pair.of(up)
    for verb, change, said in (
        ("restart", "SKIP_SYNC=0 WEIGHT_SYNC=zfs", "zfs"),
        ("restart", "SKIP_BUILD=0 BASE_IMAGE=no/such:tag", "the base no/such:tag is not on"),
        ("restart", "SKIP_SYNC=0 WEIGHT_SYNC=nfs", "its base debian:bookworm-slim is not on"),
        ("start", "WEIGHT_SYNC=nfs", "the volume dsv41-exl3-weights on the worker is not"),
    ):
        ran = up.start(verb, "--set", *change.split(), timeout=START)
        assert ran.status == 1 and said in ran.err, ran.said
        assert Pair.of(up) == pair and pair.completes()
    # Nor does an image that is kept, though it would be of another base by now.
    ran = up.start("start", "--set", "BASE_IMAGE=no/such:tag", timeout=START)
    assert ran.status == 0 and "not of this recipe; SKIP_BUILD=1 keeps it" in ran.err, ran.said
    assert "SKIP_OVERLAY_VERIFY=1: NOT checked on either node" in ran.err
    assert "served already and nothing has changed" in ran.out
    assert Pair.of(up) == pair


def test_a_folder_of_the_users_in_the_cache_root_stays(clean: HeadClone) -> None:
    kept = f"{USER.home}/data/launch/my-thesis/draft.txt"
    clean.rig.head.run("sh", "-c", 'mkdir -p "${1%/*}" && echo thesis > "$1"', "sh", kept,
                       user=USER.name)  # fmt: skip
    clean.env({"CACHE_ROOT": f"{USER.home}/data"})
    for verb in ("start", "restart", "stop"):
        ran = clean.start(verb, timeout=START)
        assert ran.status == 0, ran.said
        assert clean.rig.head.read(kept) == "thesis\n"


def test_a_paused_rank_is_not_called_serving_and_a_start_mends_it(up: HeadClone) -> None:
    Pair.of(up).container("worker").pause()
    ran = up.start("status")
    assert ran.status == 3 and "the worker is paused" in ran.said, ran.said
    ran = up.start("start", timeout=START)
    assert ran.status == 0, ran.said
    assert Pair.of(up).completes()


def test_a_lost_record_does_not_hide_a_pair_that_runs(up: HeadClone) -> None:
    (up.logs / "state.json").unlink()
    ran = up.start("status")
    assert ran.status == 3 and "no deployment is recorded, but" in ran.said, ran.said
    ran = up.start("stop", timeout=START)
    assert ran.status == 0 and up.containers() == {}, ran.said


def test_a_rank_that_is_removed_behind_our_back_is_told_by_the_watch(up: HeadClone) -> None:
    Pair.of(up).container("worker").remove(force=True)
    told = up.logs / "watch.log"
    # A removal by force kills first: a look in between finds a rank that has died, not yet gone.
    ways = re.compile("rank (is gone: worker|died: worker, ended by SIGKILL)")
    assert up.until(3).status == 3
    end = time.monotonic() + 60
    while not ways.search(told.read_text()) and time.monotonic() < end:
        time.sleep(0.2)
    assert ways.search(told.read_text())
