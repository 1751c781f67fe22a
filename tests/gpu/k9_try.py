"""Variants of the indexer's CUDA library; the flake of call 1."""
import json, os, statistics, sys, time
from pathlib import Path
ROOT = Path(__file__).resolve().parents[2]
for p in (ROOT / "overlay/benchmarks", ROOT / "overlay", ROOT / "tests"): sys.path.insert(1, str(p))
import torch
import timing, indexer_inputs as made
from indexer_inputs import Shape
from gpu import indexer_cases as cases
from spark_overlay.indexer.kernels import launch, launch_cuda, library, sizes, select
OUT = Path(sys.argv[1]); until = time.monotonic() + float(sys.argv[2])
K = 1024
STOCK = {"1x1 16K": 10.8, "1x1 128K": 20.9, "1x1 600K": 55.3, "1x4 16K": 10.9, "1x4 128K": 23.2, "1x4 600K": 63.7, "4x4 32K": 21.6, "8x1 32K": 23.2, "1x6 128K": 32.6, "1x1 4K": 7.4, "4x4 128K": 46.8, "4x4 32K limited": 25.5, "8x1 32K limited": 27.4, "pre 2048 16K": 371}
SHAPES = [Shape("1x4 600K", 1, 4, 600*K), Shape("1x1 600K", 1, 1, 600*K), Shape("1x1 128K", 1, 1, 128*K), Shape("1x4 128K", 1, 4, 128*K), Shape("4x4 32K", 4, 4, 32*K), Shape("8x1 32K", 8, 1, 32*K),
  Shape("1x1 16K", 1, 1, 16*K), Shape("1x4 16K", 1, 4, 16*K), Shape("1x6 128K", 1, 6, 128*K), Shape("4x4 128K", 4, 4, 128*K), Shape("1x1 4K", 1, 1, 4*K), Shape("pre 2048 16K", 1, 2048, 16*K)]
ws = torch.empty(256 << 18, dtype=torch.int32, device="cuda")
copy = timing.copy_ceiling(3)
CT = {"a": 3, "b": 3, "c": 2, "d": 3}
def use(v):
    os.environ[library.OVERRIDE] = str(ROOT / f".carry/indexer_{v}.so")
    library.load.cache_clear(); library.present.cache_clear(); launch_cuda.CTAS = CT[v]
def layer(lib=True): return launch.Selection(1, made.COUNT, ws, sizes.Tuning(library=lib))
def calls(one, kind):
    L = layer()
    c = None if kind == "plain" else launch.Candidates(one.chosen, made.SIZE, kind == "write")
    return lambda: L(one.q, one.weights, one.cache, one.step, one.final, c)
def parts(lib, one, kind):
    L = layer(lib); n, width = one.final.shape[0], one.step.bound
    lim = kind == "limited"; fan = 8 if kind == "write" else L.tuning.fan
    scored = 16384 if lim else width
    used = sizes.plan(scored, fan); n = min(n, ws.numel() // used.numbers)
    held = launch.Rows(one.step, 0, n, width, *L._parts(used, n), by_library=lib)
    g = (one.q.view(torch.uint8), one.weights, one.cache, held)
    if lim:
        c = launch.Candidates(one.chosen, made.SIZE, False)
        return (lambda: L._candidate_scores(*g, c, fan)), (lambda: L._choose(held, one.final[:n], select.CANDIDATES.value, scored, fan, c)), held
    return (lambda: L._scores(*g, fan)), (lambda: L._choose(held, one.final[:n], select.POSITIONS.value, scored, fan, None)), held
med = lambda c, r=5: round(statistics.median(timing.graph_us(c, r)), 2)
rows = []
def stress():
    """The failing case of call 1, again and again."""
    share, found, left, i = [1, 4, 2, 6, 3, 1, 5], [], 33, 0
    while left:
        count = min(left, share[i % 7]); n = max(count, 30000 * (1 + i % 4) // (1 + i % 3) // 4)
        found.append((count, n)); left -= count; i += 1
    found[0] = (1, 30000)
    for exact in (True, False):
        case = cases.make(found, padding=3, exact=exact, seed=33, device="cuda")
        final = torch.empty(len(case.visible), 512, dtype=torch.int32, device="cuda")
        def once():
            ws[: 8 << 20].fill_(0x7FC00000); final.fill_(99)
            launch.Selection(1, 512, ws)(case.q, case.weights, case.cache, case.step, final, None)
        for v, early in (("a", True), ("a", False), ("c", True), ("c", False), ("d", True)):
            use(v); launch_cuda.EARLY = early
            bad, right = 0, None
            for n in range(150):
                once(); torch.cuda.synchronize()
                if n == 0:
                    right = final.clone(); first = cases.wrong(case, final, 512, exact=exact)
                else: bad += int(not torch.equal(final, right))
            print(f"stress exact={exact} {v} early={early}: {bad} of 149 differ; first {'right' if not first else first[:1]}", flush=True)
    launch_cuda.EARLY = True
stress()
for shape in SHAPES:
    sets = made.sets_of(shape)
    for kind in ("plain", "limited"):
        if kind == "limited" and shape.name not in ("4x4 32K", "8x1 32K"): continue
        if time.monotonic() > until: print("time", shape.name, kind); break
        row = {"shape": shape.name + (" limited" if kind == "limited" else ""), "floor": round(shape.key_bytes / copy * 1e6, 2)}
        try:
            one = sets[0]
            s0, c0, held = parts(False, one, kind); held.scores.fill_(7e7); held.tops.fill_(7e7); s0(); a = held.scores.clone(); ta = held.tops.clone()
            c0(); fa = one.final.clone()
            for v in "abcd" if shape.rows < 100 else "ab":
                use(v)
                s1, c1, held = parts(True, one, kind); held.scores.fill_(7e7); held.tops.fill_(7e7); s1(); b = held.scores.clone(); tb = held.tops.clone()
                one.final.fill_(98); c1(); torch.cuda.synchronize(); fb = one.final.clone()
                fin = torch.isfinite(a) & (a < 6e7)
                ok = bool(((a < 6e7) == (b < 6e7)).all() and (torch.isneginf(a) == torch.isneginf(b)).all() and ((ta < 6e7) == (tb < 6e7)).all())
                ok &= ((a - b)[fin].abs().max() / a[fin].abs().max()).item() < 1e-6 and bool((fb[:, 1:] > fb[:, :-1]).all())
                ok &= min(torch.isin(fb[i], fa[i]).float().mean().item() for i in range(min(16, fa.shape[0]))) > 0.98
                row[v] = med([calls(s, kind) for s in sets])
                row[f"{v}s"] = med([parts(True, s, kind)[0] for s in sets])
                parts(True, one, kind)[0]()
                row[f"{v}c"] = med([parts(True, one, kind)[1]] * 8)
                row[f"{v}ok"] = ok
        except Exception as e:
            row["error"] = f"{type(e).__name__}: {e}"[:300]
        rows.append(row)
        (OUT / "k9_try.json").write_text(json.dumps(rows, indent=0))
        g = row.get
        print(f'{g("shape"):16} floor {g("floor"):6} stock {STOCK.get(g("shape"))} | ' + " | ".join(f'{v} {g(v)} ({g(v + "s")} {g(v + "c")}){"" if g(v + "ok") else " WRONG"}' for v in "abcd") + f' {g("error") or ""}', flush=True)
    del sets
