"""The image's recipe: one stamp for every clone; what is copied, pinned and told of a build."""

from __future__ import annotations

if __name__ == "__main__":  # before the imports that a bare Python lacks
    from _standalone import main

    main(__file__)

import hashlib
import io
import os
import shutil
import subprocess
import tarfile
import tomllib
from pathlib import Path
from typing import Any

import pytest

from launcher.errors import LauncherError
from launcher.image import build, stamp
from launcher.settings.table import TABLE

ROOT = Path(__file__).resolve().parents[1]


JUNK = (
    "overlay/spark_overlay/__pycache__/model.cpython-312.pyc",
    "overlay/spark_overlay/engram/_native.so",
    "overlay/spark_overlay/.model.py.swp",
    "overlay/spark_overlay/.hidden/x.py",
    "overlay/spark_overlay/model.py.orig",
    "overlay/spark_overlay/exl3/build/x.py",
    "overlay/csrc/engram/store.o",
    "overlay/build/lib/spark_overlay/model.py",
    "overlay/spark_overlay.egg-info/PKG-INFO",
    "overlay/dist/spark_overlay-0.whl",
    "docker/notes",
)


@pytest.fixture(scope="module")
def clones(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The recipe's files in two places; in the second with what tools leave, in another order."""
    one, other = (tmp_path_factory.mktemp(name) / "a clone" for name in ("one", "other"))
    names = stamp.files(ROOT)
    for clone, order in ((one, names), (other, reversed(names))):
        for name in order:
            (clone / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, clone / name)
    for name in JUNK:
        (other / name).parent.mkdir(parents=True, exist_ok=True)
        (other / name).write_text("junk")
    os.symlink("/etc/passwd", other / "overlay" / "spark_overlay" / "link.py")
    (other / stamp.WHOLE[0]).chmod(0o600)
    return one, other


def test_two_clones_have_one_stamp_and_one_context(clones: tuple[Path, Path]) -> None:
    one, other = clones
    assert stamp.stamp(one) == stamp.stamp(other)
    assert stamp.context(one) == stamp.context(other)
    with tarfile.open(fileobj=io.BytesIO(stamp.context(other))) as tar:
        assert tar.getnames() == stamp.files(other) == stamp.files(one)


def test_the_stamp_is_what_the_shell_would_say(clones: tuple[Path, Path]) -> None:
    one, _ = clones
    argv = ["sha256sum", "--", *sorted(stamp.files(one), key=os.fsencode)]
    said = subprocess.run(argv, cwd=one, capture_output=True, check=True).stdout
    assert stamp.stamp(one) == hashlib.sha256(said).hexdigest()


def test_every_file_and_its_name_and_the_base_count(tmp_path: Path, clones: Any) -> None:
    clone = tmp_path / "clone"
    shutil.copytree(clones[0], clone)
    seen = {
        stamp.stamp(clone),
        stamp.stamp(clone, "python:3.12"),
        stamp.stamp(clone, "python:3.13"),
    }
    assert len(seen) == 3
    for name in (stamp.DOCKERFILE, "docker/run.txt", "overlay/csrc/common/ptx.cuh"):
        (clone / name).write_bytes((clone / name).read_bytes() + b"\n")
        assert stamp.stamp(clone) not in seen
        seen.add(stamp.stamp(clone))
    (clone / "overlay/csrc/common/ptx.cuh").rename(clone / "overlay/csrc/common/ptx2.cuh")
    assert stamp.stamp(clone) not in seen
    (clone / "docker/run.txt").unlink()
    with pytest.raises(LauncherError, match=r"lacks docker/run\.txt"):
        stamp.stamp(clone)


def test_no_tracked_file_of_the_overlay_is_left_out() -> None:
    argv = ["git", "-C", str(ROOT), "ls-files", "--", *stamp.TREES, "docker"]
    listed = subprocess.run(argv, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    elsewhere = {name for name in listed.stdout.split() if name.startswith("docker/nfs/")}
    assert set(listed.stdout.split()) - elsewhere - set(stamp.files(ROOT)) == set()


def test_dockerignore_names_the_same_files() -> None:
    assert (ROOT / ".dockerignore").read_text() == stamp.ignore_text()


def test_the_dockerfile_copies_what_is_stamped_and_pins_what_the_overlay_needs() -> None:
    text = (ROOT / stamp.DOCKERFILE).read_text()
    copied = [
        word
        for line in text.splitlines()
        if line.startswith("COPY ") and "--from" not in line
        for word in line.split()[1:-1]
    ]
    assert {name.rstrip("/") for name in copied} == {"overlay"} | {
        name for name in stamp.WHOLE if not name.startswith("overlay/") and name != stamp.DOCKERFILE
    }
    assert f"ARG BASE_IMAGE={TABLE['BASE_IMAGE'].default}\n" in text
    assert f"LABEL {stamp.LABEL}=" in text
    needed = tomllib.loads((ROOT / "overlay/pyproject.toml").read_text())["project"]["dependencies"]
    pinned = (ROOT / "docker/run.txt").read_text().splitlines()
    assert [name for name in needed if name not in pinned] == ["numpy"]  # vLLM brings it
    engine = (ROOT / "docker/engine.txt").read_text()
    version = TABLE["BASE_IMAGE"].default.rpartition(":v")[2]
    assert f"\nvllm=={version}\n" in engine and "\nnumpy==" in engine
    assert all("==" in line for line in engine.splitlines() if not line.startswith("#"))


def test_a_build_s_arguments_hold_the_stamp_and_no_secret() -> None:
    argv = build.argv("n:1", "base:2", "abc", "", "docker/Dockerfile")
    assert argv[:2] == ["docker", "build"] and argv[-3:] == ["--file", "docker/Dockerfile", "-"]
    assert "SPARK_RECIPE_STAMP=abc" in argv and "BASE_IMAGE=base:2" in argv
    assert "--platform" not in argv
    assert "linux/arm64" in build.argv("n:1", "b", "a", "linux/arm64", "f")


@pytest.mark.parametrize(
    ("line", "needed"),
    [
        ("write /x: no space left on device", "space for the base"),
        ("manifest for a/b:1 not found: manifest unknown", "a base that can be pulled"),
        ("dial tcp: lookup x: no such host", "a network"),
        ("error: expected ';'", "a build whose every step ends well"),
    ],
)
def test_a_failed_build_tells_its_last_lines_and_what_helps(line: str, needed: str) -> None:
    error = build.failed("n:1", "a/b:1", ["Step 3/9", line], Path("/l"))
    assert line in error.found and needed in error.needed and error.log == Path("/l")
