"""The serving image of the rig: Python and the stub, as a tar that `docker load` takes.

It is written by hand, without a daemon: the same tar gives both nodes the same image, ids included.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
NAME = "spark-rig/serving:stub"
PYTHON = Path("/usr/bin/python3")
PACKAGES = "usr/lib/python3/dist-packages"
#: Of the overlay, as they are; what ``prepare`` needs is among them.
OURS = (
    "stacks.py", "serving/secret_env.py", "engram/meter.py", "engram/names.py", "engram/writing.py",
    "collector.py", "headers.py",
    *(f"exl3/{name}.py" for name in ("layout", "modules", "names", "shares")),
    *(
        f"loading/{name}.py"
        for name in ("__init__", "cuts", "journal", "plan", "prepare", "prepared", "reader")
    ),
)  # fmt: skip
TOOLS = ("sh", "cat", "env", "ls", "sleep", "kill", "touch", "true", "id")
LEFT_OUT = {
    "test", "tests", "idlelib", "tkinter", "lib2to3", "turtledemo", "ensurepip", "distutils",
    "pydoc_data", "unittest", "sqlite3", "curses", "dbm", "xmlrpc", "wsgiref",
}  # fmt: skip
MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}


def make(cache: Path) -> Path:
    """The image's tar in ``cache``, made anew when what goes into it has changed."""
    entries = dict(contents())
    state = [[name, str(path), *_stamp(path)] for name, path in sorted(entries.items())]
    key = hashlib.sha256(json.dumps([state, Path(__file__).read_text()]).encode()).hexdigest()[:16]
    target = cache / f"stub-{key}.tar"
    if not target.exists():
        cache.mkdir(parents=True, exist_ok=True)
        for old in cache.glob("stub-*.tar"):
            old.unlink()
        part = cache / f"part-{os.getpid()}"
        part.write_bytes(_image(entries))
        part.rename(target)
    return target


def contents() -> Iterator[tuple[str, Path]]:
    """Path in the image and the file of this machine that is put there."""
    python = PYTHON.resolve()
    version = python.name
    library = Path("/usr/lib") / version
    yield f"usr/bin/{version}", python
    needed = {python}
    for path in sorted(library.rglob("*")):
        inside = path.relative_to(library)
        left_out = LEFT_OUT & set(inside.parts) or inside.parts[0].startswith("config-")
        if path.is_file() and not left_out:
            yield f"usr/lib/{version}/{inside}", path.resolve()
            if path.suffix == ".so":
                needed.add(path)
    for tool in TOOLS:
        for path in (Path("/usr/bin") / tool, Path("/bin") / tool):
            if path.exists():
                yield f"usr/bin/{tool}", path.resolve()
                needed.add(path.resolve())
                break
    for path in sorted(_libraries(needed)):
        yield str(_merged(path)), path.resolve()
    stub = HERE / "image"
    for path in sorted(stub.rglob("*.py")):
        yield f"{PACKAGES}/{path.relative_to(stub)}", path
    yield f"{PACKAGES}/official.py", ROOT / "tests" / "official.py"
    for real in OURS:
        yield f"{PACKAGES}/spark_overlay/{real}", ROOT / "overlay" / "spark_overlay" / real


def _libraries(programs: set[Path]) -> set[Path]:
    listed = subprocess.run(
        ["ldd", *map(str, sorted(programs))], capture_output=True, text=True, check=False
    ).stdout
    words = [word for line in listed.splitlines() if "(0x" in line for word in line.split()]
    return {Path(word) for word in words if word.startswith("/")}


def _merged(path: Path) -> Path:
    """Without the leading slash, /lib as what it is in the image: a link to usr/lib."""
    inside = path.relative_to("/")
    return inside if inside.parts[0] == "usr" else Path("usr") / inside


def _stamp(path: Path) -> tuple[int, int]:
    info = path.stat()
    return info.st_size, info.st_mtime_ns


def _image(entries: dict[str, Path]) -> bytes:
    layer = _layer(entries)
    digest = hashlib.sha256(layer).hexdigest()
    config = json.dumps(
        {
            "architecture": MACHINES.get(platform.machine(), platform.machine()),
            "os": "linux",
            "created": "2026-01-01T00:00:00Z",
            "config": {"Env": ["PATH=/usr/bin", "PYTHONUNBUFFERED=1"], "WorkingDir": "/"},
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
            "history": [{"created": "2026-01-01T00:00:00Z", "created_by": "tests/rig"}],
        }
    ).encode()
    name = f"{hashlib.sha256(config).hexdigest()}.json"
    manifest = [{"Config": name, "RepoTags": [NAME], "Layers": [f"{digest}/layer.tar"]}]
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w") as tar:
        for path, data in (
            (f"{digest}/layer.tar", layer),
            (name, config),
            ("manifest.json", json.dumps(manifest).encode()),
        ):
            info = tarfile.TarInfo(path)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return whole.getvalue()


def _layer(entries: dict[str, Path]) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for folder, mode in (("usr", 0o755), ("tmp", 0o1777), ("root", 0o700), ("etc", 0o755)):
            info = tarfile.TarInfo(folder)
            info.type, info.mode = tarfile.DIRTYPE, mode
            tar.addfile(info)
        links = {
            "bin": "usr/bin",
            "lib": "usr/lib",
            "lib64": "usr/lib64",
            "usr/bin/python3": PYTHON.resolve().name,
        }
        for name, target in links.items():
            info = tarfile.TarInfo(name)
            info.type, info.linkname = tarfile.SYMTYPE, target
            tar.addfile(info)
        passwd = b"root:x:0:0:root:/root:/bin/sh\n"
        info = tarfile.TarInfo("etc/passwd")
        info.size = len(passwd)
        tar.addfile(info, io.BytesIO(passwd))
        for name, path in sorted(entries.items()):
            data = path.read_bytes()
            info = tarfile.TarInfo(name)
            info.size = len(data)
            info.mode = 0o755 if os.access(path, os.X_OK) else 0o644
            info.mtime = int(path.stat().st_mtime)  # or the .pyc beside it would not hold
            tar.addfile(info, io.BytesIO(data))
    return made.getvalue()
