"""The contract of numbers and closed words: what is accepted, how it is written back, what is not.

The matrix covers every way a number can be wrong in a hand-written file, at both ends of its range.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the imports below, which this Python may lack
    from _standalone import main

    main(__file__)

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from settings_root import checkout, settings_of

from launcher.errors import UsageError
from launcher.settings import contract
from launcher.settings.table import TABLE

ROOT = Path(__file__).resolve().parents[1]
INTEGERS = [s for s in TABLE.values() if s.kind in ("integer", "optional integer")]
SEED_LIMITS = {
    "MAX_MODEL_LEN": (1, 1048576),
    "MAX_NUM_SEQS": (1, 4096),
    "MAX_NUM_BATCHED_TOKENS": (1, 8388608),
}
SEED_DEFAULTS = {
    "MAX_MODEL_LEN": 600000,
    "MAX_NUM_SEQS": 2,
    "MAX_NUM_BATCHED_TOKENS": 1024,
    "GPU_MEM_UTIL": "0.88",
    "KV_CACHE_MEMORY_BYTES": 2684354560,
    "KV_BLOCK_SIZE": 64,
    "DSPARK_TOKENS": 3,
    "SPEC_METHOD": "dspark",
    "LANGUAGE_MODEL_ONLY": 1,
    "PORT": 8888,
    "MASTER_PORT": 29521,
    "READY_TIMEOUT": 1500,
    "GLM53_INDEXER_WORKSPACE": "stock",
    "GLM53_SPINWAIT_MS": "stock",
}
NOT_A_NUMBER = [
    "-1", "+1", "1.0", "1e3", "0x10", "1_000", "abc", "12a", " 1", "1 ", "1\r", "1\n", "\t1", "１",
    "٣", "²", "--1", "1,000", "None", "true",
]  # fmt: skip
OVERFLOWS = ["9" * 19, "18446744073709551617", "9" * 400, "9" * 5000]


@pytest.mark.parametrize("key", SEED_LIMITS)
def test_limits_are_the_seeds(key: str) -> None:
    assert TABLE[key].limits == SEED_LIMITS[key]


@pytest.mark.parametrize(("key", "value"), SEED_DEFAULTS.items())
def test_defaults_are_the_seeds(tmp_path: Path, key: str, value: object) -> None:
    resolved = {s.key: r for s, r in settings_of(tmp_path).items()}[key]
    assert (resolved.value, resolved.origin) == (value, "default")


@pytest.mark.parametrize("setting", INTEGERS, ids=lambda s: s.key)
def test_every_integer_accepts_its_ends_and_refuses_what_is_beyond(setting) -> None:
    low, high = setting.limits
    assert setting.read(str(low)) == low
    assert setting.read(str(high)) == high
    for text in (str(high + 1), str(high) + "0", *([str(low - 1)] if low else ["-0"])):
        with pytest.raises(contract.Violation):
            setting.read(text)


@pytest.mark.parametrize("setting", INTEGERS, ids=lambda s: s.key)
@pytest.mark.parametrize("text", [*NOT_A_NUMBER, *OVERFLOWS])
def test_every_integer_refuses_anything_but_plain_digits_in_range(setting, text: str) -> None:
    with pytest.raises(contract.Violation):
        setting.read(text)


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("MAX_MODEL_LEN", "01000000", 1000000),
        ("MAX_MODEL_LEN", "0" * 300 + "7", 7),
        ("MAX_NUM_SEQS", "0004", 4),
        ("MAX_NUM_BATCHED_TOKENS", "0000001536", 1536),
        ("NCCL_IB_GID_INDEX", "000", 0),
        ("LONG_PREFILL_TOKEN_THRESHOLD", "01792", 1792),
    ],
)
def test_leading_zeros_are_dropped(key: str, text: str, value: int) -> None:
    assert TABLE[key].read(text) == value


@pytest.mark.parametrize("key", SEED_LIMITS)
@pytest.mark.parametrize("text", ["0", "00", "000000"])
def test_zero_is_refused(key: str, text: str) -> None:
    with pytest.raises(contract.Violation):
        TABLE[key].read(text)


@pytest.mark.parametrize("text", ["1", "1.0", "1.000", "0.88", ".87", "0.001", ".5", "0.9999"])
def test_utilisation_is_kept_as_typed(text: str) -> None:
    assert TABLE["GPU_MEM_UTIL"].read(text) == text


@pytest.mark.parametrize(
    "text",
    ["0", "0.0", ".0", "0.000", "8.7", "1.01", "2", "nope", "-0.5", "+.5", "0.", ".", "1.", "88%",
     "0,88", " 0.88", "0.88 ", "0.88\r", "0.88\n", "1e-1", "00.5", "nan", "inf", "٠.٥"],
)  # fmt: skip
def test_utilisation_outside_its_grammar_is_refused(text: str) -> None:
    with pytest.raises(contract.Violation):
        TABLE["GPU_MEM_UTIL"].read(text)


@pytest.mark.parametrize("text", ["stock", "rightsize"])
def test_indexer_workspace_words(text: str) -> None:
    assert TABLE["GLM53_INDEXER_WORKSPACE"].read(text) == text


@pytest.mark.parametrize("text", ["", " ", "Stock", "stock\n", "stock\r", "STOCK", "stock ", "2"])
def test_indexer_workspace_refuses_any_other_spelling(text: str) -> None:
    with pytest.raises(contract.Violation, match="must be one of stock, rightsize"):
        TABLE["GLM53_INDEXER_WORKSPACE"].read(text)


@pytest.mark.parametrize(
    ("text", "value"), [("stock", "stock"), ("1", "1"), ("1000", "1000"), ("016", "16")]
)
def test_spin_wait(text: str, value: str) -> None:
    assert TABLE["GLM53_SPINWAIT_MS"].read(text) == value


@pytest.mark.parametrize("text", ["", "0", "1001", "-1", "1.5", " 16", "16 ", "STOCK", "stock\n"])
def test_spin_wait_refuses(text: str) -> None:
    with pytest.raises(contract.Violation, match="stock"):
        TABLE["GLM53_SPINWAIT_MS"].read(text)


@pytest.mark.parametrize("text", ["", " ", "Stock"])
def test_an_explicit_empty_word_in_the_file_is_refused_not_defaulted(
    tmp_path: Path, text: str
) -> None:
    with pytest.raises(UsageError, match="must be one of"):
        settings_of(tmp_path, f"GLM53_INDEXER_WORKSPACE='{text}'\n")


@pytest.mark.parametrize(
    "setting", [s for s in TABLE.values() if s.kind == "flag"], ids=lambda s: s.key
)
def test_flags_are_0_or_1(setting) -> None:
    assert (setting.read("0"), setting.read("1")) == (0, 1)
    for text in ("2", "true", "yes", "01", " 1", "1\r"):
        with pytest.raises(contract.Violation):
            setting.read(text)


@pytest.mark.parametrize(
    "text",
    ["10.0.0", "10.0.0.256", "10.0.0.1 ", "010.0.0.1", "::1", "host", "10.0.0.1.", "1.2.3.4\n"],
)
def test_addresses_that_are_not_ipv4_are_refused(text: str) -> None:
    with pytest.raises(contract.Violation):
        TABLE["HEAD_IP"].read(text)


@given(st.integers(0, 10**30), st.integers(0, 60), st.integers(0, 1), st.integers(1, 1 << 63))
def test_integer_agrees_with_arithmetic(number: int, zeros: int, low: int, high: int) -> None:
    text = "0" * zeros + str(number)
    if low <= number <= high:
        assert contract.integer(text, low, high) == number
    else:
        with pytest.raises(contract.Violation):
            contract.integer(text, low, high)


@given(st.text(max_size=12))
def test_integer_never_accepts_what_is_not_ascii_digits(text: str) -> None:
    if text and all(c in "0123456789" for c in text):
        return
    with pytest.raises(contract.Violation):
        contract.integer(text, 0, 1 << 62)


def test_every_default_is_itself_legal() -> None:
    for setting in TABLE.values():
        setting.read(setting.default)


def test_all_violations_are_listed_at_once_with_their_places(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as error:
        settings_of(
            tmp_path,
            "MAX_MODEL_LEN=0\nMAX_NUM_SEQS=two\nPORT=99999\n",
            {"TAIL": "2"},
            ["GPU_MEM_UTIL=8.7"],
        )
    text = str(error.value)
    assert error.value.exit_code == 2
    for part in (
        ".env line 1: MAX_MODEL_LEN", ".env line 2: MAX_NUM_SEQS", ".env line 3: PORT",
        "environment: TAIL", "--set: GPU_MEM_UTIL", "5 problems",
    ):  # fmt: skip
        assert part in text


def _config(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    code = (
        "import argparse, pathlib, sys\n"
        "from launcher.settings import cli_config\n"
        "cli_config.ROOT = pathlib.Path(sys.argv.pop(1))\n"
        "p = argparse.ArgumentParser(); cli_config.add_arguments(p)\n"
        "p.add_argument('--set', action='append')\n"
        "sys.exit(cli_config.run(p.parse_args()))\n"
    )
    return subprocess.run(
        [sys.executable, "-c", code, str(root), *arguments],
        cwd=ROOT, env={"PATH": os.environ["PATH"]}, capture_output=True, text=True, timeout=30,
    )  # fmt: skip


def test_config_exits_2_and_prints_nothing_to_stdout_on_a_violation(tmp_path: Path) -> None:
    done = _config(checkout(tmp_path), "--json", "--set", "MAX_MODEL_LEN=1048577")
    assert (done.returncode, done.stdout) == (2, "")
    assert "MAX_MODEL_LEN must be within 1..1048576" in done.stderr


def test_config_prints_json_with_integers_as_integers(tmp_path: Path) -> None:
    overrides = ("--set", "MAX_MODEL_LEN=01000000", "--set", "GPU_MEM_UTIL=.87")
    done = _config(checkout(tmp_path), "--json", *overrides)
    values = json.loads(done.stdout)["settings"]
    assert values["MAX_MODEL_LEN"] == {"value": 1000000, "origin": "--set"}
    assert values["GPU_MEM_UTIL"] == {"value": ".87", "origin": "--set"}
    assert values.keys() == TABLE.keys()
