"""The one command line that a node's login shell reads. Pure."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence

from launcher.errors import LauncherError

KILL_AFTER = 5  # seconds from SIGTERM to SIGKILL once a command's limit is over
MARK = "dsv41-command:"  # what the account's shell says before it is not the command's
LONGEST = 120_000  # bytes; Linux takes 128 KiB in one argument, and this is one


def command(
    argv: Sequence[str], seconds: float, env: Mapping[str, str] | None, cwd: str | None
) -> bytes:
    """`timeout … env … argv`, quoted for a POSIX shell. It begins with a line of MARK and its pid.

    `timeout` ends the command at its limit even when nobody is connected any more. With `env` the
    command gets these variables and no other. They are seen in the process list of the node: no
    secret goes this way.
    """
    if not argv or not argv[0] or "=" in argv[0]:
        raise _unusable(f"the program {argv[0]!r}" if argv else "no program", "a program's name")
    words = [
        "sh",
        "-c",
        f'echo {MARK}$$; exec "$@"',
        "sh",
        "timeout",
        "-k",
        str(KILL_AFTER),
        f"{max(seconds, 0.001):.3f}",
        "env",
    ]
    words += [] if cwd is None else ["-C", cwd]
    words += [] if env is None else ["-i"]
    words.append("--")
    for key, value in (env or {}).items():
        if not key or "=" in key:
            raise _unusable(f"a variable named {key!r}", "a name without =")
        words.append(f"{key}={value}")
    text = shlex.join([*words, *argv])
    if "\0" in text:
        raise _unusable("a NUL character in a command", "arguments without it")
    line = os.fsencode(text)
    if len(line) > LONGEST:
        raise _unusable(f"a command of {len(line):,} bytes", f"at most {LONGEST:,} bytes")
    return line


def _unusable(found: str, needed: str) -> LauncherError:
    return LauncherError(found, needed, "correct the setting it comes from: ./start.sh config")
