"""DSpark: three small layers that guess the next few tokens at once.

The block of a round is the last accepted token (the anchor) and noise tokens. Every token of the
block sees all others and the window of context rows before it; these rows are made from the hidden
states of the target's last three layers. A Markov head then adds, token by token, what usually
follows the one just guessed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spark_overlay.reference.layers import rms_norm
from spark_overlay.reference.model import Reference, State


def target_states(reference: Reference, tokens: Tensor) -> Tensor:
    """``[T, layers * H]``: the streams' mean after each target layer, side by side."""
    seen: dict[int, Tensor] = {}

    def keep(layer: int, state: State) -> None:
        if layer in reference.config.dspark_target_layer_ids:
            seen[layer] = reference.cast(state.streams.mean(1))

    reference(tokens, keep)
    return torch.cat([seen[layer] for layer in reference.config.dspark_target_layer_ids], -1)


def propose(reference: Reference, states: Tensor, anchor: int, count: int) -> Tensor:
    """``count`` tokens to follow ``anchor``, given ``states [P, layers * H]`` of all before it."""
    weights, config, cast = reference.weights, reference.config, reference.cast
    eps = config.rms_norm_eps
    context = cast(weights.linear(states, "mtp.0.main_proj"))
    context = cast(rms_norm(context, weights["mtp.0.main_norm.weight"], eps))
    first = max(0, len(states) - config.sliding_window)
    table = reference.window_table
    before, here = table[first : len(states)], table[len(states) : len(states) + count]

    block = torch.full((count,), config.dspark_noise_token_id, device=states.device)
    block[0] = anchor
    state = reference.embed(block, len(states))
    for stage in range(config.num_nextn_predict_layers):
        prefix = f"mtp.{stage}"
        past = reference.rows(f"{prefix}.attn", context[first:], before)

        def attention(x: Tensor, prefix: str = f"{prefix}.attn", past: Tensor = past) -> Tensor:
            _, q = reference.query(prefix, x, here)
            rows = torch.cat((past, reference.rows(prefix, x, here)))
            everything = torch.ones(count, len(rows), dtype=torch.bool, device=x.device)
            return reference.read(prefix, q, rows, everything, here)

        def experts(x: Tensor, prefix: str = f"{prefix}.ffn") -> Tensor:
            return reference.experts(prefix, x, config.dspark_num_experts_per_tok)

        reference.sublayer(f"{prefix}.", "attn", state, attention)
        reference.sublayer(f"{prefix}.", "ffn", state, experts)

    last = f"mtp.{config.num_nextn_predict_layers - 1}"
    logits = reference.logits(state, f"{last}.norm.weight")
    embed, head = (weights[f"{last}.markov_head.{side}.weight"] for side in ("embed", "head"))
    guessed = [anchor]
    for step in range(count):
        follow = cast(embed[guessed[-1]] @ head.T)
        guessed.append(int((logits[step] + follow).argmax()))
    return torch.tensor(guessed[1:])
