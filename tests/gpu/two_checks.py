"""What is judged of two GPUs, by name; each says which served engines it asks and what it costs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from gpu import checks, collectives, engines, fall, served
from gpu.checks import TIE, Values
from gpu.served import LONG, SERVED, SHORT

KIND = "served"
#: Where NCCL may use neither NVLink nor shared memory it goes by sockets, and so through buffers as
#: it does between two Sparks.
BY_SOCKET = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_NET": "Socket",
             "NCCL_SOCKET_IFNAME": "lo"}  # fmt: skip
OBSERVE = {"cuda": 12.0, "cpu": 30.0}
Judge = Callable[["Two"], tuple[bool, Values]]


@dataclass
class Two:
    """What the checks share. ``gpus`` by rank; ``left`` the seconds of this call that are left."""

    text: Mapping[str, Any]
    model: Path
    scratch: Path
    device: str
    world: int
    left: Callable[[], float]
    answers: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)

    @property
    def cpu(self) -> bool:
        return self.device == "cpu"

    @cached_property
    def reference(self) -> Any:
        """The reference on the packed checkpoint, with its n-gram tables."""
        import torch
        from oracle import Watched

        from gpu.dense import DenseWeights
        from spark_overlay.reference.config import V41Config
        from spark_overlay.reference.weights import Weights
        from spark_overlay.rehearsal.train import tokens_of

        reader = Weights if self.cpu or checks.ours() else DenseWeights
        dtype = torch.float64 if self.cpu else torch.float32
        weights = reader(self.model, self.model, dtype=dtype, device=self.device)
        config = V41Config.read(self.model)
        return Watched(
            weights, config, token_map=tokens_of(self.model), serving=True, positions=4096
        )

    @cached_property
    def expected(self) -> list[Any]:
        """The reference's log-probabilities after each context, replaying as serving does."""
        return [
            checks.expected(self.reference, context, 1, replay=True)[0]
            for context in served.contexts(self.text)
        ]


@dataclass(frozen=True)
class Check:
    """``seconds``: the judging alone, without its engines' (served.py). ``world``: the ranks it
    needs."""

    name: str
    asks: tuple[str, ...]
    seconds: int
    world: int
    what: str
    judge: Judge


class Listed(dict[int, float]):
    """Another engine's likeliest tokens as a row over all: what it did not list shares the rest."""

    def __init__(self, place: Mapping[str, float], vocabulary: int) -> None:
        super().__init__({int(name): value for name, value in place.items()})
        rest = max(1e-12, 1 - sum(map(math.exp, self.values())))
        self.rest = math.log(rest / max(1, vocabulary - len(self)))

    def __missing__(self, token: int) -> float:
        return self.rest

    def argmax(self) -> int:
        return max(self, key=self.__getitem__)


def placed(two: Two, name: str) -> tuple[bool, Values]:
    """Whether an engine was what it is called: its ranks, each on a GPU of its own; kernels;
    graphs; tables in files; replay."""
    found, tp = two.answers[name], SERVED[name].tp
    places = found["places"]
    right = [p["rank"] for p in places] == list(range(tp)) and {p["tp"] for p in places} == {tp}
    right = right and len({p["pid"] for p in places}) == tp
    right = right and len(found["engram"]) == tp
    for tables in found["engram"]:
        right = right and len(tables) == len(two.text["engram_layer_ids"])
        right = right and all(t["lookups"] > 0 and t["parameters"] == 0 for t in tables)
    rows = found["rows"][0]
    # Proof that it replayed, as in checks.replayed.
    right = right and two.text["sliding_window"] in rows
    right = right and max(map(len, engines.prompts(two.text))) not in rows
    if not two.cpu:
        right = right and len({p["gpu"] for p in places}) == tp
        right = right and all(one["graphs"] > 0 for one in found["classes"])
        if checks.ours():
            right = right and all(one["kernels"] == checks.KERNELS for one in found["classes"])
    values = {"computed_by": found["classes"][0], "engine_seconds": _rounded(found["seconds"])}
    return right, {"tp": tp, **values}


def referred(name: str, two: Two) -> tuple[bool, Values]:
    """The next token after each context against the reference's."""
    nexts = two.answers[name]["nexts"]
    compared = [
        checks.against(reply["logprobs"][0], reply["tokens"][0], row)
        for reply, row in zip(nexts, two.expected, strict=True)
    ]
    right, values = checks.summary(compared)
    as_named, more = placed(two, name)
    return right and as_named, {**values, "as_named": as_named, **more}


def compared(one: str, other: str, two: Two) -> tuple[bool, Values]:
    """Two engines fed with the same texts, and their replies up to the first difference, which must
    be a tie."""
    vocabulary = two.text["vocab_size"]
    pairs, parted = [], []
    first, second = two.answers[one], two.answers[other]
    for x, y in zip(first["nexts"], second["nexts"], strict=True):
        pairs.append((x, y, 0))
    forced = len(pairs)
    for x, y in zip(first["replies"], second["replies"], strict=True):
        same = [a == b for a, b in zip(x["tokens"], y["tokens"], strict=True)]
        until = same.index(False) if False in same else len(same) - 1
        pairs += [(x, y, place) for place in range(until + 1)]
        if False in same:
            parted.append({"at": until, "gap": round(_gap(x["logprobs"][until]), 3)})
    found = [
        checks.against(x["logprobs"][at], x["tokens"][at], Listed(y["logprobs"][at], vocabulary))
        for x, y, at in pairs
    ]
    right, values = checks.summary(found)
    values |= {"teacher_forced": forced, "replies_parted": parted}
    right = right and all(each["gap"] < TIE for each in parted)
    for name in (one, other):
        as_named, _ = placed(two, name)
        right = right and as_named
    return right, values


def share(name: str, two: Two) -> tuple[bool, Values]:
    """What collectives take of decoding, on each rank; the prefill of 12 tokens is among it."""
    found, tp = two.answers[name], SERVED[name].tp
    ranks = found["collectives"]
    parts = [one["collective_seconds"] / one["seconds"] for one in ranks]
    values: Values = {
        "share_of_time": [round(part, 4) for part in parts],
        "by_rank": [_rounded(one, 6) for one in ranks],
        "tokens": LONG,
        # Without a profiler; with a draft a step makes more than one token.
        "ms_per_token": round(
            1e3 * (found["timed"][str(LONG)] - found["timed"][str(SHORT)]) / (LONG - SHORT), 3
        ),
        "layers": two.text["num_hidden_layers"],
    }
    counted = [sum(one["collectives"].values()) for one in ranks]
    values["collectives"] = counted
    right = len(ranks) == tp and all(0 <= part < 1 for part in parts)
    return right and (tp == 1 or all(count > LONG // 4 for count in counted)), values


def latency(name: str, two: Two) -> tuple[bool, Values]:
    """Collectives of decode sizes under one choice of NCCL's settings."""
    kit = served.kit_env(two.scratch)
    more = {
        # Multicast stays off as on the Sparks, or the two would not be comparable.
        "defaults": {"NCCL_NVLS_ENABLE": "0"},
        "kit": kit,
        "defaults-socket": {"NCCL_NVLS_ENABLE": "0", **BY_SOCKET},
        "kit-socket": {**kit, **BY_SOCKET},
    }[name]
    limit = min(120.0, max(1.0, two.left()))
    ranks = collectives.measure(name, two.world, two.scratch, two.device, more, limit)
    first = ranks[0]
    values: Values = {
        "world": two.world,
        "library": first["library"],
        "settings": more,
        "bytes": {str(r): r * collectives.WIDTH * 2 for r in collectives.ROWS},
        "median_p90": first["table"],
        "grown_bytes": [rank["grown_bytes"] for rank in ranks],
    }
    timed = [
        us
        for by_rows in first["table"].values()
        for found in by_rows.values()
        for us, _ in found.values()
    ]
    key = "eager_us" if two.cpu else "graph_us"
    for call, by_rows in first["table"].items():
        values[f"{call}_1_row_us"] = by_rows["1"][key][0]
        values[f"{call}_8_rows_us"] = by_rows["8"][key][0]
    right = len(ranks) == two.world and bool(timed) and all(us > 0 for us in timed)
    return right, values


def fallen(two: Two) -> tuple[bool, Values]:
    """The worker of a serving pair killed, then the head (see fall.py); DSpark off, graphs on."""
    place = two.scratch / "fall"
    chosen = served.settings(place, draft=False, cpu=two.cpu)
    gpus = tuple(range(two.world))
    tp = two.world
    deployment = served.planned(chosen, two.model, place, tp=tp, cpu=two.cpu, gpus=gpus)
    prompt = engines.tokens(two.text, 12, 700)
    roles = ("worker", "head")[-tp:]
    make = partial(served.Pair, deployment, place)
    return fall.fall(make, roles, prompt, OBSERVE[two.device], two.left)


def _gap(place: Mapping[str, float]) -> float:
    best, next_best = sorted(place.values(), reverse=True)[:2]
    return best - next_best


def _rounded(values: Mapping[str, Any], digits: int = 1) -> Values:
    return {k: round(v, digits) if isinstance(v, float) else v for k, v in values.items()}


_SETTINGS: Sequence[tuple[str, str]] = (
    ("defaults", "NCCL's defaults"),
    ("kit", "the kit's settings"),
    ("defaults-socket", "NCCL's defaults, by sockets alone"),
    ("kit-socket", "the kit's settings, by sockets alone"),
)
CHECKS: tuple[Check, ...] = (
    *(Check(f"collectives-{name}", (), 25, 1, f"latency and memory of decode sizes: {what}",
            partial(latency, name)) for name, what in _SETTINGS),
    *(Check(f"{name}-reference", (name,), 10, SERVED[name].tp,
            "every context's next token against the reference, replay on",
            partial(referred, name)) for name in SERVED),
    Check("tp2-tp1", ("tp1", "tp2"), 1, 2, "two ranks against one, fed alike; DSpark off",
          partial(compared, "tp1", "tp2")),
    Check("tp2-tp1-draft", ("tp1-draft", "tp2-draft"), 1, 2, "the same with DSpark on",
          partial(compared, "tp1-draft", "tp2-draft")),
    Check("draft-tp1", ("tp1", "tp1-draft"), 1, 1, "one rank with DSpark on against off",
          partial(compared, "tp1", "tp1-draft")),
    Check("draft-tp2", ("tp2", "tp2-draft"), 1, 2, "two ranks with DSpark on against off",
          partial(compared, "tp2", "tp2-draft")),
    Check("share-tp2", ("tp2",), 1, 2, "what collectives take of decoding, DSpark off",
          partial(share, "tp2")),
    Check("share-tp2-draft", ("tp2-draft",), 1, 2, "the same with DSpark on",
          partial(share, "tp2-draft")),
    Check("kill", (), 300, 1, "worker, then head killed: the other, the launcher, a restart",
          fallen),
)  # fmt: skip
