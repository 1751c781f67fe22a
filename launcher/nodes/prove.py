"""Whether the three clients of the worker work: commands, rsync, the Docker SDK."""

from __future__ import annotations

import shlex

from launcher.commands import rsync
from launcher.errors import LauncherError
from launcher.findings import Finding
from launcher.nodes import daemon
from launcher.nodes.base import Done, Node
from launcher.nodes.local import LocalNode
from launcher.nodes.ssh import SshNode
from launcher.together import together

# Arrives unchanged through any POSIX shell; csh and fish read it otherwise.
HARD = "a b\t'\"\\n $HOME $(id) `id` !x *\nü"
SECONDS = 20.0


def prove(node: SshNode, local: Node | None = None) -> list[Finding]:
    """A finding for each client that does not work. Raises LauncherError when no command runs
    there, and each who asked again would wait as long for nothing."""
    if found := commands(node):
        return found

    def ask(which: str) -> list[Finding]:
        return copies(node, local or LocalNode()) if which == "rsync" else containers(node)

    return [each for found in together(ask, ("rsync", "docker")) for each in found]


def commands(node: SshNode) -> list[Finding]:
    """paramiko: the account runs a command, and its shell changes no argument."""
    done = node.run(["printf", "%s", HARD], timeout=SECONDS)
    if done.out == HARD.encode() and not done.status:
        return []
    to = node.destination()
    return [
        Finding(
            f"the login shell of {to} changes what is said to it: {done.last(3)!r}",
            "a shell that passes arguments on unchanged",
            f"on the worker: sudo usermod -s /bin/bash {shlex.quote(to.user)}",
            topic="ssh",
        )
    ]


def copies(node: SshNode, local: Node) -> list[Finding]:
    """rsync, by a dry run of one small file."""
    config = node.config
    argv = rsync.push(node.endpoint, config, [str(config)], "", "--dry-run", "--timeout=10")
    try:
        done = local.run(argv, timeout=SECONDS)
    except LauncherError as error:
        if "could not be started" not in error.found:
            return [finding(error)]
        return [Finding("no rsync on this machine", "rsync", "sudo apt install rsync", topic="ssh")]
    return [] if done.status == 0 else [_rsync_failed(node, done)]


def _rsync_failed(node: SshNode, done: Done) -> Finding:
    said, to = done.last(6), node.destination()
    found = f"rsync to the worker {to} failed (exit status {done.status}): {said}"
    if "rsync" in said and ("not found" in said or done.status == 127):
        mend = "on the worker: sudo apt install rsync"
    elif "is your shell clean" in said:
        mend = f"this must print nothing: {to.command('true')}; mend ~/.bashrc on the worker"
    else:
        mend = f"this must succeed: {to.command('rsync', '--version')}"
    return Finding(found, "rsync between the nodes", mend, topic="ssh")


def containers(node: SshNode) -> list[Finding]:
    """The Docker SDK."""
    try:
        client = daemon.daemon(node.endpoint, node.folder, include=node.include)
        client.close()
    except LauncherError as error:
        return [finding(error)]
    return []


def finding(error: LauncherError) -> Finding:
    return Finding(error.found, error.needed, error.do_next, topic="ssh")
