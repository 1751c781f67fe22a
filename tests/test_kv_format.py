"""The KV record's number formats, every code of each, against their definitions. No torch."""

from __future__ import annotations

if __name__ == "__main__":  # before the imports that a bare Python lacks
    from _standalone import main

    main(__file__)

import math
from fractions import Fraction

import numpy as np
import pytest

from spark_overlay.attention import format as fmt

CODES = np.arange(256, dtype=np.uint8)


def e4m3(code: int) -> Fraction | None:
    """By the definition; None is NaN."""
    sign, exponent, mantissa = -1 if code & 0x80 else 1, code >> 3 & 15, code & 7
    if (exponent, mantissa) == (15, 7):
        return None
    if exponent == 0:
        return sign * Fraction(mantissa, 512)
    return sign * Fraction(8 + mantissa, 8) * Fraction(2) ** (exponent - 7)


def test_every_e4m3_code() -> None:
    for code, value in zip(CODES.tolist(), fmt.e4m3_to_float32(CODES).tolist(), strict=True):
        right = e4m3(code)
        assert math.isnan(value) if right is None else Fraction(value) == right, code
    assert np.signbit(fmt.e4m3_to_float32(np.uint8(0x80)))


def test_every_ue8m0_code() -> None:
    values = fmt.ue8m0_to_float32(CODES)
    assert [math.frexp(v) for v in values[:255].tolist()] == [(0.5, n - 126) for n in range(255)]
    assert np.isnan(values[255])


def test_every_code_with_every_scale_is_one_exact_product() -> None:
    """float32 holds the product but where it overflows: the bits that the kernels build are sums of
    powers of two within float32's range."""
    values, scales = fmt.e4m3_to_float32(CODES), fmt.ue8m0_to_float32(CODES)
    with np.errstate(over="ignore", invalid="ignore"):
        product = values[:, None] * scales[None, :]
    for code in range(256):
        right = e4m3(code)
        for scale in range(255):
            if right is None:
                assert np.isnan(product[code, scale])
                continue
            exact = right * Fraction(2) ** (scale - 127)
            found = float(product[code, scale])
            if abs(exact) >= Fraction(2) ** 128:
                assert math.isinf(found) and (found > 0) == (exact > 0)
            else:
                assert Fraction(found) == exact, (code, scale)
    assert np.isnan(product[:, 255]).all()


def test_encoding_finds_every_code_again() -> None:
    finite = np.array([c for c in CODES if c & 0x7F != 0x7F])
    assert np.array_equal(fmt.float32_to_e4m3(fmt.e4m3_to_float32(finite)), finite)
    assert fmt.float32_to_e4m3(np.float32("nan")) & 0x7F == 0x7F
    exponents = np.arange(-127, 128)
    assert np.array_equal(fmt.float32_to_ue8m0(exponents), CODES[:255])


def test_encoding_rounds_to_nearest_and_ties_to_even() -> None:
    known = sorted({float(e) for c in range(128) if (e := e4m3(c)) is not None})
    for low, high in zip(known[:-1], known[1:], strict=True):
        middle = (low + high) / 2
        at = known.index(low)
        for value, right in (
            (math.nextafter(middle, 0) if middle else 0.0, at), (middle, at + at % 2),
            (np.nextafter(np.float32(middle), np.float32(500)), at + 1),
        ):  # fmt: skip
            value = np.float32(value)
            if Fraction(float(value)) != Fraction(middle) or right == at + at % 2:
                assert fmt.float32_to_e4m3(value) == right, (low, high, value)
                assert fmt.float32_to_e4m3(-value) == right | 0x80


@pytest.mark.parametrize("value", [448.0, 449.0, 1e30, math.inf])
def test_encoding_saturates(value: float) -> None:
    assert fmt.float32_to_e4m3(np.float32(value)) == 0x7E
    assert fmt.float32_to_e4m3(np.float32(-value)) == 0xFE


def test_sizes() -> None:
    assert (fmt.DATA_BYTES, fmt.SCALE_BYTES, fmt.RECORD_BYTES) == (576, 8, 584)
    assert fmt.SCALE_GROUPS * fmt.SCALE_GROUP + fmt.ROPE_DIM == fmt.HEAD_DIM == 512
