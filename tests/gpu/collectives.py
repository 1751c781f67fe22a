"""Latency and pinned memory of the collectives of decode steps, one process for each rank.

``python3 collectives.py --rank R --world N --store FILE --out R.json --device cuda|cpu``. NCCL's
settings are the caller's environment; ``measure`` starts the ranks, each with one GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROWS, WIDTH = range(1, 9), 5120
TIMES = {"cuda": 400, "cpu": 60}
WARM = 20
#: In one graph: enough that its launch does not count.
CAPTURED = 50


class CollectivesFailed(RuntimeError):
    """A rank ended without its numbers."""


def measure(
    name: str, world: int, scratch: Path, device: str, more: Mapping[str, str], limit: float
) -> list[dict[str, Any]]:
    """Each rank's numbers under the settings ``more``. Raises CollectivesFailed."""
    store = scratch / f"collectives-{name}.store"
    store.unlink(missing_ok=True)
    ranks, logs = [], []
    for rank in range(world):
        out, log = (scratch / f"collectives-{name}-{rank}.{kind}" for kind in ("json", "log"))
        out.unlink(missing_ok=True)
        argv = [sys.executable, __file__, "--rank", str(rank), "--world", str(world)]
        argv += ["--store", str(store), "--out", str(out), "--device", device]
        kept = {k: v for k, v in os.environ.items() if not k.startswith("NCCL_")}
        own = {"CUDA_VISIBLE_DEVICES": str(rank), "OMP_NUM_THREADS": "1"}
        own["GLOO_SOCKET_IFNAME"] = "lo"
        with log.open("wb") as file:
            ranks.append(
                subprocess.Popen(
                    argv, stdout=file, stderr=subprocess.STDOUT, env={**kept, **own, **more}
                )
            )
        logs.append((out, log))
    deadline = time.monotonic() + limit
    try:
        ended: list[Any] = [r.wait(max(0.1, deadline - time.monotonic())) for r in ranks]
    except subprocess.TimeoutExpired:
        ended = [f"not done after {limit:.0f} s"]
    finally:
        for process in ranks:
            if process.poll() is None:
                process.kill()
                process.wait()
    if any(ended):
        ends = [log.read_text(errors="replace")[-1500:] for _, log in logs]
        raise CollectivesFailed(f"collectives {name} ended with {ended}:\n" + "\n--\n".join(ends))
    return [json.loads(out.read_text()) for out, _ in logs]


def memory(device: str) -> dict[str, int]:
    """Bytes: what the driver gave away of this GPU, what this process holds of the host."""
    found = {"gpu_used": 0}
    if device == "cuda":
        import torch

        free, total = torch.cuda.mem_get_info()
        found["gpu_used"] = total - free
    for line in Path("/proc/self/status").read_text().splitlines():
        key, _, value = line.partition(":")
        if key in ("VmLck", "VmPin", "RssAnon", "RssShmem", "RssFile"):
            found[key] = int(value.split()[0]) << 10
    shared = Path("/dev/shm")
    files = shared.glob("nccl-*") if shared.is_dir() else ()
    found["nccl_shm"] = sum(p.stat().st_size for p in files)
    return found


def quantiles(times: list[float]) -> list[float]:
    """Median and p90 in microseconds of seconds."""
    ordered = sorted(times)
    return [round(1e6 * ordered[int(len(ordered) * q)], 2) for q in (0.5, 0.9)]


def one(call: Callable[[], Any], device: str, times: int) -> list[float]:
    """Seconds of each call, to the end of its work."""
    import torch

    sync = torch.cuda.synchronize if device == "cuda" else lambda: None
    found = []
    for turn in range(WARM + times):
        began = time.perf_counter()
        call()
        sync()
        if turn >= WARM:
            found.append(time.perf_counter() - began)
    return found


def captured(call: Callable[[], Any]) -> list[float]:
    """Seconds of one call among ``CAPTURED`` in a CUDA graph, by events; each replay's."""
    import torch

    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for _ in range(CAPTURED):
            call()
    found = []
    for turn in range(30):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in "12")
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        if turn >= 5:
            found.append(begin.elapsed_time(end) / 1e3 / CAPTURED)
    return found


def rank(args: argparse.Namespace) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    cuda = args.device == "cuda"
    if cuda:
        torch.cuda.set_device(0)
        torch.ones(1, device="cuda")
    before = memory(args.device)
    dist.init_process_group(
        "nccl" if cuda else "gloo", init_method=f"file://{args.store}", rank=args.rank,
        world_size=args.world, **({"device_id": torch.device("cuda:0")} if cuda else {}),
    )  # fmt: skip
    table: dict[str, dict[str, Any]] = {}
    for rows in ROWS:
        mine = torch.full((rows, WIDTH), args.rank + 1.0, dtype=torch.bfloat16, device=args.device)
        whole = torch.empty(args.world * rows, WIDTH, dtype=torch.bfloat16, device=args.device)
        check(dist, mine, whole, args.world)
        # Sums would grow without bound; zeros take as long.
        mine.zero_()
        calls: dict[str, Callable[[], Any]] = {
            "all_reduce": lambda mine=mine: dist.all_reduce(mine),
            "all_gather": lambda mine=mine, whole=whole: dist.all_gather_into_tensor(whole, mine),
        }
        for name, call in calls.items():
            found = {"eager_us": quantiles(one(call, args.device, TIMES[args.device]))}
            if cuda:
                found["graph_us"] = quantiles(captured(call))
            table.setdefault(name, {})[str(rows)] = found
    after = memory(args.device)
    grown = {key: after[key] - before.get(key, 0) for key in after}
    version = ".".join(map(str, torch.cuda.nccl.version())) if cuda else "gloo"
    dist.barrier()
    dist.destroy_process_group()
    return {"table": table, "grown_bytes": grown, "library": version}


def check(dist: Any, mine: Any, whole: Any, world: int) -> None:
    """Both collectives once for their answer. Raises ValueError where it is wrong."""
    dist.all_gather_into_tensor(whole, mine)
    rows = mine.shape[0]
    got = [float(whole[r * rows, 0]) for r in range(world)]
    summed = mine.clone()
    dist.all_reduce(summed)
    if got != [r + 1.0 for r in range(world)] or float(summed[0, 0]) != world * (world + 1) / 2:
        raise ValueError(f"gathered {got}, summed {float(summed[0, 0])} over {world} ranks")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world", type=int, required=True)
    parser.add_argument("--store", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    args = parser.parse_args()
    args.out.write_text(json.dumps(rank(args)))


if __name__ == "__main__":
    main()
