"""A stand-in for pip in a base image of the rig: the command lines of docker/Dockerfile, no other.

It fetches nothing. ``wheel`` writes down which files it was given; ``install`` puts a wheel's list
into /opt/installed. A requirement that names "nowhere" is not found.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

INSTALLED = Path("/opt/installed")


def fail(text: str) -> None:
    print(f"ERROR: {text}", file=sys.stderr)
    sys.exit(1)


def wheel(asked: argparse.Namespace) -> None:
    if not os.environ.get("CUDA_HOME") or not os.environ.get("SPARK_CUDA_ARCH"):
        fail("no CUDA_HOME, or no SPARK_CUDA_ARCH")
    source = Path(asked.source)
    for needed in ("setup.py", "csrc/build_cuda.py", "spark_overlay/verify/__main__.py"):
        if not (source / needed).is_file():
            fail(f"{source / needed} is not there")
    listed = sorted(str(p.relative_to(source)) for p in source.rglob("*") if p.is_file())
    folder = Path(asked.wheel_dir)
    folder.mkdir(parents=True)
    told = {"files": listed, "arch": os.environ["SPARK_CUDA_ARCH"]}
    (folder / "spark_overlay-0-py3-none-any.whl").write_text(json.dumps(told))


def install(asked: argparse.Namespace) -> None:
    for name in asked.requirements:
        for line in Path(name).read_text().splitlines():
            if "nowhere" in line:
                fail(f"No matching distribution found for {line}")
    for name in asked.wheels:
        INSTALLED.mkdir(parents=True, exist_ok=True)
        (INSTALLED / "overlay.json").write_text(Path(name).read_text())


def main() -> None:
    parser = argparse.ArgumentParser("pip")
    verbs = parser.add_subparsers(required=True)
    one = verbs.add_parser("wheel")
    one.add_argument("--no-deps", action="store_true", required=True)
    one.add_argument("--no-build-isolation", action="store_true", required=True)
    one.add_argument("--wheel-dir", required=True)
    one.add_argument("source")
    one.set_defaults(do=wheel)
    other = verbs.add_parser("install")
    other.add_argument("--no-deps", action="store_true")
    other.add_argument("--target")
    other.add_argument("-r", dest="requirements", action="append", default=[])
    other.add_argument("wheels", nargs="*")
    other.set_defaults(do=install)
    asked = parser.parse_args()
    asked.do(asked)


main()
