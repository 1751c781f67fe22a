"""A clean clone on the head, used as its owner would: ``./start.sh`` in a login of the node."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import stub_image
import weights
from clone import CHECKOUT, QUICK, Command, Ran, copy_working_tree
from machine import Done
from rig import HEAD, SECOND, USER, WORKER, Rig

from launcher.settings import dotenv

CACHE = ".cache/dsv41-flash-exl3"  # WORKER_MODEL_DIR and WORKER_ENGRAM_DIR lie there
LAUNCHES = ".cache/vllm-dsv41-flash-exl3/launch"  # in CACHE_ROOT
PORT = 8888
MARK = "key-4711"
KEY = f"{MARK} \"with\" 'quotes' and $(touch /tmp/pwned)"
# What the rig's machines lack or are too slow for; all else is as shipped.
SETTINGS = {
    "HEAD_IP": HEAD.address,
    "WORKER_IP": WORKER.address,
    "IMAGE": stub_image.NAME,
    # Both nodes have their tiny weights already; test_4_download.py and others bring them.
    "AUTO_DOWNLOAD": "0",
    "SKIP_SYNC": "1",
    "WEIGHT_SYNC": "rsync",
    # Both nodes have the stub already; tests/rig/test_5_image.py brings images.
    "SKIP_BUILD": "1",
    "SKIP_PULL": "1",
    "SKIP_SHIP": "1",
    "SKIP_OVERLAY_VERIFY": "1",
    "CONTAINER_ULIMITS": "core=0",  # no CAP_SYS_RESOURCE here, so memlock cannot be raised
    "VLLM_API_KEY": KEY,
    "READY_TIMEOUT": "60",
    "DSV41_HANG_SECONDS": "30",
}


class InNode:
    """A process of a node, as Popen would show it: its pid is the program's, not nsenter's."""

    def __init__(self, around: subprocess.Popen[bytes]) -> None:
        self._around = around
        self.pid = self._inner()

    def _inner(self) -> int:
        listed = Path(f"/proc/{self._around.pid}/task/{self._around.pid}/children")
        while self._around.poll() is None:
            with contextlib.suppress(OSError):
                if found := listed.read_text().split():
                    return int(found[0])
            time.sleep(0.001)
        return self._around.pid  # it has ended already

    def poll(self) -> int | None:
        return self._around.poll()

    def wait(self) -> int:
        return self._around.wait()

    @property
    def returncode(self) -> int:
        return self._around.returncode

    def kill(self) -> None:
        """nsenter ends as its child did."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


@dataclass
class HeadClone:
    """``at`` is where the head has it; ``root`` is the same folder as seen from outside."""

    rig: Rig
    at: str
    port: int = PORT
    key: str = KEY
    history: list[Ran] = field(default_factory=list)
    stood: object = None  # `standing_still` after the last start of the fixture `serving`

    @classmethod
    def make(cls, rig: Rig, name: str = "a clean clone") -> HeadClone:
        clone = cls(rig, f"{USER.home}/{name}")
        copy_working_tree(CHECKOUT, clone.root)
        (clone.root / ".venv").symlink_to(CHECKOUT / ".venv")
        for folder, files in (("model", weights.checkpoint()), ("engram-src", weights.engram())):
            for path, data in files.items():
                rig.head.write(f"{clone.at}/{folder}/{path}", data)
                for user in (USER, SECOND):
                    where = f"{user.home}/{CACHE}/{folder}/{path}"
                    rig.worker.write(where, data, user=user.name)
        clone.env()
        rig.head.run("chown", "-R", f"{USER.name}:", clone.at)
        return clone

    @property
    def root(self) -> Path:
        return self.rig.head.path(self.at)

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    def env(self, settings: Mapping[str, str | None] | None = None) -> None:
        """Write ``.env``: the rig's settings, those given above them; None leaves one out."""
        merged: dict[str, str | None] = {**SETTINGS, **(settings or {})}
        lines = [f"{key}={dotenv.quote(text)}" for key, text in merged.items() if text is not None]
        text = "".join(f"{line}\n" for line in lines)
        self.rig.head.write(f"{self.at}/.env", text, 0o600, USER.name)

    def stub(self, **roles: Mapping[str, Any]) -> None:
        """How the next ranks behave: ``head={…}, worker={…}`` of serve.py's stub.json."""
        text = json.dumps(roles)
        self.rig.head.write(f"{self.at}/model/stub.json", text, user=USER.name)
        for user in (USER, SECOND):
            where = f"{user.home}/{CACHE}/model/stub.json"
            self.rig.worker.write(where, text, user=user.name)

    def tables(self, **ranks: Mapping[str, Any]) -> None:
        """How the next packers behave: ``r0={…}, r1={…}`` of the stub's pack.json."""
        text = json.dumps({rank.removeprefix("r"): told for rank, told in ranks.items()})
        self.rig.head.write(f"{self.at}/engram-src/pack.json", text, user=USER.name)
        where = f"{USER.home}/{CACHE}/engram-src/pack.json"
        self.rig.worker.write(where, text, user=USER.name)

    def begin(self, *words: str, env: Mapping[str, str] | None = None) -> Command:
        """``./start.sh WORDS``, not waited for, in a session as a terminal's."""
        spool = self.rig.folder / "said"
        spool.mkdir(exist_ok=True)
        out = spool / f"{time.monotonic_ns()}.out"
        err = out.with_suffix(".err")
        earlier = frozenset(self.runs())
        argv = self.rig.head.argv(["./start.sh", *words], USER.name, env, self.at, session=True)
        with out.open("wb") as to_out, err.open("wb") as to_err:
            process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=to_out, stderr=to_err)
        told = f"./start.sh {' '.join(words)}"
        return Command(self, told, InNode(process), out, err, earlier)  # type: ignore[arg-type]

    def start(self, *words: str, timeout: float = QUICK, **more: Any) -> Ran:
        """``./start.sh WORDS`` to its end."""
        return self.begin(*words, **more).wait(timeout)

    def runs(self) -> list[str]:
        folder = self.logs / "runs"
        return sorted(os.listdir(folder)) if folder.is_dir() else []

    def standing(self) -> dict[str, Any]:
        """``status --json``; its exit status must agree with what it prints."""
        ran = self.start("status", "--json")
        try:
            told: dict[str, Any] = json.loads(ran.out)
        except ValueError:
            raise AssertionError(f"no JSON of status ({ran.status}):\n{ran.said}") from None
        assert told["code"] == ran.status, ran.said
        return told

    def until(self, code: int, timeout: float = 40.0) -> Ran:
        """Ask ``status`` until it ends with ``code``; the last answer, whatever it is."""
        end = time.monotonic() + timeout
        while True:
            ran = self.start("status")
            if ran.status == code or time.monotonic() > end:
                return ran

    def curl(self, path: str, body: Any = None, *, key: bool = True, within: float = 10) -> Done:
        """One request to the API, by curl on the head."""
        words = ["curl", "-sS", "--noproxy", "*", "-m", str(within), "-w", "\n%{http_code}"]
        if key:
            words += ["-H", f"Authorization: Bearer {self.key}"]
        if body is not None:
            words += ["-H", "Content-Type: application/json", "-d", json.dumps(body)]
        return self.rig.head.run(*words, f"http://127.0.0.1:{self.port}{path}", check=False)

    def completes(self, model: str) -> dict[str, Any]:
        """A completion's body; it takes both ranks."""
        asked = {"model": model, "prompt": "17*19", "max_tokens": 4}
        text, _, status = self.curl("/v1/completions", asked).out.rpartition("\n")
        assert status == "200", text
        answer: dict[str, Any] = json.loads(text)
        return answer

    def forget(self) -> None:
        """Take the pair away behind the launcher's back, with all that it remembers."""
        self.rig.head.end(self.processes())
        for node in (self.rig.head, self.rig.worker):
            node.remove_containers()
            node.run("rm", "-rf", *(f"{user.home}/{LAUNCHES}" for user in (USER, SECOND)))
        if self.logs.exists():
            shutil.rmtree(self.logs)

    def containers(self) -> dict[str, str]:
        """State of each container by node and name, ended ones too."""
        nodes = (self.rig.head, self.rig.worker)
        return {f"{n.name} {k}": v for n in nodes for k, v in n.containers().items()}

    def running(self) -> set[str]:
        return {name for name, state in self.containers().items() if state == "running"}

    def secrets(self) -> list[str]:
        """Files with secrets on either node."""
        found = []
        for node in (self.rig.head, self.rig.worker):
            told = node.run("find", "/", "-xdev", "-name", "secret.env").out
            found += [f"{node.name} {line}" for line in told.splitlines()]
        return found

    def processes(self) -> list[psutil.Process]:
        """What the clone's launchers left running, a watcher for example."""
        found = []
        for process in self.rig.head.processes():
            with contextlib.suppress(psutil.Error):
                if process.cwd() == self.at or f"{self.at}/" in " ".join(process.cmdline()):
                    found.append(process)
        return found

    def standing_still(self) -> object:
        """What is another once anything was done to the pair, to what it was started from or to
        what watches it. A new rank's behaviour is not of that: the old ones do not read it."""
        state = self.logs / "state.json"
        containers, files = [], []
        for node, places in (
            (self.rig.head, (f"{self.at}/model", f"{self.at}/engram-src")),
            (self.rig.worker, (f"{USER.home}/{CACHE}",)),
        ):
            listed = node.docker.containers.list(all=True, ignore_removed=True)
            containers += sorted((node.name, each.id, each.status) for each in listed)
            found = node.run("find", *places, "-type", "f", "-printf", "%p %s %T@ %C@\n").out
            files += sorted(row for row in found.splitlines() if "/stub.json " not in row)
        left = sorted((each.pid, each.create_time()) for each in self.processes())
        return state.read_text() if state.exists() else "", containers, files, left

    def account(self, commands: int = 4, lines: int = 30) -> Iterator[tuple[str, str]]:
        """The last commands and what they said, the containers and the ends of the logs."""
        for ran in self.history[-commands:]:
            yield f"{ran.words}: status {ran.status} after {ran.seconds:.1f} s", ran.said
        for node in (self.rig.head, self.rig.worker):
            yield from node.account(lines)
        for path in sorted(self.logs.glob("*.log")):
            text = path.read_text(errors="replace")
            yield str(path.name), "\n".join(text.splitlines()[-lines:])
