"""What a model may say, token by token."""

from __future__ import annotations

import codecs
import json
import random
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from spark_overlay.bytelevel import byte_alphabet
from spark_overlay.rehearsal.tokenizer import EOS, tokenizer_json

Body = dict[str, Any]
Encode = Callable[[str], list[int]]
D = "｜DSML｜"
#: Stand for the tokens </think> and ｜DSML｜: the same text in other tokens is no mark.
END, TAG = "\ue000", "\ue001"
STOPS = ("STOP", "é", "ab")

#: Pieces of text that the rehearsal's tokenizer has no token for, as the real one has: parts of
#: characters with whole ones beside them, and marks of the format cut elsewhere than usual.
MORE = (
    b" \xe2\x82", b"\xac.", b"\xf0\x9f", b"\x98\x80\n", b"\x80a\xf0", b"\xe3\x81\x82\xe3",
    b"\xa9\xc3", b"\xef\xbd", b"\x9cDSML\xef", b"</thi", b"nk>\n", b"\n\n\n", b"STO", b"P STOP",
    b"```json\n", b'{"a": 1',
)  # fmt: skip
_WORDS = (
    "hello", " world", "\n", "\n\n", "é", "€", "日本", "😀", "STOP", "ab", "</think>", "<think>",
    "a", '{"a": 1}', "```json\n", "```", "<", "</", f"{D} ", "json", " ST", "OP",
)  # fmt: skip


def tokenizer() -> Body:
    """The rehearsal's tokenizer.json with MORE in it."""
    made = tokenizer_json()
    letters = byte_alphabet()
    vocabulary = made["model"]["vocab"]
    for number, piece in enumerate(MORE):
        vocabulary["".join(letters[byte] for byte in piece)] = len(vocabulary)
        assert len(vocabulary) == 512 + number + 1, piece
    return made


class Tongue:
    """Says things in the tokens of one tokenizer. ``pieces``: the bytes of each id."""

    #: Ids that no token has; the model has rows for some.
    UNKNOWN = 3

    def __init__(self, encode: Encode, pieces: Sequence[bytes], special: Mapping[str, int]) -> None:
        self.encode, self._pieces, self._special = cache(encode), pieces, special
        self._marks = {special["</think>"]: END, special[D]: TAG}

    def stream(self, draw: random.Random) -> list[int]:
        """Anything at all."""
        ids: list[int] = []
        for _ in range(draw.randrange(10)):
            ids += draw.choice(self._KINDS)(self, draw)
        return ids

    def marked(self, ids: Sequence[int]) -> str:
        """The text of the tokens, with END and TAG for the marks that tokens of their own make. A
        token without text, as EOS is, ends the character before it."""
        return "".join(self._bytes(part).decode(errors="replace") for part in self._parts(ids))

    def ends_within_character(self, ids: Sequence[int]) -> bool:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        decoder.decode(self._bytes(self._parts(ids)[-1]))
        return bool(decoder.getstate()[0])

    def _parts(self, ids: Sequence[int]) -> list[list[int]]:
        parts: list[list[int]] = [[]]
        for token in ids:
            if token == self._special[EOS] or not self._piece(token):
                parts.append([])
            else:
                parts[-1].append(token)
        return parts

    def _bytes(self, ids: Sequence[int]) -> bytes:
        return b"".join(
            self._marks[token].encode() if token in self._marks else self._piece(token)
            for token in ids
        )

    def bytes_of(self, text: str) -> list[int]:
        """The text in tokens of one byte each."""
        return [self._pieces.index(bytes([byte])) for byte in text.encode()]

    def _piece(self, token: int) -> bytes:
        return self._pieces[token] if token < len(self._pieces) else b""

    def _any(self, draw: random.Random) -> list[int]:
        return [draw.randrange(len(self._pieces) + self.UNKNOWN)]

    def _more(self, draw: random.Random) -> list[int]:
        return [len(self._pieces) - 1 - draw.randrange(len(MORE))]

    def _words(self, draw: random.Random) -> list[int]:
        return self.encode(draw.choice(_WORDS))

    def _mark(self, draw: random.Random) -> list[int]:
        return [draw.choice(list(self._special.values()))]

    def _calls(self, draw: random.Random) -> list[int]:
        ids = self.encode(calls_text(draw, most=1)[0])
        return ids[: draw.choice((len(ids), draw.randrange(len(ids))))]

    def _tag(self, draw: random.Random) -> list[int]:
        after = draw.choice(("", " calls>\n", ' invoke name="find">\n', " x", "\n"))
        return self.encode(f"{draw.choice(('<', '</'))}{D}{after}")

    def _noise(self, draw: random.Random) -> list[int]:
        return [self._pieces.index(bytes([byte])) for byte in draw.randbytes(draw.randrange(6))]

    _KINDS = (_any, _any, _more, _more, _words, _words, _words, _words, _mark, _calls, _tag, _noise)


def calls_text(draw: random.Random, most: int = 3) -> tuple[str, list[tuple[str, Body]]]:
    """A block of calls as the model writes it, and the calls in it."""
    calls, text = [], f"<{D} calls>\n"
    for _ in range(draw.randint(1, most)):
        arguments: Body = {}
        text += f'<{D} invoke name="{(name := draw.choice(("find", "save-it_2")))}">\n'
        for key in draw.sample(("x", "y", "long_key", "é"), draw.randint(0, most)):
            value: Any = draw.choice(
                ("", 'a"b\\', "€ 5", "</x>\n", 7, -1.5, None, [1, "ü"], {"z": {}})
            )
            arguments[key] = value
            string = isinstance(value, str)
            written = value if string else json.dumps(value, ensure_ascii=False)
            text += f'<{D} parameter name="{key}" string="{str(string).lower()}">{written}'
            text += f"</{D} parameter>\n"
        text += f"</{D} invoke>\n"
        calls.append((name, arguments))
    return text + f"</{D} calls>", calls
