"""Signs of trouble in the kernel's log, of this boot and the one before.

A host that froze leaves them in the previous boot's log only.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from launcher.facts.base import shell

_GREP = (
    "NVRM|AER:|mlx5_|soft lockup|blocked for more than|oom-kill|Out of memory: Kill|PCIe Bus Error"
)

# Kind of sign -> what its line looks like. The first that fits is taken.
_SIGNS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("no-memory", re.compile(r"NVRM.*(NV_ERR_NO_MEMORY|[Oo]ut of memory)")),
    ("xid", re.compile(r"NVRM: Xid")),
    ("aer-fatal", re.compile(r"(AER|PCIe Bus Error).*Uncorrect(ed|able)\b.*\(Fatal\)")),
    ("aer", re.compile(r"(AER|PCIe Bus Error).*(Uncorrect|[Rr]ecovery failed|can't recover)")),
    ("aer-corrected", re.compile(r"(AER|PCIe Bus Error).*[Cc]orrect(ed|able)")),
    (
        "mlx5",
        re.compile(
            r"mlx5_.*(health|[Ff]atal|assert|timeout|[Ff]ail|error state|device error|slot_reset)"
        ),
    ),
    ("link-down", re.compile(r"mlx5_.*Link down")),
    ("lockup", re.compile(r"soft lockup|blocked for more than")),
    ("oom-kill", re.compile(r"oom-kill|Out of memory: Kill")),
)
# Said on healthy Sparks too.
_HARMLESS = re.compile(r"insufficient power|firmware version|health counters|\b0 errors")


@dataclass(frozen=True)
class Sign:
    kind: str
    line: str
    previous: bool  # of the boot before


@dataclass(frozen=True)
class KernelLog:
    source: str  # "dmesg", "journal", or "" when this user may read neither
    signs: tuple[Sign, ...]

    def of(self, kind: str, previous: bool = False) -> tuple[Sign, ...]:
        return tuple(s for s in self.signs if s.kind == kind and s.previous is previous)


@dataclass(frozen=True)
class KernelLogFact:
    key: str = "kernel_log"
    argv: tuple[str, ...] = shell(
        f"want='{_GREP}'; read_log() {{ journalctl -k -q --no-pager -o short-iso \"$@\" "
        "2>/dev/null; }; "
        "if dmesg --time-format iso >/dev/null 2>&1; then echo 'source dmesg'; "
        'dmesg --time-format iso | grep -E "$want" | tail -n 300; '
        "elif [ -n \"$(read_log -b -n 1)\" ]; then echo 'source journal'; "
        'read_log -b | grep -E "$want" | tail -n 300; else echo "source "; fi; '
        'read_log -b -1 | grep -E "$want" | tail -n 200 | sed "s/^/previous /"; true'
    )
    takes_paths: bool = False

    def parse(self, text: str) -> KernelLog:
        source = ""
        signs = []
        for row in text.splitlines():
            if row.startswith("source "):
                source = row.removeprefix("source ").strip()
                continue
            previous = row.startswith("previous ")
            line = row.removeprefix("previous ")
            if _HARMLESS.search(line):
                continue
            kind = next((name for name, looks in _SIGNS if looks.search(line)), None)
            if kind is not None:
                signs.append(Sign(kind, line.strip(), previous))
        return KernelLog(source, tuple(signs))
