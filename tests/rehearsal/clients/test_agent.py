"""An agent of ten turns through the official openai client: its history meets the prefix cache.

The longest test, so the file that comes first.
"""

from __future__ import annotations

import pytest

from clients.server import Message, Server, user
from clients.tools import GO, require_calls

pytestmark = pytest.mark.rehearsal

TURNS = 10
#: The model may take several steps at once.
TURN_TOKENS = 192
KV_BLOCK = 64


def test_ten_turns_of_an_agent_meet_the_prefix_cache(server: Server) -> None:
    history: list[Message] = [user("Take ten steps")]
    prompts, cached = [], []
    for turn in range(TURNS):
        answer = server.chat(history, TURN_TOKENS, tools=[GO], tool_choice="required")
        (choice,) = answer.choices
        assert choice.finish_reason == "tool_calls", f"turn {turn}: {choice}"
        calls = require_calls(choice.message, GO)
        assert answer.usage and answer.usage.prompt_tokens_details
        prompts.append(answer.usage.prompt_tokens)
        cached.append(answer.usage.prompt_tokens_details.cached_tokens or 0)
        history.append(choice.message.model_dump(exclude_none=True))
        history += [
            {"role": "tool", "tool_call_id": call.id, "content": f"step {turn} is done"}
            for call in calls
        ]
    seen = f"prompts {prompts}, cached {cached}"
    assert len({call["id"] for one in history for call in one.get("tool_calls", ())}) >= TURNS
    # All of the prompt before is found again, but for the block that it ends in.
    for before, now, prompt in zip(prompts, cached[1:], prompts[1:], strict=False):
        assert before - KV_BLOCK < now < prompt, seen
    assert cached[-1] > cached[1] + KV_BLOCK * (TURNS // 2), seen
