"""Settings: who wins, what is said, and a `.env` that nobody would write on purpose."""

from __future__ import annotations

if __name__ == "__main__":  # before the imports below, which this Python may lack
    from _standalone import main

    main(__file__)

import json
import stat
import subprocess
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from settings_root import checkout, settings_of

from launcher.errors import LauncherError, UsageError
from launcher.settings import Secret, dotenv, load, rehearsal
from launcher.settings.cli_config import as_json, explain
from launcher.settings.gone import GONE
from launcher.settings.table import GROUPS, TABLE

ONE_SHOTS = {
    "BUILD", "SKIP_BUILD", "PULL", "SKIP_PULL", "SKIP_SHIP", "SKIP_SYNC", "SKIP_OVERLAY_VERIFY",
    "FORCE_SYNC", "TAIL", "IMAGE_PLATFORM", "GHCR_TOKEN", "HF_MAX_WORKERS",
}  # fmt: skip


# ---- who wins


def test_the_one_shots_are_exactly_those_of_the_guide() -> None:
    assert {key for key, setting in TABLE.items() if setting.one_shot} == ONE_SHOTS


def test_env_file_beats_the_environment_and_says_so(tmp_path: Path) -> None:
    said: list[str] = []
    settings = settings_of(tmp_path, "WEIGHT_SYNC=nfs\n", {"WEIGHT_SYNC": "zfs"}, said=said)
    assert (settings.text("WEIGHT_SYNC"), settings.origin("WEIGHT_SYNC")) == ("nfs", ".env")
    assert said == [
        "WARNING: WEIGHT_SYNC of the environment is ignored, .env line 1 decides; "
        "for one run give --set WEIGHT_SYNC=zfs"
    ]


@pytest.mark.parametrize("key", sorted(TABLE.keys() - ONE_SHOTS))
def test_no_other_key_is_taken_from_the_environment(tmp_path: Path, key: str) -> None:
    assert settings_of(tmp_path, "", {key: "1"}, said=[]).origin(key) == "default"


@pytest.mark.parametrize("key", sorted(ONE_SHOTS))
def test_a_one_shot_comes_from_the_environment_unless_the_file_names_it(
    tmp_path: Path, key: str
) -> None:
    said: list[str] = []
    assert settings_of(tmp_path, "", {key: "1"}, said=said).origin(key) == "environment"
    assert said == []
    assert (
        settings_of(
            tmp_path,
            f"{key}=0001\n" if key == "HF_MAX_WORKERS" else f"{key}=0\n",
            {key: "1"},
            said=said,
        ).origin(key)
        == ".env"
    )


def test_an_empty_variable_in_front_of_the_command_is_no_value(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, "", {"BUILD": "", "PORT": ""}, said=(said := []))
    assert (settings.flag("BUILD"), settings.origin("BUILD"), said) == (False, "default", [])


def test_an_inherited_value_that_is_in_force_anyway_is_not_worth_a_word(tmp_path: Path) -> None:
    said: list[str] = []
    settings_of(tmp_path, "PORT=9000\n", {"PORT": "09000", "HF_HOME": "/x"}, said=said)
    assert said == []


def test_set_beats_everything(tmp_path: Path) -> None:
    settings = settings_of(
        tmp_path, "PORT=1\nSKIP_SYNC=0\n", {"SKIP_SYNC": "1"}, ["PORT=2", "SKIP_SYNC=1"]
    )
    assert (settings.int("PORT"), settings.origin("PORT")) == (2, "--set")
    assert (settings.flag("SKIP_SYNC"), settings.origin("SKIP_SYNC")) == (True, "--set")


def test_a_profile_stands_between_the_file_and_set(tmp_path: Path) -> None:
    root = checkout(tmp_path, "MAX_MODEL_LEN=5000\nMAX_NUM_SEQS=3\n")
    settings = load(root, {}, ["MAX_NUM_SEQS=8"], rehearsal.PROFILE)
    assert (settings.int("MAX_MODEL_LEN"), settings.origin("MAX_MODEL_LEN")) == (4096, "rehearsal")
    assert (settings.int("MAX_NUM_SEQS"), settings.origin("MAX_NUM_SEQS")) == (8, "--set")
    plain = load(root, {}, ["MAX_NUM_SEQS=8"])
    assert plain.int("MAX_MODEL_LEN") == 5000
    later = plain.with_profile("rehearsal", rehearsal.PROFILE)
    assert list(later.items()) == list(settings.items())
    assert plain.origin("MAX_MODEL_LEN") == ".env"


def test_an_empty_value_asks_for_the_default_even_over_another_layer(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, "PORT=9000\nMAX_NUM_SEQS=\n", overrides=["PORT="])
    assert (settings.int("PORT"), settings.origin("PORT")) == (8888, "default")
    assert (settings.int("MAX_NUM_SEQS"), settings.origin("MAX_NUM_SEQS")) == (2, "default")


def test_an_empty_optional_number_means_none(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, "KV_CACHE_MEMORY_BYTES=\n")
    assert settings.maybe_int("KV_CACHE_MEMORY_BYTES") is None
    assert settings.origin("KV_CACHE_MEMORY_BYTES") == ".env"


def test_readers_refuse_a_key_of_another_type(tmp_path: Path) -> None:
    settings = settings_of(tmp_path)
    for read, key in (
        (settings.int, "BUILD"), (settings.int, "BIND"), (settings.flag, "PORT"),
        (settings.text, "PORT"), (settings.text, "VLLM_API_KEY"), (settings.path, "BIND"),
        (settings.secret, "BIND"),
    ):  # fmt: skip
        with pytest.raises(TypeError):
            read(key)


def test_paths_start_at_the_root_or_at_home(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    settings = settings_of(tmp_path, "MODEL_HOST=~/m\nENGRAM_DIR=/abs\nREHEARSAL_DIR='a b'\n")
    assert settings.path("MODEL_HOST") == Path("/home/me/m")
    assert settings.path("ENGRAM_DIR") == Path("/abs")
    assert settings.path("REHEARSAL_DIR") == tmp_path / "a b"


# ---- what is refused


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\nMAX_MODEL_LENGTH=1\n", ".env line 2: MAX_MODEL_LENGTH is not a setting; did you mean "
         "MAX_MODEL_LEN?"),
        ("max_num_seqs=1\n", "did you mean MAX_NUM_SEQS?"),
        ("DSV41_SPINWAIT_MS=1\n", "did you mean GLM53_SPINWAIT_MS?"),
        ("QXZ_JJJ=1\n", ".env line 1: QXZ_JJJ is not a setting"),
        ("PORT=1\n# x\nPORT=1\n", ".env line 3: PORT stands a second time (first on line 1)"),
        ("PORT 1\n", ".env line 1: is not KEY=value"),
        ("1PORT=1\n", ".env line 1: is not KEY=value"),
        ("IMAGE='x\nPORT=1\n", ".env line 1: IMAGE: the single quote is never closed"),
        ('IMAGE="x\\"\nPORT=1\n', ".env line 1: IMAGE: the double quote is never closed"),
        ("IMAGE='x' y\n", ".env line 1: IMAGE: text after the closing quote"),
        ("IMAGE='x'#y\nIMAGE='x\0'\n", "NUL"),
        (b"PORT=1\nIMAGE=\xff\n", ".env line 2: is not UTF-8"),
        ("EXL3_FUSED_MOE=1\n", "EXL3_FUSED_MOE is no setting here (a switch of other kernels"),
        ("EXTRA_ARGS='--x \"y'\n", "EXTRA_ARGS cannot be split"),
        ("EXTRA_ARGS=--kv_cache_dtype=fp8\n", "--kv-cache-dtype"),
        ("EXTRA_ARGS='--moe-backend marlin'\n", "marlin"),
        ("EXTRA_ARGS='--api-key x'\n", "set VLLM_API_KEY"),
        ("EXTRA_ARGS='--max-model-len 5'\n", "set MAX_MODEL_LEN"),
        ("BIND=0.0.0.0\n", "BIND 0.0.0.0 opens the API"),
        ("SERVED_MODEL_NAME=--headless\n", "SERVED_MODEL_NAME must not start with '-'"),
        ("LANGUAGE_MODEL_ONLY=0\nLIMIT_MM=[1]\n", "LIMIT_MM must be a JSON object"),
    ],
)  # fmt: skip
def test_a_bad_file_is_refused_with_line_and_reason(
    tmp_path: Path, text: str | bytes, message: str
) -> None:
    with pytest.raises(UsageError) as error:
        settings_of(tmp_path, text)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("PORTT=1", "did you mean PORT?"), ("PORT", "'PORT' is not KEY=VALUE"),
        ("=1", "is not KEY=VALUE"), ("PORT=1\r", "PORT must be a whole number"),
        ("MODEL_HOST=a\0b", "NUL"),
    ],
)  # fmt: skip
def test_a_bad_override_is_refused(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(UsageError) as error:
        settings_of(tmp_path, overrides=[override])
    assert message in str(error.value)


def test_the_same_override_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="given twice"):
        settings_of(tmp_path, overrides=["PORT=1", "PORT=2"])


def test_syntax_and_value_problems_come_together(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as error:
        settings_of(tmp_path, "what is this\nPORT=0\nPORTX=1\n", overrides=["NOPE"])
    for part in ("line 1", "line 2: PORT", "line 3: PORTX", "NOPE"):
        assert part in str(error.value)


@pytest.mark.parametrize(
    "dotenv_text",
    ["BIND=0.0.0.0\nVLLM_API_KEY=k\n", "BIND=127.0.0.2\n", "BIND=0.0.0.0\nALLOW_NO_AUTH=1\n"],
)
def test_a_guarded_or_meant_exposure_is_accepted(tmp_path: Path, dotenv_text: str) -> None:
    settings_of(tmp_path, dotenv_text)


def test_a_missing_file_is_copied_from_the_example_for_its_owner_only(tmp_path: Path) -> None:
    (tmp_path / ".env.example").write_text("PORT=9001\n")
    said: list[str] = []
    assert load(tmp_path, {}, say=said.append).int("PORT") == 9001
    assert said == [".env was not there: copied from .env.example"]
    assert stat.S_IMODE((tmp_path / ".env").stat().st_mode) == 0o600
    assert sorted(p.name for p in tmp_path.iterdir()) == [".env", ".env.example"]


def test_without_file_and_example_nothing_is_invented(tmp_path: Path) -> None:
    with pytest.raises(LauncherError, match="neither") as error:
        load(tmp_path, {})
    assert error.value.exit_code == 1


def test_keys_that_are_gone_are_not_in_the_table() -> None:
    assert not GONE.keys() & TABLE.keys()


def test_a_key_that_claims_to_be_used_is_read_somewhere() -> None:
    made_of = ("table.py", "gone.py", "rehearsal.py", "example.py")
    sources = [
        path.read_text(encoding="utf-8")
        for path in (Path(__file__).resolve().parents[1] / "launcher").rglob("*.py")
        if not (path.parent.name == "settings" and path.name in made_of)
    ]
    idle = [
        key
        for key, setting in TABLE.items()
        if setting.reader == "now" and not any(f'"{key}"' in source for source in sources)
    ]
    assert idle == []


def test_every_group_has_a_title_and_keys() -> None:
    assert {setting.group for setting in TABLE.values()} == GROUPS.keys()


# ---- secrets


def test_secrets_are_shown_nowhere(tmp_path: Path) -> None:
    said: list[str] = []
    settings = settings_of(
        tmp_path,
        "VLLM_API_KEY=hunter2\n",
        {"GHCR_TOKEN": "hunter3", "VLLM_API_KEY": "hunter4"},
        said=said,
    )
    shown = [explain(settings, 100), as_json(settings), repr(list(settings.items())), *said]
    assert "hunter" not in "".join(shown)
    assert json.loads(as_json(settings))["settings"]["VLLM_API_KEY"]["value"] == "***"
    assert len(said) == 1
    assert "VLLM_API_KEY" in said[0]
    assert settings.secret("GHCR_TOKEN") == Secret("hunter3")
    assert f"{Secret('x')} {Secret('x')!r}" == "*** ***"


def test_a_refused_secret_is_not_quoted(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as error:
        settings_of(tmp_path, overrides=["VLLM_API_KEY=hunter\0"])
    assert "hunter" not in str(error.value)


# ---- the file as data

HOSTILE = [
    "two  words", "it's", 'say "hi"', "$(touch /tmp/pwned)", "`id`", "$HOME/x", "${PORT}", "a\nb",
    "a;b|c&d>e", "*", "~root", "back\\slash", "\\n", "tail\\", "#hash", "a #b", "=x=", "\ttab",
    " edge ", "ünïcödé 模型", "'\"'", "!", "a\rb", "--x", "'", '"', "$", "\u2028", "\x85",
]  # fmt: skip


@pytest.mark.parametrize("value", HOSTILE)
def test_hostile_values_arrive_as_they_are(tmp_path: Path, value: str) -> None:
    settings = settings_of(tmp_path, f"MODEL_HOST={dotenv.quote(value)}\nPORT=9002\n")
    assert settings.text("MODEL_HOST") == value
    assert settings.int("PORT") == 9002
    assert settings_of(tmp_path, overrides=[f"MODEL_HOST={value}"]).text("MODEL_HOST") == value


@pytest.mark.parametrize("value", HOSTILE)
def test_quoted_values_mean_the_same_to_sh(value: str) -> None:
    line = f"KEY={dotenv.quote(value)}\n"
    if value.startswith("~"):
        return  # the one thing that sh expands in what quote leaves bare
    done = subprocess.run(["sh", "-c", line + 'printf %s "$KEY"'], capture_output=True, check=True)
    assert done.stdout.decode() == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("IMAGE=a b c\n", "a b c"),
        ("IMAGE=  a b  # why\n", "a b"),
        ("IMAGE=a#b\n", "a#b"),
        ("IMAGE=#b\n", "#b"),
        ("IMAGE= #b\n", TABLE["IMAGE"].default),
        ("export IMAGE=x\n", "x"),
        ("  export\tIMAGE = x\n", "x"),
        ("IMAGE='a #b' # c\n", "a #b"),
        ('IMAGE="a\\"b\\\\c\\nd\\$e"\n', 'a"b\\c\\nd$e'),
        ("IMAGE=a'b\"c\n", "a'b\"c"),
        ("IMAGE=$(id) `id` ${X}\n", "$(id) `id` ${X}"),
        ('IMAGE="one\ntwo"\n', "one\ntwo"),
        ("IMAGE=x", "x"),
        ("\ufeffIMAGE=x\n", "x"),
        ("\n\n  # c\n\t\nIMAGE=x\n\n", "x"),
    ],
)
@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_grammar(tmp_path: Path, text: str, value: str, ending: str) -> None:
    said = settings_of(tmp_path, text.replace("\n", ending).encode())
    assert said.text("IMAGE") == value


def test_lines_are_counted_through_quoted_line_breaks() -> None:
    entries, problems = dotenv.parse("A='1\n2\n3'\nB=\"x\ny\" # c\nC=1\nC=2\n")
    assert [(e.key, e.line) for e in entries] == [("A", 1), ("B", 4), ("C", 6)]
    assert [p.line for p in problems] == [7]


def test_reading_goes_on_after_a_bad_line() -> None:
    entries, problems = dotenv.parse("A=1\n???\nB='x'y\nC=3\n")
    assert [e.key for e in entries] == ["A", "C"]
    assert [p.line for p in problems] == [2, 3]


TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)), max_size=30)
KEYS = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True)


@given(st.dictionaries(KEYS, TEXT, max_size=6), st.sampled_from(["\n", "\r\n"]))
def test_what_quote_writes_parse_reads(pairs: dict[str, str], ending: str) -> None:
    assume(all("\r\n" not in value for value in pairs.values()))
    text = "".join(f"{key}={dotenv.quote(value)}\n" for key, value in pairs.items())
    assume(ending == "\n" or "\r" not in text)
    entries, problems = dotenv.parse(text.replace("\n", ending))
    assert problems == []
    assert {entry.key: entry.value for entry in entries} == pairs


@given(st.text(st.sampled_from("AB=#'\"\\ \t\r\n$xé\0"), max_size=40))
def test_any_text_is_read_or_refused_but_never_raises(text: str) -> None:
    entries, problems = dotenv.parse(text)
    lines = text.replace("\r\n", "\n").count("\n") + 1
    assert all(1 <= item.line <= lines for item in (*entries, *problems))


@pytest.mark.parametrize("key", ["'two\nlines'", "'tab\there'", "'\u20ac'"])
def test_a_key_that_no_header_can_carry_is_refused_and_not_shown(tmp_path: Path, key: str) -> None:
    with pytest.raises(UsageError) as error:
        settings_of(tmp_path, f"VLLM_API_KEY={key}\n")
    assert "VLLM_API_KEY is not usable" in str(error.value)
    assert key.strip("'") not in str(error.value)
