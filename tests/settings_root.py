"""A checkout in a temporary directory, for tests of settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from launcher.settings import Settings, load


def checkout(tmp_path: Path, dotenv: str | bytes = "") -> Path:
    """A directory with that `.env`."""
    data = dotenv.encode() if isinstance(dotenv, str) else dotenv
    (tmp_path / ".env").write_bytes(data)
    return tmp_path


def settings_of(
    tmp_path: Path,
    dotenv: str | bytes = "",
    environ: Mapping[str, str] | None = None,
    overrides: Sequence[str] = (),
    said: list[str] | None = None,
) -> Settings:
    """Settings as the launcher would see them; `said` collects the lines for the user."""
    say = (said if said is not None else []).append
    return load(checkout(tmp_path, dotenv), environ or {}, overrides, say=say)
