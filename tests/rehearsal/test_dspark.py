"""The draft proposes and the target decides: a reply with DSpark is the greedy one, only sooner."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from engine import Answers
from jobs import FAR, PROMPTS, SERVED, TEXTS, TOP_K, WINDOW

from spark_overlay.rehearsal.constructed import successor

pytestmark = pytest.mark.rehearsal

ACCEPTED_AT_LEAST = 0.90


def drafts(answers: Answers) -> tuple[int, int, int]:
    """Of a job's whole run: draft rounds, tokens drafted, tokens accepted."""
    counters: Mapping[str, float] = answers["metrics"]
    names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    rounds, drafted, accepted = (int(counters[f"vllm:spec_decode_{name}"]) for name in names)
    return rounds, drafted, accepted


@pytest.mark.parametrize("index", range(len(PROMPTS)))
@pytest.mark.parametrize("name", ["alone", "batch"])
def test_three_drafted_tokens_change_no_reply(
    plain: Answers, draft3: Answers, name: str, index: int
) -> None:
    """Nor any log-probability: a verified token is computed as a generated one."""
    found, greedy = draft3[name][index], plain["alone"][index]
    assert found["tokens"] == greedy["tokens"]
    assert found["logprobs"] == greedy["logprobs"]


@pytest.mark.parametrize("index", range(len(SERVED)))
def test_five_drafted_tokens_change_no_reply(replay: Answers, draft5: Answers, index: int) -> None:
    """As it is served, with bounded replay on both sides, and twice as far."""
    found, greedy = draft5["alone"][index], replay["alone"][index]
    assert len(found["tokens"]) == FAR
    assert found["tokens"] == greedy["tokens"]
    assert found["logprobs"] == greedy["logprobs"]


def test_one_prompt_makes_every_part_of_attention_choose() -> None:
    assert max(map(len, PROMPTS)) > WINDOW + 2 * TOP_K


@pytest.mark.parametrize(("name", "tokens"), [("draft3", 3), ("draft5", 5)])
def test_the_draft_was_really_at_work(
    request: pytest.FixtureRequest, name: str, tokens: int
) -> None:
    rounds, drafted, accepted = drafts(request.getfixturevalue(name))
    assert rounds > 0 and drafted > (tokens - 1) * rounds
    # An untrained draft is mostly wrong: its proposals are refused and the replies stay right.
    assert accepted < drafted / 2


@pytest.mark.parametrize("index", range(len(TEXTS)))
def test_a_constructed_reply_is_the_known_one(constructed: Answers, index: int) -> None:
    last, expected = TEXTS[index][-1], []
    for _ in range(36):
        last = successor(last)
        expected.append(last)
    assert constructed["alone"][index]["tokens"] == expected


def test_a_draft_that_knows_the_target_is_accepted(constructed: Answers) -> None:
    rounds, drafted, accepted = drafts(constructed)
    print(f"accepted {accepted} of {drafted} drafted tokens in {rounds} rounds")
    assert accepted >= ACCEPTED_AT_LEAST * drafted
    # Six tokens a pass instead of one.
    replied = sum(len(reply["tokens"]) for reply in constructed["alone"])
    assert rounds <= replied / 4
