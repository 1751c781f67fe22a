"""From `.env`, the environment and `--set` to Settings: the edge where files are read.

Who wins, from weakest to strongest: the default; a one-shot key in the environment; `.env`; a
profile (the rehearsal's); `--set KEY=VALUE`. So `.env` beats what stands in front of the command,
and nothing else of the environment is a setting.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from launcher.errors import LauncherError
from launcher.settings import contract, dotenv
from launcher.settings.secret import Secret
from launcher.settings.table import TABLE
from launcher.settings.values import Given, Layer, Settings, refuse, unknown


def to_stderr(line: str) -> None:
    print(line, file=sys.stderr)


def load(
    root: Path,
    environ: Mapping[str, str],
    overrides: Sequence[str] = (),
    profile: Mapping[str, str] | None = None,
    profile_name: str = "rehearsal",
    say: Callable[[str], None] = to_stderr,
) -> Settings:
    """The settings of the checkout `root`; `overrides` are the `KEY=VALUE` of `--set`.

    Makes `.env` from `.env.example` when there is none. Raises UsageError that lists every
    problem at once. `say` gets one line for each thing the user should know.
    """
    problems: list[str] = []
    file = Layer(".env", _from_file(ensure_dotenv(root, say), problems))
    prefix = Layer("environment", _from_environment(environ))
    explicit = Layer("--set", _from_overrides(overrides, problems))
    try:
        settings = Settings(root, (prefix, file), (explicit,))
    except LauncherError as error:
        # Values are judged even when the file has syntax errors: the user hears everything once.
        if problems:
            head, _, rest = error.found.partition("\n")
            problems += [line.strip() for line in rest.splitlines()] or [head]
            raise refuse(problems) from None
        raise
    if problems:
        raise refuse(problems)
    if profile is not None:
        settings = settings.with_profile(profile_name, profile)
    for line in _ignored(settings, environ):
        say(line)
    return settings


def ensure_dotenv(root: Path, say: Callable[[str], None] = to_stderr) -> Path:
    """`.env`, copied from `.env.example` on first use; readable by its owner only."""
    target, example = root / ".env", root / ".env.example"
    if target.exists() or target.is_symlink():
        return target
    try:
        text = example.read_bytes()
    except OSError:
        raise LauncherError(
            found=f"neither .env nor .env.example in {root}",
            needed="one of them",
            do_next="restore .env.example from the repository, or write .env yourself",
        ) from None
    draft = root / f".env.new.{os.getpid()}"
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as handle:
            handle.write(text)
        os.replace(draft, target)
    except OSError as error:
        raise LauncherError(
            found=f".env cannot be written in {root}: {error.strerror}",
            needed="a checkout that belongs to you",
            do_next=f"clone the repository as this user, or write {target} yourself",
        ) from None
    say(".env was not there: copied from .env.example")
    return target


def _from_file(path: Path, problems: list[str]) -> dict[str, Given]:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise LauncherError(
            found=f"{path} cannot be read: {error.strerror}",
            needed="a readable file of settings",
            do_next=f"see `ls -ld {shlex.quote(str(path))}`",
        ) from None
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        problems.append(f".env line {line}: is not UTF-8 text")
        return {}
    entries, unreadable = dotenv.parse(text)
    problems.extend(f".env line {problem.line}: {problem.message}" for problem in unreadable)
    return {entry.key: Given(entry.value, f".env line {entry.line}") for entry in entries}


def _from_environment(environ: Mapping[str, str]) -> dict[str, Given]:
    return {
        key: Given(environ[key], "environment")
        for key, setting in TABLE.items()
        if setting.one_shot and environ.get(key)
    }


def _from_overrides(overrides: Sequence[str], problems: list[str]) -> dict[str, Given]:
    given: dict[str, Given] = {}
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", key):
            problems.append(f"--set: {override!r} is not KEY=VALUE")
        elif key not in TABLE:
            problems.append(f"--set: {unknown(key)}")
        elif key in given:
            problems.append(f"--set: {key} is given twice")
        else:
            given[key] = Given(text, "--set")
    return given


def _ignored(settings: Settings, environ: Mapping[str, str]) -> list[str]:
    """A warning for each inherited variable that names a key and is not what is in force."""
    warnings = []
    for setting, resolved in settings.items():
        text = environ.get(setting.key)
        if not text or resolved.origin == "environment":
            continue
        try:
            same = _plain(resolved.value) == setting.read(text)
        except contract.Violation:
            same = False
        if not same:
            way = f"{setting.key}=…" if setting.secret else shlex.quote(f"{setting.key}={text}")
            warnings.append(
                f"WARNING: {setting.key} of the environment is ignored, {resolved.where} decides; "
                f"for one run give --set {way}"
            )
    return warnings


def _plain(value: object) -> object:
    return value.reveal() if isinstance(value, Secret) else value
