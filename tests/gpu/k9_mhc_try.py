"""What of mHC's one launch takes how long."""
import json, statistics, sys, time
from dataclasses import replace
from pathlib import Path
ROOT = Path(__file__).resolve().parents[2]
for p in (ROOT / "overlay/benchmarks", ROOT / "overlay", ROOT / "tests"): sys.path.insert(1, str(p))
sys.argv = sys.argv[:1] + sys.argv[1:]
import torch, timing
from gpu import mhc_cases as cases
from gpu import mhc_sweep as sweep
from spark_overlay.mhc import plan
from spark_overlay.mhc.kernels import launch
OUT = Path(sys.argv[1]); until = time.monotonic() + float(sys.argv[2])
found = {"nothing": round(sweep.floor(), 2)}
print(found, flush=True)
import os
os.environ["SPARK_MHC_LIBRARY"] = str(ROOT / ".carry/mhc.so")
for T in (3, 13, 64):
    for w in (4, 8, 16):
        case = cases.draw(T, 5120, T, mean=True)
        try: found[f"off {T} {w}"] = {k: float(f"{v:.1e}") for k, v in cases.off(cases.computed(case.to("cuda"), plan.Cuda(w)), cases.oracle(case)).items()}
        except Exception as e: found[f"off {T} {w}"] = f"{type(e).__name__} {e}"[:200]
        print(f"off {T} {w}", found[f"off {T} {w}"], flush=True)
for T in (1, 4, 8, 16, 32, 64):
    works = sweep.works(T)
    for name, numbers, geo in (
        ("triton", cases.NUMBERS, plan.one_launch(T, 5120)),
        *((f"cuda {w}", cases.NUMBERS, plan.Cuda(w)) for w in (4, 8, 16)),
        ("cuda 1 iteration", replace(cases.NUMBERS, iterations=1), plan.cuda(T, 5120)),
    ):
        if time.monotonic() > until: break
        if name == "no norm": ws = [replace(w, weight=None) for w in works]
        else: ws = works
        try:
            us = statistics.median(timing.graph_us([lambda w=w: launch.run(w, numbers, geo) for w in ws], 7))
            found[f"{T} {name}"] = round(us, 2)
        except Exception as e: found[f"{T} {name}"] = f"{type(e).__name__} {e}"[:200]
    print({k: v for k, v in found.items() if k.startswith(f"{T} ")}, flush=True)
    (OUT / "k9_mhc_try.json").write_text(json.dumps(found, indent=0))
