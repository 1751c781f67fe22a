"""One rank and two compute the same model: every layer, fed with the same input.

The one-rank engine's layers are taped (a chunked prefill, then decode); those of the two-rank
engine get the tape's inputs, their outputs are compared token by token, and the tape's outputs go
on. The experts are compared on a taped input of their own. What differs is that two ranks' partial
sums are rounded to bf16 before they are added.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import pytest
from engine import Answers
from jobs import FAULT_LAYER, LONG, REPLY, TAPE_BUDGET
from probe import OUTPUTS

pytestmark = pytest.mark.rehearsal

LAYERS = 9
MEDIAN, P90 = 0.005, 0.01
#: How clearly a deliberate fault must break both limits.
CLEARLY = 3

Errors = Mapping[str, Mapping[str, Sequence[float]]]


def quantile(values: Sequence[float], part: float) -> float:
    """The smallest value that at least ``part`` of all do not exceed."""
    return sorted(values)[math.ceil(part * len(values)) - 1]


def limits_of(values: Sequence[float]) -> tuple[float, float]:
    return quantile(values, 0.5), quantile(values, 0.9)


def errors(pair: Answers, name: str) -> Errors:
    """Of rank 0; the ranks' outputs are sums over both and must be the same."""
    first, second = pair[name]
    assert first == second
    found: Errors = first["errors"]
    tokens = len(LONG) + REPLY - 1
    assert [*found] == [str(layer) for layer in range(LAYERS)]
    for outputs in found.values():
        assert [*outputs] == [*OUTPUTS]
        assert all(len(rows) == tokens for rows in outputs.values())
    return found


def table(found: Errors) -> str:
    lines = ["layer  " + "  ".join(f"{name:>10} median   p90    max" for name in OUTPUTS)]
    for layer, outputs in found.items():
        cells = []
        for rows in outputs.values():
            numbers = (*limits_of(rows), max(rows))
            cells.append(" " * 11 + "  ".join(f"{100 * number:5.2f}" for number in numbers))
        lines.append(f"{layer:>5}  " + "  ".join(cells))
    return "\n".join(["relative error, % of a token's norm:", *lines])


def broken(found: Errors) -> set[tuple[str, str]]:
    """Layers and outputs beyond a limit."""
    return {
        (layer, output)
        for layer, outputs in found.items()
        for output, rows in outputs.items()
        if limits_of(rows)[0] > MEDIAN or limits_of(rows)[1] > P90
    }


def test_the_whole_tape_was_played(plain: Answers, pair: Answers) -> None:
    passes = math.ceil(len(LONG) / TAPE_BUDGET) + REPLY - 1
    assert plain["tape"] == [passes]
    for name in ("right", "swapped groups", "shifted experts"):
        assert [(rank["passes"], rank["of"]) for rank in pair[name]] == [(passes, passes)] * 2
        # The tape's last outputs decide, so the reply is the taped one.
        assert pair[f"{name} reply"][0]["tokens"] == plain["taped"][0]["tokens"]


def test_two_ranks_compute_every_layer_as_one(pair: Answers) -> None:
    found = errors(pair, "right")
    print(table(found))
    assert not broken(found), table(found)


def test_two_ranks_are_not_compared_with_themselves(pair: Answers) -> None:
    """Two rounded halves are not the whole: no error at all would mean nothing was compared."""
    for outputs in errors(pair, "right").values():
        assert all(limits_of(rows)[0] > 1e-4 for rows in outputs.values())


@pytest.mark.parametrize(
    ("fault", "output"), [("swapped groups", "attention"), ("shifted experts", "experts")]
)
def test_a_fault_in_one_rank_s_slices_is_seen_where_it_is(
    pair: Answers, fault: str, output: str
) -> None:
    found = errors(pair, fault)
    print(table(found))
    median, p90 = limits_of(found[str(FAULT_LAYER)][output])
    assert median > CLEARLY * MEDIAN and p90 > CLEARLY * P90
    # Layer and experts are fed from the tape, so the fault shows there and in nothing else.
    assert broken(found) == {(str(FAULT_LAYER), place) for place in (output, "layer")}


def test_two_ranks_reply_alike_twice(pair: Answers) -> None:
    first, again = pair["alone"][0], pair["again"][0]
    assert first["tokens"] == again["tokens"] and first["logprobs"] == again["logprobs"]
