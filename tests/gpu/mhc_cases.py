"""Inputs of mHC, its float64 oracle, and how far from it a result is."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from spark_overlay.attention.reference import rms_norm
from spark_overlay.mhc import plan
from spark_overlay.mhc.kernels import launch
from spark_overlay.mhc.kernels.work import Numbers, Work
from spark_overlay.mhc.reference import collapse, expand, mixes

NUMBERS = Numbers(1e-6, 1e-6, 1e-6, 2.0, 20, 1e-6)
NAMES = ("streams", "post", "comb", "input", "next_pre", "mean")


@dataclass
class Case:
    """Inputs of one call; ``own``: the projection's own input, where it has one (then ``fn`` is
    ``[24, H]`` and nothing is written back)."""

    x: Tensor
    residual: Tensor
    post: Tensor
    comb: Tensor
    pre: Tensor | None
    fn: Tensor
    scale: Tensor
    base: Tensor
    weight: Tensor | None
    write_back: bool = True
    own: bool = False
    mean: bool = False

    def to(self, device: str) -> Case:
        moved = {
            name: value.to(device) if isinstance(value, Tensor) else value
            for name, value in vars(self).items()
        }
        return Case(**moved)


def draw(tokens: int, hidden: int, seed: int = 0, **how: bool) -> Case:
    """Streams that grow over the model's layers, mixes as Sinkhorn leaves them. ``pre``,
    ``weight`` False: without. The rest of ``how`` is Case's."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g)

    size = torch.exp(normal(tokens, 4, 1))
    own = how.get("own", False)
    pre, weight = how.pop("pre", True), how.pop("weight", True)
    return Case(
        x=normal(tokens, hidden).bfloat16(),
        residual=(size * normal(tokens, 4, hidden)).bfloat16(),
        post=2 * torch.rand(tokens, 4, 1, generator=g),
        comb=torch.softmax(normal(tokens, 4, 4), -1),
        pre=torch.rand(tokens, 4, generator=g) if pre else None,
        fn=normal(24, hidden * (1 if own else 4)) * hidden**-0.5,
        scale=torch.tensor([1.0, 0.7, 0.9]),
        base=normal(24),
        weight=(1 + 0.1 * normal(hidden)).bfloat16() if weight else None,
        **how,
    )


def oracle(case: Case) -> dict[str, Tensor]:
    """In float64 on a CPU, with the model's own roundings (streams and collapsed streams are bf16)
    and no other."""
    streams = case.residual
    if case.write_back:
        streams = expand(case.x, streams, case.post.squeeze(-1), case.comb)
    mix = mixes(
        case.x if case.own else streams.flatten(1),
        case.fn,
        case.scale,
        case.base,
        rms_eps=NUMBERS.rms_eps,
        pre_eps=NUMBERS.pre_eps,
        sinkhorn_eps=NUMBERS.sinkhorn_eps,
        post_gain=NUMBERS.post_gain,
        iterations=NUMBERS.iterations,
    )
    read = collapse(streams, case.pre)
    found = {
        "post": mix.post,
        "comb": mix.residual,
        "next_pre": mix.next_pre,
        "input": read if case.weight is None else rms_norm(read, case.weight, NUMBERS.norm_eps),
    }
    if case.write_back:
        found["streams"] = streams
    if case.mean:
        found["mean"] = streams.double().mean(1)
    return found


def poisoned(case: Case) -> Work:
    """A call's arguments, every output full of NaN."""
    tokens, streams, hidden = case.residual.shape

    def room(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.full(shape, torch.nan, dtype=dtype, device=case.residual.device)

    bf16 = torch.bfloat16
    return Work(
        x=case.x if case.write_back or case.own else None,
        residual=case.residual,
        post=case.post if case.write_back else None,
        comb=case.comb if case.write_back else None,
        pre=case.pre,
        fn=case.fn,
        scale=case.scale,
        base=case.base,
        weight=case.weight,
        streams=room(tokens, streams, hidden, dtype=bf16) if case.write_back else None,
        post_out=room(tokens, streams),
        comb_out=room(tokens, streams, streams),
        input_out=room(tokens, hidden, dtype=bf16),
        pre_out=room(tokens, streams),
        mean_out=room(tokens, hidden, dtype=bf16) if case.mean else None,
    )


def results(work: Work) -> dict[str, Tensor]:
    found = {
        "streams": work.streams,
        "post": work.post_out,
        "comb": work.comb_out,
        "input": work.input_out,
        "next_pre": work.pre_out,
        "mean": work.mean_out,
    }
    return {name: value for name, value in found.items() if value is not None}


def computed(case: Case, geometry: plan.Geometry | None = None) -> dict[str, Tensor]:
    work = poisoned(case)
    launch.run(work, NUMBERS, geometry)
    return results(work)


def off(found: dict[str, Tensor], right: dict[str, Tensor]) -> dict[str, float]:
    """Relative RMS error of each output; NaN where one was left unwritten."""
    return {
        name: float(
            (value.cpu().double() - right[name].double()).norm() / right[name].double().norm()
        )
        for name, value in found.items()
        if value.numel()
    }
