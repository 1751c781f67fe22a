"""EXL3: decode by known answers, and the ops against the torch reference in float64."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from spark_overlay.exl3 import reference
from spark_overlay.exl3.cuda import library, ops
from spark_overlay.exl3.format import Codebook
from spark_overlay.verify.report import Check, Outcome, within

#: Of a matrix product and of experts: |found - right| / |right|, with bf16 inputs and fp32 sums.
DENSE, EXPERTS = 5e-4, 1.2e-3
#: Of the ops that a CPU has.
PLAIN = 1e-5
#: sha256 of the fp16 values that ``pattern(128, 128, k2)`` decodes to, its first 16 digits. They
#: were taken from code that the real quantizer's tensors were decoded with, bit for bit.
KNOWN: dict[tuple[Codebook, int], str] = {
    ("mul1", 4): "3bdd64056ceb6b9e",
    ("mul1", 6): "c3cfea7f01ec1efa",
    ("mul1", 8): "73a12a71fc9cd29f",
    ("mul1", 10): "f8aeadb051cfc128",
    ("mul1", 12): "a024bb39ad538a8a",
    ("mul1", 16): "6a1fd5e9e8f2d668",
    ("mcg", 4): "ee8488532a8a37eb",
    ("mcg", 6): "5ac453b4d8885e9d",
    ("mcg", 8): "67fa8ba83c3684ed",
    ("mcg", 10): "64e0fdbb3df5371c",
    ("mcg", 12): "68ef43a5d464e40a",
    ("mcg", 16): "8463a6ab4e3b351a",
    ("3inst", 4): "9424ba482f05a3f7",
    ("3inst", 6): "a34c6ab975e38757",
    ("3inst", 8): "25d0aeb33f482ef5",
    ("3inst", 10): "94eb6f59d76cbdb9",
    ("3inst", 12): "88aa2bd422deb0c3",
    ("3inst", 16): "4fcd87bf0a510914",
}
#: Rates of the checkpoint: K 2 to 6 and 8, in half bits.
RATES = (4, 6, 8, 10, 12, 16)


def pattern(n_in: int, n_out: int, k2: int, seed: int = 1) -> Tensor:
    """A trellis int16 ``[in/16, out/16, 8 * k2]`` that is the same everywhere and always."""
    count = n_in // 16 * (n_out // 16) * 8 * k2
    mixed = np.arange(seed, seed + count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    words = (mixed >> np.uint64(40)).astype(np.uint16).view(np.int16)
    return torch.from_numpy(words.reshape(n_in // 16, n_out // 16, 8 * k2))


def digest(values: Tensor) -> str:
    """Of fp16 values, bit for bit."""
    raw = values.contiguous().cpu().view(torch.int16).numpy().tobytes()
    return hashlib.sha256(raw).hexdigest()[:16]


def matrix(n_in: int, n_out: int, k2: int, seed: int, device: torch.device) -> ops.Entry:
    made = torch.Generator().manual_seed(seed)
    suh = torch.randn(n_in, generator=made).half()
    svh = (torch.randn(n_out, generator=made) / n_in**0.5).half()
    parts = (pattern(n_in, n_out, k2, seed + 1), suh, svh)
    trellis, suh, svh = (part.to(device) for part in parts)
    return trellis, suh, svh, "mul1"


def rows(count: int, width: int, device: torch.device, seed: int = 0) -> Tensor:
    made = torch.Generator().manual_seed(100 + seed)
    return torch.randn((count, width), generator=made).bfloat16().to(device)


def off(found: Tensor, right: Tensor) -> float:
    return float((found.double() - right).norm() / right.norm())


def checks(device: torch.device, on: str) -> Iterator[Check]:
    # What the layers of the model look like at tensor parallel 2, and the same made small.
    gpu = device.type == "cuda"
    hidden, inter = (5120, 1152) if gpu else (256, 128)
    yield Check("exl3 decode, known answers", on, lambda: decoded(device))
    yield Check("exl3 matrices", on, lambda: dense(device, hidden, inter, DENSE if gpu else PLAIN))
    yield Check("exl3 experts", on, lambda: moe(device, hidden, inter, EXPERTS if gpu else PLAIN))


def decoded(device: torch.device) -> Outcome:
    """By the op of the device, and by the reference."""
    wrong = []
    for (codebook, k2), known in KNOWN.items():
        trellis = pattern(128, 128, k2).to(device)
        for who, decode in (("op", ops.decode), ("reference", reference.decode_torch)):
            if digest(decode(trellis, codebook)) != known:
                wrong.append(f"{who} {codebook} {k2 / 2:g} bits")
    return Outcome(not wrong, wrong or f"{len(KNOWN)} of {len(KNOWN)} equal", "equal")


def dense(device: torch.device, n_in: int, n_out: int, limit: float) -> Outcome:
    """Every rate of the checkpoint alone, and all as one group, for one to 64 rows."""
    entries = [matrix(n_in, n_out, k2, seed, device) for seed, k2 in enumerate(RATES)]
    worst = 0.0
    for count in (1, 4, 6, 64):
        x = rows(count, n_in, device, count)
        right = torch.cat([_linear(x, entry) for entry in entries], -1)
        worst = max(worst, off(_group(x, entries), right))
        for place, entry in enumerate(entries):
            alone = _group(x, [entry])
            worst = max(worst, off(alone, right[:, place * n_out : (place + 1) * n_out]))
    return within(worst, limit)


def moe(device: torch.device, hidden: int, inter: int, limit: float) -> Outcome:
    """Six of eight routed experts and a shared one, gate and up clamped, as a decode step asks."""
    routed, topk, clamp = 8, 6, 10.0
    made: dict[str, list[ops.Entry]] = {"gate": [], "up": [], "down": []}
    for place, name in enumerate(made):
        size = (inter, hidden) if name == "down" else (hidden, inter)
        made[name] = [
            matrix(*size, 8 if e == routed else (6, 4)[e % 2], 50 * place + e, device)
            for e in range(routed + 1)
        ]
    table = ops.experts_table(made["gate"], made["up"], made["down"])
    worst = 0.0
    for tokens in (1, 4):
        x = rows(tokens, hidden, device, tokens)
        noise = torch.rand((tokens, routed), generator=torch.Generator().manual_seed(tokens))
        ids = noise.topk(topk).indices.to(device)
        weights = torch.full((tokens, topk), 0.25, device=device)
        found = ops.experts(
            x, ids, weights, table, routed, inter, 8,
            shared=True, limit=clamp, dtype=torch.float32,
        )  # fmt: skip
        every = [_expert(x, made, e, clamp) for e in range(routed + 1)]
        right = every[routed].clone()
        for t in range(tokens):
            right[t] += sum(0.25 * every[e][t] for e in ids[t].tolist())
        worst = max(worst, off(found, right))
    return within(worst, limit)


def _linear(x: Tensor, entry: ops.Entry) -> Tensor:
    return reference.linear(x.double(), *entry)


def _group(x: Tensor, entries: list[ops.Entry]) -> Tensor:
    trellis, suh, svh, books = map(list, zip(*entries, strict=True))
    numbers = [library.CODEBOOKS[book] for book in books]
    return ops.group([x], trellis, suh, svh, [None] * len(books), numbers, torch.float32)


def _expert(x: Tensor, made: dict[str, list[ops.Entry]], e: int, clamp: float) -> Tensor:
    gate, up = (_linear(x, made[name][e]) for name in ("gate", "up"))
    inner = torch.nn.functional.silu(gate.clamp_max(clamp)) * up.clamp(-clamp, clamp)
    return reference.linear(inner, *made["down"][e])
