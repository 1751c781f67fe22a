"""What an NFS export of the weights is, and the commands that make, use and end it. Pure.

The host's directories are bound under one root, so that of their parents (a home of mode 0750)
nobody who is squashed needs a right. Each has a number of its own as fsid: directories of one file
system would otherwise look alike to the server.
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from launcher.facts.docker import OWNER as RANKS

PORT = 2049
ROOT = "/export"  # of the exporter's container
OWNER = "dsv41.exporter"  # label: whose the container is
DESCRIPTION = "dsv41.export"  # label: hash of what it exports
RECIPE = "dsv41.nfs.recipe"  # label of the image
READER = "dsv41.reader"  # label of a container that proves a mount
WIDEST = 8  # bits of a network that may mount


@dataclass(frozen=True)
class Export:
    """``directories`` are the host's, by their names under the root; ``root`` an empty one of the
    host's; ``address`` the one that is listened on; ``options`` those of exports(5)."""

    root: str
    directories: Mapping[str, str]
    address: str
    clients: tuple[str, ...]
    options: str

    def text(self, root: str = ROOT) -> str:
        """The exports file, a line for the root and one for each directory."""
        own = [word for word in self.options.split(",") if word and not word.startswith("fsid=")]
        below = [word for word in own if word != "crossmnt"]
        lines = [self._line(root, ["crossmnt", *below, "fsid=0"])]
        for number, name in enumerate(self.directories, 1):
            lines.append(self._line(f"{root}/{name}", [*below, f"fsid={number}"]))
        return "\n".join(lines)

    def _line(self, path: str, options: Sequence[str]) -> str:
        told = ",".join(options)
        return " ".join([_quoted(path), *(f"{client}({told})" for client in self.clients)])

    def mark(self) -> str:
        """Equal for equal exports."""
        value = [self.root, dict(self.directories), self.address, self.text()]
        return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def _quoted(path: str) -> str:
    """As exports(5) has it: octal escapes inside of quotes."""
    special = {
        " ": "\\040",
        "\t": "\\011",
        "\n": "\\012",
        '"': "\\042",
        "\\": "\\134",
        "#": "\\043",
    }
    escaped = "".join(special.get(each, each) for each in path)
    return f'"{escaped}"' if escaped != path else path


def clients(given: str, address: str, prefix: int) -> tuple[str, ...]:
    """Who may mount: what NFS_CLIENTS says, else the network of the link."""
    if given.strip():
        return tuple(given.replace(",", " ").split())
    return (str(ipaddress.ip_network(f"{address}/{prefix}", strict=False)),)


def wrong_clients(given: str) -> str:
    """Why NFS_CLIENTS is refused, to be read after its name; empty where it is fine."""
    for word in given.replace(",", " ").split():
        try:
            network = ipaddress.IPv4Network(word, strict=False)
        except ValueError:
            return f"has {word!r}: addresses and networks such as 10.0.0.0/24 only, never a pattern"
        if network.prefixlen < WIDEST:
            return f"has {word}, nearly everyone; name the worker's address or the link's network"
    return ""


def wrong_options(given: str) -> str:
    """Why NFS_OPTS is refused."""
    words = given.split(",")
    for bad in ("rw", "no_root_squash", "insecure"):
        if bad in words:
            return f"has {bad}: the weights are exported read-only, to a client's root as to nobody"
    if "ro" not in words or not {"root_squash", "all_squash"}.intersection(words):
        return "needs ro and root_squash"
    if odd := [word for word in words if not word or set(word) & set(' \t()"\\#\n')]:
        return f"has {odd[0]!r}, which is no option of exports(5)"
    return ""


def wrong_mount(given: str) -> str:
    """Why NFS_OPTS_CLIENT is refused."""
    words = given.split(",")
    if "ro" not in words:
        return "needs ro"
    if "soft" in words or "hard" not in words:
        return "needs hard: a soft mount gives an error in the middle of a table"
    if not any(word.startswith(("nfsvers=4", "vers=4")) for word in words):
        return "needs nfsvers=4.2: the exporter speaks version 4 alone"
    if odd := [word for word in words if not word or set(word) & set(" \t\n\"'")]:
        return f"has {odd[0]!r}"
    return ""


# ---- the exporter's container, on the head ----


def recipe(files: Mapping[str, bytes]) -> str:
    """Stamp of the exporter's image: its files, by name."""
    told = [[name, hashlib.sha256(data).hexdigest()] for name, data in sorted(files.items())]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16]


def base(dockerfile: str) -> str:
    """The image that the exporter's is built on. Raises ValueError where none is named."""
    for line in dockerfile.splitlines():
        key, _, name = line.partition("=")
        if key.strip() == "ARG BASE_IMAGE":
            return name.strip()
    raise ValueError("no line ARG BASE_IMAGE=… in docker/nfs/Dockerfile")


def build(image: str, stamp: str, folder: str) -> tuple[str, ...]:
    return ("docker", "build", "--tag", image, "--label", f"{RECIPE}={stamp}", folder)


def exporter(export: Export, image: str, name: str, owner: str) -> tuple[str, ...]:
    """Starts the exporter. It needs the kernel's server, which no lesser right than this gives."""
    binds = [f"type=bind,source={export.root},target={ROOT},bind-propagation=rprivate"]
    binds += [
        f"type=bind,source={source},target={ROOT}/{below},readonly"
        for below, source in export.directories.items()
    ]
    # What the server must know when the container is another: its clients, and that it is ours.
    binds.append(f"type=volume,source={name}-state,target=/var/lib/nfs")
    mounts = [word for bind in binds for word in ("--mount", bind)]
    return (
        "docker", "run", "--detach", "--name", name, "--restart", "unless-stopped",
        "--privileged", "--network", "host", "--stop-timeout", "20",
        "--label", f"{OWNER}={owner}", "--label", f"{DESCRIPTION}={export.mark()}",
        "--env", f"EXPORTS={export.text()}", "--env", f"NFS_ADDRESS={export.address}",
        "--log-opt", "max-size=1m", *mounts, image,
    )  # fmt: skip


def end(name: str) -> tuple[tuple[str, ...], ...]:
    """Ends the exporter. Killed, it would leave the kernel's server running."""
    return (("docker", "stop", "--time", "20", name), ("docker", "rm", "--force", name))


def listening(tables: str) -> frozenset[str]:
    """The addresses that a server of NFS listens at, by /proc/net/tcp and tcp6; "*" for one that is
    not an IPv4 address of its own."""
    found = set()
    for row in tables.splitlines():
        words = row.split()
        if len(words) < 4 or words[3] != "0A" or not words[1].endswith(f":{PORT:04X}"):
            continue
        number = words[1].partition(":")[0]
        alone = len(number) == 8 and int(number, 16)
        found.add(str(ipaddress.IPv4Address(bytes.fromhex(number)[::-1])) if alone else "*")
    return frozenset(found)


# ---- the host's own server (HOST_NFS=1) ----


def host_file(name: str) -> str:
    return f"/etc/exports.d/{name}.exports"


def on_host(export: Export, name: str) -> tuple[tuple[str, ...], ...]:
    """Commands, as root on the head, that export by its own nfs-server. Each may be run again."""
    found: list[tuple[str, ...]] = []
    for below, source in export.directories.items():
        target = f"{export.root}/{below}"
        found.append(("mkdir", "-p", target))
        bind = (
            'mountpoint -q "$2" && [ "$1" -ef "$2" ] || { umount -q "$2"; mount --bind "$1" "$2"; }'
        )
        found.append(("sh", "-c", bind, "sh", source, target))
    line = 'mkdir -p /etc/exports.d && printf "%s\\n" "$1" >"$2"'
    found.append(("sh", "-c", line, "sh", export.text(export.root), host_file(name)))
    found.append(("systemctl", "enable", "--now", "nfs-server"))
    found.append(("exportfs", "-ra"))
    return tuple(found)


def as_root(commands: Sequence[Sequence[str]]) -> str:
    """The same, to be copied into a shell."""
    return "\n".join(shlex.join(["sudo", *words]) for words in commands)


# ---- the volumes, on the worker ----


@dataclass(frozen=True)
class Volume:
    """A Docker volume of type nfs: its name, what it mounts, and how."""

    name: str
    options: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, name: str, server: str, directory: str, options: str) -> Volume:
        """``directory`` is the name under the export's root."""
        device = str(PurePosixPath("/") / directory)
        how = {"type": "nfs", "device": f":{device}", "o": f"addr={server},{options}"}
        return cls(name, how)

    def same(self, attrs: Mapping[str, Any]) -> bool:
        """Whether what Docker tells of a volume is this one."""
        return attrs.get("Driver") == "local" and dict(attrs.get("Options") or {}) == self.options

    def create(self) -> tuple[str, ...]:
        words = [word for key, text in self.options.items() for word in ("--opt", f"{key}={text}")]
        return ("docker", "volume", "create", "--driver", "local", *words, self.name)

    def remove(self) -> tuple[str, ...]:
        return ("docker", "volume", "rm", self.name)

    def look(self) -> tuple[str, ...]:
        return ("docker", "volume", "inspect", "--format", "{{json .}}", self.name)

    def users(self, owner: str = "") -> tuple[str, ...]:
        """Containers that have it; with an owner, only the ranks of that checkout."""
        label = ("--filter", f"label={RANKS}={owner}") if owner else ()
        return (
            "docker", "ps", "--all", "--filter", f"volume={self.name}", *label,
            "--format", "{{.Names}}",
        )  # fmt: skip


def reading(
    volume: Volume, target: str, image: str, name: str, owner: str, argv: Sequence[str]
) -> tuple[str, ...]:
    """``argv`` in a throwaway container that has the volume and nothing else. It reads stdin."""
    return (
        "docker", "run", "--rm", "--interactive", "--name", name, "--label", f"{READER}={owner}",
        "--network", "none", "--mount",
        f"type=volume,source={volume.name},target={target},readonly,volume-nocopy",
        "--entrypoint", argv[0], image, *argv[1:],
    )  # fmt: skip


def answers(server: str, seconds: float) -> tuple[str, ...]:
    """Asks from a node whether a server listens there; status 0 if so."""
    code = (
        "import socket, sys\n"
        "try:\n"
        "    at = sys.argv[1], int(sys.argv[2])\n"
        "    socket.create_connection(at, float(sys.argv[3])).close()\n"
        "except OSError as error:\n"
        "    sys.exit(str(error))\n"
    )
    return ("python3", "-I", "-c", code, server, str(PORT), str(seconds))
