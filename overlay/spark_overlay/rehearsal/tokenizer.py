"""A byte-level BPE tokenizer of 512 tokens with the markers of DeepSeek's V4.1 encoding.

Written as tokenizer.json directly, so its bytes do not depend on a library's version. The merges
are learned here from a page of text, in a fixed order.
"""

from __future__ import annotations

import re
from collections import Counter
from itertools import pairwise
from typing import Any

from spark_overlay.bytelevel import byte_alphabet
from spark_overlay.engram.tokens import token_map

from .corpus import TEXT as CORPUS
from .shape import VOCAB

BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
NOISE = "<｜place▁holder▁no▁0｜>"
IMAGE = "<｜deepseek_image｜>"

#: Ids 0, 1, 2; the only ones that a decoder may drop as special.
FIRST = (BOS, EOS, PAD)
#: The last ids. Text of a reply may contain them (reasoning and tool parsers look for them), so
#: they are added tokens but not special ones, as in DeepSeek's own tokenizers.
LAST = (
    "<｜System｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<think>",
    "</think>",
    "｜DSML｜",
    "<｜latest_reminder｜>",
    "<｜action｜>",
    "<｜query｜>",
    "<｜authority｜>",
    "<｜domain｜>",
    "<｜title｜>",
    "<｜read_url｜>",
    IMAGE,
    NOISE,
)

#: Words of text for BPE: a run of letters, of digits, of other marks, each with one space before
#: it, or of white space that leaves the last space to the next word. For ASCII this is the regex
#: of the ByteLevel pre-tokenizer.
_WORD = re.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+")


def learn_merges(text: str, count: int) -> list[tuple[str, str]]:
    """The ``count`` most frequent pairs, one after the other; ties go to the smaller pair."""
    alphabet = byte_alphabet()
    words = Counter(_WORD.findall(text))
    pieces = [([alphabet[b] for b in word.encode()], n) for word, n in sorted(words.items())]
    merges: list[tuple[str, str]] = []
    while len(merges) < count:
        pairs: Counter[tuple[str, str]] = Counter()
        for piece, n in pieces:
            for pair in pairwise(piece):
                pairs[pair] += n
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        for piece, _ in pieces:
            _merge(piece, best)
    return merges


def vocabulary() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """(token -> id, merges): markers first and last, bytes and merges between them."""
    merges = learn_merges(CORPUS, VOCAB - 256 - len(FIRST) - len(LAST))
    tokens = [*FIRST, *byte_alphabet(), *(a + b for a, b in merges), *LAST]
    vocab = {token: i for i, token in enumerate(tokens)}
    if len(vocab) != VOCAB:
        raise ValueError(f"tokenizer has {len(vocab)} different tokens, needs {VOCAB}")
    return vocab, merges


def tokenizer_json() -> dict[str, Any]:
    """Contents of tokenizer.json (Hugging Face tokenizers, format 1.0)."""
    vocab, merges = vocabulary()
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": vocab[token],
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": token in FIRST,
            }
            for token in (*FIRST, *LAST)
        ],
        "normalizer": None,
        "pre_tokenizer": {**byte_level, "use_regex": True},
        "post_processor": None,
        "decoder": {**byte_level, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": [list(pair) for pair in merges],
        },
    }


def tokenizer_config(max_length: int) -> dict[str, Any]:
    """Contents of tokenizer_config.json. The chat encoding adds BOS itself, the tokenizer none."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
    }


def compressed_vocab_size() -> int:
    """How many ids Engram's hash tells apart (see engram/tokens.py)."""
    vocab, _ = vocabulary()
    byte_of = {character: b for b, character in enumerate(byte_alphabet())}
    markers = {*FIRST, *LAST}

    def text(token: str) -> str:
        if token in markers:
            return token
        return bytes(byte_of[c] for c in token).decode("utf-8", errors="replace")

    return int(token_map((token, text(token)) for token in vocab).max()) + 1


def _merge(piece: list[str], pair: tuple[str, str]) -> None:
    at = 0
    while at < len(piece) - 1:
        if (piece[at], piece[at + 1]) == pair:
            piece[at : at + 2] = ["".join(pair)]
        at += 1
