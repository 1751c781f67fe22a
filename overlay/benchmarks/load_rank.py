"""One rank of load.py: allocates its share, loads it, checks it, and prints what it took."""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parents[2] / "tests"))
sys.path.insert(1, str(Path(__file__).resolve().parents[2] / "overlay"))

import load_set
import torch
from page_cache import resident
from torch import nn

from spark_overlay.exl3.loading import PackedLoader
from spark_overlay.exl3.modules import Exl3Facts, scan_modules
from spark_overlay.exl3.packed import PackedStack, Slab
from spark_overlay.exl3.shares import share, share_bytes
from spark_overlay.headers import CheckpointHeaders
from spark_overlay.loading.plan import PAGE, blocks
from spark_overlay.loading.prepared import find, origin
from spark_overlay.loading.stream import SLOTS, stream
from spark_overlay.memory.pagecache import drop


class Watch(threading.Thread):
    """The most anonymous memory of this process, and the most of the shards in the page cache."""

    def __init__(self, files: list[Path]) -> None:
        super().__init__(daemon=True)
        self.files, self.over = files, threading.Event()
        self.anon = self.cached = 0

    def run(self) -> None:
        looks = 0
        while not self.over.wait(0.02):
            self.anon = max(self.anon, anonymous())
            if looks % 25 == 0:
                self.cached = max(self.cached, sum(map(resident, self.files)) * PAGE)
            looks += 1
        self.anon = max(self.anon, anonymous())
        self.cached = max(self.cached, sum(map(resident, self.files)) * PAGE)


def anonymous() -> int:
    """Bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise SystemExit("/proc/self/status has no RssAnon")


def build(modules: dict[str, Exl3Facts], device: torch.device) -> nn.Module:
    """The matrices as a model holds them: a slab a layer, a stack a projection."""
    groups: dict[str, dict[str, list[Exl3Facts]]] = {}
    for key, facts in modules.items():
        groups.setdefault(key.split(".ffn")[0], {}).setdefault(key[-2:], []).append(facts)
    model = nn.Module()
    stacks = nn.ModuleList()
    with device:
        for projections in groups.values():
            parts = {
                name: share(members[0], load_set.RANK, load_set.RANKS)
                for name, members in projections.items()
            }
            sizes = (share_bytes(f, parts[name]) for name, fs in projections.items() for f in fs)
            slab = Slab(sum(sizes))
            for name, members in projections.items():
                part = parts[name]
                assert part is not None
                stacks.append(PackedStack(members, part, slab))
    model.stacks = stacks
    for parameter in stacks.parameters():
        parameter.data.zero_()  # its memory is there before the loading, as a GPU's is
    return model


def right(model: nn.Module, loader: PackedLoader) -> bool:
    """Every matrix against its bytes in the file, read anew, cut by torch."""

    def same(stack: PackedStack, index: int, key: str) -> bool:
        for leaf in ("trellis", "suh", "svh"):
            header = loader.tensors[f"{key}.{leaf}"]
            data = bytearray(header.nbytes)
            with header.file.open("rb", buffering=0) as shard:
                shard.seek(header.begin)
                if shard.readinto(data) != len(data):
                    return False
            whole = torch.frombuffer(data, dtype=torch.int16)
            expected = whole.view(header.shape)[getattr(stack.cut, leaf)]
            found = getattr(stack, leaf).data[index].view(torch.int16).cpu()
            if not torch.equal(found, expected):
                return False
        return True

    stacks = [stack for stack in model.modules() if isinstance(stack, PackedStack)]
    every = [(stack, index, key) for stack in stacks for index, key in enumerate(stack.keys)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        good = all(pool.map(same, *zip(*every, strict=True)))
    for file in {header.file for header in loader.tensors.values()}:
        drop(file)  # or the next run would find them cached
    return good


def main() -> None:
    options = argparse.ArgumentParser()
    add = options.add_argument
    add("--folder", type=Path, required=True)
    add("--device", default="cpu")
    add("--prepared", type=Path, help="directory of the rank's own file")
    add("--buffered", action="store_true")
    add("--unchecked", action="store_true")
    add("--threads", type=int)
    add("--block", type=int, help="MiB")
    asked = options.parse_args()
    torch.set_num_threads(1)
    device = torch.device(asked.device)
    if device.type == "cuda":
        torch.zeros(1, device=device)
    more: dict[str, Any] = {"direct": not asked.buffered}
    if asked.threads is not None:
        more |= {"threads": asked.threads, "slots": asked.threads + 2}
    if asked.block is not None:
        more["size"] = asked.block << 20
    tensors = CheckpointHeaders.scan(asked.folder, whole=True).tensors
    model = build(scan_modules(tensors), device)
    loader = PackedLoader(model, tensors)
    files = sorted(asked.folder.glob("*.safetensors"))
    watched = sorted((asked.prepared or asked.folder).glob("*.safetensors"))
    before, watch = anonymous(), Watch(watched)
    watch.start()
    began, cpu = time.perf_counter(), os.times()
    own = None
    if asked.prepared is not None:
        own = find(asked.prepared, origin(asked.folder, load_set.RANK, load_set.RANKS))
        assert own is not None
    wanted = loader.wanted(files, own)
    size = more.get("size", 8 << 20)
    read = sum(block.length for block in blocks(wanted, size))
    kept = sum(one.left for one in wanted)
    for _ in stream(wanted, device, **more):
        pass
    loader.finish()
    if device.type == "cuda":
        torch.cuda.synchronize()
    seconds, after = time.perf_counter() - began, os.times()
    watch.over.set()
    watch.join()
    slots = more.get("slots", SLOTS)
    print(
        json.dumps(
            {
                "seconds": seconds,
                "cpu": after.user + after.system - cpu.user - cpu.system,
                "read": read,
                "kept": kept,
                "staging": slots * size,
                "before": before,
                "anon": watch.anon,
                "cached": watch.cached,
                "pinned": device.type == "cuda",
                "right": asked.unchecked or right(model, loader),
            }
        )
    )


if __name__ == "__main__":
    main()
