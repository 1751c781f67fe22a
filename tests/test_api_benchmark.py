"""What overlay/benchmarks/api.py measures with: the inputs have the sizes that the figures name."""

from __future__ import annotations

if __name__ == "__main__":
    from _standalone import main

    main(__file__)

import base64
import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from spark_overlay.bytelevel import added_tokens, token_bytes
from spark_overlay.rehearsal.tokenizer import tokenizer_json

FILE = Path(__file__).resolve().parents[1] / "overlay" / "benchmarks" / "api_inputs.py"


@pytest.fixture(scope="module")
def inputs() -> ModuleType:
    spec = importlib.util.spec_from_file_location("api_inputs", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def texts(message: dict[str, Any]) -> list[str]:
    calls = [json.loads(call["function"]["arguments"]) for call in message.get("tool_calls", ())]
    return [
        message["content"],
        message.get("reasoning_content", ""),
        *(call["content"] for call in calls),
    ]


def test_conversations_have_the_characters_and_messages_asked_for(inputs: ModuleType) -> None:
    one, many = (
        json.loads(raw) for raw in (inputs.one_message(5000), inputs.many_messages(5000, 7))
    )
    source = inputs.source_text(5000)
    assert [message["content"] for message in one["messages"]] == [source]
    assert len(many["messages"]) == 29 and many["tools"]
    assert sum(len(text) for message in many["messages"] for text in texts(message)) == 5000
    assert {message["role"] for message in many["messages"]} == {"user", "assistant", "tool"}


def test_too_many_characters_are_named(inputs: ModuleType) -> None:
    with pytest.raises(ValueError, match=f"{10**12} are needed"):
        inputs.source_text(10**12)


def test_the_larger_tokenizer_has_the_ranks_and_the_markers(inputs: ModuleType) -> None:
    small = tokenizer_json()
    count = 256 + 3
    tokens = [bytes([n]) for n in range(256)] + [b"ab", b"abc", b"bc", b"unused"]
    tekken = {
        "config": {"default_vocab_size": count + len(small["added_tokens"]), "pattern": "."},
        "vocab": [{"token_bytes": base64.b64encode(token).decode()} for token in tokens],
    }
    made = inputs.larger_tokenizer(small, tekken)
    assert token_bytes(made)[:count] == tokens[:count]
    assert made["model"]["merges"] == [["a", "b"], ["a", "bc"], ["ab", "c"], ["b", "c"]]
    markers = added_tokens(made)
    assert list(markers) == list(added_tokens(small))
    assert sorted(markers.values()) == list(range(count, count + len(markers)))
    assert small == tokenizer_json()


def test_a_figure_is_of_all_that_was_measured(inputs: ModuleType) -> None:
    found = inputs.figure([3.00004, 1, 2], "s")
    assert found == {"unit": "s", "median": 2, "min": 1, "max": 3.0}


def test_said_is_the_same_streamed_and_whole(inputs: ModuleType) -> None:
    function = {"name": "f", "arguments": '{"a": "b c"}'}
    whole = {
        "choices": [
            {
                "message": {
                    "reasoning": "so it is ",
                    "content": "yes\n",
                    "tool_calls": [{"function": function}],
                }
            }
        ]
    }
    deltas = [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "so it"},
        {"reasoning_content": " is"},
        {"content": "yes"},
        {"tool_calls": [{"function": {"name": "f", "arguments": '{"a":'}}]},
        {"tool_calls": [{"function": {"arguments": '"b c"}'}}]},
    ]
    events = [json.dumps({"choices": [{"delta": delta}]}) for delta in deltas]
    stream = "".join(f"data: {event}\n\n" for event in [*events, "[DONE]"])
    expected = {"reasoning": "soitis", "content": "yes", "arguments": '{"a":"bc"}'}
    assert inputs.said(stream) == inputs.said(json.dumps(whole)) == expected
