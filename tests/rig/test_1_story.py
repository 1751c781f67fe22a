"""The story of a pair on two nodes: start, look, change, stop, start; in order, with one clone.

Each test can also be run by itself: `serving` starts the pair if it does not serve.
"""

from __future__ import annotations

import json
import time

import pytest
from head_clone import KEY, MARK, HeadClone
from machine import command_of
from pair import Pair, launcher_events
from rig import HEAD, SECOND, USER, WORKER

pytestmark = pytest.mark.rig

START = 90.0  # seconds for a start on a busy machine; about six on two idle cores


def test_doctor_finds_nothing_wrong_and_changes_nothing(clean: HeadClone) -> None:
    before = _home_of_the_worker(clean)
    ran = clean.start("doctor")
    assert ran.status == 0, ran.said
    for told in (HEAD.hca, WORKER.hca, HEAD.interface, WORKER.interface, "580.95.05", "9000"):
        assert told in ran.out, ran.said
    assert clean.containers() == {}
    assert _home_of_the_worker(clean) == before


def _home_of_the_worker(clone: HeadClone) -> str:
    return clone.rig.worker.run("find", USER.home, "-printf", "%p %s %T@\n").out


def test_a_fresh_clone_is_brought_up(clean: HeadClone) -> None:
    assert clean.standing()["code"] == 1
    ran = clean.start("start", timeout=START)
    assert ran.status == 0, ran.said
    assert f"the pair serves at http://127.0.0.1:{clean.port}" in ran.out
    started = [e["role"] for e in launcher_events(ran) if e["event"] == "rank started"]
    assert started == ["worker", "head"]
    pair = Pair.of(clean)
    told = clean.standing()
    assert told["code"] == 0 and told["deployment"]["launch_id"] == pair.launch_id


def test_both_ranks_are_what_the_design_says(serving: HeadClone) -> None:
    pair = Pair.of(serving)
    for role, node, card in (
        ("head", serving.rig.head, HEAD),
        ("worker", serving.rig.worker, WORKER),
    ):
        attrs = pair.inspect(role)
        host, config = attrs["HostConfig"], attrs["Config"]
        assert config["Labels"]["dsv41.launch"] == pair.launch_id
        assert config["Labels"]["dsv41.role"] == role
        assert config["Labels"]["dsv41.owner"] == f"spark-1:{serving.at}"
        assert (host["NetworkMode"], host["IpcMode"]) == ("host", "host")
        assert host["OomScoreAdj"] == 1000
        assert {"SYS_PTRACE", "IPC_LOCK"} <= {c.removeprefix("CAP_") for c in host["CapAdd"]}
        assert host["RestartPolicy"]["Name"] in ("", "no") and host["Init"]
        assert {"Name": "core", "Soft": 0, "Hard": 0} in host["Ulimits"]
        devices = {device["PathOnHost"] for device in host["Devices"]}
        assert {"/dev/nvidia0", "/dev/nvidiactl", "/dev/nvidia-uvm"} <= devices
        assert any(path.startswith("/dev/infiniband") for path in devices)
        env = dict(word.split("=", 1) for word in config["Env"])
        assert env["NCCL_IB_HCA"].lstrip("=").startswith(card.hca)
        assert env["NCCL_IB_GID_INDEX"] == "3"
        for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
            assert env[name].lstrip("=") == card.interface
        assert env["VLLM_HOST_IP"] == card.address
        assert all(value for value in env.values()), "an empty value"
        # Docker counts pids as its own namespace does, which is the node's.
        assert node.read(f"/proc/{attrs['State']['Pid']}/oom_score_adj").strip() == "1000"
    head, worker = pair.argv("head"), pair.argv("worker")
    assert "--headless" in worker and "--headless" not in head
    assert head[head.index("--master-addr") + 1] == HEAD.address
    assert "--kv-cache-dtype" not in head
    assert f"the worker came from {WORKER.address}" in pair.log("head")


def test_the_key_is_needed_and_shown_nowhere(serving: HeadClone) -> None:
    assert serving.curl("/v1/models", key=False).out.endswith("401")
    assert serving.curl("/health", key=False).out.endswith("200")
    pair = Pair.of(serving)
    assert pair.completes()
    for role in ("head", "worker"):
        assert KEY not in json.dumps(pair.inspect(role)) and KEY not in pair.log(role)
        assert json.dumps(KEY)[1:-1] not in json.dumps(pair.inspect(role))
    for node in (serving.rig.head, serving.rig.worker):
        for process in node.processes():
            assert KEY not in command_of(process)
    for path in serving.logs.rglob("*"):
        if path.is_file() and not path.is_symlink():
            assert KEY.encode() not in path.read_bytes(), path
    held = 'grep -rlF -- "$1" /home /data /tmp /run /var/tmp 2>/dev/null || true'
    found = serving.rig.worker.run("sh", "-c", held, "sh", MARK).out
    assert found == "", "the worker needs no key"
    found = serving.rig.head.run("sh", "-c", held, "sh", MARK).out.splitlines()
    for path in found:
        if path.endswith("secret.env"):
            assert serving.rig.head.path(path).stat().st_mode & 0o777 == 0o600
        else:
            assert path == f"{serving.at}/.env" or "/tests/" in path, path


def test_status_takes_less_than_a_second_and_a_half(serving: HeadClone) -> None:
    took: list[float] = []
    while not took or min(took) >= 1.5:
        ran = serving.start("status")
        assert ran.status == 0, ran.said
        took.append(ran.seconds)
        assert len(took) < 20, took  # what other rigs do beside this one comes and goes


def test_a_second_start_finds_all_done(serving: HeadClone) -> None:
    pair = Pair.of(serving)
    ran = serving.start("start", timeout=START)
    assert ran.status == 0, ran.said
    assert "served already and nothing has changed" in ran.out
    assert ran.seconds < 10
    assert Pair.of(serving) == pair


def test_start_is_the_verb_when_none_is_given(serving: HeadClone) -> None:
    pair = Pair.of(serving)
    ran = serving.start(timeout=START)
    assert ran.status == 0 and Pair.of(serving) == pair


@pytest.mark.parametrize("role", ["head", "worker"])
def test_logs_are_those_of_the_node(serving: HeadClone, role: str) -> None:
    ran = serving.start("logs", role, "--no-follow", "-n", "1000")
    assert ran.status == 0, ran.said
    assert "Resolved architecture" in ran.out
    name = "spark-1" if role == "head" else "spark-2"
    assert f"[stub] {role} on {name}" in ran.out


@pytest.mark.parametrize("role", ["head", "worker"])
def test_ctrl_c_on_logs_only_detaches(serving: HeadClone, role: str) -> None:
    pair = Pair.of(serving)
    following = serving.begin("logs", role, "-n", "3")
    end = time.monotonic() + 20
    while len(following.said().splitlines()) < 3 and time.monotonic() < end:
        time.sleep(0.05)
    following.ctrl_c()
    left = following.wait()
    assert left.status == 130, left.said
    assert f"no longer following; the {role} runs on" in left.out
    assert Pair.of(serving) == pair


def test_restart_validates_before_it_stops(serving: HeadClone) -> None:
    pair = Pair.of(serving)
    for bad in ("KV_BLOCK_SIZE=16", "MAX_NUM_SEQS=none", "BIND=0.0.0.0 VLLM_API_KEY="):
        ran = serving.start("restart", "--set", *bad.split())
        assert ran.status == 2, ran.said
        assert bad.split("=")[0] in ran.err
    serving.rig.worker.mtu(1500)
    ran = serving.start("restart")
    assert ran.status == 1 and "MTU 9000" in ran.err, ran.said
    assert Pair.of(serving) == pair and pair.completes()


def test_restart_brings_another_launch(serving: HeadClone) -> None:
    pair = Pair.of(serving)
    ran = serving.start("restart", timeout=START)
    assert ran.status == 0, ran.said
    now = Pair.of(serving)
    assert now.launch_id != pair.launch_id and now.completes()


def test_a_changed_setting_starts_the_pair_anew(serving: HeadClone) -> None:
    pair = Pair.of(serving)
    ran = serving.start("start", "--set", "MAX_NUM_SEQS=1", timeout=START)
    assert ran.status == 0, ran.said
    now = Pair.of(serving)
    assert now.launch_id != pair.launch_id
    argv = now.argv("head")
    assert argv[argv.index("--max-num-seqs") + 1] == "1"


def test_stop_takes_both_down_and_waits_for_the_memory(serving: HeadClone) -> None:
    Pair.of(serving)
    worker = serving.rig.worker
    worker.memory(available=20.0)  # the driver has not given it back yet
    stopping = serving.begin("stop")
    end = time.monotonic() + 40
    while serving.running() and time.monotonic() < end:
        time.sleep(0.1)
    assert not serving.running()
    time.sleep(2.0)
    assert stopping.process.poll() is None, stopping.said()
    worker.memory(available=117.5)
    ran = stopping.wait(60)
    assert ran.status == 0, ran.said
    assert "the pair is stopped" in ran.out
    assert serving.containers() == {}
    for node in (serving.rig.head, worker):
        assert node.shared_memory() == []
    assert serving.secrets() == []
    assert serving.standing()["code"] == 1
    again = serving.start("stop")
    assert again.status == 0, again.said
    assert "the pair has no container of this checkout on the head or the worker" in again.out


def test_it_starts_again_after_a_stop(clone: HeadClone) -> None:
    assert clone.start("stop").status == 0
    ran = clone.start("start", timeout=START)
    assert ran.status == 0, ran.said
    assert Pair.of(clone).completes()


def test_another_account_and_home_on_the_worker(clean: HeadClone) -> None:
    ran = clean.start("start", "--set", f"WORKER_USER={SECOND.name}", timeout=START)
    assert ran.status == 0, ran.said
    mounts = {m["Destination"]: m["Source"] for m in Pair.of(clean).inspect("worker")["Mounts"]}
    assert mounts["/model"].startswith(f"{SECOND.home}/")
    assert not any(source.startswith(USER.home) for source in mounts.values())
    # What is recorded of the launch finds it again, whatever .env says.
    assert clean.standing()["code"] == 0
    assert clean.start("stop").status == 0
    assert clean.containers() == {}


def test_after_a_reboot_nothing_comes_up_by_itself_and_start_does(serving: HeadClone) -> None:
    """The containers have ended, the kernel has another boot id, memory is back."""
    old = Pair.of(serving)
    for node in (serving.rig.head, serving.rig.worker):
        node.dockerd_stop()
        node.end(node.called("containerd-shim"))
    serving.rig.head.end(serving.processes())
    for node, boot in ((serving.rig.head, "11"), (serving.rig.worker, "22")):
        node.boot_id(f"0f9ad5c1-5b1e-4b0e-9d6c-1111111111{boot}")
        node.dockerd_start()
        node.dockerd_ready()
    assert serving.running() == set()
    told = serving.standing()
    assert told["code"] == 1, told
    ran = serving.start("start", timeout=START)
    assert ran.status == 0, ran.said
    now = Pair.of(serving)
    assert now.launch_id != old.launch_id and now.completes()
