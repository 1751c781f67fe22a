"""The image: what is kept, pulled, built, refused; the recipe's stamp; what a registry is asked."""

from __future__ import annotations

if __name__ == "__main__":  # before the imports that a bare Python lacks
    from _standalone import main

    main(__file__)

import hashlib
import io
import itertools
import json
import os
import shutil
import subprocess
import sys
import tarfile
import threading
import tomllib
from base64 import b64encode
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from settings_root import settings_of

from launcher.errors import LauncherError
from launcher.facts.docker import Image
from launcher.image import build, decide, identity, pipe, registry, results, staged, stamp
from launcher.image.decide import Flags, Found
from launcher.image.reference import HUB, Reference, reference
from launcher.image.registry import Absent, Login, OutOfReach
from launcher.image.store import ImageStore, PullFailed, split
from launcher.settings.secret import Secret
from launcher.settings.table import TABLE
from launcher.steps.parity import LOG, Parity

ROOT = Path(__file__).resolve().parents[1]

# ---- what is done: the table, a row an outcome, the first that fits ----

ANY = None
#: BUILD, SKIP_BUILD, PULL, the head's image, the registry's → what is done, whether it is warned
TABLE_OF_THE_HEAD: tuple[tuple[tuple[Any, ...], str, bool], ...] = (
    ((True, ANY, ANY, ANY, ANY), "build", False),
    ((ANY, ANY, ANY, ANY, "right"), "pull", False),
    ((ANY, True, ANY, "none", "other"), "pull", True),
    ((ANY, True, True, ANY, "other"), "pull", True),
    ((ANY, ANY, ANY, "right", ANY), "keep", False),
    ((ANY, True, ANY, "other", ANY), "keep", True),
    ((ANY, True, ANY, "none", ANY), "refuse", False),
    ((ANY, ANY, ANY, ANY, "out of reach"), "build", True),
    ((ANY, ANY, ANY, ANY, "not pulled"), "build", True),
    ((ANY, ANY, ANY, ANY, ANY), "build", False),
)
HEADS = {"none": None, "right": "a1", "other": "b2"}
BOOLS = (False, True)


def found_of(head: str, says: str) -> Found:
    if says in ("right", "other"):
        return Found("a1", HEADS[head], "there", {"right": "a1", "other": "b2"}[says])
    return Found("a1", HEADS[head], says)  # type: ignore[arg-type]


@pytest.mark.parametrize("flags", [Flags(*each) for each in itertools.product(BOOLS, repeat=5)])
@pytest.mark.parametrize("head", HEADS)
def test_the_head_s_image_by_every_flag(flags: Flags, head: str) -> None:
    # PULL=1 overrides SKIP_PULL=1; BUILD=1 asks nobody; nobody is asked for what is here already.
    may = not flags.build and (flags.pull or not flags.skip_pull)
    wants = may and (head != "right" or flags.pull)
    assert decide.asks(flags, found_of(head, "not asked"), in_a_registry=True) == wants
    assert not decide.asks(flags, found_of(head, "not asked"), in_a_registry=False)
    answers = ("out of reach", "absent", "right", "other", "not pulled")
    said = answers if wants else ("not asked",)
    for says in said:
        asked = (flags.build, flags.skip_build, flags.pull, head, says)
        act, warned = next(
            (act, warned)
            for row, act, warned in TABLE_OF_THE_HEAD
            if all(want is ANY or want == have for want, have in zip(row, asked, strict=True))
        )
        plan = decide.head(flags, found_of(head, says))
        assert (plan.act, plan.warning) == (act, warned), (asked, plan)
        assert plan.why
    # The preflight asks for an image exactly where no outcome could bring one.
    outcomes = {
        decide.head(flags, found_of("none", s)).act for s in ("right", "absent", "not asked")
    }
    may_bring = bool(outcomes & {"build"}) or may
    assert flags.head_needs_one == (not may_bring)


@pytest.mark.parametrize("flags", [Flags(), Flags(skip_build=True)])
def test_a_registry_that_answered_is_not_out_of_reach(flags: Flags) -> None:
    found = Found("a1", None, "not pulled", "a1", failed="unexpected EOF")
    assert "could not be pulled: unexpected EOF" in decide.head(flags, found).why


@pytest.mark.parametrize("flags", [Flags(*each) for each in itertools.product(BOOLS, repeat=5)])
def test_the_worker_s_image_by_every_flag(flags: Flags) -> None:
    for remote in BOOLS:
        assert decide.worker(flags, True, remote) == "keep"
        way = decide.worker(flags, False, remote)
        if flags.skip_ship:
            assert way == "refuse"
        elif remote and not flags.build and (flags.pull or not flags.skip_pull):
            assert way == "pull"
        else:
            assert way == "ship"


def test_flags_are_read_from_the_settings(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, "SKIP_BUILD=1\nPULL=1\n")
    assert Flags.of(settings) == Flags(skip_build=True, pull=True)


# ---- the same image ----


def image(*layers: str, architecture: str = "arm64") -> Image:
    return Image("sha256:1", layers, architecture, "linux")


def test_images_are_the_same_by_their_layers_in_order() -> None:
    assert identity.same(image("a", "b"), image("a", "b"))
    for other in (image("b", "a"), image("a"), image("a", "b", "c"), None):
        assert not identity.same(image("a", "b"), other)
    assert not identity.same(image(), image())  # nothing is known of either
    assert identity.key(["a", "b"]) == hashlib.sha256(b"a,b").hexdigest()[:16]
    assert "the first 1 are equal" in identity.first_difference(["a", "b", "c"], ["a", "c", "b"])


def test_the_platform_is_as_asked_as_inspected_as_the_machine() -> None:
    assert identity.platform("linux/arm64/v8", image("a", architecture="amd64")) == "linux/arm64/v8"
    assert identity.platform("", image("a", architecture="amd64"), "aarch64") == "linux/amd64"
    assert identity.platform("", None, "x86_64") == "linux/amd64"
    assert identity.platform("", None) == "linux/arm64"
    assert identity.fits(image("a"), "", "aarch64") and not identity.fits(image("a"), "", "x86_64")
    assert identity.fits(image("a"), "linux/arm64", "x86_64")


# ---- the recipe ----

JUNK = (
    "overlay/spark_overlay/__pycache__/model.cpython-312.pyc",
    "overlay/spark_overlay/engram/_native.so",
    "overlay/spark_overlay/.model.py.swp",
    "overlay/spark_overlay/.hidden/x.py",
    "overlay/spark_overlay/model.py.orig",
    "overlay/spark_overlay/exl3/build/x.py",
    "overlay/csrc/engram/store.o",
    "overlay/build/lib/spark_overlay/model.py",
    "overlay/spark_overlay.egg-info/PKG-INFO",
    "overlay/dist/spark_overlay-0.whl",
    "docker/notes",
)


@pytest.fixture(scope="module")
def clones(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The recipe's files in two places; in the second with what tools leave, in another order."""
    one, other = (tmp_path_factory.mktemp(name) / "a clone" for name in ("one", "other"))
    names = stamp.files(ROOT)
    for clone, order in ((one, names), (other, reversed(names))):
        for name in order:
            (clone / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, clone / name)
    for name in JUNK:
        (other / name).parent.mkdir(parents=True, exist_ok=True)
        (other / name).write_text("junk")
    os.symlink("/etc/passwd", other / "overlay" / "spark_overlay" / "link.py")
    (other / stamp.WHOLE[0]).chmod(0o600)
    return one, other


def test_two_clones_have_one_stamp_and_one_context(clones: tuple[Path, Path]) -> None:
    one, other = clones
    assert stamp.stamp(one) == stamp.stamp(other)
    assert stamp.context(one) == stamp.context(other)
    with tarfile.open(fileobj=io.BytesIO(stamp.context(other))) as tar:
        assert tar.getnames() == stamp.files(other) == stamp.files(one)


def test_the_stamp_is_what_the_shell_would_say(clones: tuple[Path, Path]) -> None:
    one, _ = clones
    argv = ["sha256sum", "--", *sorted(stamp.files(one), key=os.fsencode)]
    said = subprocess.run(argv, cwd=one, capture_output=True, check=True).stdout
    assert stamp.stamp(one) == hashlib.sha256(said).hexdigest()


def test_every_file_and_its_name_and_the_base_count(tmp_path: Path, clones: Any) -> None:
    clone = tmp_path / "clone"
    shutil.copytree(clones[0], clone)
    seen = {
        stamp.stamp(clone),
        stamp.stamp(clone, "python:3.12"),
        stamp.stamp(clone, "python:3.13"),
    }
    assert len(seen) == 3
    for name in (stamp.DOCKERFILE, "docker/run.txt", "overlay/csrc/common/ptx.cuh"):
        (clone / name).write_bytes((clone / name).read_bytes() + b"\n")
        assert stamp.stamp(clone) not in seen
        seen.add(stamp.stamp(clone))
    (clone / "overlay/csrc/common/ptx.cuh").rename(clone / "overlay/csrc/common/ptx2.cuh")
    assert stamp.stamp(clone) not in seen
    (clone / "docker/run.txt").unlink()
    with pytest.raises(LauncherError, match=r"lacks docker/run\.txt"):
        stamp.stamp(clone)


def test_no_tracked_file_of_the_overlay_is_left_out() -> None:
    argv = ["git", "-C", str(ROOT), "ls-files", "--", *stamp.TREES, "docker"]
    listed = subprocess.run(argv, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    elsewhere = {name for name in listed.stdout.split() if name.startswith("docker/nfs/")}
    assert set(listed.stdout.split()) - elsewhere - set(stamp.files(ROOT)) == set()


def test_dockerignore_names_the_same_files() -> None:
    assert (ROOT / ".dockerignore").read_text() == stamp.ignore_text()


def test_the_dockerfile_copies_what_is_stamped_and_pins_what_the_overlay_needs() -> None:
    text = (ROOT / stamp.DOCKERFILE).read_text()
    copied = [
        word
        for line in text.splitlines()
        if line.startswith("COPY ") and "--from" not in line
        for word in line.split()[1:-1]
    ]
    assert {name.rstrip("/") for name in copied} == {"overlay"} | {
        name for name in stamp.WHOLE if not name.startswith("overlay/") and name != stamp.DOCKERFILE
    }
    assert f"ARG BASE_IMAGE={TABLE['BASE_IMAGE'].default}\n" in text
    assert f"LABEL {stamp.LABEL}=" in text
    needed = tomllib.loads((ROOT / "overlay/pyproject.toml").read_text())["project"]["dependencies"]
    pinned = (ROOT / "docker/run.txt").read_text().splitlines()
    assert [name for name in needed if name not in pinned] == ["numpy"]  # vLLM brings it
    engine = (ROOT / "docker/engine.txt").read_text()
    version = TABLE["BASE_IMAGE"].default.rpartition(":v")[2]
    assert f"\nvllm=={version}\n" in engine and "\nnumpy==" in engine
    assert all("==" in line for line in engine.splitlines() if not line.startswith("#"))


def test_a_build_s_arguments_hold_the_stamp_and_no_secret() -> None:
    argv = build.argv("n:1", "base:2", "abc", "", "docker/Dockerfile")
    assert argv[:2] == ["docker", "build"] and argv[-3:] == ["--file", "docker/Dockerfile", "-"]
    assert "SPARK_RECIPE_STAMP=abc" in argv and "BASE_IMAGE=base:2" in argv
    assert "--platform" not in argv
    assert "linux/arm64" in build.argv("n:1", "b", "a", "linux/arm64", "f")


@pytest.mark.parametrize(
    ("line", "needed"),
    [
        ("write /x: no space left on device", "space for the base"),
        ("manifest for a/b:1 not found: manifest unknown", "a base that can be pulled"),
        ("dial tcp: lookup x: no such host", "a network"),
        ("error: expected ';'", "a build whose every step ends well"),
    ],
)
def test_a_failed_build_tells_its_last_lines_and_what_helps(line: str, needed: str) -> None:
    error = build.failed("n:1", "a/b:1", ["Step 3/9", line], Path("/l"))
    assert line in error.found and needed in error.needed and error.log == Path("/l")


# ---- names ----


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ubuntu", Reference(HUB, "library/ubuntu", "latest")),
        ("vllm/vllm-openai:v0.33.0", Reference(HUB, "vllm/vllm-openai", "v0.33.0")),
        ("docker.io/a/b:c", Reference(HUB, "a/b", "c")),
        ("ghcr.io/a/b-c.d/e:2.9bpw", Reference("ghcr.io", "a/b-c.d/e", "2.9bpw")),
        ("localhost:5000/a", Reference("localhost:5000", "a", "latest")),
        (f"r.io/a@sha256:{'0' * 64}", Reference("r.io", "a", f"sha256:{'0' * 64}")),
        ("ghcr.io/A/b", None),
        ("ghcr.io/a/../b", None),
        ("ghcr.io/a/b:c/d", None),
        ("a b", None),
        ("r.io/a@sha256:12", None),
        ("", None),
    ],
)
def test_a_name_as_docker_reads_it(name: str, expected: Reference | None) -> None:
    assert reference(name) == expected


def test_repository_and_tag() -> None:
    assert split("localhost:5000/a/b") == ("localhost:5000/a/b", "latest")
    assert split("r.io:1/a:2") == ("r.io:1/a", "2")
    assert split("r.io/a@sha256:ab") == ("r.io/a", "sha256:ab")


# ---- a registry ----

TOKEN = "token-of-the-account"


class Hub:
    """A registry on loopback: an index of two platforms, their manifests and configs; with a login
    where ``closed``."""

    def __init__(self, stamped: str = "s1", closed: bool = False) -> None:
        self.closed = closed
        self.asked: list[tuple[str, str]] = []  # path and Authorization of each request
        self.blobs: dict[str, bytes] = {}
        self.damage = b""
        listed = []
        for architecture in ("amd64", "arm64"):
            config = self._blob(
                {
                    "architecture": architecture,
                    "config": {"Labels": {stamp.LABEL: stamped} if stamped else None},
                    "rootfs": {"diff_ids": [f"sha256:{architecture}", "sha256:2"]},
                }
            )
            manifest = self._blob(
                {
                    "mediaType": registry.MANIFESTS[0],
                    "config": {"digest": config},
                    "layers": [{"size": 30, "digest": "sha256:x"}, {"size": 12}],
                }
            )
            platform = {"os": "linux", "architecture": architecture}
            listed.append({"digest": manifest, "platform": platform})
        self.index = json.dumps({"mediaType": registry.INDEXES[0], "manifests": listed}).encode()
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                status, headers, data = hub.answer(self.path, self.headers.get("Authorization", ""))
                self.send_response(status)
                for key, value in headers.items():
                    self.send_header(key, value)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *words: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.host = f"127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    def _blob(self, value: Any) -> str:
        data = json.dumps(value).encode()
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        self.blobs[digest] = data
        return digest

    def answer(self, path: str, auth: str) -> tuple[int, dict[str, str], bytes]:
        self.asked.append((path, auth))
        if path.startswith("/token"):
            right = "Basic " + b64encode(f"me:{TOKEN}".encode()).decode()
            if self.closed and auth != right:
                return 403, {}, b"{}"
            return 200, {}, b'{"token": "bearer-1"}'
        if auth != "Bearer bearer-1":
            realm = f'Bearer realm="http://{self.host}/token",service="hub"'
            return 401, {"WWW-Authenticate": realm}, b"{}"
        _, _, rest = path.partition("/v2/a/kit/")
        kind, _, name = rest.partition("/")
        if kind == "manifests" and name == "1":
            return 200, {"Content-Type": registry.INDEXES[0]}, self.index
        if kind == "blobs" and name in self.blobs:
            return 307, {"Location": f"/stored/{name}"}, b""
        if path.startswith("/stored/"):
            return 200, {}, self.blobs[path.removeprefix("/stored/")] + self.damage
        if kind == "manifests" and name in self.blobs:
            return 200, {}, self.blobs[name]
        return 404, {}, b"{}"

    def ask(self, platform: str = "linux/arm64", login: Login | None = None, tag: str = "1") -> Any:
        return registry.ask(Reference(self.host, "a/kit", tag), platform, login)


@pytest.fixture
def hub() -> Iterator[Hub]:
    made = Hub()
    yield made
    made.server.shutdown()
    made.server.server_close()


def test_stamp_layers_and_size_without_a_layer_being_moved(hub: Hub) -> None:
    found = hub.ask()
    assert (found.stamp, found.layers, found.size) == ("s1", ("sha256:arm64", "sha256:2"), 42)
    assert hub.ask("linux/amd64").layers[0] == "sha256:amd64"
    assert not any("sha256:x" in path for path, _ in hub.asked)
    with pytest.raises(Absent, match="none for linux/riscv64"):
        hub.ask("linux/riscv64")
    with pytest.raises(Absent, match="404"):
        hub.ask(tag="2")


def test_damaged_bytes_are_no_answer(hub: Hub) -> None:
    hub.damage = b" "
    with pytest.raises(OutOfReach, match="with other bytes"):
        hub.ask()


def test_the_login_goes_to_its_own_registry_alone(hub: Hub) -> None:
    hub.closed = True
    with pytest.raises(Absent, match="gives no token for it"):
        hub.ask()
    assert hub.ask(login=Login("me", Secret(TOKEN), hub.host)).stamp == "s1"
    hub.asked.clear()
    with pytest.raises(Absent):  # it is ghcr.io's
        hub.ask(login=Login("me", Secret(TOKEN)))
    sent = b64encode(f"me:{TOKEN}".encode()).decode()
    assert hub.asked and not any(sent in auth for _, auth in hub.asked)
    assert TOKEN not in repr(Login("me", Secret(TOKEN)))


def test_a_foreign_realm_gets_no_login(hub: Hub) -> None:
    """Nor is a token asked for without TLS, but of this machine."""
    elsewhere = Hub()
    try:
        hub.answer = lambda path, auth: (  # type: ignore[method-assign]
            401, {"WWW-Authenticate": f'Bearer realm="http://{elsewhere.host}/token"'}, b"{}"
        )  # fmt: skip
        with pytest.raises(Absent):
            hub.ask(login=Login("me", Secret(TOKEN), hub.host))
        assert elsewhere.asked and not any("Basic" in auth for _, auth in elsewhere.asked)
        hub.answer = lambda path, auth: (  # type: ignore[method-assign]
            401, {"WWW-Authenticate": 'Bearer realm="http://tokens.example/t"'}, b"{}"
        )  # fmt: skip
        with pytest.raises(OutOfReach, match="without TLS"):
            hub.ask()
    finally:
        elsewhere.server.shutdown()
        elsewhere.server.server_close()


def test_nobody_there_and_no_registry_there(hub: Hub) -> None:
    hub.answer = lambda path, auth: (200, {}, b"<html>log in to the hotel</html>")  # type: ignore
    with pytest.raises(OutOfReach, match="not a registry's"):
        hub.ask()
    hub.answer = lambda path, auth: (500, {}, b"")  # type: ignore
    with pytest.raises(OutOfReach, match="answers 500"):
        hub.ask()
    hub.server.shutdown()
    hub.server.server_close()
    with pytest.raises(OutOfReach, match="cannot be connected to"):
        hub.ask()


# ---- a daemon ----


class Pulling:
    """A Docker client whose pulls say what they were told to."""

    def __init__(self, *lines: dict[str, Any]) -> None:
        self.lines = lines
        self.given: dict[str, Any] = {}
        self.api = self
        self.timeout = 0

    def pull(self, name: str, **given: Any) -> Iterator[dict[str, Any]]:
        self.given = {"name": name, **given}
        yield from self.lines

    def close(self) -> None:
        pass


def test_a_pull_that_breaks_off_is_told_apart_and_its_login_is_its_registry_s() -> None:
    half = {"status": "Downloading", "id": "a", "progressDetail": {"current": 1, "total": 4 << 30}}
    said: list[str] = []
    login = Login("me", Secret(TOKEN))
    client = Pulling(half, {"error": "unexpected EOF"})
    store = ImageStore("head", lambda: client)  # type: ignore[arg-type, return-value]
    with pytest.raises(PullFailed, match="unexpected EOF"):
        store.pull("ghcr.io/a/b:c", "", login, said.append)
    assert said == ["Downloading, 0.00 of 4.29 GB known so far"]
    assert client.given["auth_config"] == {"username": "me", "password": TOKEN}
    assert (client.given["name"], client.given["tag"]) == ("ghcr.io/a/b", "c")
    client.lines = (half,)
    store.pull("r.io/a/b:c", "linux/arm64", login, said.append)
    assert client.given["auth_config"] is None and client.given["platform"] == "linux/arm64"


# ---- a tar on its way ----


def test_a_platform_is_named_to_daemons_that_know_it() -> None:
    knows = "Options:\n  -o, --output string\n      --platform string   Save only the given"
    assert staged.save_argv("n", "linux/arm64", knows, "1.48\n")[2:4] == [
        "--platform",
        "linux/arm64",
    ]
    assert staged.save_argv("n", "linux/arm64", knows, "1.51\n")[2] == "--platform"
    for help_text, api in ((knows, "1.47"), (knows, "1.9"), ("Options: -o", "1.51"), (knows, "")):
        assert staged.save_argv("n", "linux/arm64", help_text, api) == ["docker", "save", "n"]


def saved(path: Path, *layers: str) -> Path:
    """What ``docker save`` writes, without the layers themselves."""
    with tarfile.open(path, "w") as tar:
        config = json.dumps({"rootfs": {"diff_ids": layers}}).encode()
        manifest = json.dumps([{"Config": "c.json", "RepoTags": ["n:1"]}]).encode()
        for name, data in (("c.json", config), ("manifest.json", manifest)):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def test_a_tar_is_saved_whole_and_reused_while_it_is_of_the_image(tmp_path: Path) -> None:
    made = saved(tmp_path / "made", "a", "b")
    tar = tmp_path / "ship" / "i.tar"
    assert staged.reusable(tar, ["a", "b"]) is None
    size = staged.save(["cat", str(made)], tar, ["a", "b"], lambda n: None)
    assert size == made.stat().st_size == staged.reusable(tar, ["a", "b"])
    assert staged.reusable(tar, ["a", "c"]) is None
    with tar.open("ab") as more:
        more.write(b"x")
    assert staged.reusable(tar, ["a", "b"]) is None
    staged.remove(tar)
    assert list(tar.parent.iterdir()) == []


@pytest.mark.parametrize(
    ("program", "told"),
    [
        ("import sys; sys.exit('write: no space left on device')", "IMAGE_SHIP_DIR"),
        ("import sys; sys.exit('no such image')", "no such image"),
        ("pass", "0 bytes that are no image"),
        ("print('x' * 100000)", "that are no image"),
    ],
)
def test_a_tar_that_could_not_be_made_is_none(tmp_path: Path, program: str, told: str) -> None:
    tar = tmp_path / "i.tar"
    with pytest.raises(LauncherError) as refused:
        staged.save([sys.executable, "-c", program], tar, ["a"], lambda n: None)
    assert told in str(refused.value)
    assert list(tmp_path.iterdir()) == []


def test_a_tar_of_another_image_is_refused(tmp_path: Path) -> None:
    made = saved(tmp_path / "made", "a", "c")
    with pytest.raises(LauncherError, match="the first 1 are equal"):
        staged.save(["cat", str(made)], tmp_path / "i.tar", ["a", "b"], lambda n: None)


def test_pipes_tell_progress_and_who_failed(tmp_path: Path) -> None:
    seen: list[int] = []
    out = tmp_path / "out"
    write = "import sys; sys.stdout.buffer.write(bytes(3 << 20)); sys.exit({})"
    sink = "import sys; open({!r}, 'wb').write(sys.stdin.buffer.read()); sys.exit({})"

    def run(first: int, second: int) -> pipe.Ended:
        return pipe.through(
            [sys.executable, "-c", write.format(first)],
            [sys.executable, "-c", sink.format(str(out), second)],
            seen.append,
        )

    assert run(0, 0).well and out.stat().st_size == seen[-1] == 3 << 20
    assert run(3, 0).statuses == (3, 0)
    assert run(0, 4).statuses == (0, 4)
    early = pipe.through(
        [sys.executable, "-c", "import time, os\nwhile True: os.write(1, bytes(65536))"],
        [sys.executable, "-c", "import sys; sys.exit('full')"],
        seen.append,
    )
    assert not early.well and early.said[1] == "full"
    lines: list[str] = []
    ended = pipe.follow(
        [sys.executable, "-c", r"print('a 1%\ra 2%\nb'); import sys; sys.exit('why')"], lines.append
    )
    assert lines == ["a 1%", "a 2%", "b"] and ended.statuses == (1,) and ended.said == ("why",)
    with pytest.raises(LauncherError, match="could not be started"):
        pipe.follow(["/nowhere/docker"], lines.append)


# ---- what the nodes' self-checks said ----


def node(*checks: tuple[str, bool], index: str = "abc", done: int | None = None) -> list[str]:
    rows: list[dict[str, Any]] = [
        {"check": results.INDEX, "ok": True, "on": "cpu", "found": index, "limit": ""},
        *({"check": n, "ok": ok, "on": "GB10", "found": 0.3, "limit": 0.1} for n, ok in checks),
    ]
    last = {"done": len(rows) if done is None else done, "failed": 0}
    return ["chatter {", "[1]", *map(json.dumps, [*rows, last])]


def told(head: list[str], worker: list[str], /, **ended: str) -> list[str]:
    both = {"head": results.read(head), "worker": results.read(worker)}
    return results.faults(both, {"head": "", "worker": "", **ended})


def test_two_nodes_that_agree() -> None:
    good = node(("one", True), ("two", True))
    assert told(good, good) == []
    assert results.read(good).devices == ["GB10"]


def test_each_way_not_to_agree() -> None:
    good = node(("one", True), ("two", True))
    assert told(good, node(("one", True), ("two", False))) == ["worker: two (GB10): 0.3, limit 0.1"]
    assert told(good, good[:-1]) == ["worker: the self-check ended without a word, after 3 checks"]
    assert "ended by SIGSEGV" in told(good, good[:3], worker="ended by SIGSEGV")[0]
    assert "exit code 1" in told(good, good, head="ended with exit code 1")[0]
    assert told(good, node(("one", True), ("two", True), done=9)) != []
    assert told(good, node(("one", True))) == ["two was checked on the head alone"]
    other = node(("one", True), ("two", True), index="xyz")
    assert told(good, other) == [
        "the checkpoint's index differs: abc on the head, xyz on the worker"
    ]
    assert len(told([], [])) == 2


def test_what_was_skipped_is_not_proven(tmp_path: Path) -> None:
    def never(*given: Any) -> Any:
        raise AssertionError("a node was asked")

    def done(skip: str) -> bool:
        settings = settings_of(tmp_path, f"SKIP_OVERLAY_VERIFY={skip}\n")
        ctx: Any = SimpleNamespace(logs=tmp_path, settings=settings)
        return parity.done(ctx)

    parity = Parity(runtime=never, image=never, index=never)
    log = tmp_path / LOG
    assert not done("0") and not done("1")  # nothing was ever done
    said: list[str] = []
    ctx: Any = SimpleNamespace(
        logs=tmp_path,
        settings=settings_of(tmp_path, "SKIP_OVERLAY_VERIFY=1\n"),
        console=SimpleNamespace(warn=said.append),
        record=SimpleNamespace(event=lambda *words: None),
    )
    parity.do(ctx)
    assert "NOT checked on either node: EXL3's kernels, Engram's rows" in said[0]
    assert done("1") and not done("0")
    # It is said each time that nothing was checked, and never called done.
    assert parity.found(ctx) == "left out, as before"
    assert len(said) == 2 and said[1] == said[0]
    log.write_text('head: {"check": "one", "ok": true}\n')
    assert done("0") and done("1")
    assert parity.found(ctx) == "already done" and len(said) == 2


def test_the_image_or_the_checkpoint_changed_is_checked_again(tmp_path: Path) -> None:
    index = tmp_path / "index"
    seen = set()
    for layers, text in (("a", "1"), ("b", "1"), ("a", "2")):
        index.write_text(text)
        step = Parity(runtime=lambda ctx: None, image=lambda: layers, index=lambda: index)  # type: ignore  # noqa: B023
        none: Any = None
        seen.add(step.inputs(none))
        assert step.inputs(none) in seen
    assert len(seen) == 3


def test_the_self_check_of_the_overlay_speaks_as_it_is_read() -> None:
    """The names that both sides use stand in two distributions."""
    source = (ROOT / "overlay/spark_overlay/verify/checkpoint.py").read_text()
    assert f'NAME = "{results.INDEX}"' in source
    assert (ROOT / "overlay" / Path(*results.MODULE.split(".")) / "__main__.py").is_file()
