"""``python -m spark_overlay.verify [--built ARCH …] [--model FOLDER] [--device cpu|cuda]``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from spark_overlay.verify import attention, built, checkpoint, engram, exl3
from spark_overlay.verify.report import Check, report


def checks(given: argparse.Namespace) -> Iterator[Check]:
    if given.model is not None:
        yield from checkpoint.checks(given.model)
    if given.built is not None:
        yield from built.checks(tuple(given.built))
    device = torch.device(given.device)
    on = "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device)
    for module in (exl3, engram, attention):
        yield from module.checks(device, on)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser("spark_overlay.verify", description="the overlay's self-check")
    present = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=present, help="default: the GPU where there is one")
    parser.add_argument("--model", type=Path, help="a checkpoint, whose index is hashed")
    parser.add_argument(
        "--built",
        nargs="*",
        metavar="ARCH",
        help="also that the native libraries are there, EXL3's with code for ARCH (121a)",
    )
    return report(checks(parser.parse_args(argv)), lambda line: print(line, flush=True))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
