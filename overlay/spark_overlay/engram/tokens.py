"""Compressed token ids, over which Engram hashes: tokens that read alike share one.

The rule of DeepSeek's reference (vLLM's ``build_compressed_token_map``): NFKC, then NFD without
accents, lower case, white space as one space, none at the ends. A token that is no whole UTF-8 text
stands for itself, and so does one of which nothing would remain.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

#: White space that Rust's ``trim`` removes at the ends of a text.
_SPACES = (
    "\t\n\x0b\x0c\r \x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009"
    "\u200a\u2028\u2029\u202f\u205f\u3000"
)


def normalized(text: str) -> str:
    """The text that a token is compared by."""
    text = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
    text = "".join(c for c in text if unicodedata.category(c) != "Mn").lower()
    text = re.sub(r"[ \t\r\n]+", " ", text)
    return text if text == " " else text.strip(_SPACES)


def key(token: str, text: str) -> str:
    """What two tokens share if they read alike. ``token`` is the vocabulary's entry, ``text`` what
    it decodes to."""
    return token if "\ufffd" in text else normalized(text) or text


def token_map(tokens: Iterable[tuple[str, str]]) -> npt.NDArray[np.int64]:
    """``[vocab]``: compressed id of each token (entry, decoded text), in the order of their ids."""
    ids: dict[str, int] = {}
    return np.array(
        [ids.setdefault(key(token, text), len(ids)) for token, text in tokens], np.int64
    )
