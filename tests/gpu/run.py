#!/usr/bin/env python3
"""Run the checks of a GPU host: ``python3 tests/gpu/run.py --out RESULT.json [NAME…]``.

Without names all checks run, group by group; with ``--list`` they are only listed with their cost.
A line is printed for each, and the result file is rewritten after each: what a limit cuts off is
run by calling again with the same file. ``--again`` runs what already stands there, too.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    sys.path.insert(1, str(Path(__file__).resolve().parents[2] / "overlay"))

from gpu import engines, results
from gpu.bench import Bench, Check, ours
from gpu.checks import CHECKS, import_oracle
from gpu.engines import ENGINES
from gpu.shape import SHAPES

#: Seconds that an engine which never ends leaves for what the others answered.
JUDGING = 15
PACKAGES = ("vllm", "torch", "triton", "tilelang", "transformers", "numpy")


def chosen(names: Sequence[str], done: Iterable[str]) -> list[Check]:
    """The named checks (none: all) that do not stand yet. Raises ValueError for an unknown name."""
    known = [check.name for check in CHECKS]
    unknown = sorted(set(names) - set(known))
    if unknown:
        raise ValueError(f"no check is named {', '.join(unknown)}; there are {', '.join(known)}")
    stand = set(done)
    return [c for c in CHECKS if (not names or c.name in names) and c.name not in stand]


def asked(checks: Iterable[Check]) -> list[str]:
    """The engines they need, each once, in the order of ENGINES."""
    wanted = {engine for check in checks for engine in check.asks}
    return [name for name in ENGINES if name in wanted]


def listing() -> str:
    lines = [f"{'check':16} {'judging':>8}  asks (engine: seconds, seconds with nothing compiled)"]
    for check in CHECKS:
        needs = ", ".join(
            f"{name}: {ENGINES[name].seconds}, {ENGINES[name].cold}" for name in check.asks
        )
        lines.append(f"{check.name:16} {check.seconds:>6} s  {needs}\n{'':26} {check.what}")
    judging = sum(check.seconds for check in CHECKS)
    once = max(engine.seconds for engine in ENGINES.values())
    cold = max(engine.cold for engine in ENGINES.values())
    lines.append(
        f"all of them, engines at once: about {judging + once} s, with nothing compiled "
        f"{judging + cold} s; before that 25 s to unpack and 15 s to make both models"
    )
    return "\n".join(lines)


def begin(path: Path, host: results.Result, again: bool) -> results.Result:
    """The result to go on with: what stands in ``path`` if it is of this host and commit."""
    if again or not path.is_file():
        return host
    found = results.read(path)
    if not found.same_host(host):
        raise results.ResultError(
            f"{path} is of {found.device}, commit {found.commit}; this is {host.device}, commit "
            f"{host.commit}: give another --out, or --again to replace it"
        )
    return found


def host(commit: str, device: str) -> results.Result:
    import torch

    name, driver = f"cpu ({os.cpu_count()} cores)", "none"
    if device != "cpu":
        name = torch.cuda.get_device_name()
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True).stdout.strip() or "unknown"
    versions = {"python": sys.version.split()[0], "cuda": str(torch.version.cuda)}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "absent"
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return results.Result(now, name, driver, versions, commit)


def commit_here() -> str:
    argv = ["git", "-C", str(engines.TESTS), "describe", "--always", "--dirty", "--abbrev=12"]
    done = subprocess.run(argv, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def roomy(needed: int = 24 << 30) -> Path:
    """A place for models and tapes: in memory where that is large enough."""
    memory = Path("/dev/shm")
    enough = memory.is_dir() and shutil.disk_usage(memory).free >= needed
    return memory if enough else Path(tempfile.gettempdir())


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="checks to run (default: all)")
    parser.add_argument("--list", action="store_true", help="list checks and costs, run nothing")
    parser.add_argument("--out", type=Path, default=Path("gpu-result.json"))
    parser.add_argument("--again", action="store_true", help="replace what stands in --out")
    parser.add_argument("--commit", help="where git cannot say it")
    parser.add_argument("--at-once", type=int, default=4, help="engines beside each other")
    parser.add_argument("--limit", type=float, default=540, help="seconds for all of it")
    parser.add_argument("--scratch", type=Path, help="models, tapes and logs (default: in memory)")
    parser.add_argument("--keep-logs", type=Path, help="copy the engines' logs there")
    parser.add_argument("--shape", choices=tuple(SHAPES), default="real")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    args = parser.parse_args()
    if args.list:
        print(listing())
        return 0
    began = time.monotonic()
    result = begin(args.out, host(args.commit or commit_here(), args.device), args.again)
    before = result.seconds
    todo = chosen(args.names, result.done())
    scratch = args.scratch or roomy() / "spark-gpu-checks"
    scratch.mkdir(parents=True, exist_ok=True)

    def save() -> None:
        result.seconds = round(before + time.monotonic() - began, 1)
        result.write(args.out)

    def left() -> float:
        return args.limit - (time.monotonic() - began)

    print(f"{result.device}, driver {result.driver}, vLLM {result.versions['vllm']}; "
          f"{len(todo)} checks", flush=True)  # fmt: skip
    failed = work(todo, args, scratch, result, save, left)
    if args.keep_logs:
        args.keep_logs.mkdir(parents=True, exist_ok=True)
        for log in scratch.glob("*.log"):
            shutil.copy(log, args.keep_logs)
    save()
    wrong = [row["name"] for row in result.rows if not row["ok"]]
    open_ones = [c.name for c in chosen(args.names, result.done())]
    print(f"{len(result.rows)} rows in {args.out}, {result.seconds:.0f} s; wrong: "
          f"{', '.join(wrong) or 'none'}; not run: {', '.join(open_ones) or 'none'}")  # fmt: skip
    return 1 if wrong or failed or open_ones else 0


def work(
    todo: list[Check], args: Any, scratch: Path, result: results.Result, save: Any, left: Any
) -> bool:
    """Engines one after the other (or some at once); each check as soon as its engines answered."""
    from gpu import model

    import_oracle()
    import torch

    device = torch.device(args.device)
    models = {}
    for kind in sorted({ENGINES[name].kind for name in asked(todo)}):
        models[kind] = scratch / f"{args.shape}-{kind}"
        started = time.monotonic()
        size = model.make(models[kind], model.text_of(args.shape, kind), kind, 0, device)
        print(f"model {kind}: {size / 1e9:.2f} GB, {time.monotonic() - started:.0f} s", flush=True)
    if args.device != "cpu":
        torch.cuda.empty_cache()
    bench = Bench(SHAPES[args.shape], models, scratch, args.device)
    # What asks no engine first: it measures, too, and wants the GPU for itself.
    for check in (c for c in todo if not c.asks):
        judge(check, bench, result)
        save()
    failed = native_failed(asked(todo)) or kernels_failed(asked(todo), args.device)
    gpus = 0 if args.device == "cpu" else torch.cuda.device_count()
    with ThreadPoolExecutor(args.at_once) as pool:
        running = {
            pool.submit(
                lambda name, place: engines.run(
                    name, model.text_of(args.shape, ENGINES[name].kind),
                    models[ENGINES[name].kind], scratch,
                    cpu=args.device == "cpu", limit=max(1.0, left() - JUDGING),
                    gpu=place % gpus if gpus > 1 else None,
                ), name, place,
            ): name
            for place, name in enumerate(asked(todo))
        }  # fmt: skip
        for future in as_completed(running):
            name = running[future]
            try:
                bench.answers[name] = future.result()
            except engines.EngineFailed as error:
                print(error, flush=True)
                failed = True
                continue
            whole = bench.answers[name]["seconds"]["whole"]
            print(f"engine {name}: answered after {whole:.0f} s", flush=True)
            for check in todo:
                ready = all(engine in bench.answers for engine in check.asks)
                if ready and check.name not in result.done() and left() > 0:
                    judge(check, bench, result)
                    save()
    return failed


def native_failed(names: Iterable[str]) -> bool:
    """Build the native row store where an engine reads with it and it does not load yet."""
    from spark_overlay.engram import native
    from spark_overlay.engram.layout import EngramError

    from _native import build, installed  # isort: skip

    if not any(ENGINES[name].engram for name in names):
        return False
    try:
        if installed(Path(tempfile.mkdtemp())) != native.LIBRARY:
            build(native.LIBRARY)
    except EngramError as error:
        print(error, flush=True)
        return True
    return False


def kernels_failed(names: Iterable[str], device: str) -> bool:
    """Build EXL3's kernels for this GPU where an engine needs them and they do not load yet."""
    from spark_overlay.exl3.cuda import library

    sys.path.insert(1, str(engines.OVERLAY / "csrc"))
    import build_cuda

    packed = any(ENGINES[name].kind in ("exl3", "draft") for name in names)
    if device == "cpu" or not packed or not ours():
        return False
    try:
        library.load()
    except library.Exl3CudaError:
        try:
            started = time.monotonic()
            build_cuda.build(Path(os.environ.get(library.OVERRIDE) or library.LIBRARY))
            print(f"EXL3's kernels: built in {time.monotonic() - started:.0f} s", flush=True)
        except build_cuda.BuildError as error:
            print(error, flush=True)
            return True
    return False


def judge(check: Check, bench: Bench, result: results.Result) -> None:
    started = time.monotonic()
    try:
        ok, values = check.judge(bench)
    except Exception as error:  # the other checks still have their answers
        traceback.print_exc()
        ok, values = False, {"error": f"{type(error).__name__}: {error}"[:2000]}
    seconds = round(time.monotonic() - started, 1)
    result.add({"name": check.name, "ok": ok, "seconds": seconds, "values": values})
    shown = {k: v for k, v in values.items() if isinstance(v, int | float)}
    numbers = ", ".join(f"{name} {value}" for name, value in shown.items())
    print(f"{'ok   ' if ok else 'WRONG'} {check.name} ({seconds} s): {numbers}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
