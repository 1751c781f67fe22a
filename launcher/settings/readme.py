"""The README's table of settings, made from the table. Pure."""

from __future__ import annotations

from launcher.settings.gone import GONE
from launcher.settings.table import GROUPS, TABLE

BEGIN = "<!-- made by ./start.sh config --readme -->"
END = "<!-- end of what config --readme made -->"


def block() -> str:
    """All keys and those deliberately gone, between the marks, as the README holds them."""
    rows = [BEGIN, "<details><summary>All keys</summary>", ""]
    for group, title in GROUPS.items():
        rows += [f"**{title}**", "", "| key | default | meaning |", "|---|---|---|"]
        for setting in TABLE.values():
            if setting.group != group:
                continue
            limits = f" ({setting.range_text})" if setting.range_text else ""
            later = "" if setting.reader == "now" else " [not used yet]"
            default = f"`{_cell(setting.default)}`" if setting.default else ""
            rows.append(
                f"| `{setting.key}` | {default} | {_cell(setting.meaning + limits + later)} |"
            )
        rows.append("")
    rows += ["</details>", "<details><summary>Keys of earlier kits that are gone</summary>", ""]
    rows += ["| key | why |", "|---|---|"]
    rows += [f"| `{key}` | {_cell(why)} |" for key, why in GONE.items()]
    return "\n".join([*rows, "", "</details>", END])


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
