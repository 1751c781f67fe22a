"""One real engine on the CPU: the same token has the same log-probability however it is computed.

The CPU path sums in float64 and breaks ties by position, so alone, in a batch, in chunks, from the
prefix cache and over either Engram store the answers are compared bit for bit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine import Answers
from jobs import BRANCH, BUDGETS, LONG, PROMPTS, REPLY, SHORT, TOP_K, WINDOW

from spark_overlay.exl3.modules import Exl3Facts, scan_modules
from spark_overlay.headers import CheckpointHeaders, TensorHeader

pytestmark = pytest.mark.rehearsal

#: A replayed prefix is an approximation by design: after a hit the window's tail is computed anew,
#: without what lies before it. In nats, of the first token's log-probability (0.11 was measured).
REPLAY_TOLERANCE = 0.25
ALL_TOKENS = WINDOW + 2 * TOP_K


def reply(answers: Answers, name: str, index: int = 0) -> tuple[Any, Any]:
    """Tokens and their top log-probabilities."""
    found = answers[name][index]
    return found["tokens"], found["logprobs"]


def prompt_values(answers: Answers, name: str, index: int) -> list[dict[str, float] | None]:
    """Log-probabilities of a prompt's own tokens, and the first that does not exist."""
    values: list[dict[str, float] | None] = answers[name][index]["prompt_logprobs"]
    assert values[0] is None and len(values) == len(PROMPTS[index])
    return values


@pytest.mark.parametrize("index", range(len(PROMPTS)))
def test_the_same_request_twice_is_the_same_reply(plain: Answers, index: int) -> None:
    tokens, logprobs = reply(plain, "alone", index)
    assert len(tokens) == len(logprobs) == REPLY
    assert all(len(place) >= 3 for place in logprobs)
    assert reply(plain, "again", index) == (tokens, logprobs)
    # Neither came from the cache.
    assert plain["alone"][index]["cached"] == plain["again"][index]["cached"] == 0


def test_replies_are_a_model_s_and_not_a_constant(plain: Answers) -> None:
    """Otherwise every equality here would be easy."""
    assert max(map(len, PROMPTS)) > ALL_TOKENS
    replies = [tuple(reply(plain, "alone", index)[0]) for index in range(len(PROMPTS))]
    assert len(set(replies)) == len(replies)
    assert all(len(set(tokens)) >= 4 for tokens in replies)
    best = [
        max(place.values())
        for _, places in (reply(plain, "alone", index) for index in range(len(PROMPTS)))
        for place in places
    ]
    assert all(-5.0 < value < -0.01 for value in best), best


@pytest.mark.parametrize("index", range(len(PROMPTS)))
@pytest.mark.parametrize("name", BUDGETS)
def test_chunked_prefill_is_unchunked_prefill(plain: Answers, name: str, index: int) -> None:
    tokens, logprobs = reply(plain, "alone", index)
    assert reply(plain, name, index) == (tokens[:SHORT], logprobs[:SHORT])
    assert prompt_values(plain, name, index) == prompt_values(plain, "alone", index)


@pytest.mark.parametrize(("name", "budget"), BUDGETS.items())
def test_the_chunks_were_as_large_as_told(plain: Answers, name: str, budget: int) -> None:
    (passes,) = plain[f"{name} passes"]
    expected = []
    for prompt in PROMPTS:
        whole, rest = divmod(len(prompt), budget)
        expected += [budget] * whole + [rest] * bool(rest) + [1] * (SHORT - 1)
    assert passes == expected


@pytest.mark.parametrize("index", range(len(PROMPTS)))
def test_four_at_once_are_each_as_alone(plain: Answers, index: int) -> None:
    assert reply(plain, "batch", index) == reply(plain, "alone", index)
    assert prompt_values(plain, "batch", index) == prompt_values(plain, "alone", index)


def test_the_batch_was_one(plain: Answers) -> None:
    (passes,) = plain["batch passes"]
    assert passes == [sum(map(len, PROMPTS))] + [len(PROMPTS)] * (REPLY - 1)


@pytest.mark.parametrize(("name", "prompt"), [("long", LONG), ("branch", BRANCH)])
def test_a_cached_prefix_is_as_good_as_a_cold_one(
    plain: Answers, name: str, prompt: list[int]
) -> None:
    """The same prompt again, and one that shares its first two pages."""
    cold, warm = plain[f"{name} cold"][0], plain[f"{name} warm"][0]
    assert cold["cached"] == 0 and warm["cached"] == 128
    (passes,) = plain[f"{name} warm passes"]
    assert passes[0] == len(prompt) - 128
    assert reply(plain, f"{name} warm") == reply(plain, f"{name} cold")


@pytest.mark.parametrize("name", ["long", "branch"])
def test_a_replayed_prefix_stays_near(replay: Answers, name: str) -> None:
    """vLLM's default, with which the Sparks serve."""
    cold, warm = replay[f"{name} cold"][0], replay[f"{name} warm"][0]
    assert cold["cached"] == 0 and warm["cached"] == 128
    first, token = cold["logprobs"][0], str(cold["tokens"][0])
    moved = abs(first[token] - warm["logprobs"][0][token])
    print(f"{name}: the first token's log-probability moved by {moved:.3f}")
    assert moved <= REPLAY_TOLERANCE, (first, warm["logprobs"][0])


@pytest.mark.parametrize("index", range(len(PROMPTS)))
def test_engram_in_files_is_engram_in_memory(plain: Answers, memory: Answers, index: int) -> None:
    """The engine with the tables in memory also has a smaller budget, by vLLM's own option."""
    tokens, logprobs = reply(plain, "alone", index)
    assert reply(memory, "alone", index) == (tokens[:SHORT], logprobs[:SHORT])
    assert prompt_values(memory, "alone", index) == prompt_values(plain, "alone", index)


def test_each_store_is_the_one_asked_for_and_was_read(
    plain: Answers, draft3: Answers, memory: Answers
) -> None:
    stores = {"NativeRowStore": plain, "FileRowStore": draft3, "MemoryRowStore": memory}
    for store, answers in stores.items():
        (modules,) = answers["modules"]
        assert [table["store"] for table in modules["engram"]] == [store] * 2
        assert all(table["rows_fetched"] > 1000 for table in modules["engram"])
    # Two reads a row from the files, fewer where neighbours are read together; from memory none
    # after the table itself.
    for table in draft3["modules"][0]["engram"]:
        assert table["reads"] == 2 * table["rows_fetched"]
    for table in plain["modules"][0]["engram"]:
        assert 0 < table["reads"] < 2 * table["rows_fetched"]
    for table in memory["modules"][0]["engram"]:
        assert table["reads"] == 2


@pytest.mark.parametrize("name", ["plain", "memory", "pair", "draft3"])
def test_no_parameter_is_an_engram_table(request: pytest.FixtureRequest, name: str) -> None:
    for modules in request.getfixturevalue(name)["modules"]:
        tables = modules["engram"]
        assert [table["module"].split(".")[-3:] for table in tables] == [
            [layer, "engram", "embed_tokens"] for layer in ("1", "3")
        ]
        assert all(table["tensors"] == [] for table in tables)
        lengths = {table["rows"][1] - table["rows"][0] for table in tables}
        assert min(lengths) > 5000 and len(modules["tensors"]) > 400
        for tensor, (dtype, shape) in modules["tensors"].items():
            assert not lengths & set(shape), (tensor, shape)
            assert dtype not in ("torch.float8_e4m3fn", "torch.uint8"), (tensor, dtype)


def test_two_ranks_share_each_table_and_overlap_nowhere(pair: Answers, plain: Answers) -> None:
    whole = [table["rows"] for table in plain["modules"][0]["engram"]]
    halves = [[table["rows"] for table in rank["engram"]] for rank in pair["modules"]]
    for (low, high), first, second in zip(whole, *halves, strict=True):
        assert first[0] == low == 0 and first[1] == second[0] and second[1] == high


def test_exl3_is_found_from_the_checkpoint(plain: Answers) -> None:
    """No job names a quantization."""
    (modules,) = plain["modules"]
    assert modules["quantization"] == "exl3"
    assert modules["quantization_class"] == "Exl3Config"
    assert modules["head_method"] == "Exl3HeadMethod"


@pytest.fixture(scope="module")
def headers(checkpoint: Callable[[str], Path]) -> dict[str, TensorHeader]:
    return dict(CheckpointHeaders.scan(checkpoint("standard") / "checkpoint").tensors)


@pytest.fixture(scope="module")
def stored(headers: dict[str, TensorHeader]) -> dict[str, Exl3Facts]:
    return scan_modules(headers)


def target_keys(stored: dict[str, Exl3Facts]) -> set[str]:
    return {key for key in stored if not key.startswith("mtp.")}


def test_k_of_every_matrix_is_its_header_s(
    plain: Answers, pair: Answers, stored: dict[str, Exl3Facts]
) -> None:
    for ranks in (plain["packed"], pair["packed"]):
        everywhere = set()
        for rank in ranks:
            found = {matrix["key"]: (matrix["k2"], matrix["words"]) for matrix in rank}
            assert len(found) == len(rank), "a matrix is held twice"
            assert found == {key: (stored[key].k2, 8 * stored[key].k2) for key in found}
            everywhere |= set(found)
        assert everywhere == target_keys(stored)
    # 2, 2.5, 3, 4, 5, 6 and 8 bits, some of them side by side in one fused layer.
    assert {matrix["k2"] for matrix in plain["packed"][0]} == {4, 5, 6, 8, 10, 12, 16}
    assert stored["layers.3.attn.wq_a"].k2 != stored["layers.3.attn.wkv"].k2


def test_the_draft_holds_its_own_matrices(draft3: Answers, stored: dict[str, Exl3Facts]) -> None:
    (rank,) = draft3["packed"]
    found = {m["key"]: m["k2"] for m in rank if m["model"] == "draft" and m["key"] != "head"}
    drafts = set(stored) - target_keys(stored)
    assert len(drafts) > 100
    assert found == {key: stored[key].k2 for key in drafts}


def test_what_a_rank_holds_is_what_the_file_has(
    plain: Answers, stored: dict[str, Exl3Facts], headers: dict[str, TensorHeader]
) -> None:
    """Byte for byte, and in full: one rank cuts nothing."""
    (rank,) = plain["packed"]
    for matrix in rank:
        facts = stored[matrix["key"]]
        assert [matrix["in"], matrix["out"]] == [facts.in_features, facts.out_features]
        assert matrix["dense"] == [facts.in_features, facts.out_features]
        for leaf, digest in matrix["sha256"].items():
            header = headers[f"{matrix['key']}.{leaf}"]
            with header.file.open("rb") as file:
                file.seek(header.begin)
                assert hashlib.sha256(file.read(header.nbytes)).hexdigest() == digest, (
                    f"{matrix['key']}.{leaf}"
                )


def test_two_ranks_hold_halves_where_the_layer_is_split(
    pair: Answers, stored: dict[str, Exl3Facts]
) -> None:
    first, second = ({m["key"]: m for m in rank} for rank in pair["packed"])
    halves = 0
    for key in first.keys() & second.keys():
        facts = stored[key]
        whole = facts.in_features * facts.out_features
        sizes = {m[key]["in"] * m[key]["out"] for m in (first, second)}
        assert sizes <= {whole, whole // 2} and len(sizes) == 1, key
        if sizes == {whole // 2}:
            halves += 1
            assert first[key]["sha256"]["trellis"] != second[key]["sha256"]["trellis"], key
        else:
            assert first[key]["sha256"] == second[key]["sha256"], key
    # All experts, each layer's wq_b and wo_b, two Engram projections and the head.
    assert halves == 9 * (3 * 33 + 2) + 2 + 1
    # Groups of wo_a are not cut: each rank has its own.
    for own, groups in ((first.keys() - second.keys(), "01"), (second.keys() - first.keys(), "23")):
        assert own == {f"layers.{n}.attn.wo_a.slice.{g}" for n in range(9) for g in groups}
