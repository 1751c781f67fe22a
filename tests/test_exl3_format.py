"""The EXL3 format against tensors of the real runtime and quantizer, and its slicing rules."""

from __future__ import annotations

if __name__ == "__main__":  # before the imports that a bare Python lacks
    from _standalone import main

    main(__file__)

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_overlay.exl3 import format as exl3
from spark_overlay.exl3.format import Exl3FormatError

DATA = Path(__file__).parent / "data" / "exl3"
DECODE = np.load(DATA / "exl3_decode.npz")
VECTORS = np.load(DATA / "exl3_vectors.npz")
RANDOM = sorted(
    name.removesuffix("_trellis")
    for name in DECODE
    if name.endswith("_trellis") and not name.startswith("full")
)
QUANTIZED = {4: 0.0685, 5: 0.0347, 6: 0.0177, 8: 0.00465}

RATES = [(c, k2) for c in exl3.CODEBOOKS for k2 in exl3.LEGAL_K2 if c == "mul1" or k2 % 2 == 0]


def random_trellis(rows: int, columns: int, k2: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.integers(-(1 << 15), 1 << 15, (rows, columns, 8 * k2), np.int16)


def random_scales(size: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 1, size).astype(np.float16)


def bits_equal(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def test_the_data_covers_every_codebook_and_rate() -> None:
    names = sorted(f"{c}_k{k2 / 2:g}" for c, k2 in RATES)
    assert names == RANDOM


@pytest.mark.parametrize("name", RANDOM)
def test_decode_equals_the_runtime_bit_for_bit(name: str) -> None:
    decoded = exl3.decode(DECODE[f"{name}_trellis"], name.split("_")[0])
    assert bits_equal(decoded, DECODE[f"{name}_inner"])


@pytest.mark.parametrize("k2", QUANTIZED)
def test_quantizer_made_tensors_decode_bit_for_bit_and_restore_their_source(k2: int) -> None:
    trellis = VECTORS[f"trellis_{k2}"]
    assert bits_equal(exl3.decode(trellis, "mul1"), DECODE[f"quantizer_k{k2 / 2:g}_inner"])
    weight = exl3.dequantize(trellis, VECTORS[f"su_{k2}"], VECTORS[f"sv_{k2}"])
    source = VECTORS["W"]
    error = np.square(weight - source).sum() / np.square(source).sum()
    assert error == pytest.approx(QUANTIZED[k2], rel=0.01)


def test_dequantize_equals_the_float64_weight_to_1e_6() -> None:
    parts = [DECODE[f"full_mul1_k3_{part}"] for part in ("trellis", "suh", "svh")]
    weight, expected = exl3.dequantize(*parts), DECODE["full_mul1_k3_weight"]
    assert weight.dtype == np.float32
    error = np.abs(weight.astype(np.float64) - expected)
    assert (error <= 1e-6 * np.abs(expected) + 1e-12).all()


def test_hadamard_is_symmetric_orthonormal_and_in_natural_order() -> None:
    had = exl3.hadamard_128()
    assert np.array_equal(had, had.T)
    assert np.allclose(had @ had, np.eye(128), atol=1e-12)
    assert np.array_equal(np.sign(had[1]), np.tile([1.0, -1.0], 64))


def slow_tile(words: np.ndarray, k2: int, codebook: str) -> np.ndarray:
    """One tile, bit by bit: states by the recurrence, places by the operand order."""
    bits = []
    for pair in words.view(np.uint16).reshape(-1, 2):
        bits += [int(b) for b in f"{int(pair[1]):016b}{int(pair[0]):016b}"]
    tile = np.zeros((16, 16), np.float16)
    table = exl3.codebook_table(codebook)
    state, at = int("".join(map(str, bits[-16:])), 2), 0
    for i in range(256):
        for _ in range(k2 // 2 + (i & 1) * (k2 % 2)):
            state = (state << 1 | bits[at]) & 0xFFFF
            at += 1
        lane, j = divmod(i, 8)
        row = 2 * (lane % 4) + j % 2 + 8 * (j // 2 % 2)
        tile[row, lane // 4 + 8 * (j // 4)] = table[state]
    assert at == len(bits)
    return tile


@settings(max_examples=15)
@given(rate=st.sampled_from(RATES), seed=st.integers(0, 1 << 32))
def test_every_bit_pattern_decodes_as_the_state_recurrence_says(rate, seed) -> None:
    codebook, k2 = rate
    trellis = random_trellis(1, 1, k2, seed)
    assert bits_equal(exl3.decode(trellis, codebook), slow_tile(trellis[0, 0], k2, codebook))


@settings(max_examples=60)
@given(data=st.data(), rate=st.sampled_from(RATES), seed=st.integers(0, 1 << 32))
def test_decode_of_a_slice_is_the_slice_of_the_decode(data, rate, seed) -> None:
    codebook, k2 = rate
    rows, columns = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 5))
    r0, c0 = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, columns - 1))
    r1, c1 = data.draw(st.integers(r0 + 1, rows)), data.draw(st.integers(c0 + 1, columns))
    trellis = random_trellis(rows, columns, k2, seed)
    part = exl3.decode(trellis[r0:r1, c0:c1], codebook)
    whole = exl3.decode(trellis, codebook)
    assert bits_equal(part, np.ascontiguousarray(whole[16 * r0 : 16 * r1, 16 * c0 : 16 * c1]))


def test_decode_in_chunks_equals_decode_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    trellis = random_trellis(7, 3, 6, 1)
    whole = exl3.decode(trellis, "mul1")
    monkeypatch.setattr(exl3, "_CHUNK_TILES", 6)
    assert bits_equal(exl3.decode(trellis, "mul1"), whole)


@settings(max_examples=8)
@given(
    rate=st.sampled_from(RATES),
    blocks=st.sampled_from([(1, 1), (1, 2), (2, 1)]),
    tp=st.integers(1, 3),
    seed=st.integers(0, 1 << 32),
)
def test_column_slices_join_and_row_slices_sum_to_the_whole(rate, blocks, tp, seed) -> None:
    codebook, k2 = rate
    rows, columns = 128 * blocks[0] * tp, 128 * blocks[1] * tp
    trellis = random_trellis(rows // 16, columns // 16, k2, seed)
    suh, svh = random_scales(rows, seed), random_scales(columns, seed + 1)
    x = np.random.default_rng(seed).normal(size=(2, rows))
    whole = exl3.dequantize(trellis, suh, svh, codebook)
    expected = x @ whole

    parts = []
    for lo, hi in exl3.shard_ranges(columns, tp):
        cut = exl3.column_slice(lo, hi, columns)
        part = exl3.dequantize(trellis[cut.trellis], suh[cut.suh], svh[cut.svh], codebook)
        # Not bit for bit: a matrix product's order of addition depends on its shape.
        np.testing.assert_allclose(part, whole[:, lo:hi], rtol=1e-6, atol=1e-12)
        parts.append(x @ part)
    assert np.allclose(np.concatenate(parts, axis=1), expected)

    total = np.zeros_like(expected)
    for lo, hi in exl3.shard_ranges(rows, tp):
        cut = exl3.row_slice(lo, hi, rows)
        part = exl3.dequantize(trellis[cut.trellis], suh[cut.suh], svh[cut.svh], codebook)
        total += x[:, lo:hi] @ part
    assert np.allclose(total, expected)


def test_only_the_first_rank_of_a_row_split_adds_the_bias() -> None:
    assert exl3.row_slice(0, 128, 256).bias == slice(None)
    assert exl3.row_slice(128, 256, 256).bias is None
    assert exl3.column_slice(128, 256, 256).bias == slice(128, 256)


@given(lo=st.integers(-300, 700), hi=st.integers(-300, 700), blocks=st.integers(1, 4))
def test_a_cut_is_legal_only_between_hadamard_blocks(lo: int, hi: int, blocks: int) -> None:
    size = 128 * blocks
    legal = lo % 128 == 0 and hi % 128 == 0 and 0 <= lo < hi <= size
    for cut in (exl3.column_slice, exl3.row_slice):
        if legal:
            assert cut(lo, hi, size)
        else:
            with pytest.raises(Exl3FormatError, match=r"layers\.0.*multiples of 128"):
                cut(lo, hi, size, "layers.0.attn.wo_b")


@pytest.mark.parametrize(("size", "tp", "legal"), [(2304, 4, "1, 2, 3, 6, 9, 18"), (128, 2, "1")])
def test_an_illegal_tensor_parallel_size_names_the_legal_ones(size, tp, legal) -> None:
    with pytest.raises(Exl3FormatError, match=rf"w1: {size} .*over {tp} .*here: {legal}$"):
        exl3.shard_ranges(size, tp, "w1")


def test_a_cut_at_a_tile_but_not_a_block_would_have_been_silently_wrong() -> None:
    """Why the rule is 128 and not the tile's 16: the shapes fit, the numbers do not."""
    trellis = random_trellis(8, 8, 6, 0)
    ones = np.ones(128, np.float16)
    whole = exl3.dequantize(trellis, ones, ones)
    padded = np.zeros_like(trellis)
    padded[:, :4] = trellis[:, :4]
    half = exl3.dequantize(padded, ones, ones)[:, :64]
    assert not np.allclose(half, whole[:, :64], atol=0.1)


@given(st.integers(0, 1024))
def test_the_rate_comes_from_the_words_of_a_tile(words: int) -> None:
    k2, rest = divmod(words, 8)
    if rest == 0 and (k2 in (3, 5, 7) or k2 in range(2, 17, 2)):
        assert exl3.bits_from_words(words) == k2
    else:
        with pytest.raises(Exl3FormatError, match=rf"x: {words} words .*K=2\.5"):
            exl3.bits_from_words(words, "x")


@pytest.mark.parametrize("codebook", ["mcg", "3inst"])
def test_half_rates_exist_for_mul1_only(codebook: str) -> None:
    with pytest.raises(Exl3FormatError, match=r"K=2\.5 exists for codebook mul1 only"):
        exl3.decode(random_trellis(1, 1, 5, 0), codebook)


def test_markers_are_the_signed_multipliers() -> None:
    assert exl3.MARKERS["mul1"] % (1 << 32) == 0x83DCD12D
    assert exl3.MARKERS["mcg"] % (1 << 32) == 0xCBAC1FED
    exl3.check_marker("mul1", -2082680531)
    with pytest.raises(Exl3FormatError, match="expected -2082680531"):
        exl3.check_marker("mul1", 0x83D6B12D - (1 << 32))


@pytest.mark.parametrize(
    "trellis",
    [np.zeros((1, 1, 48), np.int32), np.zeros((1, 48), np.int16), np.zeros((1, 1, 44), np.int16)],
)
def test_decode_refuses_what_is_no_trellis(trellis: np.ndarray) -> None:
    with pytest.raises(Exl3FormatError):
        exl3.decode(trellis, "mul1")


def test_dequantize_refuses_scales_of_another_size() -> None:
    trellis = random_trellis(8, 8, 4, 0)
    with pytest.raises(Exl3FormatError, match=r"suh \[256\]"):
        exl3.dequantize(trellis, random_scales(256, 0), random_scales(128, 0))


@given(st.lists(st.integers(0, 0xFFFF), max_size=4))
def test_legacy_sign_bits_unpack_lowest_bit_first(words: list[int]) -> None:
    signs = exl3.signs_from_bits(np.array(words, np.uint16).view(np.int16))
    assert signs.dtype == np.float16
    assert signs.tolist() == [-1.0 if w >> b & 1 else 1.0 for w in words for b in range(16)]
