"""One authenticated ssh connection, and the ways in which making it can fail.

A peer that goes silent is noticed: every few seconds it must answer, else the connection is closed
and whatever waits on it fails.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
import signal
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

from launcher.libraries.ssh import paramiko
from launcher.nodes import host_keys, keys, refusals
from launcher.nodes.endpoint import CONNECT_SECONDS, Destination
from launcher.nodes.piped import PipedSocket
from launcher.nodes.refusals import SshError
from launcher.nodes.resolve import account

PULSE = 5.0  # seconds between questions to an idle peer
SILENCE = 15.0  # seconds without an answer after which it is given up
_ALGORITHMS = {"ssh-rsa": ("rsa-sha2-512", "rsa-sha2-256")}

# It would print tracebacks of failures that are told in words here.
logging.getLogger("paramiko").setLevel(logging.CRITICAL + 1)


class Gone(Exception):
    """The connection is of no use any more; `silent` when nobody closed it."""

    def __init__(self, silent: bool) -> None:
        super().__init__("silent" if silent else "closed")
        self.silent = silent


class _Transport(paramiko.Transport):
    """paramiko's, which in addition keeps the signal that ended a command."""

    @staticmethod
    def _request(channel: Any, message: paramiko.Message) -> None:
        if message.get_text() == "exit-signal":
            message.get_boolean()
            with contextlib.suppress(ValueError, KeyError):
                channel.ended_by = int(signal.Signals[f"SIG{message.get_text()}"])
            channel.status_event.set()
            return
        message.rewind()
        message.get_int()  # the channel's number, which the caller has read
        paramiko.Channel._handle_request(channel, message)  # type: ignore[attr-defined]

    _channel_handler_table = {  # noqa: RUF012 - overrides a plain dictionary
        **paramiko.Transport._channel_handler_table,  # type: ignore[attr-defined]
        paramiko.common.MSG_CHANNEL_REQUEST: _request,
    }


class Connection:
    def __init__(self, to: Destination, transport: paramiko.Transport, sock: socket.socket) -> None:
        self.to = to
        self.silent = False
        self._transport = transport
        self._sock = sock
        self._beats = 0
        self._beat = threading.Condition()
        self._ask = threading.Event()
        threading.Thread(target=self._pulse, name="ssh pulse", daemon=True).start()

    @property
    def alive(self) -> bool:
        return self._transport.is_active()

    def close(self, silent: bool = False) -> None:
        self.silent = self.silent or silent
        self._transport.close()
        # close() of a transport leaves a blocked reader its socket.
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._ask.set()

    def channel(self, seconds: float) -> paramiko.Channel:
        """A new session. Raises Gone, or SshError when the worker refuses one."""
        with self.limit(seconds):
            try:
                return self._transport.open_session(timeout=seconds)
            except paramiko.ChannelException as error:
                raise refusals.no_channel(self.to, error.text) from None
            except (paramiko.SSHException, EOFError, OSError):
                silent = self.alive
                self.close(silent)
                raise Gone(self.silent) from None

    @contextlib.contextmanager
    def limit(self, seconds: float) -> Iterator[None]:
        """Closes the connection when the block takes longer, which ends every wait in it."""
        timer = threading.Timer(seconds, self.close, (True,))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def answers(self, seconds: float) -> bool:
        """Whether the peer answers now."""
        with self._beat:
            before = self._beats
            self._ask.set()
            return self._beat.wait_for(lambda: self._beats > before, seconds) and self.alive

    def end(self, pid: int) -> None:
        """Asks a command on the worker to end; `timeout`, its parent, kills it if it does not."""
        # sshd passes signals on, too, but not to root's commands.
        with contextlib.suppress(Gone, SshError, paramiko.SSHException, EOFError, OSError):
            channel = self.channel(2)
            with self.limit(3), contextlib.closing(channel):
                channel.exec_command(f"kill -TERM {pid}")
                channel.recv_exit_status()

    def _pulse(self) -> None:
        while self.alive:
            self._ask.wait(PULSE)
            self._ask.clear()
            with contextlib.suppress(paramiko.SSHException, EOFError, OSError), self.limit(SILENCE):
                # sshd knows no such request and says so, which is an answer.
                self._transport.global_request("keepalive@openssh.com", wait=True)
            with self._beat:
                if self.alive:
                    self._beats += 1
                self._beat.notify_all()


def connect(to: Destination, seconds: float = CONNECT_SECONDS) -> Connection:
    """Raises SshError: every case its own. `seconds` for each stage of it."""
    ours = keys.gather(to)
    try:
        return _login(to, ours, seconds)
    except SshError as error:
        own = account()[0]
        if error.why == "no key" and own != to.user and ours.tried:
            # The usual slip: another's name in WORKER_USER. Our own is no guess at a stranger's.
            try:
                _login(dataclasses.replace(to, user=own), ours, seconds).close()
            except SshError:
                raise error from None
            raise refusals.wrong_user(to, own) from None
        raise


def _login(to: Destination, ours: keys.Keys, seconds: float) -> Connection:
    sock = _socket(to, seconds)
    transport: paramiko.Transport | None = None
    try:
        greeting = _greeting(to, sock, seconds)
        known = host_keys.for_destination(to)
        transport = _Transport(sock)
        _prefer(transport, [each.kind for each in known if not each.marker])
        _handshake(to, transport, seconds, greeting)
        shown = transport.get_remote_server_key()
        host_keys.check(to, shown.get_name(), shown.asbytes(), known)
        _authenticate(to, transport, ours, seconds)
        return Connection(to, transport, sock)
    except BaseException:
        if transport is not None:
            transport.close()
        sock.close()
        raise


def _socket(to: Destination, seconds: float) -> socket.socket:
    if to.proxy:
        # ssh, too, gives a ProxyCommand to a shell; its text is the user's ssh configuration.
        return PipedSocket.start(["/bin/sh", "-c", f"exec {to.proxy}"])
    try:
        found = keys.within(
            seconds, lambda: socket.getaddrinfo(to.host, to.port, type=socket.SOCK_STREAM)
        )
    except TimeoutError:
        raise refusals.name(to, f"no answer of the resolver within {seconds:.0f} s") from None
    except (OSError, UnicodeError) as error:
        text = str(getattr(error, "strerror", None) or error)
        raise refusals.name(to, text) from None
    problem: SshError | None = None
    end = time.monotonic() + seconds
    for family, kind, protocol, _, address in found:
        sock = socket.socket(family, kind, protocol)
        sock.settimeout(max(0.1, end - time.monotonic()))
        try:
            sock.connect(address)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return sock
        except OSError as error:
            sock.close()
            problem = _unreached(to, error, seconds)
    raise problem or refusals.name(to, "no address")


def _unreached(to: Destination, error: OSError, seconds: float) -> SshError:
    if isinstance(error, ConnectionRefusedError):
        return refusals.refused(to)
    if isinstance(error, TimeoutError) or error.errno == errno.ETIMEDOUT:
        return refusals.timeout(to, seconds)
    return refusals.route(to, error.strerror or str(error))


def _greeting(to: Destination, sock: socket.socket, seconds: float) -> str:
    """The first words of the server, left in the socket."""
    sock.settimeout(seconds)
    try:
        first = sock.recv(256, socket.MSG_PEEK)
    except TimeoutError:
        raise refusals.silent(to, f"before its ssh greeting ({seconds:.0f} s)") from None
    except OSError as error:
        raise refusals.closed(to, error.strerror or str(error)) from None
    if first:
        return first.decode("ascii", "replace").strip()
    said = ""
    if isinstance(sock, PipedSocket):
        sock.status()
        said = f"its proxy: {sock.said() or to.proxy}"
    raise refusals.closed(to, said)


def _prefer(transport: paramiko.Transport, kinds: list[str]) -> None:
    """Ask for host keys of the known kinds first, as ssh does."""
    options = transport.get_security_options()
    wanted = [each for kind in kinds for each in _ALGORITHMS.get(kind, (kind,))]
    first = [each for each in dict.fromkeys(wanted) if each in options.key_types]
    options.key_types = [*first, *(each for each in options.key_types if each not in first)]


def _handshake(
    to: Destination, transport: paramiko.Transport, seconds: float, greeting: str
) -> None:
    transport.banner_timeout = transport.handshake_timeout = seconds
    transport.auth_timeout = seconds
    try:
        transport.start_client(timeout=seconds)
        transport.get_remote_server_key()  # a start that ran out of time returns as if it had not
    except paramiko.ssh_exception.IncompatiblePeer as error:
        raise refusals.algorithms(to, str(error)) from None
    except (paramiko.SSHException, EOFError, OSError) as error:
        if transport.is_active():
            raise refusals.silent(to, f"in the ssh handshake ({seconds:.0f} s)") from None
        if not greeting.startswith("SSH-"):
            raise (
                refusals.closed(to, greeting)
                if _of_sshd(greeting)
                else refusals.not_ssh(to, greeting.splitlines()[0][:80])
            ) from None
        raise refusals.closed(to, str(error)) from None


def _of_sshd(greeting: str) -> bool:
    return greeting.startswith(("Exceeded MaxStartups", "Not allowed at this time"))


def _authenticate(
    to: Destination, transport: paramiko.Transport, ours: keys.Keys, seconds: float
) -> None:
    told: list[str] = []
    for shown, key in ours.tried:
        told.append(shown)
        try:
            if not transport.auth_publickey(to.user, key):
                return
            told[-1] += ": accepted, but the worker asks for more than a key"
        except paramiko.BadAuthenticationType as error:
            if "publickey" not in error.allowed_types:
                raise refusals.keys_refused(to, error.allowed_types) from None
        except paramiko.AuthenticationException as error:
            if "timeout" in str(error).lower():
                raise refusals.silent(to, f"at the login ({seconds:.0f} s)") from None
        except (paramiko.SSHException, EOFError, OSError) as error:
            if transport.is_active():
                told[-1] += f": {error}"
        if not transport.is_active():
            rest = len(ours.tried) - len(told)
            if rest:
                ours.unused.append(f"{rest} more: the worker hung up before (its MaxAuthTries)")
            break
    raise refusals.no_key(to, told, ours.unused, ours.first)
