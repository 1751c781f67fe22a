"""Who and what a node is, and its clock."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.facts.base import shell

TOOLS = ("docker", "rsync", "ping", "nvidia-ctk", "nvidia-container-runtime-hook")


@dataclass(frozen=True)
class Identity:
    hostname: str
    machine: str
    kernel: str
    uid: int
    user: str
    groups: tuple[str, ...]
    home: str
    boot_id: str
    cmdline: str
    system: str  # PRETTY_NAME of /etc/os-release
    dgx: str  # version of DGX OS, "" elsewhere
    uptime: float
    tools: tuple[str, ...]  # which of TOOLS are on the PATH


@dataclass(frozen=True)
class IdentityFact:
    key: str = "identity"
    argv: tuple[str, ...] = shell(
        'say() { printf "%s=%s\\n" "$1" "$2"; }; say hostname "$(uname -n)"; '
        'say machine "$(uname -m)"; say kernel "$(uname -r)"; say uid "$(id -u)"; '
        'say user "$(id -un 2>/dev/null)"; say groups "$(id -Gn 2>/dev/null)"; say home "$HOME"; '
        'say boot_id "$(cat /proc/sys/kernel/random/boot_id)"; '
        'say cmdline "$(cat /proc/cmdline 2>/dev/null)"; '
        'say uptime "$(cut -d " " -f 1 /proc/uptime)"; '
        "say system \"$(sed -n 's/^PRETTY_NAME=//p' /etc/os-release 2>/dev/null)\"; "
        "say dgx \"$(sed -n 's/^DGX_\\(SWBUILD\\|OTA\\)_VERSION=//p' /etc/dgx-release "
        '2>/dev/null | tail -n 1)"; '
        f"for t in {' '.join(TOOLS)}; do "
        'command -v "$t" >/dev/null 2>&1 && say tool "$t"; done; true'
    )
    takes_paths: bool = False

    def parse(self, text: str) -> Identity:
        said: dict[str, str] = {}
        tools = []
        for row in text.splitlines():
            key, sign, value = row.partition("=")
            if not sign:
                continue
            if key == "tool":
                tools.append(value)
            else:
                said[key] = value
        if not said.get("hostname") or not said.get("uid", "").isdigit():
            raise ValueError("the node did not say who it is")
        return Identity(
            hostname=said["hostname"],
            machine=said.get("machine", ""),
            kernel=said.get("kernel", ""),
            uid=int(said["uid"]),
            user=said.get("user") or said["uid"],
            groups=tuple(said.get("groups", "").split()),
            home=said.get("home", ""),
            boot_id=said.get("boot_id", ""),
            cmdline=said.get("cmdline", ""),
            system=said.get("system", "").strip('"'),
            dgx=said.get("dgx", "").strip('"'),
            uptime=float(said.get("uptime") or 0),
            tools=tuple(tools),
        )


@dataclass(frozen=True)
class ClockFact:
    """Seconds since the epoch on the node."""

    key: str = "clock"
    argv: tuple[str, ...] = ("date", "+%s.%N")
    takes_paths: bool = False

    def parse(self, text: str) -> float:
        return float(text.strip())
