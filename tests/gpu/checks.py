"""The checks of a GPU host, by name. Each says which engines it asks and what it costs.

The reference runs on the same GPU in float32, rounding as serving does; layers are compared
teacher-forced (each fed with what vLLM's own layer was fed with), answers end to end.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from gpu import attention_checks, engines, engram_checks, hidden_checks, launches
from gpu.bench import Bench, Check, ours
from gpu.engines import ENGINES
from gpu.said import TIE, Values, classes, parting

#: Of a token's row: median and 90th percentile of ``|reference - vLLM| / |vLLM|`` of the streams a
#: layer leaves. Its two sublayers' own answers are smaller than the streams, and so are their sums.
MEDIAN, P90 = 0.005, 0.01
KL = 0.01
#: A sublayer's own answer, median. Its p90 is reported only: where one of the top k rows is another
#: (scores in e4m3 tie often), that token's attention moves by several percent.
SUBLAYER = 0.01
#: A deliberate fault must show this many times the right error.
SEEN = 3.0
#: What computes packed linears and experts, whether the shared expert is among them.
PACKED = ("exl3", "draft")
KERNELS = ["spark_overlay.exl3.cuda.layers.Group", "spark_overlay.exl3.cuda.layers.Experts", True]


def layers(engine: str) -> Callable[[Bench], tuple[bool, Values]]:
    def judge(bench: Bench) -> tuple[bool, Values]:
        import oracle

        kind = ENGINES[engine].kind
        tape = bench.tape(engine)
        found = oracle.errors(bench.reference(kind), tape)
        table = {
            output: [
                [round(rows.median().item(), 6), round(rows.quantile(0.9).item(), 6)]
                for rows in by_layer
            ]
            for output, by_layer in found.items()
        }
        worst = [max(pair[i] for pair in table["layer"]) for i in (0, 1)]
        values = {
            "tokens": len(tape.tokens),
            "worst_median": worst[0],
            "worst_p90": worst[1],
            "median_p90_by_layer": table,
            **classes(bench, engine),
        }
        own = max(pair[0] for pair in [*judged(bench, kind, table["attention"]), *table["experts"]])
        return worst[0] <= MEDIAN and worst[1] <= P90 and own <= SUBLAYER, values

    return judge


def judged(bench: Bench, kind: str, attention: list[list[float]]) -> list[list[float]]:
    """The layers whose attention is held to SUBLAYER. Where kernels compute with packed weights the
    reference's are not rounded as theirs, and at ratio 1 most tokens then choose another row or two
    of 512 from all the tokens before: one of 640 moves the answer by sqrt(2/640), 5.6 %."""
    if kind not in PACKED or bench.device == "cpu" or not ours():
        return attention
    ratios = bench.text["compress_ratios"]
    return [pair for layer, pair in enumerate(attention) if ratios[layer] != 1]


def by_kernels(judge: Callable[[Bench], tuple[bool, Values]], *names: str) -> Any:
    """``judge``, and each engine computed with the packed weights, the shared expert among the
    routed ones, and no stream was switched off."""

    def computed(bench: Bench) -> tuple[bool, Values]:
        right, values = judge(bench)
        found = {name: bench.answers[name]["classes"][0] for name in names}
        values["kernels"] = {name: one["kernels"] for name, one in found.items()}
        if bench.device == "cpu" or not ours():  # there the weights are decoded once
            return right, values
        for one in found.values():
            right = right and one["kernels"] == KERNELS and one["switches"] == {}
        return right, values

    return computed


def captured(judge: Callable[[Bench], tuple[bool, Values]], engine: str) -> Any:
    """``judge``, and graphs were captured."""

    def counted(bench: Bench) -> tuple[bool, Values]:
        right, values = judge(bench)
        values["graphs"] = bench.answers[engine]["classes"][0]["graphs"]
        return right and (bench.device == "cpu" or values["graphs"] > 0), values

    return counted


def faults(engine: str) -> Callable[[Bench], tuple[bool, Values]]:
    """The reference made wrong in one number must differ: the comparison can fail on this GPU, too.
    How often the right error, at the layer and output where it shows most."""

    def judge(bench: Bench) -> tuple[bool, Values]:
        import oracle

        from spark_overlay.reference.config import V41Config

        kind = ENGINES[engine].kind
        tape, right = bench.tape(engine), V41Config.read(bench.models[kind])
        usual = spread(oracle.errors(bench.reference(kind), tape))
        theta = replace(right.compressed_rope, theta=right.window_rope.theta)
        wrong: dict[str, Values] = {
            "window one narrower": {"sliding_window": right.sliding_window - 1},
            "window one wider": {"sliding_window": right.sliding_window + 1},
            "top-k halved": {"index_topk": right.index_topk // 2},
            "no candidate filter": {"candidate_source_layer_id": -1},
            "compressed RoPE by the window's theta": {"compressed_rope": theta},
            "routed scaling 1.0": {"routed_scaling_factor": 1.0},
            "one Sinkhorn iteration": {"hc_sinkhorn_iters": 1},
        }
        seen = {}
        for name, changed in wrong.items():
            found = spread(oracle.errors(bench.reference(kind, **changed), tape))
            seen[name] = round(max(found[place] / usual[place] for place in usual), 1)
        values = {"least": min(seen.values()), "times_the_right_error": seen}
        return values["least"] >= SEEN, values

    return judge


def spread(found: Mapping[str, Sequence[Any]]) -> dict[tuple[str, int, float], float]:
    """Median and 90th percentile by output and layer; none smaller than a bf16 rounding."""
    return {
        (output, layer, share): max(rows.quantile(share).item(), 1e-3)
        for output, by_layer in found.items()
        for layer, rows in enumerate(by_layer)
        for share in (0.5, 0.9)
    }


def replies(engine: str) -> Callable[[Bench], tuple[bool, Values]]:
    """The tokens and their likelihoods against the reference's, over prompt and reply."""

    def judge(bench: Bench) -> tuple[bool, Values]:
        reference = bench.reference(ENGINES[engine].kind)
        compared: list[Values] = []
        for asked, reply in zip(bench.prompts, bench.answers[engine]["replies"], strict=True):
            whole = [*asked, *reply["tokens"][:-1]]
            rows = expected(reference, whole, len(reply["tokens"]), replay=False)
            places = zip(reply["logprobs"], reply["tokens"], rows, strict=True)
            compared += [against(place, token, row) for place, token, row in places]
        right, values = summary(compared)
        return right, {**values, **classes(bench, engine)}

    return judge


def replayed(engine: str) -> Callable[[Bench], tuple[bool, Values]]:
    """The first token after each of many prompts against the reference that replays, and, as the
    measure of what replay changes at all, against the one that does not."""

    def judge(bench: Bench) -> tuple[bool, Values]:
        reference = bench.reference(ENGINES[engine].kind)
        found: dict[bool, list[Values]] = {True: [], False: []}
        asked = engines.many_prompts(bench.text)
        for prompt, reply in zip(asked, bench.answers[engine]["firsts"], strict=True):
            for replay, compared in found.items():
                (row,) = expected(reference, prompt, 1, replay=replay)
                compared.append(against(reply["logprobs"][0], reply["tokens"][0], row))
        right, values = summary(found[True])
        values["kl_median_to_no_replay"] = summary(found[False])[1]["kl_median"]
        rows = values["last_layer_rows"] = bench.answers[engine]["rows"][0]
        # Proof that it replayed: the last layer saw a window's rows, never all of the longest.
        right = right and bench.text["sliding_window"] in rows
        right = right and max(map(len, bench.prompts)) not in rows
        return right, {**values, **classes(bench, engine)}

    return judge


def summary(compared: Sequence[Values]) -> tuple[bool, Values]:
    """Whether places agree: tokens equal away from ties (and some are), likelihoods close."""
    away = [c for c in compared if c["gap"] >= TIE]
    kls = sorted(c["kl"] for c in compared)
    values: Values = {
        "tokens": len(compared),
        "away_from_ties": len(away),
        "argmax_equal_away_from_ties": sum(c["equal"] for c in away),
        "argmax_equal": sum(c["equal"] for c in compared),
        "kl_median": round(kls[len(kls) // 2], 6),
        "kl_max": round(kls[-1], 6),
    }
    return all(c["equal"] for c in away) and values["kl_median"] <= KL and bool(away), values


def expected(reference: Any, whole: Sequence[int], count: int, *, replay: bool) -> Any:
    """Log-probabilities ``[count, vocab]`` of what follows the last ``count`` tokens."""
    import torch

    tokens = torch.tensor(whole, device=reference.weights.device)
    with torch.no_grad():
        logits = reference(tokens, replay=replay)[-count:]
    return logits.double().log_softmax(-1).cpu()


def against(place: Mapping[str, float], token: int, row: Any) -> Values:
    """One place: vLLM's likeliest tokens with their log-probabilities against the reference's row.

    KL over those tokens and all others taken together, which is at most the whole KL."""
    import math

    best = sorted(place.values(), reverse=True)
    listed, mass_p, mass_q = 0.0, 0.0, 0.0
    for name, logprob in place.items():
        p, q = math.exp(logprob), math.exp(float(row[int(name)]))
        listed += p * (logprob - float(row[int(name)]))
        mass_p, mass_q = mass_p + p, mass_q + q
    rest_p, rest_q = max(1 - mass_p, 1e-12), max(1 - mass_q, 1e-12)
    kl = listed + rest_p * math.log(rest_p / rest_q)
    return {"equal": token == int(row.argmax()), "gap": best[0] - best[1], "kl": max(kl, 0.0)}


def same_tokens(one: str, other: str) -> Callable[[Bench], tuple[bool, Values]]:
    """Two engines' replies token by token, each up to the first difference: what follows it answers
    another text. A difference must be a tie of the first engine's."""

    def judge(bench: Bench) -> tuple[bool, Values]:
        first, second = (bench.answers[name]["replies"] for name in (one, other))
        right, values = parting(first, second)
        return right, {**values, "prompts": [len(p) for p in bench.prompts]}

    return judge


def launched(*names: str) -> Callable[[Bench], tuple[bool, Values]]:
    """Of each engine what a decode step launches; wrong where nothing was counted."""

    def judge(bench: Bench) -> tuple[bool, Values]:
        found = {name: launches.a_step(bench.answers[name]) for name in names}
        counted = all(one["launches"] > 0 for one in found.values())
        return counted or bench.device == "cpu", dict(found)

    return judge


def hidden(judge: Callable[[Bench], tuple[bool, Values]], engine: str) -> Any:
    """``judge`` of an engine that was held, and the overlay's attention computed there."""
    return hidden_checks.held(attention_checks.by_class(judge, engine), engine)


CHECKS: tuple[Check, ...] = (
    Check("stock-layers", ("stock-eager",), 8,
          "stock vLLM in bf16, each layer against the reference fed alike",
          layers("stock-eager")),
    Check("stock-faults", ("stock-eager",), 5,
          "seven faults of the reference that must show",
          faults("stock-eager")),
    Check("stock-replies", ("stock-eager",), 1,
          "stock vLLM's tokens and likelihoods against the reference, end to end",
          replies("stock-eager")),
    Check("graphs-tokens", ("stock-eager", "stock-graphs"), 1,
          "the same tokens eager and in CUDA graphs, up to a tie",
          same_tokens("stock-eager", "stock-graphs")),
    Check("replay-replies", ("stock-replay",), 1,
          "decoder replay on, in CUDA graphs, against the reference that replays",
          replayed("stock-replay")),
    Check("exl3-layers", ("exl3-eager",), 4,
          "the overlay on EXL3, each layer against the reference fed alike",
          by_kernels(layers("exl3-eager"), "exl3-eager")),
    Check("exl3-replies", ("exl3-eager",), 1,
          "the overlay's tokens and likelihoods against the reference, end to end",
          replies("exl3-eager")),
    Check("exl3-graphs", ("exl3-graphs",), 1,
          "the same in CUDA graphs, on vLLM's side streams, against the reference",
          captured(by_kernels(replies("exl3-graphs"), "exl3-graphs"), "exl3-graphs")),
    Check("exl3-tokens", ("exl3-eager", "exl3-graphs"), 1,
          "the overlay's tokens eager and in CUDA graphs, up to a tie",
          same_tokens("exl3-eager", "exl3-graphs")),
    Check("exl3-draft", ("exl3-draft",), 1,
          "the same with DSpark's draft ahead, in CUDA graphs, against the reference",
          captured(by_kernels(replies("exl3-draft"), "exl3-draft"), "exl3-draft")),
    Check("portable-layers", ("portable-eager",), 8,
          "the overlay's kernels in bf16, each layer against the reference fed alike",
          attention_checks.by_class(layers("portable-eager"), "portable-eager")),
    Check("portable-replies", ("portable-eager",), 1,
          "their tokens and likelihoods against the reference, end to end",
          replies("portable-eager")),
    Check("asked-stock-layers", ("asked-stock-eager",), 8,
          "vLLM's attention class under the overlay, each layer against the reference fed alike",
          attention_checks.by_class(layers("asked-stock-eager"), "asked-stock-eager")),
    Check("portable-stock", ("asked-stock-eager", "portable-eager"), 1,
          "vLLM's attention class and ours say the same, up to a tie",
          same_tokens("asked-stock-eager", "portable-eager")),
    Check("portable-graphs", ("portable-graphs",), 1,
          "decode steps in one CUDA graph each, against the reference",
          attention_checks.by_class(replies("portable-graphs"), "portable-graphs")),
    Check("portable-again", ("portable-graphs",), 1,
          "after a cached beginning as from nothing, in a padded batch as alone",
          attention_checks.again("portable-graphs")),
    Check("portable-tokens", ("portable-eager", "portable-graphs"), 1,
          "the same tokens eager and in CUDA graphs, up to a tie",
          same_tokens("portable-eager", "portable-graphs")),
    Check("portable-replay", ("portable-replay",), 1,
          "decoder replay on, in CUDA graphs, against the reference that replays",
          replayed("portable-replay")),
    Check("portable-known", ("portable-draft",), 1,
          "DSpark in whole graphs: what is known to follow, some of the draft accepted",
          attention_checks.by_class(attention_checks.accepted("portable-draft"), "portable-draft")),
    Check("portable-draft", ("asked-stock-draft", "portable-draft"), 1,
          "as much of the draft accepted as with vLLM's class",
          attention_checks.by_class(
              attention_checks.accepted("asked-stock-draft", "portable-draft"), "portable-draft")),
    Check("hidden-layers", ("hidden-eager",), 8,
          "held to an SM80, all else hidden: each layer against the reference fed alike",
          hidden(layers("hidden-eager"), "hidden-eager")),
    Check("hidden-replies", ("hidden-eager",), 1,
          "the same, end to end against the reference",
          hidden(replies("hidden-eager"), "hidden-eager")),
    Check("hidden-stock", ("asked-stock-eager", "hidden-eager"), 1,
          "vLLM's attention class unheld and ours held say the same, but for ties",
          same_tokens("asked-stock-eager", "hidden-eager")),
    Check("hidden-graphs", ("hidden-graphs",), 1,
          "held and hidden, decode steps in one CUDA graph each, against the reference",
          hidden(replies("hidden-graphs"), "hidden-graphs")),
    Check("hidden-again", ("hidden-graphs",), 1,
          "after a cached beginning as from nothing, in a padded batch as alone",
          attention_checks.again("hidden-graphs")),
    Check("launches", ("stock-graphs", "hidden-graphs"), 1,
          "what one decode step launches: stock, and held to an SM80 with all else hidden",
          launched("stock-graphs", "hidden-graphs")),
    Check("hidden-tokens", ("hidden-eager", "hidden-graphs"), 1,
          "the same tokens eager and in CUDA graphs, up to a tie",
          same_tokens("hidden-eager", "hidden-graphs")),
    Check("hidden-replay", ("hidden-replay",), 1,
          "held and hidden, decoder replay on, in CUDA graphs, against the reference that replays",
          hidden_checks.held(replayed("hidden-replay"), "hidden-replay")),
    Check("hidden-known", ("hidden-draft",), 1,
          "held and hidden, DSpark: what is known to follow, some of the draft accepted",
          hidden(attention_checks.accepted("hidden-draft"), "hidden-draft")),
    Check("hidden-draft", ("asked-stock-draft", "hidden-draft"), 1,
          "as much of the draft accepted as with vLLM's class on the whole GPU",
          hidden(attention_checks.accepted("asked-stock-draft", "hidden-draft"), "hidden-draft")),
    Check("hidden-adaptive", ("hidden-draft", "hidden-adaptive"), 1,
          "adaptive verification on and off, the same greedy tokens",
          hidden(hidden_checks.verified("hidden-draft", "hidden-adaptive"), "hidden-adaptive")),
    Check("hidden-exl3", ("hidden-exl3",), 1,
          "held and hidden on EXL3 with DSpark's draft, in CUDA graphs, against the reference",
          hidden_checks.held(
              captured(by_kernels(replies("hidden-exl3"), "hidden-exl3"), "hidden-exl3"),
              "hidden-exl3")),
    Check("engram-kernel", (), 25,
          "rows to bf16: every code under every scale, bit for bit; compiled for four GPUs",
          engram_checks.parts("kernel")),
    Check("engram-lookup", (), 40,
          "lookups eager, in 1000 replays and on two streams, bit for bit as plain reads",
          engram_checks.parts("lookup")),
    *(
        Check(f"engram-{mode}", (f"engram-twin-{mode}",), 1,
              f"vLLM's pinned tables and ours in files leave the same bits: {what}",
              engram_checks.same_layers(mode))
        for mode, what in engram_checks.MODES.items()
    ),
)  # fmt: skip


def import_oracle() -> None:
    """The comparison that the rehearsal's controls use lies beside its tests."""
    for place in (engines.TESTS / "rehearsal", engines.OVERLAY):
        if str(place) not in sys.path:
            sys.path.insert(0, str(place))
