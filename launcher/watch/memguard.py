"""``scripts/memguard.sh``: the guard by hand, with what `.env` says of it (see watch/guard)."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from launcher.errors import LauncherError
from launcher.settings.load import load
from launcher.watch.guard import __main__ as guard

ROOT = Path(__file__).resolve().parents[2]
KEYS = (
    "DSV41_MEM_GUARD",
    "DSV41_MEM_GUARD_GIB",
    "DSV41_MEM_GUARD_SAMPLES",
    "DSV41_MEM_GUARD_ANY",
)


def environment(root: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """``environ`` with the guard's keys as `.env` has them; what it does not name stays.

    Raises LauncherError where a value of `.env` cannot be.
    """
    found = dict(environ)
    if (root / ".env").is_file():
        for setting, resolved in load(root, {}, say=lambda line: None).items():
            if setting.key in KEYS and resolved.origin == ".env":
                found[setting.key] = str(resolved.value)
    return found


def main(argv: Sequence[str], environ: Mapping[str, str], root: Path = ROOT) -> int:
    try:
        return guard.main(argv, environment(root, environ))
    except LauncherError as error:
        print(error, file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
