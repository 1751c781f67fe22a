"""Variants of the indexer's CUDA library beside Triton and stock."""
import json, os, statistics, sys, time, importlib.util
from pathlib import Path
ROOT = Path(__file__).resolve().parents[2]
for p in (ROOT / "overlay/benchmarks", ROOT / "overlay", ROOT / "tests"): sys.path.insert(1, str(p))
import torch
import timing, indexer_inputs as made
from indexer_inputs import Shape
from spark_overlay.indexer.kernels import launch, launch_cuda, library, sizes, select
OUT = Path(sys.argv[1]); until = time.monotonic() + float(sys.argv[2])
K = 1024
SHAPES = [Shape(f"1x1 {n}K", 1, 1, n*K) for n in (16, 128, 600)] + [Shape(f"1x4 {n}K", 1, 4, n*K) for n in (16, 128, 600)] + [
  Shape("4x4 32K", 4, 4, 32*K), Shape("8x1 32K", 8, 1, 32*K), Shape("1x6 128K", 1, 6, 128*K), Shape("4x4 128K", 4, 4, 128*K), Shape("1x1 4K",1,1,4*K)]
PRE = [Shape("pre 2048 16K", 1, 2048, 16*K)]
stock = importlib.util.find_spec("vllm") is not None
ws = torch.empty(256 << 18, dtype=torch.int32, device="cuda")
copy = timing.copy_ceiling(5)
rows = []
def use(n):
    os.environ[library.OVERRIDE] = str(ROOT / f".carry/indexer{n}.so")
    library.load.cache_clear(); library.present.cache_clear(); launch_cuda.CTAS = n
def layer(lib): return launch.Selection(1, made.COUNT, ws, sizes.Tuning(library=lib))
def calls(lib, one, kind):
    L = layer(lib)
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
    ch = (lambda: L._choose(held, one.final[:n], select.POSITIONS.value, scored, fan, None))
    if kind == "write":
        c = launch.Candidates(one.chosen, made.SIZE, True)
        ch = (lambda: L._choose(held, one.chosen[:n], select.BLOCKS.value, -(-width // fan), fan, c))
    return (lambda: L._scores(*g, fan)), ch, held
med = lambda c, r=5: round(statistics.median(timing.graph_us(c, r)), 2)
use(3)
for shape in SHAPES + PRE:
    sets = made.sets_of(shape)
    for kind in ("plain", "limited", "write"):
        if kind != "plain" and shape.context < 32*K: continue
        if time.monotonic() > until: print("time", shape.name, kind); break
        row = {"shape": shape.name, "kind": kind, "floor": round(shape.key_bytes / copy * 1e6, 2)}
        try:
            one = sets[0]
            keep = one.chosen.clone()
            if stock:
                import indexer_stock
                call = indexer_stock.decode if shape in SHAPES else indexer_stock.prefill
                if shape in SHAPES or kind == "plain": row["stock"] = med([call(shape, s, kind) for s in sets])
                for s in sets: s.chosen.copy_(made.inputs(shape, 0).chosen) if False else None
            # numerics: library against Triton
            use(3)
            s0, c0, held = parts(False, one, kind); held.scores.fill_(7e7); held.tops.fill_(7e7); s0(); a = held.scores.clone(); ta = held.tops.clone()
            if kind == "write": one.chosen.fill_(99)
            else: one.final.fill_(99)
            c0(); fa = (one.chosen if kind == "write" else one.final).clone()
            s1, c1, held = parts(True, one, kind); held.scores.fill_(7e7); held.tops.fill_(7e7); s1(); b = held.scores.clone(); tb = held.tops.clone()
            (one.chosen if kind == "write" else one.final).fill_(98)
            c1(); torch.cuda.synchronize(); fb = (one.chosen if kind == "write" else one.final).clone()
            fin = torch.isfinite(a) & (a < 6e7)
            row["same_where"] = bool(((a < 6e7) == (b < 6e7)).all() and (torch.isneginf(a) == torch.isneginf(b)).all() and ((ta < 6e7) == (tb < 6e7)).all())
            row["off"] = float(((a - b)[fin].abs().max() / a[fin].abs().max()).item()) if fin.any() else None
            r = range(min(8, fa.shape[0]))
            row["agree"] = round(statistics.mean(torch.isin(fb[i], fa[i]).float().mean().item() for i in r), 4)
            row["order"] = bool((fb[:, 1:] > fb[:, :-1]).all())
            one.chosen.copy_(keep)
            row["triton"] = med([calls(False, s, kind) for s in sets])
            for n in ((3, 2, 4) if kind == "plain" and shape in SHAPES else (3,)):
                use(n)
                row[f"lib{n}"] = med([calls(True, s, kind) for s in sets])
                row[f"scores{n}"] = med([parts(True, s, kind)[0] for s in sets])
                if n == 3:
                    parts(True, sets[0], kind)[0]()
                    row["choose"] = med([parts(True, sets[0], kind)[1]] * 8)
            use(3)
        except Exception as e:
            row["error"] = f"{type(e).__name__}: {e}"[:300]
        rows.append(row); print(json.dumps(row), flush=True)
        (OUT / "k9_try.json").write_text(json.dumps(rows, indent=0))
    del sets
print("shape kind floor | stock triton | lib3 (scores choose) lib2 (s) lib4 (s) | ratio | off agree")
for r in rows:
    if "error" in r: print(r["shape"], r["kind"], r["error"][:120]); continue
    g = r.get
    print(f'{g("shape"):12} {g("kind"):8}{g("floor")} | {g("stock")} {g("triton")} | {g("lib3")} ({g("scores3")} {g("choose")}) {g("lib2")} ({g("scores2")}) {g("lib4")} ({g("scores4")}) | {round((g("stock") or 0)/g("lib3"),2)} | {g("off") or 0:.0e} {g("agree")} {g("same_where")} {g("order")}')
