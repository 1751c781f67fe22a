"""The warm-up: which shapes it sends, and that a failing one stops nothing."""

from __future__ import annotations

if __name__ == "__main__":  # before the imports below, which this Python may lack
    from _standalone import main

    main(__file__)

from collections import Counter

import pytest
from test_health import StubApi, api, stub

from launcher.http import Api
from launcher.ports import free
from launcher.steps.warmup import AT_ONCE, requests, send

__all__ = ["stub"]


@pytest.mark.parametrize(("seqs", "copies"), [(1, []), (2, [2]), (3, [2, 3]), (64, [2, 3, 4])])
def test_as_many_at_once_as_the_engine_takes_up_to_four(seqs: int, copies: list[int]) -> None:
    assert [each.copies for each in requests("m", seqs) if each.copies > 1] == copies
    assert max((each.copies for each in requests("m", seqs)), default=1) <= AT_ONCE


def test_every_block_of_verified_tokens_from_8_to_256_is_met() -> None:
    lengths = [len(each.body["prompt"]) for each in requests("m", 1) if "prompt" in each.body]
    for drafted in (3, 4, 5):
        blocks = {min(256, 1 << (length + drafted).bit_length()) for length in lengths}
        assert blocks >= {8, 16, 32, 64, 128, 256}


def test_answers_are_200_or_said(stub: type[StubApi]) -> None:
    assert [send(api(stub), each, 5.0) for each in requests("m", 3)] == [None] * 14
    (first, *_) = requests("another", 1)
    said = send(api(stub), first, 5.0)
    assert said is not None and said.startswith("status 404")
    closed = send(Api("127.0.0.1", free("127.0.0.1")), first, 1.0)
    assert closed is not None and "refused" in closed


def test_each_kind_is_sent_once() -> None:
    told = Counter(each.told for each in requests("m", 4))
    assert max(told.values()) == 1 and len(told) == 6 + 6 + 3
