"""A clean clone of this working tree, used as its owner would: from outside, by ``./start.sh``.

Nothing of the launcher is imported here but how a value is quoted in ``.env``. The clone has an
empty HOME and a bare environment; every command has a limit of time.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import requests

from launcher.settings import dotenv

CHECKOUT = Path(__file__).resolve().parents[2]
# Without these pip may not reach its registry; they are the machine's, not the user's.
OF_THE_NETWORK = {
    "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE",
    "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy",
}  # fmt: skip
START = 420.0  # seconds for a whole start on a busy machine; about 30 on two idle cores
QUICK = 60.0


@dataclass(frozen=True)
class Ran:
    """A command that ended: ``status`` as a shell tells it, 128 + n for signal n."""

    words: str
    status: int
    out: str
    err: str
    seconds: float
    run: Path | None = None  # the folder of its record, if it made one

    @property
    def said(self) -> str:
        return self.out + self.err


@dataclass
class Command:
    """A command that runs: in a session of its own, as in a terminal of its own."""

    clone: Clone
    words: str
    process: subprocess.Popen[bytes]
    out: Path
    err: Path
    earlier: frozenset[str]  # records of runs before it
    began: float = field(default_factory=time.monotonic)

    @property
    def pid(self) -> int:
        return self.process.pid  # start.sh hands over by exec, so it is the launcher's too

    def ctrl_c(self) -> None:
        """What a terminal does: the signal goes to the whole foreground process group."""
        os.killpg(self.pid, signal.SIGINT)

    def said(self) -> str:
        return self.out.read_text() + self.err.read_text()

    def record(self) -> Path | None:
        new = sorted(set(self.clone.runs()) - self.earlier)
        return self.clone.logs / "runs" / new[-1] if new else None

    def events(self) -> list[dict[str, Any]]:
        """What its record tells so far; a last line that is being written is left out."""
        record = self.record()
        path = None if record is None else record / "events.jsonl"
        if path is None or not path.exists():
            return []
        lines = path.read_text().split("\n")[:-1]
        return [json.loads(line) for line in lines]

    def reaches(self, step: str, event: str = "started", timeout: float = START) -> dict[str, Any]:
        """Wait until its record tells of an event. Looks a thousand times a second, so that a
        signal sent next lands inside the step."""
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            for entry in self.events():
                if (entry["step"], entry["event"]) == (step, event):
                    return entry
            if self.process.poll() is not None:
                raise AssertionError(
                    f"{self.words} ended ({self.process.returncode}) before {step} {event}:\n"
                    f"{self.said()}"
                )
            time.sleep(0.001)
        raise AssertionError(f"{self.words}: no {step} {event} in {timeout:g} s:\n{self.said()}")

    def reaches_output(self, step: str, timeout: float = QUICK) -> None:
        """Wait until the log of its record has a line of what the step runs."""
        end = time.monotonic() + timeout
        while time.monotonic() < end and self.process.poll() is None:
            record = self.record()
            path = None if record is None else record / "log.txt"
            if path is not None and path.exists() and f" {step:<11} | " in path.read_text():
                return
            time.sleep(0.001)
        raise AssertionError(f"{self.words}: no output of {step}:\n{self.said()}")

    def wait(self, timeout: float = QUICK, tick: Callable[[], None] | None = None) -> Ran:
        end = self.began + timeout
        while self.process.poll() is None:
            if time.monotonic() > end:
                self.process.kill()
                self.process.wait()
                raise AssertionError(f"{self.words} ran longer than {timeout:g} s:\n{self.said()}")
            if tick is not None:
                tick()
            time.sleep(0.02)
        status = self.process.returncode
        ran = Ran(
            self.words,
            status if status >= 0 else 128 - status,
            self.out.read_text(),
            self.err.read_text(),
            time.monotonic() - self.began,
            self.record(),
        )
        self.clone.history.append(ran)
        return ran

    def kill(self) -> Ran:
        self.process.kill()
        return self.wait(timeout=time.monotonic() - self.began + QUICK)


@dataclass
class Clone:
    """``folder`` holds the clone (with a space in its path), HOME, and what the commands said."""

    folder: Path
    rehearsal: Path  # REHEARSAL_DIR, shared with the checkout so that vLLM is installed once
    port: int
    model: str
    key: str
    history: list[Ran] = field(default_factory=list)

    @classmethod
    def make(cls, folder: Path, rehearsal: Path, model: str, key: str) -> Clone:
        clone = cls(folder, rehearsal, free_port(), model, key)
        clone.home.mkdir(parents=True)
        copy_working_tree(CHECKOUT, clone.root)
        settings = {
            "PORT": str(clone.port),
            "REHEARSAL_DIR": str(rehearsal),
            "SERVED_MODEL_NAME": model,
            "VLLM_API_KEY": key,
        }
        lines = [f"{name}={dotenv.quote(value)}" for name, value in settings.items()]
        (clone.root / ".env").write_text("\n".join(lines) + "\n")
        return clone

    @property
    def root(self) -> Path:
        return self.folder / "a clean clone"

    @property
    def home(self) -> Path:
        return self.folder / "empty home"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def environ(self, **more: str) -> dict[str, str]:
        kept = {
            name: value
            for name, value in os.environ.items()
            if name in OF_THE_NETWORK or name.startswith("PIP_")
        }
        return {**kept, "PATH": os.environ["PATH"], "HOME": str(self.home), **more}

    def begin(self, *words: str) -> Command:
        """``./start.sh WORDS``, not waited for."""
        # Under nohup or a shell's & this process ignores Ctrl-C, and its children would too.
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        out = self.folder / f"said-{time.monotonic_ns()}.out"
        err = out.with_suffix(".err")
        earlier = frozenset(self.runs())
        with out.open("wb") as to_out, err.open("wb") as to_err:
            process = subprocess.Popen(
                ["./start.sh", *words],
                cwd=self.root,
                env=self.environ(),
                stdin=subprocess.DEVNULL,
                stdout=to_out,
                stderr=to_err,
                start_new_session=True,
            )
        return Command(self, f"./start.sh {' '.join(words)}", process, out, err, earlier)

    def start(self, *words: str, timeout: float = QUICK) -> Ran:
        """``./start.sh WORDS`` to its end."""
        return self.begin(*words).wait(timeout)

    def runs(self) -> list[str]:
        folder = self.logs / "runs"
        return sorted(os.listdir(folder)) if folder.is_dir() else []

    def standing(self) -> dict[str, Any]:
        """``status --json``; its exit status must agree with what it prints."""
        ran = self.start("status", "--json")
        told: dict[str, Any] = json.loads(ran.out)
        assert told["code"] == ran.status, ran.said
        return told

    def until(self, code: int, timeout: float = 10.0) -> Ran:
        """Ask ``status`` until it ends with ``code``; the last answer, whatever it is."""
        end = time.monotonic() + timeout
        while True:
            ran = self.start("status")
            if ran.status == code or time.monotonic() > end:
                return ran

    def ask(self, method: str, path: str, *, key: bool = True, **more: Any) -> requests.Response:
        """One request to the API, never through a proxy."""
        with requests.Session() as session:
            session.trust_env = False
            headers = {"Authorization": f"Bearer {self.key}"} if key else {}
            return session.request(
                method, f"{self.url}{path}", headers=headers, timeout=120.0, **more
            )

    def log_tails(self, lines: int = 30) -> Iterator[tuple[str, str]]:
        for role in ("head", "worker"):
            path = self.logs / f"{role}.log"
            if path.exists():
                text = path.read_text(errors="replace")
                yield str(path), "\n".join(text.splitlines()[-lines:])


def copy_working_tree(checkout: Path, target: Path) -> None:
    """What ``git clone`` would bring if everything in the working tree were committed."""
    listed = subprocess.run(
        ["git", "-C", str(checkout), "ls-files", "-z", "-co", "--exclude-standard"],
        capture_output=True,
        check=False,
    )
    if listed.returncode:
        raise AssertionError(
            f"git cannot list the files of {checkout}: {listed.stderr.decode().strip()}\n"
            "The story is told in a clean clone: run it from a git checkout that is yours."
        )
    for name in listed.stdout.decode().split("\0"):
        source = checkout / name
        if name and source.exists():  # deleted, but not committed as such
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target / name)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def rehearsal_folder(environ: Mapping[str, str]) -> Path:
    """REHEARSAL_DIR, with the engine and the checkpoint made. AssertionError says what to do."""
    given = environ.get("REHEARSAL_DIR")
    advice = "run ./start.sh test story, which makes it, or set REHEARSAL_DIR to a made one"
    assert given, f"REHEARSAL_DIR is not set: {advice}"
    folder = Path(given).resolve()
    needed = ("engine/bin/python", "checkpoint/config.json", "engram-src/config.json")
    missing = [name for name in needed if not (folder / name).exists()]
    assert not missing, f"{folder} lacks {', '.join(missing)}: {advice}"
    return folder
