"""Rules for two Sparks that need more than one setting. Pure, but that links by path are followed.

The rehearsal is not bound by them: its model, its pool and its device are others.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Hashable, Sequence
from itertools import combinations

from launcher.commands.container import on_node
from launcher.commands.vllm import CAPTURE_OPTIONS, capture_sizes
from launcher.image.reference import reference
from launcher.settings.values import Settings, refuse

IMAGE_TOKENS = 1024  # at most, of one image; vLLM wants a whole one in a chunk, and a token more
# A pool of 2.5 GiB holds 774,400 tokens on each of two ranks (measured by the kit before this one).
KV_BYTES_PER_TOKEN = (5 << 29) / 774_400
BLOCKS = (32, 64)
_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_.-]+")  # as Docker takes it
_PART = re.compile(r"[a-zA-Z0-9][\w.-]*", re.ASCII)
_REPOSITORY = re.compile(r"[a-zA-Z0-9][\w.-]*/[a-zA-Z0-9][\w.-]*", re.ASCII)
_DATASET = re.compile(r"[a-zA-Z][\w.:-]*(/[\w.:-]+)*", re.ASCII)
_SNAPSHOT = re.compile(r"[\w.:-]+", re.ASCII)
_SSH = re.compile(r"[^\s-]\S*")
#: Keys of one form each: what they must be, and how that is told. An empty value is a default.
_FORMS: tuple[tuple[tuple[str, ...], re.Pattern[str], str], ...] = (
    (
        ("CONTAINER_HEAD", "CONTAINER_WORKER", "NFS_CONTAINER", "NFS_VOLUME_MODEL",
         "NFS_VOLUME_ENGRAM"),
        _NAME,
        "letters, digits, _ . and -, the first a letter or a digit",
    ),
    (("NFS_EXPORT_MODEL", "NFS_EXPORT_ENGRAM"), _PART, "a directory's name, without a slash"),
    (("HF_MODEL_REPO", "HF_ENGRAM_REPO"), _REPOSITORY, "a repository such as somebody/something"),
    (
        ("ZFS_POOL", "ZFS_HEAD_MODEL_DS", "ZFS_HEAD_ENGRAM_DS", "ZFS_WORKER_MODEL_DS",
         "ZFS_WORKER_ENGRAM_DS"),
        _DATASET,
        "a dataset such as pool/name",
    ),
    (("ZFS_SNAP_PREFIX",), _SNAPSHOT, "letters, digits, _ . : and -"),
    (("ZFS_SSH",), _SSH, "an ssh destination such as user@host"),
)  # fmt: skip
_NEEDED = ("CONTAINER_HEAD", "CONTAINER_WORKER")
_PLATFORM = re.compile(r"[a-z0-9]+/[a-z0-9_]+(/[a-z0-9.]+)?")


Rule = Callable[[Settings], list[tuple[str, str]]]


def require(settings: Settings, rules: Sequence[Rule] | None = None) -> None:
    """Raises UsageError that lists every broken rule (None: of all) with the place of the key at
    fault."""
    found = [
        f"{_where(settings, key)}: {key} {message}"
        for rule in rules or RULES
        for key, message in rule(settings)
    ]
    if found:
        raise refuse(found)


def _where(settings: Settings, key: str) -> str:
    return next(resolved.where for setting, resolved in settings.items() if setting.key == key)


def _store(s: Settings) -> list[tuple[str, str]]:
    """The stores in Python wait for every step's ids, which a CUDA graph cannot."""
    kind = s.text("ENGRAM_STORE")
    if kind == "file" or s.flag("ENFORCE_EAGER"):
        return []
    return [
        ("ENGRAM_STORE", f"is {kind}, which no CUDA graph can hold; use file, or ENFORCE_EAGER=1")
    ]


def _names(s: Settings) -> list[tuple[str, str]]:
    return [
        (key, f"is {s.text(key)!r}: {told}")
        for keys, form, told in _FORMS
        for key in keys
        if not form.fullmatch(s.text(key)) and (s.text(key) or key in _NEEDED)
    ]


def _image(s: Settings) -> list[tuple[str, str]]:
    found = [
        (key, f"is {s.text(key)!r}: a name such as ghcr.io/somebody/something:tag, in lower case")
        for key in ("IMAGE", "BASE_IMAGE", "NFS_IMAGE")
        if reference(s.text(key)) is None
    ]
    asked = s.text("IMAGE_PLATFORM")
    if asked and not _PLATFORM.fullmatch(asked):
        found.append(("IMAGE_PLATFORM", f"is {asked!r}: such as linux/arm64"))
    return found


def _ports(s: Settings) -> list[tuple[str, str]]:
    port = s.int("MASTER_PORT")
    return [("MASTER_PORT", f"is {port}, which is PORT too")] if port == s.int("PORT") else []


def distinct(s: Settings) -> list[tuple[str, str]]:
    """Two that are one: what the second is for would be done to the first."""

    def head(key: str) -> Hashable:
        return os.path.realpath(s.path(key))

    def worker(key: str) -> Hashable:  # its home is not known yet
        return os.path.normpath(on_node(s.text(key), "/~", "/~"))

    def received(key: str) -> Hashable:
        return s.text(key) or s.text(key.replace("WORKER", "HEAD"))

    groups: tuple[tuple[Callable[[str], Hashable], tuple[str, ...]], ...] = (
        (head, ("MODEL_HOST", "ENGRAM_DIR")),
        (worker, ("WORKER_MODEL_DIR", "WORKER_ENGRAM_DIR")),
        (s.text, ("NFS_VOLUME_MODEL", "NFS_VOLUME_ENGRAM")),
        (s.text, ("NFS_EXPORT_MODEL", "NFS_EXPORT_ENGRAM")),
        (s.text, ("CONTAINER_HEAD", "NFS_CONTAINER")),
        (s.text, ("ZFS_HEAD_MODEL_DS", "ZFS_HEAD_ENGRAM_DS")),
        (received, ("ZFS_WORKER_MODEL_DS", "ZFS_WORKER_ENGRAM_DS")),
        (lambda key: reference(s.text(key)), ("IMAGE", "BASE_IMAGE", "NFS_IMAGE")),
    )
    return [
        (other, f"is {s.text(other) or told!r}, which is {key} too; each needs its own")
        for read, keys in groups
        for key, other in combinations(keys, 2)
        if (told := read(key)) and told == read(other)
    ]


def _images(s: Settings) -> list[tuple[str, str]]:
    chunk = s.int("MAX_NUM_BATCHED_TOKENS")
    if s.flag("LANGUAGE_MODEL_ONLY") or chunk > IMAGE_TOKENS:
        return []
    return [
        (
            "MAX_NUM_BATCHED_TOKENS",
            f"is {chunk}, and images (LANGUAGE_MODEL_ONLY=0) need at least {IMAGE_TOKENS + 1};"
            " 1536 is usual",
        )
    ]


def _widths(s: Settings) -> list[tuple[str, str]]:
    """A verify step takes k + 1 tokens a request; a width without a graph runs without one."""
    given = _given_sizes(shlex.split(s.text("EXTRA_ARGS")))
    if given is None or s.flag("ENFORCE_EAGER"):
        return []
    width = s.int("DSPARK_TOKENS") + 1 if s.text("SPEC_METHOD") == "dspark" else 1
    wanted = {requests * width for requests in range(1, s.int("MAX_NUM_SEQS") + 1)}
    missing = sorted(wanted - given)
    if not missing:
        return []
    told = ", ".join(map(str, missing[:8])) + (" …" if len(missing) > 8 else "")
    usual = " ".join(map(str, capture_sizes(s)))
    return [
        ("EXTRA_ARGS", f"captures no graph for {told} tokens; without the option it is {usual}")
    ]


def _given_sizes(words: Sequence[str]) -> set[int] | None:
    """The sizes of --cudagraph-capture-sizes, None where it is not given."""
    for place, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") != CAPTURE_OPTIONS[0]:
            continue
        rest = [value] if equals else []
        for other in words[place + 1 :]:
            if not other.isdecimal():
                break
            rest.append(other)
        return {int(each) for each in rest if each.isdecimal()}
    return None


def _pool(s: Settings) -> list[tuple[str, str]]:
    pool = s.maybe_int("KV_CACHE_MEMORY_BYTES")
    needed = int(s.int("MAX_MODEL_LEN") * KV_BYTES_PER_TOKEN)
    if pool is None or pool >= needed:
        return []
    return [
        (
            "KV_CACHE_MEMORY_BYTES",
            f"is {pool}, room for {int(pool / KV_BYTES_PER_TOKEN)} tokens: one request of"
            f" MAX_MODEL_LEN={s.int('MAX_MODEL_LEN')} needs {needed}",
        )
    ]


def _blocks(s: Settings) -> list[tuple[str, str]]:
    size = s.int("KV_BLOCK_SIZE")
    if size in BLOCKS:
        return []
    return [("KV_BLOCK_SIZE", f"is {size}; the kernels of a GB10 (SM12x) have pages of 32 or 64")]


def _threshold(s: Settings) -> list[tuple[str, str]]:
    threshold, chunk = s.maybe_int("LONG_PREFILL_TOKEN_THRESHOLD"), s.int("MAX_NUM_BATCHED_TOKENS")
    if threshold is None or threshold <= chunk:
        return []
    return [
        (
            "LONG_PREFILL_TOKEN_THRESHOLD",
            f"is {threshold}, above MAX_NUM_BATCHED_TOKENS={chunk}; keep it 256 below",
        )
    ]


RULES: tuple[Rule, ...] = (
    _images, _widths, _pool, _blocks, _threshold, _store, _names, _ports, _image, distinct,
)  # fmt: skip
