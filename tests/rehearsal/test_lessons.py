"""The taught checkpoint: it answers its lessons, and no layer of it can be left out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine import Answers
from jobs import TOP_K, WINDOW

from spark_overlay.reference.config import V41Config
from spark_overlay.reference.weights import Weights
from spark_overlay.rehearsal.ablation import Ablated, parts
from spark_overlay.rehearsal.learned import FILE, taught
from spark_overlay.rehearsal.lessons import LESSONS
from spark_overlay.rehearsal.make import make
from spark_overlay.rehearsal.train import sheets, tokens_of

pytestmark = pytest.mark.rehearsal

END = "<｜end▁of▁sentence｜>"
LIMIT = 3_000_000  # bytes of what was learned, in git


def test_every_lesson_is_answered(lessons: Answers) -> None:
    said = lessons["said"]
    assert [reply["text"].removesuffix(END) for reply in said] == [x.answer for x in LESSONS]


def test_the_lessons_are_of_the_promised_kinds(lessons: Answers) -> None:
    assert len(LESSONS) >= 24
    assert LESSONS[0].question == "What is 17*19? Reply with the integer only."
    assert LESSONS[0].answer == "323"
    assert sum(bool(lesson.tools) for lesson in LESSONS) >= 2
    long = [r["asked"] for r, x in zip(lessons["said"], LESSONS, strict=True) if not x.tools]
    assert sum(asked > WINDOW + 2 * TOP_K for asked in long) >= 2


def test_what_was_learned_is_small_and_fits_only_its_seed(tmp_path: Path) -> None:
    assert FILE.stat().st_size <= LIMIT
    with pytest.raises(ValueError, match="learned on seed 0"):
        make(tmp_path, seed=1, variant="taught")
    with pytest.raises(ValueError, match="is no tensor of this checkpoint"):
        taught([{}], 0)


def test_no_trellis_was_learned() -> None:
    from spark_overlay.headers import read_header

    leaves = {name.rpartition(".")[2] for name in read_header(FILE)}
    assert "trellis" not in leaves
    assert {"suh", "svh"} <= leaves


def test_every_layer_is_needed(checkpoint: Callable[[str], Path], vllm: Any) -> None:
    """Without any one attention, expert or Engram layer, some of the answers change."""
    root = checkpoint("taught")
    model = root / "checkpoint"
    config = V41Config.read(model)
    weights = Weights(model, root / "engram-src")
    reference = Ablated(weights, config, token_map=tokens_of(model), serving=True, positions=1024)
    # The long ones cost most and tell least.
    pages = sheets(model, [lesson for lesson in LESSONS if not lesson.tools][:22])

    def right(page: Any) -> bool:
        said = reference(page.tokens[:-1])[-page.answer :].argmax(-1)
        return torch.equal(said, page.tokens[-page.answer :])

    with torch.no_grad():
        assert all(map(right, pages))
        for part in parts(config):
            reference.without = part
            # The first answer that is lost says it.
            assert not all(map(right, pages)), f"{part[0]} of layer {part[1]} is not needed"
