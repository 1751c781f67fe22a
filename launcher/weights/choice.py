"""Which files of a repository, or of a directory, are the weights. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from fnmatch import fnmatchcase

from launcher.errors import LauncherError
from launcher.facts.trees import CONFIG, INDEX, TABLES
from launcher.weights.manifest import Role, plain

# Beside the shards: what vLLM, transformers and the overlay read to serve. A repository may hold
# more, such as the quantizer's measurements.
SERVING = (
    "*config.json",  # the model's, the tokenizer's, the quantization's, a processor's
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
    "*.jinja",
)
_TABLE = re.compile(TABLES + r"\Z")


def shards(role: Role, index: str | bytes, where: str) -> tuple[str, ...]:
    """The shards that an index names; of the original those with Engram tables.

    ``where`` names the index in the LauncherError that is raised for one that is none.
    """
    try:
        names = json.loads(index)["weight_map"]
        found = {
            str(file) for tensor, file in names.items() if role == "model" or _TABLE.search(tensor)
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise LauncherError(
            f"{where} cannot be read: {type(error).__name__}: {error}",
            "an index of safetensors: a JSON object with weight_map",
            _mend(role),
        ) from error
    if not found:
        what = "an Engram table" if role == "engram" else "a shard"
        raise LauncherError(f"{where} does not name {what}", f"{what} in the index", _mend(role))
    return tuple(sorted(found))


def chosen(
    role: Role, index: str | bytes, listing: Iterable[str], where: str
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names that are needed and listed, and those that are needed and not listed.

    Raises LauncherError for an index that is none, or that leads out of its directory.
    """
    there = set(listing)
    needed = [CONFIG, INDEX, *shards(role, index, where)]
    if odd := [name for name in needed if not plain(name)]:
        raise LauncherError(
            f"{where} names {odd[0]!r}", "shards beside their index, by plain names", _mend(role)
        )
    found = [name for name in needed if name in there]
    if role == "model":
        found += [
            name
            for name in there
            if plain(name) and any(fnmatchcase(name, pattern) for pattern in SERVING)
        ]
    missing = tuple(name for name in needed if name not in there)
    return tuple(sorted(set(found))), missing


def _mend(role: Role) -> str:
    if role == "engram":
        return "see that HF_ENGRAM_REPO and ENGRAM_DIR are the original checkpoint's, unquantized"
    return "see that HF_MODEL_REPO and MODEL_HOST are the EXL3 checkpoint's"
