"""What one setting is: its type, its limits, and how its text is read. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from launcher.settings import contract

Kind = Literal[
    "integer",  # int
    "optional integer",  # int | None, empty means none
    "flag",  # 0 or 1
    "choice",  # one of `choices`
    "utilisation",  # str, 0 < u <= 1, kept as typed
    "decimal",  # str, kept as typed
    "stock or integer",  # str
    "ipv4",  # str
    "text",  # str, anything
    "word",  # str, anything that does not start with '-'
    "path",  # str, relative to the repository, ~ is the home of the node it names
]
Value = int | str | None


@dataclass(frozen=True)
class Setting:
    """One key.

    default   as it would stand in `.env`; for most kinds an empty value means the default.
    limits    inclusive bounds of a number.
    reader    "now", or the number of the work item that will read the key; until then it is
              checked and shown, and changes nothing.
    one_shot  may come from the environment in front of the command, when `.env` does not name it.
    secret    never shown, never in argv.
    shown     stands uncommented in `.env.example`.
    """

    key: str
    group: str
    kind: Kind
    default: str
    meaning: str
    reader: str = "now"
    limits: tuple[int, int] = (0, 0)
    choices: tuple[str, ...] = ()
    one_shot: bool = False
    secret: bool = False
    shown: bool = False
    empty_is_default: bool = True

    def read(self, text: str) -> Value:
        """The value of `text`; raises contract.Violation."""
        if "\0" in text:
            raise contract.Violation("must not hold a NUL character")
        if self.secret and not (text.isprintable() and _latin(text)):
            raise contract.Violation("has characters that no HTTP header can carry")
        if text == "" and self.kind == "optional integer":
            return None
        if text == "" and self.empty_is_default:
            if self.default == "":
                return ""
            text = self.default
        match self.kind:
            case "integer" | "optional integer":
                return contract.integer(text, *self.limits)
            case "flag":
                return contract.flag(text)
            case "choice":
                return contract.choice(text, self.choices)
            case "utilisation":
                return contract.utilisation(text)
            case "decimal":
                return contract.decimal(text, *self.limits)
            case "stock or integer":
                return contract.stock_or_integer(text, *self.limits)
            case "ipv4":
                return contract.ipv4(text)
            case "word":
                return contract.word(text)
            case "text" | "path":
                return text

    @property
    def range_text(self) -> str:
        """The limits in words, empty where there are none."""
        match self.kind:
            case "integer" | "decimal":
                return f"{self.limits[0]}..{self.limits[1]}"
            case "optional integer":
                return f"{self.limits[0]}..{self.limits[1]} or empty"
            case "flag":
                return "0 or 1"
            case "choice":
                return " | ".join(c if c else "(empty)" for c in self.choices)
            case "utilisation":
                return "above 0, at most 1"
            case "stock or integer":
                return f"stock or {self.limits[0]}..{self.limits[1]}"
            case _:
                return ""


PORTS = (1, 65535)
SECONDS = (1, 604800)
BYTES = (1, 1 << 50)


def _latin(text: str) -> bool:
    try:
        text.encode("latin-1")
    except UnicodeEncodeError:
        return False
    return True
