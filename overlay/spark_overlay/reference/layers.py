"""The parts of a V4.1 layer for one sequence of T tokens, each as its formula says it.

``cast`` rounds a value as serving does between operations (bf16, and the 8-bit records of the
caches), or does nothing; everything else is computed in the weights' dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from spark_overlay.attention.format import E4M3_MAX, NOPE_DIM, SCALE_GROUP, SCALE_GROUPS
from spark_overlay.attention.reference import e4m3_exponent
from spark_overlay.engram.reference import dequantize_rows
from spark_overlay.reference.weights import Weights


@dataclass(frozen=True)
class Cast:
    """Rounding between operations. Gradients pass through it unchanged."""

    serving: bool = False

    def __call__(self, x: Tensor) -> Tensor:
        """To bf16 and back."""
        return _through(x, x.bfloat16()) if self.serving else x

    def single(self, x: Tensor) -> Tensor:
        """To float32 and back: what the compressor's scores are kept in."""
        return _through(x, x.float()) if self.serving else x

    def record(self, kv: Tensor) -> Tensor:
        """What a KV record keeps of ``kv [..., 512]``: 448 values in e4m3 by groups of 64, 64 in
        bf16."""
        if not self.serving:
            return kv
        nope, rope = kv[..., :NOPE_DIM], kv[..., NOPE_DIM:]
        groups = nope.unflatten(-1, (SCALE_GROUPS, SCALE_GROUP))
        kept = _e4m3(groups, e4m3_exponent(groups.abs().amax(-1, keepdim=True).float()))
        return torch.cat((_through(nope, kept.flatten(-2).bfloat16()), self(rope)), -1)

    def index_key(self, key: Tensor) -> Tensor:
        """What the index cache keeps of ``key [..., 128]``: e4m3 with one scale."""
        if not self.serving:
            return key
        key = self(key)
        return _through(key, _e4m3(key, e4m3_exponent(key.abs().amax(-1, keepdim=True).float())))

    def index_query(self, q: Tensor) -> Tensor:
        """As a key, but without the floor under its scale."""
        if not self.serving:
            return q
        q = self(q)
        largest = q.abs().amax(-1, keepdim=True).clamp_min(1e-10).float()
        return _through(q, _e4m3(q, torch.ceil(torch.log2(largest / E4M3_MAX))))


def _e4m3(x: Tensor, exponent: Tensor) -> Tensor:
    scaled = (x.float() * torch.exp2(-exponent)).clamp(-E4M3_MAX, E4M3_MAX)
    return scaled.to(torch.float8_e4m3fn).float() * torch.exp2(exponent)


def _through(x: Tensor, rounded: Tensor) -> Tensor:
    """The rounded value with the gradient of ``x`` (straight-through)."""
    return x + (rounded.to(x.dtype) - x).detach()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / rms(x) * weight`` over the last dimension."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def turn(x: Tensor, table: Tensor, *, back: bool = False) -> Tensor:
    """GPT-J RoPE of the last 64 of ``x [T, ..., D]``: pair (2i, 2i+1) by ``table [T, 64]``."""
    # In float32 whatever the model is computed in: the table is, and serving turns so.
    cos, sin = table.chunk(2, -1)
    shape = (x.shape[0],) + (1,) * (x.dim() - 2) + (cos.shape[-1],)
    cos, sin = cos.view(shape), (-sin if back else sin).view(shape)
    size = 2 * cos.shape[-1]
    even, odd = x[..., -size::2].float(), x[..., -size + 1 :: 2].float()
    turned = torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)
    return torch.cat((x[..., :-size], turned.to(x.dtype)), -1)


def attend(q: Tensor, kv: Tensor, visible: Tensor, sink: Tensor, scale: float) -> Tensor:
    """Softmax attention with one latent as key and value, and a per-head sink in the denominator.

    ``q [T, H, 512]``, ``kv [N, 512]``, ``visible [T, N]`` bool, ``sink [H]`` -> ``[T, H, 512]``.
    """
    logits = torch.einsum("thd,nd->thn", q, kv) * scale
    logits = logits.masked_fill(~visible[:, None], float("-inf"))
    sinks = sink.to(logits.dtype).view(1, -1, 1).expand(len(q), -1, 1)
    weight = torch.softmax(torch.cat((logits, sinks), -1), -1)[..., :-1]
    return torch.einsum("thn,nd->thd", weight, kv)


def mixture(
    weights: Weights,
    prefix: str,
    x: Tensor,
    *,
    top_k: int,
    scaling: float,
    limit: float,
    cast: Cast,
) -> Tensor:
    """Routed experts plus the shared one: ``x [T, H] -> [T, H]``.

    score = sqrt(softplus(x W_gate)); the top k of score + bias are chosen, weighted by
    score / sum(chosen scores) * scaling.
    """
    score = F.softplus(weights.linear(x, f"{prefix}.gate")).sqrt()
    chosen = (score + weights[f"{prefix}.gate.bias"]).topk(top_k, -1).indices
    share = score.gather(-1, chosen)
    share = share / share.sum(-1, keepdim=True) * scaling
    routed = torch.zeros_like(x)
    for expert in chosen.unique().tolist():
        token, place = (chosen == expert).nonzero(as_tuple=True)
        y = swiglu(weights, f"{prefix}.experts.{expert}", x[token], limit)
        routed = routed.index_add(0, token, y * share[token, place, None])
    return cast(cast(routed) + cast(swiglu(weights, f"{prefix}.shared_experts", x, limit, cast)))


def swiglu(weights: Weights, key: str, x: Tensor, limit: float, cast: Cast | None = None) -> Tensor:
    """``W2(silu(min(W1 x, L)) * clamp(W3 x, -L, L))``."""
    cast = cast or Cast()
    gate = cast(weights.linear(x, f"{key}.w1")).clamp(max=limit)
    up = cast(weights.linear(x, f"{key}.w3")).clamp(-limit, limit)
    return weights.linear(cast(F.silu(gate) * up), f"{key}.w2")


def engram_rows(weights: Weights, layer: int, ids: Tensor) -> Tensor:
    """Dequantised table rows of ``ids [T, columns]``, side by side: ``[T, columns * dim]``."""
    rows, scales = weights.engram_rows(layer, ids)
    return dequantize_rows(rows, scales).view(ids.shape[0], -1).to(weights.dtype)
