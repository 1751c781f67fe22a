"""`.env.example`, made from the table. Pure."""

from __future__ import annotations

import textwrap

from launcher.settings.dotenv import quote
from launcher.settings.setting import Setting
from launcher.settings.table import GROUPS, TABLE

_HEAD = """\
# Settings of ./start.sh. Made from launcher/settings/table.py: ./start.sh config --example
#
# The file is data: nothing in it is executed or expanded ($HOME and $(…) stay as they are; ~ at
# the start of a path is the home of the node the path is on). KEY=value, 'value' or "value"; text
# after " #" is a comment. An empty value means the default. A key may stand once.
# What stands here beats the environment in front of the command. For one run use
#   ./start.sh VERB --set KEY=VALUE
# Lines with a leading # show the default.
"""
_ONE_SHOTS = """
# ---- For one run
# These may also stand in front of the command (SKIP_SYNC=1 ./start.sh restart), so they are
# best left out of this file.
"""


def example() -> str:
    """The whole text, ending in a newline."""
    lines = [_HEAD]
    for group, title in GROUPS.items():
        lines.append(f"\n# ---- {title}\n")
        lines += [
            _entry(setting)
            for setting in TABLE.values()
            if setting.group == group and not setting.one_shot
        ]
    lines.append(_ONE_SHOTS)
    lines += [_entry(setting) for setting in TABLE.values() if setting.one_shot]
    return "".join(lines)


def _entry(setting: Setting) -> str:
    limits = f" ({setting.range_text})" if setting.range_text else ""
    later = "" if setting.reader == "now" else " [not used yet]"
    comment = textwrap.fill(
        setting.meaning + limits + later, 98, initial_indent="# ", subsequent_indent="# "
    )
    mark = "" if setting.shown else "#"
    return f"{comment}\n{mark}{setting.key}={quote(setting.default)}\n"
