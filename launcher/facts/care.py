"""What a node has to keep memory in bounds: asked by the doctor alone."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.facts.base import shell


@dataclass(frozen=True)
class Care:
    """``scope``: systemd-run can limit a job (and for this user alone, without root). ``sudo``:
    page cache may be dropped without a password. ``core``: where a crashing program's memory goes.
    ``shm``: bytes in /dev/shm. ``killers``: services that end processes when memory is short."""

    scope: bool
    scope_user: bool
    sudo: bool
    pressure: bool
    python: str  # version of its python3, empty without one
    core: str
    shm: int
    killers: tuple[str, ...] = ()


@dataclass(frozen=True)
class CareFact:
    key: str = "care"
    argv: tuple[str, ...] = shell(
        "command -v systemd-run >/dev/null && echo scope;"
        ' [ -n "$XDG_RUNTIME_DIR" ] && [ -S "$XDG_RUNTIME_DIR/bus" ] && echo scope-user;'
        " timeout 2 sudo -n -l sysctl -q vm.drop_caches=1 >/dev/null 2>&1 && echo sudo;"
        " [ -r /proc/pressure/memory ] && cat /proc/pressure/memory >/dev/null 2>&1"
        " && echo pressure;"
        " echo \"python $(python3 -c 'import platform; print(platform.python_version())'"
        ' 2>/dev/null)";'
        ' echo "core $(cat /proc/sys/kernel/core_pattern)";'
        " echo \"shm $(df -k /dev/shm 2>/dev/null | awk 'NR == 2 {print $3}')\";"
        " for each in systemd-oomd earlyoom nohang; do"
        ' [ "$(systemctl is-active $each 2>/dev/null)" = active ] && echo "killer $each";'
        " done; true"
    )
    takes_paths: bool = False

    def parse(self, text: str) -> Care:
        rows = [row.strip() for row in text.splitlines() if row.strip()]
        named = {row.partition(" ")[0]: row.partition(" ")[2].strip() for row in rows}
        if "core" not in named:
            raise ValueError("/proc/sys/kernel/core_pattern was not told")
        shm = named.get("shm", "")
        return Care(
            scope="scope" in rows,
            scope_user="scope-user" in rows,
            sudo="sudo" in rows,
            pressure="pressure" in rows,
            python=named.get("python", ""),
            core=named["core"],
            shm=int(shm) << 10 if shm.isdigit() else 0,
            killers=tuple(row.partition(" ")[2] for row in rows if row.startswith("killer ")),
        )
