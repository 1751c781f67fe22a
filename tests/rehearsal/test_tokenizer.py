"""The rehearsal tokenizer: loads as any other, loses nothing, and speaks V4.1's encoding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_overlay.rehearsal import shape
from spark_overlay.rehearsal import tokenizer as ours
from spark_overlay.rehearsal.make import make

pytest.importorskip("vllm", reason="run by the engine's Python: ./start.sh test")
pytestmark = pytest.mark.rehearsal

MARKERS = (*ours.FIRST, *ours.LAST)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather of a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("rehearsal")
    make(root)
    return root / "checkpoint"


@pytest.fixture(scope="module")
def hf(checkpoint: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(checkpoint, local_files_only=True)


@pytest.fixture(scope="module")
def v41(checkpoint: Path) -> Any:
    from vllm.tokenizers.deepseek_v41 import DeepseekV41Tokenizer

    return DeepseekV41Tokenizer.from_pretrained(checkpoint, local_files_only=True)


@pytest.fixture(scope="module")
def config(checkpoint: Path) -> Any:
    from vllm.transformers_utils.configs.deepseek_v41 import DeepseekV41Config

    return DeepseekV41Config(**json.loads((checkpoint / "config.json").read_text()))


def test_it_covers_the_vocabulary(hf: Any, config: Any) -> None:
    assert len(hf) == config.vocab_size == shape.VOCAB
    assert (hf.bos_token_id, hf.eos_token_id, hf.pad_token_id) == (0, 1, 2)
    assert config.engram_pad_token_id == hf.pad_token_id
    assert hf.convert_ids_to_tokens(config.dspark_noise_token_id) == ours.NOISE


@given(text=st.text(st.characters(exclude_categories=["Cs"])))
@settings(deadline=None)
def test_any_text_comes_back(hf: Any, text: str) -> None:
    assert hf.decode(hf.encode(text, add_special_tokens=False)) == text


@given(data=st.binary())
@settings(deadline=None)
def test_any_bytes_have_tokens(hf: Any, data: bytes) -> None:
    """Bytes that are no UTF-8 cannot be typed, but the model may say them."""
    alphabet = ours.byte_alphabet()
    ids = hf.convert_tokens_to_ids([alphabet[b] for b in data])
    assert hf.decode(ids) == data.decode("utf-8", errors="replace")


@given(pieces=st.lists(st.sampled_from([*MARKERS, "a", " b", "<", "｜", "\n"]), max_size=12))
@settings(deadline=None)
def test_markers_in_a_text_are_single_tokens(hf: Any, pieces: list[str]) -> None:
    ids = hf.encode("".join(pieces), add_special_tokens=False)
    assert hf.decode(ids) == "".join(pieces)
    expected = [piece for piece in pieces if piece in MARKERS]
    assert [t for t in hf.convert_ids_to_tokens(ids) if t in MARKERS] == expected


def test_merges_are_learned_and_reach_single_words(hf: Any) -> None:
    # The warm-up's prompts of exact length repeat this word.
    for count in (1, 10, 58):
        text = "hello" + " hello" * (count - 1)
        assert len(hf.encode(text, add_special_tokens=False)) == count
    page = ours.CORPUS
    assert len(hf.encode(page, add_special_tokens=False)) < 0.5 * len(page)


def test_engram_sees_as_many_ids_as_vllm_computes(hf: Any, v41: Any, config: Any) -> None:
    from vllm.models.deepseek_v41.common.engram import build_compressed_token_map

    for tokenizer in (hf, v41):
        token_map, size = build_compressed_token_map(tokenizer)
        assert size == ours.compressed_vocab_size() == config.engram_compressed_vocab_size
        assert len(token_map) == shape.VOCAB
    assert size < shape.VOCAB - 20, "some tokens must read alike"


def test_vllm_draws_the_same_table_sizes(config: Any) -> None:
    from vllm.models.deepseek_v41.common.engram import EngramLayout

    layout = EngramLayout.from_config(config)
    sums = [sum(prime for order in layer for prime in order) for layer in layout.primes]
    assert sums == list(layout.num_embeddings) == config.engram_num_embeddings


def test_a_chat_is_rendered_with_its_markers_as_single_tokens(v41: Any, hf: Any) -> None:
    question = "What is 17*19? Reply with the integer only."
    chat = [{"role": "user", "content": question}]
    ids = v41.apply_chat_template(chat, thinking=False)
    user, assistant, end = hf.convert_tokens_to_ids(["<｜User｜>", "<｜Assistant｜>", "</think>"])
    text = hf.encode(question, add_special_tokens=False)
    assert ids == [hf.bos_token_id, user, *text, assistant, end]


def test_a_chat_with_tools_and_reasoning_is_rendered_whole(v41: Any) -> None:
    function = {"name": "get_weather", "arguments": '{"city": "Köln"}'}
    call = {"id": "1", "type": "function", "function": function}
    chat: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "reasoning": "Ask the tool.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "rain"},
    ]
    text = v41.apply_chat_template(chat, tools=TOOLS, tokenize=False)
    ids = v41.apply_chat_template(chat, tools=TOOLS)
    assert v41.decode(ids) == text
    tokens = v41.convert_ids_to_tokens(ids)
    for marker in (
        "<｜System｜>",
        "<｜User｜>",
        "<｜Assistant｜>",
        "<think>",
        "</think>",
        "｜DSML｜",
    ):
        assert tokens.count(marker) == text.count(marker) > 0, marker
    assert len(ids) < shape.TEXT["max_position_embeddings"] // 4


def test_a_reply_keeps_what_the_parsers_look_for(v41: Any) -> None:
    reply = "Thinking.</think><｜DSML｜ calls>\n</｜DSML｜ calls><｜end▁of▁sentence｜>"
    ids = v41.encode(reply, add_special_tokens=False)
    shown = v41.decode(ids, skip_special_tokens=True)
    assert shown == reply.removesuffix("<｜end▁of▁sentence｜>")


def test_every_marker_of_the_encoding_is_known() -> None:
    from vllm.tokenizers import deepseek_v41_encoding as encoding

    used = {
        encoding.bos_token,
        encoding.eos_token,
        encoding.thinking_start_token,
        encoding.thinking_end_token,
        encoding.dsml_token,
        encoding.USER_SP_TOKEN,
        encoding.ASSISTANT_SP_TOKEN,
        encoding.SYSTEM_SP_TOKEN,
        encoding.LATEST_REMINDER_SP_TOKEN,
        encoding.IMAGE_PLACEHOLDER,
        *encoding.DS_TASK_SP_TOKENS.values(),
    }
    assert used <= set(MARKERS)
