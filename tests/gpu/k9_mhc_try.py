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
for T in (1, 4, 8, 16, 32):
    works = sweep.works(T)
    for name, numbers, geo in (
        ("default", cases.NUMBERS, None),
        ("1 iteration", replace(cases.NUMBERS, iterations=1), None),
        ("limbs 1", cases.NUMBERS, replace(plan.one_launch(T, 5120), limbs=1)),
        ("4 rows", cases.NUMBERS, plan.OneLaunch(4, 24, 80, 32, 4)),
        ("16x40x64", cases.NUMBERS, plan.OneLaunch(16, 24, 40, 64, 4)),
        ("no norm", cases.NUMBERS, None),
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
