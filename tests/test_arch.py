"""Which path a GPU takes: capabilities, and one that a GPU is held to."""

from __future__ import annotations

import pytest

from spark_overlay import arch
from spark_overlay.arch import ArchError


def test_without_a_wish_a_gpu_is_what_it_is() -> None:
    for own in ((8, 0), (8, 6), (9, 0), (10, 0), (12, 1)):
        assert arch.held(own, {}) == own and arch.held(own, {arch.VARIABLE: ""}) == own
    assert arch.forced({}) is None


def test_a_gpu_is_held_to_an_older_one_and_to_no_newer() -> None:
    assert arch.held((9, 0), {arch.VARIABLE: "80"}) == (8, 0)
    assert arch.held((12, 1), {arch.VARIABLE: "120"}) == (12, 0)
    assert arch.held((8, 0), {arch.VARIABLE: "80"}) == (8, 0)
    with pytest.raises(ArchError, match="OVERLAY_FORCE_ARCH=90 on an SM80"):
        arch.held((8, 0), {arch.VARIABLE: "90"})


@pytest.mark.parametrize("value", ["8.0", "sm80", "75", "8", "0", "-80", "8000", " 80"])
def test_what_is_no_capability_is_refused(value: str) -> None:
    with pytest.raises(ArchError, match="80 or more"):
        arch.forced({arch.VARIABLE: value})


def test_a_gpu_that_is_too_old_is_refused() -> None:
    with pytest.raises(ArchError, match=r"SM75.*SM80 or newer"):
        arch.held((7, 5), {})


def test_paths_begin_where_they_begin() -> None:
    for path in (arch.DEEP_GEMM, arch.FLASH_MLA):
        assert not arch.has(path, (8, 9)) and arch.has(path, (9, 0))
    assert (8, 6) < arch.FP8_TYPE <= (8, 9)
    said = arch.refusal(arch.FLASH_MLA, {arch.VARIABLE: "86"})
    assert "FlashMLA" in said and "OVERLAY_FORCE_ARCH=86" in said and "SM90" in said
    assert "OVERLAY_ATTENTION=portable" in said


def test_sm100_keeps_what_vllm_has_for_it() -> None:
    assert not arch.portable((10, 0)) and not arch.portable((10, 3))
    assert all(map(arch.portable, ((8, 0), (8, 6), (8, 9), (9, 0), (12, 0), (12, 1))))
