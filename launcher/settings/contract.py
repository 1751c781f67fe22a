"""What a value may be: pure functions from the text a user typed to the value, or a `Violation`.

Integers are ASCII digits and nothing else: no sign, blank, letter, carriage return; leading zeros
are dropped; the length is compared before the value, so no text is too long to be refused.
"""

from __future__ import annotations

import re

_UTILISATION = re.compile(r"0|0?\.[0-9]+|1|1\.0+")
_DECIMAL = re.compile(r"[0-9]{1,9}(?:\.[0-9]{1,9})?|\.[0-9]{1,9}")
_DIGITS = re.compile(r"[0-9]+")
_IPV4 = re.compile(r"(?:(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])(?:\.(?!$)|$)){4}")


class Violation(ValueError):
    """Why a value is refused, to be read after the key's name."""


def integer(text: str, low: int, high: int) -> int:
    """An integer of `low`..`high`; `low` is 0 or 1."""
    if not _DIGITS.fullmatch(text):
        raise Violation(f"must be a whole number {low}..{high} in plain digits, not {text!r}")
    digits = text.lstrip("0") or "0"
    if len(digits) > len(str(high)) or not low <= int(digits) <= high:
        raise Violation(f"must be within {low}..{high}, not {_shorten(text)}")
    return int(digits)


def utilisation(text: str) -> str:
    """A share 0 < u <= 1, written `0.x`, `.x`, `1` or `1.0`; kept as typed."""
    if not _UTILISATION.fullmatch(text) or not 0 < float(text) <= 1:
        raise Violation(f"must be above 0 and at most 1, as 0.88 or .88, not {_shorten(text)!r}")
    return text


def decimal(text: str, low: float, high: float) -> str:
    """A plain decimal number of `low`..`high`; kept as typed."""
    if not _DECIMAL.fullmatch(text) or not low <= float(text) <= high:
        raise Violation(f"must be a number {low:g}..{high:g}, not {_shorten(text)!r}")
    return text


def choice(text: str, choices: tuple[str, ...]) -> str:
    """One of the listed words, letter by letter."""
    if text not in choices:
        raise Violation(f"must be one of {', '.join(choices)}; not {_shorten(text)!r}")
    return text


def flag(text: str) -> int:
    """`0` or `1`."""
    if text not in ("0", "1"):
        raise Violation(f"must be 0 or 1, not {_shorten(text)!r}")
    return int(text)


def stock_or_integer(text: str, low: int, high: int) -> str:
    """The word `stock`, or an integer as `integer` reads it, written back without zeros."""
    if text == "stock":
        return text
    try:
        return str(integer(text, low, high))
    except Violation as problem:
        raise Violation(
            f"must be the word stock, or {str(problem).removeprefix('must be ')}"
        ) from None


def ipv4(text: str) -> str:
    """A dotted IPv4 address without leading zeros."""
    if not _IPV4.fullmatch(text):
        raise Violation(f"must be an IPv4 address such as 10.0.0.1, not {_shorten(text)!r}")
    return text


def word(text: str) -> str:
    """Any text that a command line cannot mistake for an option."""
    if text.startswith("-"):
        raise Violation(f"must not start with '-', as {_shorten(text)!r} does")
    return text


def _shorten(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:37]}..."
