"""Engram's parts on a device, without an engine: ``python3 engram.py kernel|lookup --out R.json``.

The result is rewritten after each part; a part that fails says how and the next one is tried. With
``--device cpu`` (and TRITON_INTERPRET=1) the parts that need no CUDA run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[:1] = [str(TESTS), str(TESTS.parent / "overlay")]
if "cpu" in sys.argv:
    os.environ.setdefault("TRITON_INTERPRET", "1")

import torch  # noqa: E402  (after Triton's mode is chosen)
from torch import Tensor  # noqa: E402

from spark_overlay.engram import dequant  # noqa: E402
from spark_overlay.engram.dequant import dequantize_into  # noqa: E402
from spark_overlay.engram.reference import dequantize_rows  # noqa: E402

FP8 = torch.float8_e4m3fn
Values = dict[str, Any]
Part = Callable[[torch.device], Values]


def same_bits(found: Tensor, expected: Tensor) -> bool:
    """Bit for bit; a NaN's other bits are each device's own."""
    nan = expected.isnan()
    differ = (found.view(torch.int16) != expected.view(torch.int16)) & ~nan
    return torch.equal(found.isnan(), nan) and not bool(differ.any())


def dequantized(weights: Tensor, scales: Tensor) -> Tensor:
    out = torch.full(weights.shape, 7.0, dtype=torch.bfloat16, device=weights.device)
    dequantize_into(weights.view(FP8), scales, out)
    return out


def codes(device: torch.device) -> Values:
    """Every code under every scale, against the reference on both devices."""
    weights = torch.arange(256, dtype=torch.uint8).repeat(256, 1)
    scales = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, 8)
    found = dequantized(weights.to(device), scales.to(device))
    on_device = dequantize_rows(weights.to(device).view(FP8), scales.to(device))
    equal = same_bits(found.cpu(), dequantize_rows(weights.view(FP8), scales))
    try:
        dequantize_into(weights.to(device), scales.to(device), found)
        refused = False
    except TypeError:
        refused = True
    ok = equal and same_bits(found, on_device) and refused
    return {"ok": ok, "pairs": weights.numel(), "uint8_is_a_type_error": refused}


def ragged(device: torch.device) -> Values:
    """Any number of rows; nothing behind the last one is written."""
    generator = torch.Generator().manual_seed(0)
    wrong = []
    for rows in (1, 2, 3, 4, 5, 12, 24, 97, 1000) + ((24576,) if device.type == "cuda" else ()):
        weights = torch.randint(0, 256, (rows, 256), dtype=torch.uint8, generator=generator)
        scales = torch.randint(0, 256, (rows, 8), dtype=torch.uint8, generator=generator)
        room = torch.full((rows * 256 + 512,), 7.0, dtype=torch.bfloat16, device=device)
        out = room[: rows * 256].view(rows, 256)
        dequantize_into(weights.to(device).view(FP8), scales.to(device), out)
        right = same_bits(out.cpu(), dequantize_rows(weights.view(FP8), scales))
        if not right or not bool((room[rows * 256 :] == 7).all()):
            wrong.append(rows)
    return {"ok": not wrong, "wrong": wrong}


def compiled(_device: torch.device) -> Values:
    """What it takes on four GPUs, by this machine's Triton, and on this one."""
    script = TESTS / "rehearsal" / "engram_compiled.py"
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join([str(TESTS.parent / "overlay"), env.get("PYTHONPATH", "")])
    argv = [sys.executable, str(script)]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=120)
    if done.returncode:
        return {"ok": False, "said": done.stderr[-1500:]}
    found = json.loads(done.stdout.splitlines()[-1])
    ok = all(one["shared"] == one["spilled"] == 0 and not one["fp8"] for one in found.values())
    return {"ok": ok and all(one["registers"] <= 48 for one in found.values()), "by_sm": found}


def speed(device: torch.device) -> Values:
    """Device time of the kernel in a graph of 20 calls; bytes read and written."""
    times = {}
    for rows in (12, 288, 24576):
        weights = torch.zeros(rows, 256, dtype=torch.uint8, device=device).view(FP8)
        scales = torch.full((rows, 8), 127, dtype=torch.uint8, device=device)
        out = torch.empty(rows, 256, dtype=torch.bfloat16, device=device)
        dequantize_into(weights, scales, out)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(20):
                dequantize_into(weights, scales, out)
        us = device_seconds(graph.replay, 20) * 1e6 / 20
        gb = rows * (256 + 8 + 512) / 1e9
        times[str(rows)] = {"us": round(us, 2), "gb_s": round(gb / us * 1e6)}
    kernel = dequant._dequantize_kernel
    return {"ok": True, "by_rows": times, "variants": len(getattr(kernel, "device_caches", ()))}


def device_seconds(call: Callable[[], Any], times: int) -> float:
    """Median of ``times`` calls between events."""
    spent = []
    for _ in range(times):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        spent.append(begin.elapsed_time(end) / 1e3)
    return sorted(spent)[len(spent) // 2]


def run(parts: dict[str, Part], device: torch.device, out: Path) -> bool:
    found: dict[str, Values] = {}
    for name, part in parts.items():
        began = time.monotonic()
        try:
            values = part(device)
        except Exception as error:
            traceback.print_exc()
            values = {"ok": False, "error": f"{type(error).__name__}: {error}"[:1500]}
        values["seconds"] = round(time.monotonic() - began, 2)
        found[name] = values
        out.write_text(json.dumps(found, indent=1) + "\n")
        print("ok   " if values["ok"] else "WRONG", name, json.dumps(values), flush=True)
    return all(values["ok"] for values in found.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("kind", choices=("kernel", "lookup"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--scratch", type=Path, default=Path("/tmp"), help="for the tables")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    args = parser.parse_args()
    device = torch.device(args.device)
    on_gpu = device.type == "cuda"
    parts: dict[str, Part] = {"codes": codes, "ragged": ragged, "compiled": compiled}
    if on_gpu:
        parts["speed"] = speed
    if args.kind == "lookup":
        if not on_gpu:
            print("lookups on a stream need a GPU; tests/rehearsal/test_engram_lookup.py has more")
            return 1
        from gpu import engram_lookup

        parts = engram_lookup.parts(args.scratch)
    return 0 if run(parts, device, args.out) else 1


if __name__ == "__main__":
    sys.exit(main())
