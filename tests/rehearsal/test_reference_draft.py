"""The reference's draft on the constructed checkpoint, whose draft is always right."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import oracle
import pytest
import torch
from jobs import TEXTS

from spark_overlay.reference.draft import propose, target_states
from spark_overlay.rehearsal.constructed import successor

pytestmark = pytest.mark.rehearsal

DRAFTED = 5


@pytest.mark.parametrize("text", TEXTS[:2])
def test_it_proposes_what_the_target_will_say(
    checkpoint: Callable[[str], Path], text: list[int]
) -> None:
    model = oracle.oracle(checkpoint("constructed"))
    tokens = torch.tensor(text)
    with torch.no_grad():
        anchor = int(model(tokens)[-1].argmax())
        assert anchor == successor(text[-1])
        proposed = propose(model, target_states(model, tokens), anchor, DRAFTED).tolist()
    expected = [successor(anchor)]
    while len(expected) < DRAFTED:
        expected.append(successor(expected[-1]))
    assert proposed == expected
