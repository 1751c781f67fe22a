#!/usr/bin/env python3
"""Two GPUs: tensor parallel 2 over NCCL: ``python3 tests/gpu/two.py --out R.json [NAME…]``.

The small model of V4.1's real dimensions, packed as EXL3, with a draft and n-gram tables in files,
is served by one rank and by two (``--nnodes 2``, a process and a GPU each, as on the Sparks).
Without names all checks run, as many as ``--limit`` has room for; calling again with the same
``--out`` runs the rest. ``--list`` says what there is, ``--shape tiny --device cpu`` rehearses it.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    TESTS = Path(__file__).resolve().parents[1]
    sys.path[0] = str(TESTS)
    sys.path[1:1] = [str(TESTS.parent / "overlay"), str(TESTS.parent)]

from gpu import results, run
from gpu.served import SERVED, Quiet, ServedFailed, ask
from gpu.shape import SHAPES
from gpu.two_checks import CHECKS, KIND, Check, Two

#: A rehearsal's engines and checks take a part of what is planned for a GPU that compiles.
CPU_PART = 0.35
#: A model and its cache take 12 GB of a GPU; a small machine has cores for one.
AT_ONCE = {"cuda": 4, "cpu": 1}


def chosen(names: Sequence[str], done: Iterable[str], world: int) -> list[Check]:
    """The named checks (none: all) of this many ranks that do not stand yet. Raises ValueError."""
    known = {check.name: check for check in CHECKS}
    if unknown := sorted(set(names) - set(known)):
        raise ValueError(f"no check is named {', '.join(unknown)}; there are {', '.join(known)}")
    if short := [name for name in names if known[name].world > world]:
        raise ValueError(f"{', '.join(short)} needs 2 ranks, --world is {world}")
    stand = set(done)
    return [
        check for check in CHECKS
        if check.world <= world and check.name not in stand and (not names or check.name in names)
    ]  # fmt: skip


def listing() -> str:
    lines = [f"{'check':25} {'judging':>8}  ranks  asks (engine: seconds)"]
    for check in CHECKS:
        needs = ", ".join(f"{name}: {SERVED[name].seconds}" for name in check.asks)
        lines.append(f"{check.name:25} {check.seconds:>6} s  {check.world:>5}  {needs}")
        lines.append(f"{'':43} {check.what}")
    return "\n".join(lines)


def turns(todo: Sequence[Check], seen: Iterable[str], at_once: int) -> list[list[str]]:
    """The engines still to ask, ``at_once`` side by side. Their starts take the time; what is timed
    waits for the others (served.Quiet)."""
    asked = {name for check in todo for name in check.asks} - set(seen)
    wanted = [name for name in SERVED if name in asked]
    return [wanted[at : at + at_once] for at in range(0, len(wanted), at_once)]


def gpus_here(device: str) -> int:
    import torch

    return torch.cuda.device_count() if device == "cuda" else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="checks to run (default: all)")
    parser.add_argument("--list", action="store_true", help="list checks and costs, run nothing")
    parser.add_argument("--out", type=Path, default=Path("two-result.json"))
    parser.add_argument("--again", action="store_true", help="replace what stands in --out")
    parser.add_argument("--commit", help="where git cannot say it")
    parser.add_argument("--world", type=int, choices=(1, 2), default=2, help="ranks at most")
    parser.add_argument("--limit", type=float, default=540, help="seconds for this call")
    parser.add_argument("--at-once", type=int, choices=range(1, 5), help="engines side by side")
    parser.add_argument("--scratch", type=Path, help="model, answers and logs (default: in memory)")
    parser.add_argument("--keep-logs", type=Path, help="copy the ranks' logs there")
    parser.add_argument("--shape", choices=tuple(SHAPES), default="real")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    args = parser.parse_args()
    if args.list:
        print(listing())
        return 0
    if args.device == "cuda" and (count := gpus_here("cuda")) < args.world:
        print(f"{count} GPUs here, {args.world} needed: give --world 1, or --device cpu",
              file=sys.stderr)  # fmt: skip
        return 2
    began = time.monotonic()
    result = run.begin(
        args.out, run.host(args.commit or run.commit_here(), args.device), args.again
    )
    before = result.seconds
    todo = chosen(args.names, result.done(), args.world)
    # Answers that are kept there are of one commit.
    scratch = (args.scratch or run.roomy() / "spark-two-gpus") / f"{result.commit}-{args.shape}"
    if args.again:
        shutil.rmtree(scratch, ignore_errors=True)
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
        for log in scratch.rglob("*.log*"):
            place = args.keep_logs / log.relative_to(scratch)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(log, place)
    save()
    wrong = [row["name"] for row in result.rows if not row["ok"]]
    open_ones = [c.name for c in chosen(args.names, result.done(), args.world)]
    print(f"{len(result.rows)} rows in {args.out}, {result.seconds:.0f} s; wrong: "
          f"{', '.join(wrong) or 'none'}; not run: {', '.join(open_ones) or 'none'}")  # fmt: skip
    return 1 if wrong or failed or open_ones else 0


def work(
    todo: list[Check], args: Any, scratch: Path, result: results.Result,
    save: Callable[[], None], left: Callable[[], float],
) -> bool:  # fmt: skip
    """What asks no engine and is short, the engines in turns with what they allow to judge, and the
    kills last. Whether something could not be asked."""
    from gpu import model
    from gpu.checks import import_oracle

    import_oracle()
    import torch

    device = torch.device(args.device)
    text = model.text_of(args.shape, KIND)  # type: ignore[arg-type]
    folder = scratch / f"model-{args.shape}"
    size = model.make(folder, text, KIND, 0, device)  # type: ignore[arg-type]
    print(f"model: {size / 1e9:.2f} GB, {text['num_hidden_layers']} layers", flush=True)
    if args.device == "cuda":
        torch.cuda.empty_cache()
    if native_failed() or (todo and run.kernels_failed(["exl3-eager"], args.device)):
        return True
    two = Two(text, folder, scratch, args.device, args.world, left)
    part = CPU_PART if args.device == "cpu" else 1.0

    def judge(check: Check) -> None:
        run.judge(check, two, result)  # type: ignore[arg-type]
        save()

    def room(seconds: float, what: str) -> bool:
        if left() >= part * seconds:
            return True
        print(f"{what}: {left():.0f} s left, {part * seconds:.0f} needed: call again", flush=True)
        return False

    later = []
    for check in (c for c in todo if not c.asks):
        if check.name.startswith("kill"):
            later.append(check)
        elif room(check.seconds, check.name):
            judge(check)
    failed = False
    gpus = tuple(range(args.world))
    for turn in turns(todo, two.answers, args.at_once or AT_ONCE[args.device]):
        if not room(max(SERVED[name].seconds for name in turn), ", ".join(turn)):
            continue
        quiet = Quiet(turn)
        with ThreadPoolExecutor(len(turn)) as pool:
            running = {
                name: pool.submit(
                    ask, name, text, folder, scratch, cpu=two.cpu, left=left, quiet=quiet,
                    gpus=gpus if SERVED[name].tp > 1 else (at % args.world,),
                )
                for at, name in enumerate(turn)
            }  # fmt: skip
        for name, future in running.items():
            try:
                two.answers[name] = future.result()
                print(f"engine {name}: {two.answers[name]['seconds']['whole']:.0f} s", flush=True)
            except ServedFailed as error:
                print(f"engine {name}: {error}", flush=True)
                failed = True
        for check in todo:
            ready = bool(check.asks) and all(name in two.answers for name in check.asks)
            if ready and check.name not in result.done() and room(check.seconds, check.name):
                judge(check)
    # The reference's weights and answers leave the GPU to the ranks.
    two.__dict__.pop("reference", None)
    if args.device == "cuda":
        torch.cuda.empty_cache()
    for check in later:
        if room(check.seconds, check.name):
            judge(check)
    return failed


def native_failed() -> bool:
    """Build the native row store where it does not load yet; whether that failed."""
    return run.native_failed(["engram-twin-eager"])


if __name__ == "__main__":
    sys.exit(main())
