"""Make the rehearsal checkpoint: ``python -m spark_overlay.rehearsal.make --out DIR``.

DIR/checkpoint/   the model directory: three EXL3 shards, configs, tokenizer
DIR/engram-src/   the native Engram tables, in shards named 47 and 48 of 48
DIR/manifest.json seed, variant, and size and SHA-256 of every file; written last

The same seed gives the same bytes on every machine. Both directories are built beside their place
and renamed into it; without a manifest, what lies there is unfinished.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import config, engram_tables, shape, tensors, tokenizer
from .constructed import constructed
from .learned import taught
from .shards import write_json, write_sharded

#: Raised by every change that gives other bytes for the same seed.
GENERATOR = 1
SHARDS = 3
VARIANTS = ("standard", "taught", "constructed")
PARTS = ("checkpoint", "engram-src")
MANIFEST = "manifest.json"
_BUILDING = ".making"


def make(out: Path, seed: int = 0, variant: str = "standard") -> dict[str, Any]:
    """Make the files under ``out`` and return the manifest.

    ``variant`` is "standard", "taught" (learned.py) or "constructed" (constructed.py). An earlier
    rehearsal checkpoint in ``out`` is replaced; anything else of those names raises
    FileExistsError.
    """
    if variant not in VARIANTS:
        raise ValueError(f"variant {variant!r} is none of {', '.join(VARIANTS)}")
    shape.check_ranks(2)
    for part in PARTS:
        _refuse_foreign(out / part)
    building = out / _BUILDING
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir(parents=True)
    try:
        _build(building, seed, variant)
        manifest = {
            **_origin(seed, variant),
            "files": {name: _digest(building / name) for name in _files(building)},
        }
        write_json(building / MANIFEST, manifest)
        _put_in_place(building, out)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return manifest


def _build(root: Path, seed: int, variant: str) -> None:
    vocab, _ = tokenizer.vocabulary()
    rows_of = engram_tables.table_rows()
    text = shape.text_config(tokenizer.compressed_vocab_size(), rows_of, vocab[tokenizer.NOISE])
    packed = [(linear, tensors.packed(linear, seed)) for linear in shape.linears()]
    plain = [tensors.native(native, seed) for native in shape.natives()]
    modules = [*plain, *(module for _, module in packed)]
    if variant == "taught":
        modules = taught(modules, seed)
    elif variant == "constructed":
        everything = {name: raw for module in modules for name, raw in module.items()}
        changed = constructed(everything, vocab[tokenizer.NOISE])
        modules = [{name: changed[name] for name in module} for module in modules]

    checkpoint, engram = (root / part for part in PARTS)
    checkpoint.mkdir()
    engram.mkdir()
    origin = _origin(seed, variant)
    files = {
        "config.json": config.model_config(text, vocab, config.QUANTIZATION, origin),
        "quantization_config.json": config.quantization_file(packed),
        "generation_config.json": config.generation_config(),
        "tokenizer.json": tokenizer.tokenizer_json(),
        "tokenizer_config.json": tokenizer.tokenizer_config(text["max_position_embeddings"]),
    }
    for name, value in files.items():
        write_json(checkpoint / name, value)
    write_sharded(checkpoint, modules, SHARDS)
    native = config.model_config(text, vocab, config.NATIVE_QUANTIZATION, origin)
    engram_tables.write_tables(engram, rows_of, native, seed)


def _put_in_place(building: Path, out: Path) -> None:
    # The old set is gone from here on: no manifest may vouch for a mixture of old and new.
    (out / MANIFEST).unlink(missing_ok=True)
    for part in PARTS:
        if (out / part).exists():
            (out / part).rename(building / f"old-{part}")
        (building / part).rename(out / part)
    (building / MANIFEST).rename(out / MANIFEST)


def _origin(seed: int, variant: str) -> dict[str, Any]:
    return {"generator": GENERATOR, "seed": seed, "variant": variant}


def _refuse_foreign(path: Path) -> None:
    """Raise FileExistsError if ``path`` holds anything but a rehearsal checkpoint."""
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return
    try:
        found = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        found = None
    if not isinstance(found, dict) or config.MARK not in found:
        raise FileExistsError(
            f"{path} holds something that is no rehearsal checkpoint. "
            "Move it away, or give another --out"
        )


def _files(root: Path) -> list[str]:
    return sorted(str(p.relative_to(root)) for p in root.rglob("*") if p.is_file())


def _digest(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
    return {"size": path.stat().st_size, "sha256": digest.hexdigest()}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m spark_overlay.rehearsal.make",
        description="Make the rehearsal checkpoint: a tiny EXL3 DeepSeek V4.1, from a seed.",
    )
    parser.add_argument("--out", type=Path, required=True, help="directory that holds the result")
    parser.add_argument("--seed", type=int, default=0, help="same seed, same bytes (default 0)")
    parser.add_argument(
        "--variant",
        choices=VARIANTS,
        default="standard",
        help="standard: from the seed alone; taught: it knows its lessons; "
        "constructed: its draft is always right",
    )
    args = parser.parse_args(argv)
    started = time.monotonic()
    try:
        manifest = make(args.out, args.seed, args.variant)
    except (OSError, ValueError) as error:
        print(f"rehearsal checkpoint not made: {error}", file=sys.stderr)
        return 1
    size = sum(entry["size"] for entry in manifest["files"].values())
    seconds = time.monotonic() - started
    print(
        f"{args.out}: {args.variant} rehearsal checkpoint, seed {args.seed}, "
        f"{len(manifest['files'])} files, {size / 1e6:.1f} MB, made in {seconds:.1f} s"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
