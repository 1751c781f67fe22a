"""vLLM against the plain reference, and deliberate faults that must be seen.

Every layer of the reference is fed with what vLLM's own layer was fed with (a chunked prefill, then
decode), so errors do not add up. A fault counts as seen when some layer's median error is at least
three times the largest median of the right model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from engine import Answers, Engines
from oracle import OUTPUTS, Taped, Watched, errors
from torch import Tensor

from spark_overlay.reference.config import V41Config
from spark_overlay.reference.model import State
from spark_overlay.reference.weights import Weights

pytestmark = pytest.mark.rehearsal

LAYERS = 9
MEDIAN, P90 = 0.005, 0.01
SEEN = 3.0
#: The right model agrees with vLLM to the bit in most places; less than this is not told apart.
FLOOR = 0.001
#: Nats between the best two below which a choice is a tie; and the median divergence allowed.
TIE, KL = 0.5, 0.01

Found = dict[str, list[Tensor]]


@pytest.fixture(scope="module")
def root(checkpoint: Callable[[str], Path]) -> Path:
    return checkpoint("standard")


@pytest.fixture(scope="module")
def tape(plain: Answers, engines: Engines) -> Taped:
    assert plain["tape"]
    return Taped(engines.tape, LAYERS)


@pytest.fixture(scope="module")
def model(root: Path) -> Any:
    return oracle.oracle(root)


@pytest.fixture(scope="module")
def right(model: Any, tape: Taped) -> Found:
    return errors(model, tape)


def medians(found: Found) -> dict[str, list[float]]:
    return {name: [rows.median().item() for rows in layers] for name, layers in found.items()}


def test_every_layer_agrees(right: Found) -> None:
    lines = [
        "relative error, % of a token's norm:",
        "layer  " + "".join(f"{o:>22}" for o in OUTPUTS),
    ]
    for layer in range(LAYERS):
        cells = []
        for name in OUTPUTS:
            rows = right[name][layer]
            cells.append(f"{100 * rows.median():9.2f} p90 {100 * rows.quantile(0.9):5.2f}  ")
        lines.append(f"{layer:>5}  " + "".join(cells))
    print("\n".join(lines))
    for name in OUTPUTS:
        for rows in right[name]:
            assert rows.median() <= MEDIAN
            assert rows.quantile(0.9) <= P90


def test_from_the_tokens_alone(model: Any, tape: Taped) -> None:
    """End to end: the same choice where it is one, and nearly the same distribution everywhere."""
    alone, served = oracle.logits(model, tape)
    best = served.topk(2, -1).values
    clear = best[:, 0] - best[:, 1] > TIE
    same = alone.argmax(-1) == served.argmax(-1)
    divergence = (served.softmax(-1) * (served.log_softmax(-1) - alone.log_softmax(-1))).sum(-1)
    print(
        f"{int(clear.sum())} of {len(clear)} tokens clear, {int(same.sum())} equal; "
        f"KL median {divergence.median():.2e}, largest {divergence.max():.2e}"
    )
    assert bool(same[clear].all())
    assert divergence.median() <= KL
    assert int(clear.sum()) > len(clear) // 2


class Faulty(Weights):
    """The checkpoint's tensors with one thing wrong."""

    def __init__(self, root: Path, fault: str) -> None:
        super().__init__(root / "checkpoint", root / "engram-src", dtype=torch.float64)
        self.fault = fault

    def __getitem__(self, name: str) -> Tensor:
        tensor = super().__getitem__(name)
        if self.fault == "no attention sink" and name.endswith("attn_sink"):
            return torch.full_like(tensor, -1e9)
        if self.fault == "suh and svh swapped" and name.endswith((".suh", ".svh")):
            key, leaf = name.rsplit(".", 1)
            other = super().__getitem__(f"{key}.{'svh' if leaf == 'suh' else 'suh'}")
            return other if other.shape == tensor.shape else tensor
        return tensor

    def linear(self, x: Tensor, key: str) -> Tensor:
        if self.fault == "gate and up swapped" and ".experts." in key:
            head, _, leaf = key.rpartition(".")
            key = f"{head}.{ {'w1': 'w3', 'w3': 'w1'}.get(leaf, leaf) }"
        if self.fault == "experts rotated" and ".ffn.experts." in key:
            head, rest = key.split(".ffn.experts.")
            number, leaf = rest.split(".")
            key = f"{head}.ffn.experts.{(int(number) + 1) % 32}.{leaf}"
        return super().linear(x, key)

    def inner(self, key: str) -> Tensor:
        if self.fault in ("wrong codebook", "wrong K") and key not in self._inner:
            self._inner[key] = misread(self, key, self.fault)
        return super().inner(key)

    def engram_rows(self, layer: int, ids: Tensor) -> tuple[Tensor, Tensor]:
        if self.fault == "Engram rows shifted by one":
            ids = (ids - 1).clamp_min(0)
        rows, scales = super().engram_rows(layer, ids)
        if self.fault == "Engram scale byte + 1":
            scales = scales + 1
        if self.fault == "Engram bytes as integers":
            # The field's fault: bytes converted as the numbers 0..255 instead of viewed as e4m3.
            rows = rows.view(torch.uint8).float().clamp_max(448).to(torch.float8_e4m3fn)
        return rows, scales


def misread(weights: Weights, key: str, fault: str) -> Tensor:
    """``H W_hat H`` of a trellis decoded by another codebook, or at one bit less than it has."""
    from spark_overlay.exl3.reference import decode_torch, hadamard_rotate
    from spark_overlay.reference.weights import read_tensor

    trellis = read_tensor(weights.headers[f"{key}.trellis"])
    facts = weights.packed[key]
    if fault == "wrong codebook":
        core = decode_torch(trellis, "mcg" if facts.k2 % 2 == 0 else "mul1")
    else:
        words = max(16, 16 * (facts.k2 // 2 - 1))
        core = decode_torch(trellis[..., :words].contiguous(), facts.codebook)
    return hadamard_rotate(hadamard_rotate(core.double().T).T).to(weights.dtype)


class Undelayed(Watched):
    """A sublayer reads the streams by the mixture it has just computed, not by the last one."""

    def sublayer(self, prefix: str, name: str, state: State, compute: Any) -> None:
        state.pre = self.mixture_of(f"{prefix}hc_{name}", state.streams).next_pre
        super().sublayer(prefix, name, state, compute)


def changed(**values: Any) -> Callable[[V41Config], V41Config]:
    return lambda config: replace(config, **values)


CONFIG_FAULTS: dict[str, Callable[[V41Config], V41Config]] = {
    "window one narrower": lambda c: replace(c, sliding_window=c.sliding_window - 1),
    "window one wider": lambda c: replace(c, sliding_window=c.sliding_window + 1),
    "no candidate filter": changed(candidate_source_layer_id=-1),
    "top-k halved": lambda c: replace(c, index_topk=c.index_topk // 2),
    "compressed RoPE by the window's theta": lambda c: replace(
        c, compressed_rope=replace(c.compressed_rope, theta=c.window_rope.theta)
    ),
    "no YaRN": lambda c: replace(c, compressed_rope=replace(c.compressed_rope, factor=1.0)),
    "routed scaling 1.0": changed(routed_scaling_factor=1.0),
    "one Sinkhorn iteration": changed(hc_sinkhorn_iters=1),
    "Engram off": changed(engram=None),
}
WEIGHT_FAULTS = (
    "no attention sink",
    "Engram rows shifted by one",
    "Engram bytes as integers",
    "Engram scale byte + 1",
    "wrong K",
    "wrong codebook",
    "suh and svh swapped",
    "gate and up swapped",
    "experts rotated",
)
FAULTS = (*CONFIG_FAULTS, *WEIGHT_FAULTS, "pre-mix not delayed")


def with_fault(root: Path, fault: str, model: Any) -> Any:
    if fault in CONFIG_FAULTS:
        config = CONFIG_FAULTS[fault](model.config)
        return oracle.oracle(root, weights=model.weights, config=config)
    if fault in WEIGHT_FAULTS:
        faulty = Faulty(root, fault)
        if fault not in ("wrong K", "wrong codebook"):
            faulty.share_decoded(model.weights)
        return oracle.oracle(root, weights=faulty)
    return oracle.oracle(root, kind=Undelayed, weights=model.weights)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(root: Path, model: Any, tape: Taped, right: Found, fault: str) -> None:
    usual, wrong = medians(right), medians(errors(with_fault(root, fault, model), tape))
    # Sublayer by sublayer: a window that is one too wide shows in attention long before streams.
    ratios = {
        (name, layer): wrong[name][layer] / max(FLOOR, *usual[name])
        for name in OUTPUTS
        for layer in range(LAYERS)
    }
    (name, layer), largest = max(ratios.items(), key=lambda item: item[1])
    print(f"{fault}: {largest:.1f} x the right model's error, in the {name} of layer {layer}")
    assert largest >= SEEN
