"""Engram's prime rule, rank ranges and hashes: the real model's numbers, and a slow second way."""

from __future__ import annotations

if __name__ == "__main__":  # before the imports that a bare Python lacks
    from _standalone import main

    main(__file__)

import random
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from _tables import small_config, small_layout
from hypothesis import given
from hypothesis import strategies as st

from spark_overlay.engram.layout import EngramError, EngramLayout, RankRange, column_primes

REAL = {
    "engram_layer_ids": [1, 14],
    "engram_num_embeddings": [384006168, 384016682],
    "engram_vocab_size": 16000000,
    "engram_n_heads": 8,
    "engram_max_ngram_size": 4,
    "engram_head_dim": 256,
    "engram_pad_token_id": 2,
    "engram_compressed_vocab_size": 99092,
}


@pytest.fixture(scope="module")
def real() -> EngramLayout:
    layout = EngramLayout.from_config(REAL)
    assert layout is not None
    return layout


def test_the_prime_rule_gives_the_real_tables(real: EngramLayout) -> None:
    assert real.columns == 24
    assert real.num_embeddings == (384006168, 384016682)
    assert (real.primes[0][0], real.primes[0][-1]) == (16000057, 16000463)
    assert (real.primes[1][0], real.primes[1][-1]) == (16000477, 16000889)
    assert len({p for sizes in real.primes for p in sizes}) == 48


def test_the_real_hash_multipliers(real: EngramLayout) -> None:
    assert real.multipliers.dtype == np.int64
    assert real.multipliers.tolist() == [
        [76632096046245, 4839876093313, 35959672319349, 73987337458391],
        [67716810739261, 51510806800915, 30921347202721, 82619226485591],
    ]


@pytest.mark.parametrize(
    ("layer_id", "cut", "rows"), [(1, 192001740, 384006168), (14, 192007016, 384016682)]
)
def test_two_ranks_own_twelve_columns_each(real, layer_id, cut, rows) -> None:
    assert real.rank_range(layer_id, 0, 2) == RankRange((0, 12), (0, cut))
    assert real.rank_range(layer_id, 1, 2) == RankRange((12, 24), (cut, rows))
    assert cut != rows // 2


@pytest.mark.parametrize("tp", range(1, 25))
def test_ranks_cover_the_table_once_or_the_size_is_refused(real, tp: int) -> None:
    each = -(-24 // tp)
    if (tp - 1) * each >= 24:
        with pytest.raises(EngramError, match="leave a rank without any"):
            real.rank_range(1, 0, tp)
        return
    parts = [real.rank_range(1, rank, tp) for rank in range(tp)]
    assert parts[0].rows[0] == 0 and parts[-1].rows[1] == 384006168
    assert all(a.rows[1] == b.rows[0] for a, b in pairwise(parts))
    assert all(part.rows[0] < part.rows[1] for part in parts)


def test_a_rank_outside_the_group_and_a_layer_without_a_table_are_refused(real) -> None:
    for rank, tp in ((2, 2), (-1, 2), (0, 0)):
        with pytest.raises(EngramError):
            real.rank_range(1, rank, tp)
    with pytest.raises(EngramError, match=r"layer 2 has no Engram table; \[1, 14\] have"):
        real.rank_range(2, 0, 2)


@given(
    vocab=st.integers(0, 2000),
    layers=st.integers(1, 3),
    orders=st.integers(1, 3),
    heads=st.integers(1, 9),
)
def test_primes_are_prime_unused_and_the_next_ones(vocab, layers, orders, heads) -> None:
    table = column_primes(vocab, layers, orders, heads)
    flat = [p for sizes in table for p in sizes]
    assert [len(sizes) for sizes in table] == [orders * heads] * layers
    sieve = [n for n in range(2, max(flat) + 1) if all(n % d for d in range(2, int(n**0.5) + 1))]
    # All orders search from the same start and skip what is taken: the list is one sorted run.
    assert flat == [n for n in sieve if n >= vocab]


def test_from_config_reads_mappings_objects_and_nested_text_configs() -> None:
    config = small_config()
    layout = EngramLayout.from_config(config)
    assert layout == EngramLayout.from_config({"text_config": config})
    assert layout == EngramLayout.from_config(SimpleNamespace(**config))
    assert EngramLayout.from_config({}) is None
    assert EngramLayout.from_config({"engram_layer_ids": []}) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"engram_num_embeddings": [384006168, 384016681]}, "primes sum to"),
        ({"engram_num_embeddings": [384006168]}, "primes sum to"),
        ({"engram_vocab_size": 16000001}, None),  # the same primes: legal
        ({"engram_vocab_size": 16000058}, "primes sum to"),
        ({"engram_vocab_size": 61}, "below 62, where vLLM skips a prime"),
        ({"engram_n_heads": "8"}, "engram_n_heads is '8'"),
        ({"engram_head_dim": 100}, "not a multiple of 32"),
        ({"engram_pad_token_id": None}, "engram_pad_token_id is None"),
        ({"engram_layer_ids": 1}, "engram_layer_ids is 1"),
    ],
)
def test_a_config_that_does_not_fit_its_tables_is_refused(change, message) -> None:
    if message is None:
        assert EngramLayout.from_config(REAL | change) is not None
        return
    with pytest.raises(EngramError, match=message):
        EngramLayout.from_config(REAL | change)


LAYOUT = small_layout()
VOCAB = 40
#: 19 compressed ids; the pad token's own compressed id is not its token id.
TOKEN_MAP = np.array([(7 * token + 3) % 19 for token in range(VOCAB)], np.int64)


def slow_hash(tokens, dead, position: int, layer: int) -> list[int]:
    """One position in Python integers; tokens of None are not known."""
    pad = int(TOKEN_MAP[LAYOUT.pad_token_id])
    values, blocked = [], False
    for shift in range(LAYOUT.max_ngram):
        at = position - shift
        blocked = blocked or at < 0 or dead[at]
        known = not blocked and tokens[at] is not None
        values.append(int(TOKEN_MAP[tokens[at]]) if known else pad)
    ids, begin = [], 0
    for order in range(2, LAYOUT.max_ngram + 1):
        mixed = 0
        for value, factor in zip(values[:order], LAYOUT.multipliers[layer], strict=False):
            mixed ^= value * int(factor)
        for head in range(LAYOUT.heads):
            prime = LAYOUT.primes[layer][(order - 2) * LAYOUT.heads + head]
            ids.append(begin + mixed % prime)
            begin += prime
    return ids


TEXT = st.lists(st.tuples(st.integers(0, VOCAB - 1), st.booleans()), max_size=12)


@given(TEXT)
def test_hash_ids_equal_the_slow_way(text: list[tuple[int, bool]]) -> None:
    tokens, dead = [t for t, _ in text], [d for _, d in text]
    ids = LAYOUT.hash_ids(np.array(tokens, np.int64), TOKEN_MAP, np.array(dead, np.bool_))
    assert ids.shape == (len(text), 2, 6) and ids.dtype == np.int64
    for position in range(len(text)):
        for layer in range(2):
            assert ids[position, layer].tolist() == slow_hash(tokens, dead, position, layer)


@given(text=TEXT, cut=st.integers(0, 12), unknown=st.sets(st.integers(0, 12)))
def test_a_chunk_with_its_lookback_hashes_as_the_whole_text(text, cut, unknown) -> None:
    cut = min(cut, len(text))
    first = max(0, cut - (LAYOUT.max_ngram - 1))
    gone = {i for i in unknown if first <= i < cut}
    tokens = np.array([t for t, _ in text], np.int64)
    # A token that is not known cannot be known to be dead either.
    dead = np.array([d and i not in gone for i, (_, d) in enumerate(text)], np.bool_)
    before = np.array([-1 if i in gone else tokens[i] for i in range(first, cut)], np.int64)
    ids = LAYOUT.hash_ids(tokens[cut:], TOKEN_MAP, dead[cut:], before, dead[first:cut])
    whole = [None if i in gone else int(t) for i, t in enumerate(tokens)]
    for position in range(cut, len(text)):
        expected = [slow_hash(whole, dead, position, layer) for layer in range(2)]
        assert ids[position - cut].tolist() == expected


def test_hash_ids_stay_inside_their_columns(real: EngramLayout) -> None:
    rng = np.random.default_rng(0)
    token_map = np.concatenate([np.arange(99092), rng.integers(0, 99092, 1000)])
    ids = real.hash_ids(rng.integers(0, len(token_map), 500), token_map)
    begins, sizes = np.array(real.offsets), np.array(real.primes)
    assert ((begins <= ids) & (ids < begins + sizes)).all()


def test_an_image_span_cuts_the_text_before_it() -> None:
    tokens = np.array(random.Random(0).choices(range(VOCAB), k=8), np.int64)
    dead = np.arange(8) == 4
    after = LAYOUT.hash_ids(tokens, TOKEN_MAP, dead)[5:]
    assert np.array_equal(after, LAYOUT.hash_ids(tokens[5:], TOKEN_MAP))


@pytest.mark.parametrize("token", [-1, VOCAB])
def test_a_token_outside_the_vocabulary_is_refused(token: int) -> None:
    with pytest.raises(EngramError, match=f"token id {token} is outside"):
        LAYOUT.hash_ids(np.array([1, token]), TOKEN_MAP)


def test_a_token_map_of_another_tokenizer_is_refused() -> None:
    with pytest.raises(EngramError, match="has 18 compressed ids, the tables were built for 19"):
        LAYOUT.hash_ids(np.array([1]), np.minimum(TOKEN_MAP, 17))
