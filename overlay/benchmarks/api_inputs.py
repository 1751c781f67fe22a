"""What api.py measures with: texts, conversations, answers and a tokenizer of real size. Pure.

All of it is made of what the engine's Python brings along, in a fixed order, so two machines with
the same versions measure the same inputs.
"""

from __future__ import annotations

import base64
import copy
import json
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle, islice, pairwise
from pathlib import Path
from typing import Any

from spark_overlay.bytelevel import byte_alphabet

NAME = "DeepSeek-v4.1-Flash-EXL3"

#: Chinese, Japanese, Korean and emoji of one to several code points.
EAST_ASIAN = (
    "今天我们来讨论分布式系统中的一致性问题。首先要明确,网络分区发生时无法同时保证可用性与一致性🙂。",
    "この関数は引数として整数のリストを受け取り、重複を取り除いてから昇順に並べ替えて返します。🚀🔥",
    "模型先在思考过程中分析需求,然后给出结论:缓存命中率提高了百分之四十,延迟下降了一半👩‍💻。",
    "메모리 대역폭이 병목이므로 가중치를 더 작은 형식으로 저장하면 속도가 빨라집니다. 좋습니다! 🎉",
    "請注意,檔案路徑必須是絕對路徑;否則程式會拋出例外並結束。😅🇹🇼 详情见第三章第二节。",
)

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": text,
            "parameters": {
                "type": "object",
                "properties": {key: {"type": "string"} for key in keys},
                "required": keys,
            },
        },
    }
    for name, text, keys in (
        ("read_file", "Read a file of the workspace", ["path"]),
        ("write_file", "Replace a file of the workspace", ["path", "content"]),
        ("run", "Run a command in a shell and return what it prints", ["command"]),
    )
]

Message = dict[str, Any]


def source_text(length: int) -> str:
    """The first ``length`` characters of the standard library's modules, in the order of names."""
    pieces, have = [], 0
    for path in sorted(Path(os.__file__).parent.glob("*.py")):
        pieces.append(path.read_text(errors="replace"))
        have += len(pieces[-1])
        if have >= length:
            return "".join(pieces)[:length]
    raise ValueError(f"the standard library has {have} characters, {length} are needed")


def prose() -> str:
    """Python's reference as text."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def east_asian(length: int) -> str:
    """``length`` characters of it."""
    return "".join(islice(cycle("".join(EAST_ASIAN)), length))


def body(messages: Sequence[Message], **more: Any) -> bytes:
    """A request of Chat Completions."""
    request = {"model": NAME, "messages": messages, "stream": True, **more}
    return json.dumps(request, ensure_ascii=False).encode()


def one_message(length: int) -> bytes:
    """A request whose only message has ``length`` characters."""
    return body([{"role": "user", "content": source_text(length)}])


def many_messages(length: int, turns: int) -> bytes:
    """A request of 4 × ``turns`` + 1 messages whose texts have ``length`` characters together: in
    each turn a question, reasoning with a tool call, the tool's result and an answer."""
    texts = parts(source_text(length), 5 * turns)
    messages: list[Message] = []
    for turn in range(turns):
        question, reasoning, argument, result, answer = texts[5 * turn : 5 * turn + 5]
        arguments = json.dumps({"path": f"src/{turn}.py", "content": argument})
        call = {
            "id": f"call_{turn}",
            "type": "function",
            "function": {"name": "write_file", "arguments": arguments},
        }
        messages += [
            {"role": "user", "content": question},
            {
                "role": "assistant",
                "content": "",
                "reasoning_content": reasoning,
                "tool_calls": [call],
            },
            {"role": "tool", "tool_call_id": call["id"], "content": result},
            {"role": "assistant", "content": answer},
        ]
    return body([*messages, {"role": "user", "content": ""}], tools=TOOLS)


def tool_call(content: str) -> str:
    """What the model says to call write_file with ``content``, as the V4.1 encoding has it."""
    parameters = "".join(
        f'<｜DSML｜ parameter name="{name}" string="true">{value}</｜DSML｜ parameter>\n'
        for name, value in (("path", "src/module.py"), ("content", content))
    )
    return (
        '\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="write_file">\n'
        f"{parameters}</｜DSML｜ invoke>\n</｜DSML｜ calls>"
    )


def larger_tokenizer(small: Mapping[str, Any], tekken: Mapping[str, Any]) -> dict[str, Any]:
    """A tokenizer.json with the ranks and the splitting of ``tekken`` (Mistral's own format, which
    vLLM's requirements bring along) and the added tokens of ``small``.

    As in tiktoken files, a pair of tokens merges wherever both together are a token.
    """
    count = tekken["config"]["default_vocab_size"] - len(small["added_tokens"])
    ranks = [base64.b64decode(entry["token_bytes"]) for entry in tekken["vocab"][:count]]
    known, alphabet = {token: rank for rank, token in enumerate(ranks)}, byte_alphabet()
    merges: list[list[str]] = []
    for token in ranks:
        halves = [(token[:n], token[n:]) for n in range(1, len(token))]
        found = [(a, b) for a, b in halves if a in known and b in known]
        found.sort(key=lambda pair: (known[pair[0]], known[pair[1]]))
        merges += [["".join(alphabet[byte] for byte in half) for half in pair] for pair in found]
    made = copy.deepcopy(dict(small))
    made["model"]["vocab"] = {"".join(alphabet[b] for b in t): i for i, t in enumerate(ranks)}
    made["model"]["merges"] = merges
    made["model"]["ignore_merges"] = True
    for number, token in enumerate(made["added_tokens"]):
        token["id"] = count + number
    made["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [
            {
                "type": "Split",
                "pattern": {"Regex": tekken["config"]["pattern"]},
                "behavior": "Isolated",
                "invert": False,
            },
            {
                "type": "ByteLevel",
                "add_prefix_space": False,
                "trim_offsets": True,
                "use_regex": False,
            },
        ],
    }
    return made


def figure(values: Iterable[float], unit: str) -> dict[str, Any]:
    """Median, smallest and largest of what was measured, to four digits."""
    found = sorted(values)
    picked = {"median": statistics.median(found), "min": found[0], "max": found[-1]}
    return {"unit": unit, **{name: float(f"{value:.4g}") for name, value in picked.items()}}


def said(reply: str) -> dict[str, str]:
    """What a reply says without its white space, the events of a stream together: reasoning,
    content, and the arguments of a call."""
    found = {"reasoning": "", "content": "", "arguments": ""}
    for line in reply.split("\n"):
        data = line.removeprefix("data: ")
        for choice in json.loads(data)["choices"] if data.startswith("{") else ():
            part = choice.get("delta") or choice.get("message") or {}
            found["reasoning"] += part.get("reasoning_content") or part.get("reasoning") or ""
            found["content"] += part.get("content") or ""
            for call in part.get("tool_calls") or ():
                found["arguments"] += call["function"].get("arguments") or ""
    if found["arguments"]:
        found["arguments"] = json.dumps(json.loads(found["arguments"]))
    return {name: "".join(text.split()) for name, text in found.items()}


def parts(text: str, count: int) -> list[str]:
    """``text`` in ``count`` parts as even as they can be."""
    borders = [len(text) * n // count for n in range(count + 1)]
    return [text[a:b] for a, b in pairwise(borders)]
