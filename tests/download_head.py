"""A head and its hub on this machine: repositories of the real ones' form, and a download."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from local_hub import LocalHub, git_id

from launcher.console import Console
from launcher.nodes.local import LocalNode
from launcher.record import Record
from launcher.weights import hub, manifest
from launcher.weights.download import Job
from launcher.weights.hub import Hub
from launcher.weights.manifest import Entry, Manifest, Part, Role

TESTS = Path(__file__).resolve().parent
MODEL, ENGRAM = "owner/tiny-exl3", "owner/tiny-native"
INDEX = "model.safetensors.index.json"


def safetensors(names: dict[str, int], seed: int) -> bytes:
    """A file with a tensor of so many bytes for each name."""
    at, header = 0, {}
    for name, size in names.items():
        header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + random.Random(seed).randbytes(at)


def model(shards: int = 5, size: int = 60_000) -> dict[str, bytes]:
    names = [f"model-{n:05}-of-{shards:05}.safetensors" for n in range(1, shards + 1)]
    tensors = {f"layers.{n}.attn.wkv.trellis": name for n, name in enumerate(names)}
    index = {"metadata": {"total_size": size * shards}, "weight_map": tensors}
    return {
        "config.json": b'{"model_type": "deepseek_v41"}',
        INDEX: json.dumps(index).encode(),
        "tokenizer.json": b'{"tok": 1}',
        "tokenizer_config.json": b"{}",
        "chat_template.jinja": b"{{ messages }}",
        "README.md": b"not to be fetched",
        "measurement.json": b"the quantizer's",
        **{
            name: safetensors({f"layers.{n}.attn.wkv.trellis": size}, n)
            for n, name in enumerate(names)
        },
    }


def native(size: int = 50_000) -> dict[str, bytes]:
    """Four shards; the last two have tables."""
    files = [f"model-{n:05}-of-00004.safetensors" for n in range(1, 5)]
    tables = {1: files[2], 14: files[3]}
    weight_map = {"embed.weight": files[0], "norm.weight": files[1]}
    for layer, file in tables.items():
        for kind in ("weight", "scale"):
            weight_map[f"layers.{layer}.engram.embed.{kind}"] = file
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    made = {"config.json": b'{"engram_layer_ids": [1, 14]}', INDEX: json.dumps(index).encode()}
    for n, file in enumerate(files):
        held = [name for name, where in weight_map.items() if where == file]
        made[file] = safetensors(dict.fromkeys(held, size), 100 + n)
    return made


def needed(held: dict[str, bytes], role: Role) -> list[str]:
    other = {"README.md", "measurement.json"}
    if role == "engram":
        other = {f"model-0000{n}-of-00004.safetensors" for n in (1, 2)}
    return sorted(set(held) - other)


def entry(name: str, data: bytes) -> Entry:
    if name.endswith(".safetensors"):
        return Entry(name, len(data), sha256=hashlib.sha256(data).hexdigest())
    return Entry(name, len(data), git=git_id(data))


NEEDED = {"model": needed(model(), "model"), "engram": needed(native(), "engram")}
LAST = "model-00005-of-00005.safetensors"


@dataclass
class Head:
    """A head's directories, and a download into them."""

    root: Path
    hub: LocalHub
    large: int = 1_000_000_000
    out: io.StringIO = field(default_factory=io.StringIO)
    environ: dict[str, str] = field(default_factory=dict)

    def job(self, **more: Any) -> Job:
        record = self.root / "record"
        record.mkdir(exist_ok=True)
        clean = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
        environ = {
            **clean,
            "HF_ENDPOINT": self.hub.url,
            "HF_HOME": str(self.root / "hf"),
            "NO_PROXY": "127.0.0.1",
            **self.environ,
        }
        said = Record(record)
        the_hub = Hub(
            LocalNode("head"),
            TESTS.parent,
            hub.environment(environ, fast=False),
            workers=2,
            said=lambda line: said.text("download", line),
            large=self.large,
        )
        return Job(
            node=LocalNode("head"),
            hub=the_hub,
            directories={"model": self.model, "engram": self.engram},
            repos={"model": MODEL, "engram": ENGRAM},
            cache_root=self.root / "cache",
            console=Console(self.out, self.out),
            record=said,
            sleep=lambda seconds: None,
            **more,
        )

    @property
    def model(self) -> Path:
        return self.root / "model"

    @property
    def engram(self) -> Path:
        return self.root / "engram-src"

    def fill(self) -> None:
        """As a whole download leaves it, but for the manifest."""
        for folder, repo, names in (
            (self.model, MODEL, NEEDED["model"]),
            (self.engram, ENGRAM, NEEDED["engram"]),
        ):
            folder.mkdir(exist_ok=True)
            for name in names:
                (folder / name).write_bytes(self.hub.repos[repo][name])

    def settle(self, files: bool = True) -> Manifest:
        """As a whole download leaves it, without one."""
        if files:
            self.fill()
        parts = []
        roles: tuple[tuple[Role, str], ...] = (("model", MODEL), ("engram", ENGRAM))
        for role, repo in roles:
            held = self.hub.repos[repo]
            entries = tuple(entry(name, held[name]) for name in needed(held, role))
            parts.append(Part(role, repo, self.hub.commit(repo), entries))
        made = Manifest(tuple(parts))
        manifest.save(self.root / "cache" / "manifest.json", made)
        return made

    def differs(self) -> list[str]:
        """Files that are not what the hub has, or not there, or more than is needed."""
        found = []
        for folder, repo, names in (
            (self.model, MODEL, NEEDED["model"]),
            (self.engram, ENGRAM, NEEDED["engram"]),
        ):
            there = {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}
            found += [name for name in names if there.get(name) != self.hub.repos[repo][name]]
            found += sorted(set(there) - set(names))
        return found

    @property
    def said(self) -> str:
        return self.out.getvalue()


@contextlib.contextmanager
def one_head(root: Path) -> Iterator[Head]:
    """A head below ``root`` that has nothing yet, and its hub."""
    with LocalHub({MODEL: model(), ENGRAM: native()}) as hub:
        yield Head(root, hub)


def fetchers() -> list[psutil.Process]:
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "launcher.weights.fetch" in process.cmdline():
                found.append(process)
    return found
