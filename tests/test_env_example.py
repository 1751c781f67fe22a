"""`.env.example` is what the table says, and using it as it is changes nothing."""

from __future__ import annotations

if __name__ == "__main__":  # before the imports below, which this Python may lack
    from _standalone import main

    main(__file__)

from pathlib import Path

from settings_root import settings_of

from launcher.settings import dotenv
from launcher.settings.example import example
from launcher.settings.table import TABLE

FILE = Path(__file__).resolve().parents[1] / ".env.example"


def test_the_file_is_what_the_table_makes() -> None:
    assert FILE.read_text(encoding="utf-8") == example(), (
        "run ./start.sh config --example > .env.example"
    )


def test_as_shipped_it_gives_the_defaults(tmp_path: Path) -> None:
    plain = {setting.key: resolved.value for setting, resolved in settings_of(tmp_path).items()}
    shipped = settings_of(tmp_path, example())
    assert {setting.key: resolved.value for setting, resolved in shipped.items()} == plain


def test_every_key_stands_in_it_once_and_only_one_shots_and_secrets_are_never_active() -> None:
    lines = [line.lstrip("#") for line in example().splitlines() if not line.startswith("# ")]
    named = [line.partition("=")[0] for line in lines if "=" in line]
    assert sorted(named) == sorted(TABLE)
    active = {entry.key for entry in dotenv.parse(example())[0]}
    assert active == {key for key, setting in TABLE.items() if setting.shown}
    assert not [key for key in active if TABLE[key].one_shot or TABLE[key].secret]


def test_uncommenting_every_line_is_legal_and_still_the_defaults(tmp_path: Path) -> None:
    text = "\n".join(
        line[1:] if line.startswith("#") and not line.startswith("# ") and line != "#" else line
        for line in example().splitlines()
    )
    everything = settings_of(tmp_path, text)
    plain = settings_of(tmp_path)
    assert [r.value for _, r in everything.items()] == [r.value for _, r in plain.items()]
