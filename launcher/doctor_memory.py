"""What the doctor says of memory care on a node. Pure."""

from __future__ import annotations

from launcher.facts.base import Missing, gib
from launcher.facts.care import Care
from launcher.findings import Finding, warning

TOPIC = "memory"
LEFT = 1 << 30  # bytes in /dev/shm that somebody has left
OLDEST = (3, 11)  # Python of the guard


def advice(who: str, care: Care) -> str:
    """How a job beside the pair is kept within bounds there."""
    if care.scope and care.scope_user:
        told = "systemd-run --user --scope -p MemoryMax=2G <job>"
    elif care.scope:
        told = "sudo systemd-run --scope -p MemoryMax=2G <job>"
    else:
        told = "(ulimit -v 2097152; <job>): there is no systemd-run"
    return (
        f"{who}: a heavy job beside the pair (uploads, builds) is kept within bounds by {told}."
        " The ranks themselves are not: a limit of a container does not count the GPU's memory"
    )


def found(who: str, care: Care | Missing, guard: bool) -> list[Finding]:
    """Warnings. ``guard``: DSV41_MEM_GUARD=1."""
    if isinstance(care, Missing):
        return []
    told: list[Finding] = []

    def warn(what: str, needed: str, mend: str) -> None:
        told.append(warning(f"{who}: {what}", needed, mend, TOPIC))

    if not care.sudo:
        warn(
            "sudo asks for a password, so page cache is not dropped before a start",
            "nothing, while MemFree is large",
            "a line by sudo visudo -f /etc/sudoers.d/drop-caches: USER ALL=(root) NOPASSWD:"
            " /usr/sbin/sysctl -q vm.drop_caches\\=1",
        )
    if not care.pressure:
        warn(
            "the kernel tells of no pressure (PSI), so a node that only stalls is not noticed",
            "/proc/pressure/memory",
            "add psi=1 to the kernel's command line, then reboot",
        )
    if care.shm > LEFT:
        warn(
            f"{gib(care.shm)} lie in /dev/shm, which is memory",
            "next to nothing while no pair runs",
            "ls -l /dev/shm; rm what a killed program has left there",
        )
    if guard and not _new(care.python):
        warn(
            f"python3 is {care.python or 'not there'}, and DSV41_MEM_GUARD=1",
            "Python 3.11 or newer for the guard",
            "sudo apt-get install python3, or DSV41_MEM_GUARD=0",
        )
    if care.killers:
        warn(
            f"{' and '.join(care.killers)} may end a rank when memory is short, or what works"
            " beside it",
            "nothing: the ranks are marked to go first (oom_score_adj 1000)",
            f"to leave it to the guard alone: sudo systemctl disable --now {care.killers[0]}",
        )
    return told


def _new(version: str) -> bool:
    parts = version.split(".")[:2]
    return all(each.isdigit() for each in parts) and tuple(map(int, parts)) >= OLDEST
