"""The verb `config`: what is in force, why, and the example file."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import textwrap
from pathlib import Path

from launcher.errors import LauncherError
from launcher.settings import rehearsal
from launcher.settings.example import example
from launcher.settings.load import load
from launcher.settings.readme import block
from launcher.settings.secret import Secret
from launcher.settings.table import GROUPS
from launcher.settings.values import Resolved, Settings

ROOT = Path(__file__).resolve().parents[2]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `config`; `--set` is the caller's, as it belongs to every verb."""
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--explain", action="store_true", help="a table: value, origin, meaning")
    form.add_argument("--json", action="store_true", help="values and origins as JSON")
    form.add_argument("--example", action="store_true", help="the text of .env.example")
    form.add_argument("--readme", action="store_true", help="the README's table")
    parser.add_argument("--rehearsal", action="store_true", help="as `rehearse` would see them")


def run(args: argparse.Namespace) -> int:
    """Prints to stdout; returns the exit status, 2 when a setting is refused."""
    if getattr(args, "example", False):
        sys.stdout.write(example())
        return 0
    if getattr(args, "readme", False):
        sys.stdout.write(block() + "\n")
        return 0
    profile = rehearsal.PROFILE if getattr(args, "rehearsal", False) else None
    try:
        settings = load(ROOT, os.environ, getattr(args, "set", None) or (), profile)
    except LauncherError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    if getattr(args, "json", False):
        print(as_json(settings))
    else:
        print(explain(settings, shutil.get_terminal_size((100, 24)).columns))
    return 0


def as_json(settings: Settings) -> str:
    """`{"settings": {KEY: {"value": …, "origin": …}}}`; secrets are masked."""
    values = {
        setting.key: {"value": _json_value(resolved), "origin": resolved.origin}
        for setting, resolved in settings.items()
    }
    return json.dumps({"settings": values}, indent=2, ensure_ascii=False)


def explain(settings: Settings, width: int) -> str:
    """A table by groups, `width` columns wide where the values allow it."""
    lines: list[str] = []
    group = ""
    for setting, resolved in settings.items():
        if setting.group != group:
            group = setting.group
            lines += ["", GROUPS[group]]
        shown = _json_value(resolved)
        text = "(none)" if shown is None or shown == "" else _one_line(str(shown))
        lines.append(f"  {setting.key:<34} {text:<24} {resolved.where}")
        later = "" if setting.reader == "now" else " [not used yet]"
        limits = f" ({setting.range_text})" if setting.range_text else ""
        lines += textwrap.wrap(
            setting.meaning + limits + later,
            max(60, width),
            initial_indent="      ",
            subsequent_indent="      ",
        )
    return "\n".join(lines[1:])


def _json_value(resolved: Resolved) -> str | int | None:
    return str(resolved.value) if isinstance(resolved.value, Secret) else resolved.value


def _one_line(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")
