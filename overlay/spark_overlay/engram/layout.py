"""Engram's hash layout in numpy: bucket sizes, row ranges, and row ids of token sequences.

A position of a text is hashed as n-grams of order 2..max that end there, each by several heads.
Every (order, head) pair is a column with its own prime-sized range of the layer's table; columns
are ordered by order, then head. Source: DeepSeek V4.1's reference, as vLLM 0.33.0 runs it
(``EngramLayout``, ``compute_hash_multipliers``, ``_hash_ids_kernel``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np
import numpy.typing as npt

#: In place of a compressed id: a token that takes part in no n-gram (an image span).
DEAD = -1

#: Columns of a row that share one scale byte.
SCALE_GROUP = 32

#: vLLM's primality test takes 61 for composite, so its columns and ours agree from here on.
MIN_VOCAB_SIZE = 62


class EngramError(ValueError):
    """Tables, config or ids that do not belong together; the message says how to mend it."""


@dataclass(frozen=True, slots=True)
class RankRange:
    """Columns and table rows ``[lo, hi)`` that one tensor-parallel rank owns."""

    columns: tuple[int, int]
    rows: tuple[int, int]


@dataclass(frozen=True)
class EngramLayout:
    """Sizes of all tables. ``primes[layer index][column]`` is the rows of that column."""

    layer_ids: tuple[int, ...]
    max_ngram: int
    heads: int
    dim: int
    pad_token_id: int
    compressed_vocab_size: int
    primes: tuple[tuple[int, ...], ...]

    @classmethod
    def from_config(cls, config: object) -> EngramLayout | None:
        """Layout of a model config (a mapping as in config.json, or an object with attributes).

        None if the model has no Engram layers. Raises EngramError if a key is absent or if the
        prime rule does not give the config's own ``engram_num_embeddings``.
        """
        if isinstance(config, Mapping) and "engram_layer_ids" not in config:
            config = config.get("text_config", config)
        layer_ids = _ints(config, "engram_layer_ids", default=())
        if not layer_ids:
            return None
        announced = _ints(config, "engram_num_embeddings")
        dim = _int(config, "engram_head_dim")
        if dim % SCALE_GROUP:
            raise EngramError(
                f"engram_head_dim {dim} is not a multiple of {SCALE_GROUP}, the columns that "
                "share one scale; use the config.json that came with the tables"
            )
        vocab_size = _int(config, "engram_vocab_size")
        if vocab_size < MIN_VOCAB_SIZE:
            raise EngramError(
                f"engram_vocab_size {vocab_size} is below {MIN_VOCAB_SIZE}, where vLLM skips a "
                "prime and reads other rows than these; make the tables larger"
            )
        max_ngram, heads = _int(config, "engram_max_ngram_size"), _int(config, "engram_n_heads")
        columns = (max_ngram - 1) * heads
        layout = cls(
            layer_ids=layer_ids,
            max_ngram=max_ngram,
            heads=heads,
            dim=dim,
            pad_token_id=_int(config, "engram_pad_token_id"),
            compressed_vocab_size=_int(config, "engram_compressed_vocab_size"),
            primes=column_primes(vocab_size, len(layer_ids), max_ngram - 1, heads),
        )
        if columns < 1 or layout.num_embeddings != announced:
            raise EngramError(
                f"engram_num_embeddings is {list(announced)} for layers {list(layer_ids)}, but "
                f"{columns} columns of primes sum to {list(layout.num_embeddings)}: every row id "
                "would be wrong. Use the config.json that came with the tables"
            )
        return layout

    @property
    def columns(self) -> int:
        return (self.max_ngram - 1) * self.heads

    @cached_property
    def num_embeddings(self) -> tuple[int, ...]:
        """Rows of each layer's table."""
        return tuple(sum(sizes) for sizes in self.primes)

    @cached_property
    def offsets(self) -> tuple[tuple[int, ...], ...]:
        """First table row of each column, by layer index."""
        return tuple((0, *accumulate(sizes[:-1])) for sizes in self.primes)

    @cached_property
    def multipliers(self) -> npt.NDArray[np.int64]:
        """int64 ``[layers, max_ngram]``: odd hash factor by layer index and distance back.

        Bounded so that the product with a compressed id stays below 2^63.
        """
        bound = max(1, np.iinfo(np.int64).max // self.compressed_vocab_size // 2)
        rows = [
            np.random.default_rng(10007 * layer).integers(0, bound, self.max_ngram, np.int64)
            for layer in self.layer_ids
        ]
        return np.stack(rows) * 2 + 1

    def index_of(self, layer_id: int) -> int:
        """Index of a layer's table. Raises EngramError for a layer without one."""
        if layer_id not in self.layer_ids:
            raise EngramError(f"layer {layer_id} has no Engram table; {list(self.layer_ids)} have")
        return self.layer_ids.index(layer_id)

    def rank_range(self, layer_id: int, rank: int, tp: int) -> RankRange:
        """What a rank owns: whole columns, ceil(columns / tp) each, the last rank the rest.

        Never an even split of the rows. Raises EngramError if a rank would own no column.
        """
        each = -(-self.columns // tp) if tp > 0 else 0
        if not 0 <= rank < tp or (tp - 1) * each >= self.columns:
            raise EngramError(
                f"rank {rank} of {tp}: {self.columns} Engram columns in parts of {each} leave a "
                "rank without any; choose a tensor-parallel size that divides the columns"
            )
        bounds = (0, *accumulate(self.primes[self.index_of(layer_id)]))
        lo, hi = rank * each, min((rank + 1) * each, self.columns)
        return RankRange((lo, hi), (bounds[lo], bounds[hi]))

    def hash_ids(
        self,
        token_ids: npt.NDArray[np.int64],
        token_map: npt.NDArray[np.int64],
        dead: npt.NDArray[np.bool_] | None = None,
        lookback: npt.NDArray[np.int64] | None = None,
        lookback_dead: npt.NDArray[np.bool_] | None = None,
    ) -> npt.NDArray[np.int64]:
        """Table row ids int64 ``[n, layers, columns]`` of consecutive tokens of one text.

        ``token_map [vocab]`` maps token ids to compressed ids. ``dead [n]`` marks tokens of image
        spans. ``lookback [k]`` are the tokens just before, the latest last; before them the text
        begins. A -1 there is a token that is not known, read as the pad token. A dead token and
        everything before it, like everything before the begin, reads as the pad token.
        """
        if int(token_map.max(initial=-1)) + 1 != self.compressed_vocab_size:
            raise EngramError(
                f"the token map has {int(token_map.max(initial=-1)) + 1} compressed ids, the "
                f"tables were built for {self.compressed_vocab_size}: every row id would be "
                "wrong. Use the tokenizer that came with the model"
            )
        pad = int(token_map[self.pad_token_id])
        n = len(token_ids)
        before = np.zeros(0, np.int64) if lookback is None else lookback
        here = _compress(token_ids, token_map, dead)
        known = np.where(before < 0, self.pad_token_id, before)
        source = np.concatenate([_compress(known, token_map, lookback_dead), here])
        begin = np.full(self.max_ngram, DEAD, np.int64)
        source = np.concatenate([begin, source])
        first = len(source) - n

        ids = np.empty((n, len(self.layer_ids), self.columns), np.int64)
        primes = np.array(self.primes).reshape(len(self.layer_ids), -1, self.heads)
        offsets = np.array(self.offsets).reshape(primes.shape)
        rolling = np.zeros((n, len(self.layer_ids)), np.int64)
        blocked = np.zeros(n, np.bool_)
        for shift in range(self.max_ngram):
            value = source[first - shift : len(source) - shift]
            blocked |= value == DEAD
            rolling ^= np.where(blocked, pad, value)[:, None] * self.multipliers[:, shift]
            if shift:
                order = slice((shift - 1) * self.heads, shift * self.heads)
                hashed = rolling[:, :, None] % primes[:, shift - 1] + offsets[:, shift - 1]
                ids[:, :, order] = hashed
        return ids


def column_primes(
    vocab_size: int, layers: int, orders: int, heads: int
) -> tuple[tuple[int, ...], ...]:
    """Bucket sizes ``[layer][order * heads + head]``.

    For each order of each layer the heads take the next primes from ``vocab_size`` upward; none
    is used twice in the model, so a later order goes on above those of an earlier one.
    """
    used: set[int] = set()
    table = []
    for _ in range(layers):
        sizes: list[int] = []
        for _ in range(orders):
            candidate = vocab_size
            for _ in range(heads):
                while candidate in used or not _is_prime(candidate):
                    candidate += 1
                used.add(candidate)
                sizes.append(candidate)
        table.append(tuple(sizes))
    return tuple(table)


def _is_prime(n: int) -> bool:
    if n < 4 or n % 2 == 0:
        return n in (2, 3)
    return all(n % d for d in range(3, int(n**0.5) + 1, 2))


def _compress(
    token_ids: npt.NDArray[np.int64],
    token_map: npt.NDArray[np.int64],
    dead: npt.NDArray[np.bool_] | None,
) -> npt.NDArray[np.int64]:
    outside = (token_ids < 0) | (token_ids >= len(token_map))
    if outside.any():
        raise EngramError(
            f"token id {int(token_ids[outside][0])} is outside the tokenizer's "
            f"{len(token_map)} ids; use the tokenizer that came with the model"
        )
    compressed = token_map[token_ids].astype(np.int64)
    return compressed if dead is None else np.where(dead, DEAD, compressed)


def _get(config: object, key: str) -> object:
    value = config.get(key) if isinstance(config, Mapping) else getattr(config, key, None)
    return value


def _int(config: object, key: str) -> int:
    value = _get(config, key)
    if type(value) is not int or value < 0:
        raise EngramError(
            f"config: {key} is {value!r}, expected a whole number; use the config.json that came "
            "with the tables"
        )
    return value


def _ints(config: object, key: str, default: tuple[int, ...] | None = None) -> tuple[int, ...]:
    value = _get(config, key)
    if value is None and default is not None:
        return default
    if not isinstance(value, list | tuple) or not all(type(v) is int and v >= 0 for v in value):
        raise EngramError(
            f"config: {key} is {value!r}, expected a list of whole numbers; use the config.json "
            "that came with the tables"
        )
    return tuple(value)
