"""Byte-level BPE: the bytes behind the characters of a vocabulary. Pure.

Source: OpenAI's GPT-2 encoder, as in Hugging Face tokenizers' ByteLevel; DeepSeek's tokenizers use
it for every token but the added ones.
"""

from __future__ import annotations

from typing import Any


def byte_alphabet() -> list[str]:
    """The character that stands for each byte 0..255 in a byte-level vocabulary (GPT-2's)."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(b) if b in plain else chr(next(others)) for b in range(256)]


def added_tokens(tokenizer: dict[str, Any]) -> dict[str, int]:
    """Text -> id of the added tokens in a parsed ``tokenizer.json``."""
    return {entry["content"]: int(entry["id"]) for entry in tokenizer["added_tokens"]}


def token_bytes(tokenizer: dict[str, Any]) -> list[bytes]:
    """The bytes of each id in a parsed ``tokenizer.json``; empty for ids that no token has.

    Raises ValueError for a tokenizer that is not byte-level.
    """
    kinds = _kinds(tokenizer.get("decoder"))
    if kinds != {"ByteLevel"}:
        raise ValueError(
            f"tokenizer.json has the decoder {', '.join(sorted(kinds)) or 'none'}; needed is "
            "ByteLevel alone, as DeepSeek's tokenizers have it"
        )
    byte_of = {character: byte for byte, character in enumerate(byte_alphabet())}
    added = added_tokens(tokenizer)
    vocabulary = {**tokenizer["model"]["vocab"], **added}
    table = [b""] * (max(vocabulary.values()) + 1)
    for text, token in vocabulary.items():
        plain = text not in added and all(character in byte_of for character in text)
        table[token] = bytes(byte_of[c] for c in text) if plain else text.encode()
    return table


def _kinds(decoder: dict[str, Any] | None) -> set[str]:
    if decoder is None:
        return set()
    if decoder["type"] == "Sequence":
        return {kind for part in decoder["decoders"] for kind in _kinds(part)}
    return {decoder["type"]}
