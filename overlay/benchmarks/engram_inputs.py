"""What engram.py measures with: the published tables' layout and three streams of tokens. Pure.

Texts are made of what any Python brings along. Without a tokenizer.json a stand-in splits them:
words of up to 8 letters with their space, longer ones in pieces, up to 3 digits, up to 4 signs. On
the same texts a vocabulary of 131072 (Mistral's) gives 3 to 8 % fewer tokens and 5 to 6 % more
distinct rows a token.
"""

from __future__ import annotations

import os
import re
import sysconfig
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

import numpy as np
import numpy.typing as npt

from spark_overlay.engram.layout import EngramLayout
from spark_overlay.engram.tokens import key

Ids = npt.NDArray[np.int64]

#: Of the published config.json.
PUBLISHED = {
    "engram_layer_ids": [1, 14],
    "engram_num_embeddings": [384006168, 384016682],
    "engram_vocab_size": 16000000,
    "engram_n_heads": 8,
    "engram_max_ngram_size": 4,
    "engram_head_dim": 256,
    "engram_pad_token_id": 2,
    "engram_compressed_vocab_size": 99092,
}
CHUNK = 2048  # tokens of a prefill step

_PIECE = re.compile(
    r" ?[^\W\d_]{1,8}|\d{1,3}|_| ?[^\w\s]{1,4}|\s+?(?=\S)|\s+",
)
_TEXTS = ("LICEN", "README", "NOTICE", "COPYING", "AUTHORS")


def layout() -> EngramLayout:
    made = EngramLayout.from_config(PUBLISHED)
    assert made is not None
    return made


def code(length: int) -> str:
    """The standard library's modules, in the order of their names."""
    return _read(sorted(Path(os.__file__).parent.glob("*.py")), length)


def prose(length: int) -> str:
    """Python's reference, then licences and read-mes of what is installed, each once."""
    from pydoc_data.topics import topics

    installed = Path(sysconfig.get_path("purelib")).rglob("*")
    found = (p for p in installed if p.suffix in ("", ".txt", ".md", ".rst") and p.is_file())
    named = sorted(p for p in found if any(word in p.name.upper() for word in _TEXTS))
    texts = (path.read_text(errors="replace") for path in named)
    return _join(chain((topics[name] for name in sorted(topics)), dict.fromkeys(texts)), length)


def _read(paths: Iterable[Path], length: int) -> str:
    return _join((path.read_text(errors="replace") for path in paths), length)


def _join(texts: Iterable[str], length: int) -> str:
    pieces, have = [], 0
    for text in texts:
        pieces.append(text)
        have += len(text)
        if have >= length:
            break
    return "\n\n".join(pieces)[:length]


def pieces(text: str, tokenizer: Path | None = None) -> list[str]:
    """The text's tokens as they read: by a tokenizer.json, or by the stand-in."""
    if tokenizer is None:
        return _PIECE.findall(text)
    from tokenizers import Tokenizer

    encoded = Tokenizer.from_file(str(tokenizer)).encode(text, add_special_tokens=False)
    return [text[begin:end] for begin, end in encoded.offsets]


def compressed(tokens: Iterable[str], limit: int) -> Ids:
    """Ids that tokens which read alike share, numbered as they come."""
    seen: dict[str, int] = {}
    ids = [seen.setdefault(key(token, token), len(seen)) for token in tokens]
    return np.array(ids, np.int64) % limit


def random_tokens(count: int, limit: int) -> Ids:
    return np.random.default_rng(1).integers(0, limit, count)


def fresh(ids: Ids, order: int) -> tuple[float, float]:
    """The share of a text's n-grams that are the first of their kind in their chunk, and at all.
    An n-gram belongs to the chunk that its last token is in."""
    windows = np.lib.stride_tricks.sliding_window_view(ids, order)
    _, kinds = np.unique(windows, axis=0, return_inverse=True)
    seen: set[int] = set()
    inside = 0
    parts = [kinds[at : at + CHUNK] for at in range(0, len(kinds), CHUNK)]
    for part in parts:
        here = set(part.reshape(-1).tolist())
        inside += len(here)
        seen |= here
    return inside / len(kinds), len(seen) / len(kinds)


def chunks(own: EngramLayout, ids: Ids, rank: int, tp: int) -> Iterator[list[Ids]]:
    """For each whole chunk of the text the row ids that a rank looks up, by layer, by token."""
    token_map = np.arange(own.compressed_vocab_size)
    for begin in range(0, len(ids) - CHUNK + 1, CHUNK):
        before = ids[max(0, begin - own.max_ngram + 1) : begin]
        hashed = own.hash_ids(ids[begin : begin + CHUNK], token_map, lookback=before)
        yield [
            np.ascontiguousarray(
                hashed[:, i, slice(*own.rank_range(layer, rank, tp).columns)]
            ).reshape(-1)
            for i, layer in enumerate(own.layer_ids)
        ]
