"""DeepSeek V4.1, forward over one whole sequence, as one reads a paper.

Four residual streams run through the layers (hyper-connections). A layer is attention, then a
mixture of experts; each reads one mixture of the streams and is written back to all. Attention sees
a sliding window and, from layer 2 on, rows of a compressed cache that an indexer chooses. Caches,
index keys and choices are made on few "source" layers and shared by those above. Two layers first
add an n-gram memory (Engram) to the streams. Source of every formula: vLLM 0.33.0's V4.1 and
DeepSeek's reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from spark_overlay.attention.format import HEAD_DIM
from spark_overlay.engram.layout import EngramLayout
from spark_overlay.engram.reference import gate_values
from spark_overlay.indexer.format import KEY_DIM
from spark_overlay.indexer.reference import candidate_blocks, keep_candidates, top_positions
from spark_overlay.mhc.reference import Mixes, collapse, expand, mixes
from spark_overlay.reference.config import V41Config
from spark_overlay.reference.layers import (
    Cast,
    attend,
    engram_rows,
    mixture,
    rms_norm,
    turn,
)
from spark_overlay.reference.rope import cos_sin
from spark_overlay.reference.weights import Weights


@dataclass
class State:
    """What passes between the layers of one pass, for T tokens at ``positions [T]``.

    ``streams [T, S, H]``; ``pre [T, S]``, the mixture by which the next sublayer reads them (None:
    stream 0); and what the source layers have published for every token of the text.
    """

    tokens: Tensor
    positions: Tensor
    streams: Tensor
    pre: Tensor | None = None
    compressed: dict[int, Tensor] = field(default_factory=dict)  # source layer -> records [C, 512]
    index_keys: dict[int, Tensor] = field(default_factory=dict)  # source layer -> keys [C, 128]
    chosen: dict[int, Tensor] = field(default_factory=dict)  # index source -> mask [T, C]
    candidates: Tensor | None = None  # blocks [T, B]
    window: dict[int, Tensor] = field(default_factory=dict)  # layer -> rows written for all tokens

    def last(self, count: int) -> State:
        """The same text with only its last ``count`` tokens left to compute."""
        return self._part(slice(max(0, len(self.tokens) - count), None))

    def first(self, count: int) -> State:
        """The same text with only its first ``count`` tokens left to compute."""
        return self._part(slice(count))

    def _part(self, part: slice) -> State:
        return replace(
            self,
            tokens=self.tokens[part],
            positions=self.positions[part],
            streams=self.streams[part],
            pre=None if self.pre is None else self.pre[part],
            chosen={layer: mask[part] for layer, mask in self.chosen.items()},
            candidates=None if self.candidates is None else self.candidates[part],
        )


Observer = Callable[[int, State], None]
"""Called after each layer; may look, and may put other streams in place (teacher forcing)."""


class Reference:
    """``token_map [vocab]`` (see engram/tokens.py) is needed where the model has Engram layers."""

    def __init__(
        self,
        weights: Weights,
        config: V41Config,
        *,
        token_map: Tensor | None = None,
        serving: bool = False,
        positions: int = 4096,
    ) -> None:
        self.weights, self.config = weights, config
        self.cast = Cast(serving)
        self.token_map = token_map
        self.window_table, self.compressed_table = (
            cos_sin(rope, positions).to(weights.device)
            for rope in (config.window_rope, config.compressed_rope)
        )

    def __call__(
        self, tokens: Tensor, observe: Observer | None = None, *, replay: bool = False
    ) -> Tensor:
        """``tokens [T]`` int64 -> logits ``[T, vocab]``.

        With ``replay`` the layers from the last KV source on compute only the last window of tokens
        (bounded decoder replay): logits are those tokens'.
        """
        state = self.embed(tokens)
        for layer in range(self.config.num_hidden_layers):
            if replay and layer == max(self.config.kv_source_layer_ids):
                state = self.begin_replay(layer, state)
            self.layer(layer, state)
            if observe is not None:
                observe(layer, state)
        return self.logits(state)

    def embed(self, tokens: Tensor, first: int = 0) -> State:
        x = self.weights["embed.weight"][tokens]
        positions = torch.arange(first, first + len(tokens), device=x.device)
        return State(tokens, positions, x[:, None].expand(-1, self.config.hc_mult, -1))

    def begin_replay(self, layer: int, state: State) -> State:
        """Write the last source's cache rows for every token; go on with the last window only.

        This layer still reads its whole window; the layers above it find nothing before the first
        token left, which is what makes replay an approximation.
        """
        prefix = f"layers.{layer}."
        x = self.read_streams(prefix, "attn", state)
        table = self.table(layer, state.positions)
        state.window[layer] = self.rows(f"{prefix}attn", x, table)
        self.compress(layer, x, state)
        return state.last(self.config.sliding_window)

    def logits(self, state: State, norm: str = "norm.weight") -> Tensor:
        x = self.cast(collapse(state.streams, state.pre))
        x = self.cast(rms_norm(x, self.weights[norm], self.config.rms_norm_eps))
        return self.cast(self.weights.linear(x, "head"))

    def layer(self, layer: int, state: State) -> None:
        """One layer: Engram where there is one, attention, experts."""
        prefix = f"layers.{layer}"
        if self.config.engram is not None and layer in self.config.engram.layer_ids:
            self.engram(layer, state, self.config.engram)
        self.sublayer(f"{prefix}.", "attn", state, lambda x: self.attention(layer, x, state))
        self.sublayer(f"{prefix}.", "ffn", state, lambda x: self.experts(f"{prefix}.ffn", x))

    def sublayer(
        self, prefix: str, name: str, state: State, compute: Callable[[Tensor], Tensor]
    ) -> None:
        """Read the streams by the mixture computed one sublayer ago, compute, write back to all."""
        mix = self.mixture_of(f"{prefix}hc_{name}", state.streams)
        y = compute(self.read_streams(prefix, name, state))
        state.streams = self.cast(expand(y, state.streams, mix.post, mix.residual))
        state.pre = mix.next_pre

    def read_streams(self, prefix: str, name: str, state: State) -> Tensor:
        """The normalised input of a sublayer ``[T, H]``."""
        x = self.cast(collapse(state.streams, state.pre))
        norm = self.weights[f"{prefix}{name}_norm.weight"]
        return self.cast(rms_norm(x, norm, self.config.rms_norm_eps))

    def mixture_of(self, key: str, streams: Tensor) -> Mixes:
        config = self.config
        return mixes(
            streams.flatten(1),
            self.weights[f"{key}_fn"],
            self.weights[f"{key}_scale"],
            self.weights[f"{key}_base"],
            rms_eps=config.rms_norm_eps,
            pre_eps=config.hc_eps,
            sinkhorn_eps=config.hc_eps,
            post_gain=2.0,
            iterations=config.hc_sinkhorn_iters,
        )

    def engram(self, layer: int, state: State, layout: EngramLayout) -> None:
        """Add the n-grams that end at each token, gated by how well they fit the streams."""
        if self.token_map is None:
            raise ValueError(f"layer {layer} has an Engram: the reference needs a token_map")
        ids = layout.hash_ids(state.tokens.cpu().numpy(), self.token_map.cpu().numpy())
        own = torch.from_numpy(ids[:, layout.index_of(layer)])
        prefix = f"layers.{layer}.engram"
        kv = self.cast(self.weights.linear(engram_rows(self.weights, layer, own), f"{prefix}.wkv"))
        q_weight, k_weight = (self.weights[f"{prefix}.{side}_weight"] for side in "qk")
        state.streams = self.cast(
            gate_values(state.streams, kv, q_weight, k_weight, self.config.rms_norm_eps)
        )

    def experts(self, prefix: str, x: Tensor, top_k: int | None = None) -> Tensor:
        return mixture(
            self.weights,
            prefix,
            x,
            top_k=top_k or self.config.num_experts_per_tok,
            scaling=self.config.routed_scaling_factor,
            limit=self.config.swiglu_limit,
            cast=self.cast,
        )

    def attention(self, layer: int, x: Tensor, state: State) -> Tensor:
        """Sparse multi-query attention over window and chosen rows: ``x [T, H] -> [T, H]``."""
        prefix = f"layers.{layer}.attn"
        ratio = self.config.ratio(layer)
        table = self.table(layer, state.positions)
        low, q = self.query(prefix, x, table)
        rows = state.window.get(layer)
        if rows is None:
            rows = self.rows(prefix, x, table)
        # Rows end with the text's last token, whether they are all of the text's or the last ones.
        at = torch.arange(len(rows), device=rows.device) + state.positions[-1] + 1 - len(rows)
        behind = state.positions[:, None] - at
        visible = (behind >= 0) & (behind < self.config.sliding_window)
        if ratio:
            if layer in self.config.kv_source_layer_ids and layer not in state.compressed:
                self.compress(layer, x, state)
            if layer in self.config.index_source_layer_ids:
                self.choose(layer, x, low, state)
            rows = torch.cat((rows, state.compressed[self.config.kv_source(layer)]))
            visible = torch.cat((visible, state.chosen[self.config.index_source(layer)]), 1)
        return self.read(prefix, q, rows, visible, table)

    def table(self, layer: int, positions: Tensor) -> Tensor:
        """``[T, 64]``: layers with a compressed cache turn by other frequencies."""
        whole = self.compressed_table if self.config.ratio(layer) else self.window_table
        return whole[positions]

    def query(self, prefix: str, x: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        """The normalised low-rank query ``[T, r]``, and the heads ``[T, heads, 512]``, turned."""
        weights, cast = self.weights, self.cast
        low = cast(weights.linear(x, f"{prefix}.wq_a"))
        low = cast(rms_norm(low, weights[f"{prefix}.q_norm.weight"], self.config.rms_norm_eps))
        heads = cast(weights.linear(low, f"{prefix}.wq_b")).unflatten(-1, (-1, HEAD_DIM))
        return low, cast(turn(heads, table))

    def rows(self, prefix: str, x: Tensor, table: Tensor) -> Tensor:
        """The window's cache rows ``[T, 512]``: one latent is key and value of all heads."""
        weights, cast = self.weights, self.cast
        kv = cast(weights.linear(x, f"{prefix}.wkv"))
        kv = cast(rms_norm(kv, weights[f"{prefix}.kv_norm.weight"], self.config.rms_norm_eps))
        return cast.record(turn(kv, table))

    def read(self, prefix: str, q: Tensor, rows: Tensor, visible: Tensor, table: Tensor) -> Tensor:
        """Attend, turn the result back, and project it out."""
        y = attend(q, rows, visible, self.weights[f"{prefix}.attn_sink"], HEAD_DIM**-0.5)
        return self.output(prefix, self.cast(turn(self.cast(y), table, back=True)))

    def output(self, prefix: str, heads: Tensor) -> Tensor:
        """Groups of heads each through its own slice of wo_a, then all through wo_b."""
        groups = heads.unflatten(1, (self.config.o_groups, -1)).flatten(2)
        if f"{prefix}.wo_a.weight" in self.weights:
            plain = self.weights[f"{prefix}.wo_a.weight"].view(
                self.config.o_groups, -1, groups.shape[-1]
            )
            narrow = torch.einsum("tgi,gri->tgr", groups, plain).flatten(1)
        else:
            parts = (
                self.weights.linear(groups[:, g], f"{prefix}.wo_a.slice.{g}")
                for g in range(self.config.o_groups)
            )
            narrow = torch.cat(tuple(parts), -1)
        return self.cast(self.weights.linear(self.cast(narrow), f"{prefix}.wo_b"))

    def compress(self, layer: int, x: Tensor, state: State) -> None:
        """Publish a source layer's compressed rows and index keys.

        Ratio 1: a row per token. Ratio 2: a row per pair, its values mixed by a softmax of their
        two scores, at the position of the pair's first token."""
        weights, ratio, cast = self.weights, self.config.ratio(layer), self.cast
        prefix = f"layers.{layer}.attn"
        count = len(x) // ratio
        value = cast.single(weights.linear(x, f"{prefix}.compressor.wkv"))
        if ratio > 1:
            score = cast.single(weights.linear(x, f"{prefix}.compressor.wgate"))
            pairs = (count, ratio, HEAD_DIM)
            share = score[: count * ratio].view(pairs).softmax(1)
            value = (value[: count * ratio].view(pairs) * share).sum(1)
        eps = self.config.rms_norm_eps
        latent = cast(rms_norm(value, weights[f"{prefix}.compressor.norm.weight"], eps))
        table = self.compressed_table[: count * ratio : ratio]
        state.compressed[layer] = cast.record(turn(latent, table))
        key = cast(weights.linear(latent, f"{prefix}.indexer.wk"))
        key = cast(rms_norm(key, weights[f"{prefix}.indexer.k_norm.weight"], eps))
        state.index_keys[layer] = cast.index_key(turn(key, table))

    def choose(self, layer: int, x: Tensor, low: Tensor, state: State) -> None:
        """Choose each token's compressed rows: the top k by ``sum_h w_h relu(q_h . k)``.

        One layer also publishes its best blocks; the index sources above choose within them.
        """
        config, prefix = self.config, f"layers.{layer}.attn.indexer"
        keys = state.index_keys[config.kv_source(layer)]
        q = self.cast(self.weights.linear(low, f"{prefix}.wq_b")).unflatten(-1, (-1, KEY_DIM))
        q = self.cast.index_query(turn(q, self.table(layer, state.positions)))
        weight = self.cast(self.weights.linear(x, f"{prefix}.weights_proj"))
        weight = weight * (KEY_DIM**-0.5 * config.index_n_heads**-0.5)
        score = torch.einsum("thd,nd->thn", q, keys).relu()
        score = torch.einsum("th,thn->tn", weight, score).detach()
        seen = (state.positions + 1) // config.ratio(layer)
        row = torch.arange(len(keys), device=keys.device)
        score = score.masked_fill(row >= seen[:, None], float("-inf"))
        if layer == config.candidate_source_layer_id:
            state.candidates = candidate_blocks(
                score, seen, config.candidate_topk_blocks, config.candidate_block_size
            )
        elif state.candidates is not None:
            score = keep_candidates(score, state.candidates, config.candidate_block_size)
        state.chosen[layer] = as_mask(top_positions(score, config.index_topk), len(keys))


def as_mask(positions: Tensor, count: int) -> Tensor:
    """``[T, k]`` positions, -1 padded, as ``[T, count]`` bool."""
    mask = torch.zeros(len(positions), count + 1, dtype=torch.bool, device=positions.device)
    mask.scatter_(1, torch.where(positions < 0, count, positions).long(), True)
    return mask[:, :count]
