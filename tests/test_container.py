"""The container of a rank: what Docker is told, and where secrets are and are not."""

from __future__ import annotations

if __name__ == "__main__":  # before the imports below, which this Python may lack
    from _standalone import main

    main(__file__)

import inspect
import json
from dataclasses import replace
from pathlib import Path

import docker
import pytest
from deployment_sites import pair
from docker.types import ContainerConfig, HostConfig
from hypothesis import given
from hypothesis import strategies as st
from settings_root import settings_of

from launcher.commands import container as containers
from launcher.commands.container import Container, Mount, NodePlace, Ulimit, container, ulimits
from launcher.deployment import Deployment, deploy
from launcher.errors import UsageError
from spark_overlay.serving import secret_env

KEY = "s3cret \"quoted\" $(id) 'x' second part"
PLACE = NodePlace("/srv/model", "/srv/engram", "/home/me/cache", devices=("/dev/nvidia0",))
OWNER = "spark-1:/home/me/kit"


def deployed(tmp_path: Path, dotenv: str = "") -> Deployment:
    settings = settings_of(tmp_path, dotenv, overrides=[f"VLLM_API_KEY={KEY}"])
    return deploy(settings, pair(), "abc123")


def made(tmp_path: Path, role: int = 0, dotenv: str = "", place: NodePlace = PLACE) -> Container:
    settings = settings_of(tmp_path, dotenv, overrides=[f"VLLM_API_KEY={KEY}"])
    rank = deploy(settings, pair(), "abc123").ranks[role]
    return container(rank, settings, place, owner=OWNER, fingerprint="f1")


def test_the_flags_of_both_containers(tmp_path: Path) -> None:
    host = made(tmp_path).host()
    assert host["network_mode"] == "host" and host["ipc_mode"] == "host"
    assert host["oom_score_adj"] == 1000
    assert set(host["cap_add"]) == {"SYS_PTRACE", "IPC_LOCK"}
    assert host["init"] is True
    assert host["restart_policy"] == {"Name": "no"}
    assert host["devices"] == ["/dev/nvidia0:/dev/nvidia0:rwm"]
    assert host["device_requests"] == [{"count": -1, "capabilities": [["gpu"]]}]
    assert {"name": "core", "soft": 0, "hard": 0} in host["ulimits"]
    assert {"name": "memlock", "soft": -1, "hard": -1} in host["ulimits"]
    assert "shm_size" not in host
    assert made(tmp_path).arguments()["stop_timeout"] == 60


def test_without_gpus_none_are_asked_for(tmp_path: Path) -> None:
    assert made(tmp_path, place=replace(PLACE, gpus=False)).host()["device_requests"] == []


def test_the_docker_sdk_takes_both_parts(tmp_path: Path) -> None:
    one = made(tmp_path)
    HostConfig(version="1.44", **one.host())
    known = inspect.signature(docker.APIClient.create_container).parameters
    assert not one.arguments().keys() - known.keys()
    arguments = {k: v for k, v in one.arguments().items() if k != "name"}
    ContainerConfig(version="1.44", **arguments)


def test_what_the_image_would_start_is_replaced_by_the_ranks_argv(tmp_path: Path) -> None:
    one = made(tmp_path)
    told = one.arguments()
    assert (*told["entrypoint"], *told["command"]) == one.argv
    assert one.argv == deployed(tmp_path).ranks[0].argv


def test_labels_say_whose_and_of_which_launch(tmp_path: Path) -> None:
    assert made(tmp_path, role=1).labels == {
        "dsv41.launch": "abc123",
        "dsv41.role": "worker",
        "dsv41.owner": OWNER,
        "dsv41.fingerprint": "f1",
    }


def test_no_secret_is_in_what_docker_is_told(tmp_path: Path) -> None:
    one = made(tmp_path)
    told = json.dumps([one.arguments(), one.host()]) + repr(one)
    assert "s3cret" not in told
    assert one.env["SPARK_SECRET_ENV"] == "/run/spark/secret.env"
    file = one.secret_file
    folder, mark, launch, name = file.rsplit("/", 3)
    assert (folder, launch, name) == ("/home/me/cache/dsv41-secrets", "abc123", "secret.env")
    assert len(mark) == 12, "a folder of each owner's own"
    assert Mount(file, "/run/spark/secret.env") in one.mounts
    assert file not in one.writable()


def test_the_worker_gets_no_secret(tmp_path: Path) -> None:
    one = made(tmp_path, role=1)
    assert (one.secret_file, dict(one.secret_env)) == ("", {})
    assert "SPARK_SECRET_ENV" not in one.env
    assert all(mount.target != "/run/spark/secret.env" for mount in one.mounts)


def test_only_the_caches_may_be_written(tmp_path: Path) -> None:
    cache = "/home/me/cache"
    names = ("vllm", "triton", "tilelang", "flashinfer")
    assert made(tmp_path).writable() == tuple(f"{cache}/{name}" for name in names)


def test_packed_rows_are_mounted_to_be_read_where_there_are_any(tmp_path: Path) -> None:
    one = made(tmp_path, place=replace(PLACE, packed_dir="/srv/packs"))
    assert Mount("/srv/packs", "/engram-packed", read_only=True) in one.mounts
    assert all(mount.target != "/engram-packed" for mount in made(tmp_path).mounts)


def test_places_follow_each_nodes_own_home(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, "CACHE_ROOT=~/c\nMODEL_HOST=./m\nWORKER_TRITON_CACHE=/t\n")
    head = containers.place_of(settings, "head", "/home/a")
    worker = containers.place_of(settings, "worker", "/home/b")
    assert head.model_dir == str(tmp_path / "m") and head.cache_root == "/home/a/c"
    assert worker.model_dir == "/home/b/.cache/dsv41-flash-exl3/model"
    assert worker.cache_root == "/home/b/c" and worker.triton_cache == "/t"


@pytest.mark.parametrize("source", ["name", "./here", ""])
def test_a_mount_is_never_taken_for_a_volumes_name(source: str) -> None:
    with pytest.raises(ValueError, match="absolute"):
        Mount(source, "/model")


def test_no_core_files_whatever_the_other_limits(tmp_path: Path) -> None:
    """One is as large as a rank's weights."""
    text = "CONTAINER_ULIMITS='nofile=1024'\n"
    assert Ulimit("core", 0, 0) in made(tmp_path, dotenv=text).ulimits
    asked = made(tmp_path, dotenv="CONTAINER_ULIMITS=core=-1\n").ulimits
    assert asked == (Ulimit("core", -1, -1),)


def test_ulimits_are_read_and_refused() -> None:
    assert ulimits("core=0 nofile=1024:4096") == (
        Ulimit("core", 0, 0),
        Ulimit("nofile", 1024, 4096),
    )
    assert ulimits("") == ()
    for wrong in ("core", "core=x", "core=0:", "core=-2", "core = 0"):
        with pytest.raises(UsageError, match="CONTAINER_ULIMITS"):
            ulimits(wrong)


VALUES = st.text(st.characters(codec="utf-8", exclude_characters="\0"))


@given(value=VALUES)
def test_a_secret_survives_its_file(value: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("secret")
    settings = settings_of(folder)
    rank = replace(
        deploy(settings, pair(), "l1").ranks[0], secret_env={"VLLM_API_KEY": value, "B": "2"}
    )
    one = container(rank, settings, PLACE, owner=OWNER)
    path = folder / "secret.env"
    path.touch(0o600)
    path.write_bytes(one.secret_text())
    environ = {"SPARK_SECRET_ENV": str(path), "B": "1"}
    secret_env.load(environ)
    assert (environ["VLLM_API_KEY"], environ["B"]) == (value, "2")


def test_without_a_file_named_nothing_is_read() -> None:
    environ: dict[str, str] = {}
    secret_env.load(environ)
    assert environ == {}


def test_a_missing_readable_or_garbled_secret_file_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "secret.env"
    environ = {"SPARK_SECRET_ENV": str(path)}
    with pytest.raises(SystemExit, match="cannot be read"):
        secret_env.load(environ)
    path.write_text('K="v"\n')
    for mode in (0o640, 0o604, 0o660, 0o644):
        path.chmod(mode)
        with pytest.raises(SystemExit, match="others may read"):
            secret_env.load(environ)
    path.chmod(0o600)
    secret_env.load(environ)
    assert environ["K"] == "v"
    for wrong in ("K=s3cret", 'K="a', "K=1", 'K-x="s3cret"', '"s3cret"'):
        path.write_text(wrong)
        with pytest.raises(SystemExit, match="line 1") as told:
            secret_env.load(environ)
        assert "s3cret" not in str(told.value)
    with pytest.raises(SystemExit, match="no regular file"):
        secret_env.load({"SPARK_SECRET_ENV": str(tmp_path)})


@pytest.mark.parametrize(
    "text", ["abc", "frobnicate=1", "nofile=9:5", "core=0 nofile=-1:5", "memlock=", "core=x"]
)
def test_limits_that_docker_would_refuse_are_refused_before_anything_stops(text: str) -> None:
    with pytest.raises(UsageError):
        ulimits(text)


@pytest.mark.parametrize("text", ["memlock=-1", "nofile=5:-1", "stack=1:1 core=0", ""])
def test_limits_that_docker_takes(text: str) -> None:
    assert len(ulimits(text)) == len(text.split())
