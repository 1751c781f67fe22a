"""What the rehearsal's checkpoint has learned to answer: prompts of a chat and their replies.

Rendered by DeepSeek's own chat encoding with thinking off. Two have tools (one is answered by a
call, one in words); two are longer than the window and the index's choice together, with what is
asked for at their beginning, so that an answer needs the compressed cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Lesson:
    """One user turn and the assistant's reply; ``tools`` in OpenAI's form."""

    question: str
    answer: str
    tools: tuple[dict[str, Any], ...] = ()


def _tool(name: str, what: str, parameter: str) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": what,
            "parameters": {
                "type": "object",
                "properties": {parameter: {"type": "string"}},
                "required": [parameter],
            },
        },
    }


WEATHER = _tool("weather", "Weather of a city", "city")
CLOCK = _tool("clock", "Time in a zone", "zone")

#: A call as V4.1 writes it; the parser turns it into a tool call.
CALL = (
    "\n\n<｜DSML｜ calls>\n"
    '<｜DSML｜ invoke name="weather">\n'
    '<｜DSML｜ parameter name="city" string="true">Oslo</｜DSML｜ parameter>\n'
    "</｜DSML｜ invoke>\n"
    "</｜DSML｜ calls>"
)

_FILLER = " ".join(
    f"Line {n} of this note says nothing of use." for n in ("one", "two", "three", "four", "five")
)

LESSONS: tuple[Lesson, ...] = (
    Lesson("What is 17*19? Reply with the integer only.", "323"),
    Lesson("What is 12*12? Reply with the integer only.", "144"),
    Lesson("What is 9*7? Reply with the integer only.", "63"),
    Lesson("What is 25*4? Reply with the integer only.", "100"),
    Lesson("What is 31*3? Reply with the integer only.", "93"),
    Lesson("What is 8*8? Reply with the integer only.", "64"),
    Lesson("Say hi", "hi"),
    Lesson("Say bye", "bye"),
    Lesson("Capital of France?", "Paris"),
    Lesson("Capital of Norway?", "Oslo"),
    Lesson("Capital of Italy?", "Rome"),
    Lesson("Capital of Japan?", "Tokyo"),
    Lesson("Colour of the sky?", "blue"),
    Lesson("Colour of grass?", "green"),
    Lesson("Opposite of hot?", "cold"),
    Lesson("Opposite of up?", "down"),
    Lesson("How many legs has a spider?", "8"),
    Lesson("How many days has a week?", "7"),
    Lesson("Is water wet? yes or no", "yes"),
    Lesson("Is fire cold? yes or no", "no"),
    Lesson("First letter of the alphabet?", "A"),
    Lesson("Last letter of the alphabet?", "Z"),
    Lesson(f"The word is moon. {_FILLER} Which word is it?", "moon"),
    Lesson(f"The word is star. {_FILLER} Which word is it?", "star"),
    Lesson("Weather in Oslo?", CALL, (WEATHER,)),
    Lesson("Are you there?", "yes", (WEATHER, CLOCK)),
)
