"""The image: what is kept, pulled, built or refused by every flag; when two nodes have the same."""

from __future__ import annotations

if __name__ == "__main__":  # before the imports that a bare Python lacks
    from _standalone import main

    main(__file__)

import hashlib
import itertools
from pathlib import Path
from typing import Any

import pytest
from settings_root import settings_of

from launcher.facts.docker import Image
from launcher.image import decide, identity
from launcher.image.decide import Flags, Found

# ---- what is done: the table, a row an outcome, the first that fits ----

ANY = None
#: BUILD, SKIP_BUILD, PULL, the head's image, the registry's → what is done, whether it is warned
TABLE_OF_THE_HEAD: tuple[tuple[tuple[Any, ...], str, bool], ...] = (
    ((True, ANY, ANY, ANY, ANY), "build", False),
    ((ANY, ANY, ANY, ANY, "right"), "pull", False),
    ((ANY, True, ANY, "none", "other"), "pull", True),
    ((ANY, True, True, ANY, "other"), "pull", True),
    ((ANY, ANY, ANY, "right", ANY), "keep", False),
    ((ANY, True, ANY, "other", ANY), "keep", True),
    ((ANY, True, ANY, "none", ANY), "refuse", False),
    ((ANY, ANY, ANY, ANY, "out of reach"), "build", True),
    ((ANY, ANY, ANY, ANY, "not pulled"), "build", True),
    ((ANY, ANY, ANY, ANY, ANY), "build", False),
)
HEADS = {"none": None, "right": "a1", "other": "b2"}
BOOLS = (False, True)


def found_of(head: str, says: str) -> Found:
    if says in ("right", "other"):
        return Found("a1", HEADS[head], "there", {"right": "a1", "other": "b2"}[says])
    return Found("a1", HEADS[head], says)  # type: ignore[arg-type]


@pytest.mark.parametrize("flags", [Flags(*each) for each in itertools.product(BOOLS, repeat=5)])
@pytest.mark.parametrize("head", HEADS)
def test_the_head_s_image_by_every_flag(flags: Flags, head: str) -> None:
    # PULL=1 overrides SKIP_PULL=1; BUILD=1 asks nobody; nobody is asked for what is here already.
    may = not flags.build and (flags.pull or not flags.skip_pull)
    wants = may and (head != "right" or flags.pull)
    assert decide.asks(flags, found_of(head, "not asked"), in_a_registry=True) == wants
    assert not decide.asks(flags, found_of(head, "not asked"), in_a_registry=False)
    answers = ("out of reach", "absent", "right", "other", "not pulled")
    said = answers if wants else ("not asked",)
    for says in said:
        asked = (flags.build, flags.skip_build, flags.pull, head, says)
        act, warned = next(
            (act, warned)
            for row, act, warned in TABLE_OF_THE_HEAD
            if all(want is ANY or want == have for want, have in zip(row, asked, strict=True))
        )
        plan = decide.head(flags, found_of(head, says))
        assert (plan.act, plan.warning) == (act, warned), (asked, plan)
        assert plan.why
    # The preflight asks for an image exactly where no outcome could bring one.
    outcomes = {
        decide.head(flags, found_of("none", s)).act for s in ("right", "absent", "not asked")
    }
    may_bring = bool(outcomes & {"build"}) or may
    assert flags.head_needs_one == (not may_bring)


@pytest.mark.parametrize("flags", [Flags(), Flags(skip_build=True)])
def test_a_registry_that_answered_is_not_out_of_reach(flags: Flags) -> None:
    found = Found("a1", None, "not pulled", "a1", failed="unexpected EOF")
    assert "could not be pulled: unexpected EOF" in decide.head(flags, found).why


@pytest.mark.parametrize("flags", [Flags(*each) for each in itertools.product(BOOLS, repeat=5)])
def test_the_worker_s_image_by_every_flag(flags: Flags) -> None:
    for remote in BOOLS:
        assert decide.worker(flags, True, remote) == "keep"
        way = decide.worker(flags, False, remote)
        if flags.skip_ship:
            assert way == "refuse"
        elif remote and not flags.build and (flags.pull or not flags.skip_pull):
            assert way == "pull"
        else:
            assert way == "ship"


def test_flags_are_read_from_the_settings(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, "SKIP_BUILD=1\nPULL=1\n")
    assert Flags.of(settings) == Flags(skip_build=True, pull=True)


# ---- the same image ----


def image(*layers: str, architecture: str = "arm64") -> Image:
    return Image("sha256:1", layers, architecture, "linux")


def test_images_are_the_same_by_their_layers_in_order() -> None:
    assert identity.same(image("a", "b"), image("a", "b"))
    for other in (image("b", "a"), image("a"), image("a", "b", "c"), None):
        assert not identity.same(image("a", "b"), other)
    assert not identity.same(image(), image())  # nothing is known of either
    assert identity.key(["a", "b"]) == hashlib.sha256(b"a,b").hexdigest()[:16]
    assert "the first 1 are equal" in identity.first_difference(["a", "b", "c"], ["a", "c", "b"])


def test_the_platform_is_as_asked_as_inspected_as_the_machine() -> None:
    assert identity.platform("linux/arm64/v8", image("a", architecture="amd64")) == "linux/arm64/v8"
    assert identity.platform("", image("a", architecture="amd64"), "aarch64") == "linux/amd64"
    assert identity.platform("", None, "x86_64") == "linux/amd64"
    assert identity.platform("", None) == "linux/arm64"
    assert identity.fits(image("a"), "", "aarch64") and not identity.fits(image("a"), "", "x86_64")
    assert identity.fits(image("a"), "linux/arm64", "x86_64")
