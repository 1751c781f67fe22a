"""Why ssh to the worker failed, in words, each with the command that mends it. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from launcher.errors import LauncherError
from launcher.nodes.endpoint import CONNECT_SECONDS, Destination

Why = Literal[
    "no ssh", "configuration", "name", "route", "refused", "timeout", "silent", "not ssh",
    "closed", "algorithms", "unknown key", "other key type", "changed key", "revoked key",
    "no key", "keys refused", "wrong user", "no login", "lost", "no channel", "no sftp",
    "no tools",
]  # fmt: skip

_SSHD = "sudo systemctl restart ssh"


class SshError(LauncherError):
    """The worker cannot be reached, or not be used, over ssh. `why` tells which case it is."""

    def __init__(self, why: Why, found: str, needed: str, do_next: str) -> None:
        super().__init__(found, needed, do_next)
        self.why = why

    @property
    def gone(self) -> bool:
        """Nobody answers there, as after a power cut; everything else is a matter of set-up."""
        return self.why in ("route", "refused", "timeout", "silent", "closed", "lost")


@dataclass(frozen=True)
class HostKey:
    """A key that the worker shows: type as in known_hosts, and its SHA256 fingerprint."""

    kind: str
    fingerprint: str

    @property
    def file(self) -> str:
        """Where sshd keeps it by default."""
        short = self.kind.removeprefix("ssh-").partition("-")[0]
        return f"/etc/ssh/ssh_host_{short}_key.pub"


def no_ssh(program: str) -> SshError:
    return SshError(
        "no ssh",
        f"no {program} on this machine",
        "OpenSSH's client: host, key and known_hosts are read by it",
        "sudo apt install openssh-client",
    )


def configuration(typed: str, text: str, command: str) -> SshError:
    return SshError(
        "configuration",
        f"ssh cannot read its configuration for {typed}: {text}",
        "an ssh configuration without errors",
        f"correct the file and line named above; then this must print settings: {command}",
    )


def name(to: Destination, text: str) -> SshError:
    return SshError(
        "name",
        f"the worker's name {to.host!r} is not known here ({text})",
        "a name that this machine resolves, or an address",
        f"correct WORKER_SSH or WORKER_IP in .env until this prints an address: "
        f"getent hosts {shlex.quote(to.host)}",
    )


def route(to: Destination, text: str) -> SshError:
    return SshError(
        "route",
        f"no way to the worker {to} ({text})",
        "a network of this machine that reaches it",
        f"see cable, interface and address here and on the worker: ip -br addr; "
        f"ip route get {shlex.quote(to.host)}",
    )


def refused(to: Destination) -> SshError:
    return SshError(
        "refused",
        f"the worker {to.host} refuses connections to port {to.port}",
        "an ssh server on that port",
        "on the worker: sudo apt install openssh-server && sudo systemctl enable --now ssh; "
        "if it listens on another port, set WORKER_SSH_PORT",
    )


def timeout(to: Destination, seconds: float = CONNECT_SECONDS) -> SshError:
    return SshError(
        "timeout",
        f"no answer from the worker {to} within {seconds:.0f} s",
        "a worker that is switched on and reachable, without a firewall before its ssh port",
        f"ping -c 3 {shlex.quote(to.host)}; on the worker: ip -br addr, and "
        f"sudo ufw allow {to.port}/tcp if it has a firewall",
    )


def silent(to: Destination, doing: str) -> SshError:
    return SshError(
        "silent",
        f"the worker {to} takes connections but has gone silent {doing}",
        "an ssh server that answers",
        f"see whether the worker is overloaded or frozen (its console: top, sudo dmesg | tail); "
        f"there: {_SSHD}; then try: {to.command('true')}",
    )


def not_ssh(to: Destination, greeting: str) -> SshError:
    return SshError(
        "not ssh",
        f"what answers on port {to.port} of {to.host} is no ssh server; it says {greeting!r}",
        "the worker's ssh port",
        "set WORKER_SSH_PORT in .env; on the worker this shows the port: sudo sshd -T | grep ^port",
    )


def closed(to: Destination, text: str) -> SshError:
    said = f" ({text})" if text else ""
    return SshError(
        "closed",
        f"the worker {to} closed the connection during the ssh handshake{said}",
        "an ssh server that lets this machine in",
        f"on the worker: sudo sshd -t; sudo journalctl -u ssh -n 20 (host keys missing, "
        f"MaxStartups, PerSourcePenalties or hosts.deny); then try: {to.command('-v', 'true')}",
    )


def algorithms(to: Destination, text: str) -> SshError:
    return SshError(
        "algorithms",
        f"the worker {to} and this machine share no ssh algorithm ({text})",
        "an ssh server with a key exchange, cipher and host key of today",
        "on the worker: sudo ssh-keygen -A && " + _SSHD + "; sudo sshd -T | grep -i algorithms",
    )


def unknown_key(to: Destination, shown: HostKey, files: Sequence[str], note: str = "") -> SshError:
    return SshError(
        "unknown key",
        f"the worker {to} shows an ssh host key that this machine does not know: {shown.kind} "
        f"{shown.fingerprint}{note}",
        f"its key in {' or '.join(files) or 'a known_hosts file'}; it is never accepted silently",
        f"compare it on the worker: ssh-keygen -lf {shown.file}; if it is the same, accept it "
        f"by hand: {_ask(to)}",
    )


def other_key_type(to: Destination, shown: HostKey, kinds: Sequence[str], place: str) -> SshError:
    return SshError(
        "other key type",
        f"{place} knows only {', '.join(kinds)} for the worker {to}, which shows none of these "
        f"but {shown.kind} {shown.fingerprint}",
        "the host key that it shows, once a person has compared it",
        f"compare it on the worker: ssh-keygen -lf {shown.file}; if it is the same, accept it "
        f"by hand: {_ask(to)}",
    )


def changed_key(to: Destination, shown: HostKey, known: str, file: str, line: int) -> SshError:
    remove = shlex.join(["ssh-keygen", "-f", file, "-R", to.known_as])
    return SshError(
        "changed key",
        f"the ssh host key of the worker {to} has CHANGED: it shows {shown.kind} "
        f"{shown.fingerprint}, but {file} line {line} has {known}",
        "the key that is known; another machine may be answering in its place",
        f"compare it on the worker: ssh-keygen -lf {shown.file}; only if it was installed anew: "
        f"{remove} and then accept the new one: {_ask(to)}",
    )


def revoked_key(to: Destination, shown: HostKey, file: str, line: int) -> SshError:
    return SshError(
        "revoked key",
        f"the ssh host key of the worker {to}, {shown.kind} {shown.fingerprint}, is marked "
        f"@revoked in {file} line {line}",
        "a host key that is trusted",
        f"on the worker: sudo rm {shown.file.removesuffix('.pub')}* && sudo ssh-keygen -A && "
        f"{_SSHD}; or see who revoked it: sed -n {line}p {shlex.quote(file)}",
    )


def no_key(to: Destination, tried: Sequence[str], unused: Sequence[str], key: str) -> SshError:
    """`tried`, `unused`: keys in words. `key`: the private key to install, "" where none is."""
    listed = "".join(f"\n  tried: {each}" for each in tried) or "\n  no key was found to try"
    listed += "".join(f"\n  not usable: {each}" for each in unused)
    make = "" if key else "ssh-keygen -t ed25519; "
    copy = f"ssh-copy-id {shlex.join(['-i', key + '.pub']) + ' ' if key else ''}{to.plain}"
    return SshError(
        "no key",
        f"the worker {to} accepts no ssh key of ours:{listed}",
        f"a key without a passphrase, or one in ssh-agent, that {to.user} on the worker accepts",
        f"{make}{copy}; if the account has another name, set WORKER_USER",
    )


def keys_refused(to: Destination, methods: Sequence[str]) -> SshError:
    return SshError(
        "keys refused",
        f"the worker {to} takes no ssh keys at all, only {', '.join(methods)}",
        "a login by key: nobody is there to type a password",
        "on the worker: echo 'PubkeyAuthentication yes' | sudo tee "
        f"/etc/ssh/sshd_config.d/10-keys.conf && {_SSHD}",
    )


def wrong_user(to: Destination, accepted: str) -> SshError:
    return SshError(
        "wrong user",
        f"the worker {to.host} accepts our ssh key for {accepted}, not for {to.user}",
        "the name of an account on the worker that accepts our key",
        f"set WORKER_USER={accepted} in .env (or WORKER_SSH={accepted}@{to.typed}); or, if "
        f"{to.user} is an account there: ssh-copy-id {to.plain}",
    )


def no_login(to: Destination, status: int, text: str) -> SshError:
    said = f": {text}" if text else ""
    return SshError(
        "no login",
        f"{to.user} may log in on the worker {to.host} but run nothing "
        f"(exit status {status}{said})",
        "an account with a shell",
        f"on the worker: sudo usermod -s /bin/bash {shlex.quote(to.user)}; "
        f"or set WORKER_USER to another account; then try: {to.command('true')}",
    )


def lost(to: Destination, doing: str) -> SshError:
    return SshError(
        "lost",
        f"the connection to the worker {to} was lost {doing}",
        "a connection that holds",
        f"see that this works: {to.command('true')}; then run the same command again: "
        "it goes on where it was",
    )


def no_channel(to: Destination, text: str) -> SshError:
    return SshError(
        "no channel",
        f"the worker {to} opens no session ({text})",
        "an ssh server that allows ten sessions in one connection, as is its default",
        f"on the worker: sudo sshd -T | grep -i maxsessions must say 10 or more; {_SSHD}",
    )


def no_sftp(to: Destination, text: str) -> SshError:
    return SshError(
        "no sftp",
        f"the worker {to} has no sftp ({text or 'it ended at once'})",
        "sftp: small files go that way",
        "on the worker: echo 'Subsystem sftp internal-sftp' | sudo tee "
        f"/etc/ssh/sshd_config.d/10-sftp.conf && {_SSHD}",
    )


def no_tools(to: Destination, text: str) -> SshError:
    return SshError(
        "no tools",
        f"a program that every command needs is missing on the worker {to}: {text}",
        "timeout and env of GNU coreutils 8.28 or newer",
        "on the worker: sudo apt install coreutils",
    )


def _ask(to: Destination) -> str:
    return to.command("true", options=("-o", "BatchMode=no", "-o", "StrictHostKeyChecking=ask"))
