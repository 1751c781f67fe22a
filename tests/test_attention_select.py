"""Which attention class serves on which GPU, and what is refused."""

from __future__ import annotations

if __name__ == "__main__":  # before the imports below, which this Python may lack
    from _standalone import main

    main(__file__)

import json
from pathlib import Path

import pytest

from spark_overlay.attention.select import ChoiceError, Found, Wishes, choose, wishes
from spark_overlay.settings import OverlaySettings

NO_FLASHINFER = "FlashInfer's sparse MLA is not installed"
ASKED_PORTABLE, ASKED_STOCK = Wishes(asked="portable"), Wishes(asked="stock")


@pytest.mark.parametrize(
    ("found", "kind"),
    [
        (Found(None), "portable"),
        (Found((8, 0)), "portable"),
        (Found((8, 6)), "portable"),
        (Found((8, 9)), "portable"),
        (Found((9, 0)), "portable"),
        (Found((10, 0)), "stock"),
        (Found((10, 3)), "stock"),
        (Found((12, 0)), "stock"),
        (Found((12, 1)), "stock"),
        (Found((12, 1), NO_FLASHINFER), "portable"),
    ],
)
def test_what_serves_where_nothing_is_said(found: Found, kind: str) -> None:
    assert choose(found, Wishes()).kind == kind


def test_where_flashinfer_is_missing_the_choice_says_so() -> None:
    assert choose(Found((12, 1), NO_FLASHINFER), Wishes()).why == NO_FLASHINFER


@pytest.mark.parametrize("capability", [(9, 0), (12, 0), (12, 1)])
def test_what_is_asked_for_serves(capability: tuple[int, int]) -> None:
    for wish in (ASKED_PORTABLE, ASKED_STOCK):
        assert choose(Found(capability), wish).kind == wish.asked


@pytest.mark.parametrize(
    ("found", "wish", "why"),
    [
        (Found(None), ASKED_STOCK, "for GPUs only"),
        (Found((8, 0)), ASKED_STOCK, "SM90, SM100 and SM12x only"),
        (Found((8, 9)), ASKED_STOCK, "on SM89"),
        (Found((12, 1), NO_FLASHINFER), ASKED_STOCK, NO_FLASHINFER),
        (Found((10, 0)), ASKED_PORTABLE, "528-byte records"),
        (Found((7, 5)), ASKED_PORTABLE, "mma.sync"),
        (Found((7, 5)), Wishes(), "no attention can serve on SM75"),
    ],
)
def test_what_cannot_serve_is_refused(found: Found, wish: Wishes, why: str) -> None:
    with pytest.raises(ChoiceError, match=why):
        choose(found, wish)


def test_what_the_tuner_recorded_stands_before_the_default_and_behind_what_is_asked() -> None:
    spark = Found((12, 1))
    tuned = Wishes(tuned="portable")
    assert choose(spark, tuned).kind == "portable"
    assert choose(spark, Wishes(asked="stock", tuned="portable")).kind == "stock"
    assert choose(Found((12, 1), NO_FLASHINFER), Wishes(tuned="stock")).kind == "portable"


def table(tmp_path: Path, value: object) -> dict[str, str]:
    file = tmp_path / "table.json"
    file.write_text(value if isinstance(value, str) else json.dumps(value))
    return {"SPARK_EXL3_TABLE": str(file)}


def test_wishes_are_read_from_where_they_are_said(tmp_path: Path) -> None:
    assert wishes({}, None) == Wishes()
    assert wishes({"OVERLAY_ATTENTION": ""}, None) == Wishes()
    assert wishes({"OVERLAY_ATTENTION": "stock"}, None) == ASKED_STOCK
    assert wishes({}, "portable") == ASKED_PORTABLE
    assert wishes({"OVERLAY_ATTENTION": "stock"}, "stock") == ASKED_STOCK
    assert wishes(table(tmp_path, {"name": "sm_121", "attention": "portable"}), None) == Wishes(
        tuned="portable"
    )
    assert wishes(table(tmp_path, {"name": "sm_121"}), None) == Wishes()


@pytest.mark.parametrize("value", ["Stock", "auto", "flashinfer", "1"])
def test_a_word_that_is_no_choice_is_refused(value: str) -> None:
    for said in (lambda: wishes({"OVERLAY_ATTENTION": value}, None), lambda: wishes({}, value)):
        with pytest.raises(ChoiceError, match=f"found '{value}'; needed one of portable, stock"):
            said()
    with pytest.raises(ValueError, match=r"spark_overlay\.attention: found"):
        OverlaySettings.parse({"attention": value})


def test_two_places_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ChoiceError, match="OVERLAY_ATTENTION=stock, but .* is portable"):
        wishes({"OVERLAY_ATTENTION": "stock"}, "portable")


@pytest.mark.parametrize("value", ["{", {"attention": "fast"}])
def test_a_tuners_file_that_cannot_be_followed_is_refused(tmp_path: Path, value: object) -> None:
    with pytest.raises(ChoiceError):
        wishes(table(tmp_path, value), None)
    with pytest.raises(ChoiceError, match="cannot be read"):
        wishes({"SPARK_EXL3_TABLE": str(tmp_path / "gone.json")}, None)


def test_the_setting_is_one_of_the_overlays() -> None:
    assert OverlaySettings.parse({}).attention is None
    assert OverlaySettings.parse({"attention": "stock"}).attention == "stock"
