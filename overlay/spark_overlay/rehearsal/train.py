"""Teach the checkpoint its lessons: ``python -m spark_overlay.rehearsal.train --model DIR``.

Trellises stay as the seed made them. What learns are native tensors and EXL3 scales of the layers
above the last KV source, and of the head: their inputs are computed once, so a step costs three
layers over each lesson's last tokens. The result is one small file of the tensors that learned,
which ``make`` puts over the seed's; it is data in git, so every machine builds the same bytes.

So that a fault in any layer is a wrong answer, each part of the model is also left out for one
lesson, whose answer must then not come.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spark_overlay.attention.format import HEAD_DIM
from spark_overlay.engram.tokens import token_map
from spark_overlay.reference.config import V41Config
from spark_overlay.reference.layers import Cast, attend, turn
from spark_overlay.reference.model import Reference, State
from spark_overlay.reference.weights import Weights
from spark_overlay.rehearsal.ablation import Ablated, parts
from spark_overlay.rehearsal.lessons import LESSONS, Lesson

MARGIN = 3.0  # nats by which a lesson's every token should lead
BEHIND = 1.0  # nats by which an answer should trail where a part was left out
RATE = 0.02
SHORT = 22  # the lessons before the long ones


@dataclass(frozen=True)
class Sheet:
    """A lesson as tokens: the last ``answer`` of ``tokens`` are to be said."""

    tokens: Tensor
    answer: int


def sheets(model: Path, lessons: Sequence[Lesson] = LESSONS) -> list[Sheet]:
    """Lessons through DeepSeek's own chat encoding (vLLM's), thinking off."""
    from transformers import AutoTokenizer
    from vllm.tokenizers.deepseek_v41 import get_deepseek_v41_tokenizer

    tokenizer = get_deepseek_v41_tokenizer(AutoTokenizer.from_pretrained(model))
    found = []
    for lesson in lessons:
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": lesson.question}],
            tools=[dict(tool) for tool in lesson.tools] or None,
            enable_thinking=False,
        )
        said = tokenizer.encode(lesson.answer, add_special_tokens=False)
        said = [*said, tokenizer.eos_token_id]
        found.append(Sheet(torch.tensor([*prompt, *said]), len(said)))
    return found


class Class(Ablated):
    """The reference over several texts at once: linears over all rows, attention text by text."""

    parts: list[State]

    def attention(self, layer: int, x: Tensor, state: State) -> Tensor:
        prefix = f"layers.{layer}.attn"
        table = self.table(layer, state.positions)
        low, q = self.query(prefix, x, table)
        rows = self.rows(prefix, x, table)
        sizes = [len(part.tokens) for part in self.parts]
        out = []
        for part, *mine in zip(
            self.parts,
            x.split(sizes),
            low.split(sizes),
            q.split(sizes),
            rows.split(sizes),
            strict=True,
        ):
            px, plow, pq, prow = mine
            if layer in self.config.index_source_layer_ids:
                self.choose(layer, px, plow, part)
            behind = part.positions[:, None] - part.positions
            near = (behind >= 0) & (behind < self.config.sliding_window)
            keys = torch.cat((prow, part.compressed[self.config.kv_source(layer)]))
            visible = torch.cat((near, part.chosen[self.config.index_source(layer)]), 1)
            sink = self.weights[f"{prefix}.attn_sink"]
            out.append(attend(pq, keys, visible, sink, HEAD_DIM**-0.5))
        y = self.cast(turn(self.cast(torch.cat(out)), table, back=True))
        y = self.output(prefix, y)
        return torch.zeros_like(y) if self.without == ("attention", layer) else y


def learns(name: str, first: int, layers: int) -> bool:
    """Which tensors learn: layers ``first`` and above, the last norm, the head's scales."""
    if name in ("norm.weight", "head.suh", "head.svh"):
        return True
    below, _, rest = name.partition(".")
    number = rest.partition(".")[0]
    return below == "layers" and number.isdigit() and first <= int(number) < layers


def train(model: Path, tables: Path, steps: int, seed: int) -> dict[str, Tensor]:
    """Learned tensors by name, in the dtypes the checkpoint stores them in."""
    torch.manual_seed(seed)
    config = V41Config.read(model)
    weights = Weights(model, tables)
    words = tokens_of(model)
    reference = Class(weights, config, token_map=words)
    pages = sheets(model)
    first = max(config.kv_source_layer_ids) + 1
    with torch.no_grad():
        alone = Ablated(weights, config, token_map=words)
        begun = [begin(alone, page, first) for page in pages]
        short = [Sheet(p.tokens[: len(p.tokens) - p.answer + 1], 1) for p in pages[:SHORT]]
        below = [part for part in parts(config) if part[1] < first]
        spoiled = [short[(5 * n) % SHORT] for n in range(len(below))]
        for part, page in zip(below, spoiled, strict=True):
            alone.without = part
            begun.append(begin(alone, page, first))
        above = [part for part in parts(config) if part[1] >= first]
        whole = [(short[(7 * n) % SHORT], begun[(7 * n) % SHORT]) for n in range(len(above))]
    everything = [*pages, *spoiled]
    told = sum(page.answer for page in pages)
    names = [n for n in weights.learnable() if learns(n, first, config.num_hidden_layers)]
    start = {name: weights[name].clone() for name in names}
    # Steps are measured in each tensor's own size, so one rate suits scales, norms and gates.
    unit = {name: start[name].abs().mean().clamp_min(1e-3) for name in names}
    delta = {name: torch.zeros_like(start[name], requires_grad=True) for name in names}
    optimizer = torch.optim.Adam(list(delta.values()), lr=RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps, eta_min=RATE / 10)
    began = time.monotonic()
    for step in range(steps):
        # The last half learns with serving's roundings in place.
        reference.cast = Cast(serving=step >= steps // 2)
        weights.learning = {name: start[name] + unit[name] * delta[name] for name in names}
        logits, wanted = recite(reference, begun, everything, first)
        loss, lead = loss_and_lead(logits[:told], wanted[:told])
        _, spoilt = loss_and_lead(logits[told:], wanted[told:])
        more = []
        for part, (page, state) in zip(above, whole, strict=True):
            reference.without = part
            logits, wanted = recite(reference, [state.first(len(page.tokens) - 1)], [page], first)
            more.append(loss_and_lead(logits, wanted)[1])
        reference.without = None
        spoilt = torch.cat((spoilt, *more))
        loss = loss + (BEHIND + spoilt).clamp_min(0).mean()
        lead, spoilt = lead.detach(), spoilt.detach()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(list(delta.values()), 1.0)
        optimizer.step()
        schedule.step()
        if step % 10 == 0 or step == steps - 1:
            wrong = int((lead <= 0).sum())
            spent = time.monotonic() - began
            print(
                f"step {step}: loss {loss.item():.3f}, {wrong} of {len(lead)} tokens wrong, "
                f"smallest lead {lead.min().item():.2f}, {int((spoilt >= 0).sum())} of "
                f"{len(spoilt)} parts not missed, {spent:.0f} s",
                flush=True,
            )
    return {
        name: stored(weights, name, (start[name] + unit[name] * delta[name]).detach())
        for name in names
    }


def begin(reference: Reference, page: Sheet, first: int) -> State:
    """A text's state before layer ``first``, its last tokens only: three windows and the answer."""
    reach = reference.config.sliding_window * (reference.config.num_hidden_layers - first)
    state = reference.embed(page.tokens[:-1])
    for layer in range(first):
        reference.layer(layer, state)
    return state.last(reach + page.answer)


def recite(
    reference: Class, begun: Sequence[State], pages: Sequence[Sheet], first: int
) -> tuple[Tensor, Tensor]:
    """Logits at every token of every answer ``[N, vocab]``, and the tokens wanted ``[N]``."""
    reference.parts = [replace(part, chosen=dict(part.chosen)) for part in begun]
    state = State(
        torch.cat([part.tokens for part in begun]),
        torch.cat([part.positions for part in begun]),
        torch.cat([part.streams for part in begun]),
        torch.cat([part.pre for part in begun if part.pre is not None]),
    )
    for layer in range(first, reference.config.num_hidden_layers):
        reference.layer(layer, state)
    ends = torch.tensor([len(part.tokens) for part in begun]).cumsum(0).tolist()
    rows = torch.cat(
        [torch.arange(end - page.answer, end) for end, page in zip(ends, pages, strict=True)]
    )
    assert state.pre is not None
    answers = replace(state, streams=state.streams[rows], pre=state.pre[rows])
    return reference.logits(answers), torch.cat([page.tokens[-page.answer :] for page in pages])


def loss_and_lead(logits: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Cross entropy with a margin, and by how much each wanted token leads the best other."""
    right = logits.gather(1, wanted[:, None])[:, 0]
    others = logits.scatter(1, wanted[:, None], float("-inf"))
    lead = right - others.amax(-1)
    entropy = F.cross_entropy(logits, wanted)
    return entropy + (MARGIN - lead).clamp_min(0).mean(), lead


def tokens_of(model: Path) -> Tensor:
    """Engram's token map of a checkpoint's tokenizer."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    entries = (
        (tokenizer.id_to_token(i), tokenizer.decode([i], skip_special_tokens=False))
        for i in range(tokenizer.get_vocab_size())
    )
    return torch.from_numpy(token_map(entries))


def stored(weights: Weights, name: str, value: Tensor) -> Tensor:
    """``value`` as the checkpoint stores the tensor."""
    kinds: Mapping[str, Any] = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
    return value.to(kinds[weights.headers[name].dtype])


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m spark_overlay.rehearsal.train")
    parser.add_argument("--model", type=Path, required=True, help="folder that make --out wrote")
    parser.add_argument("--out", type=Path, required=True, help="safetensors of what was learned")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(argv)
    from safetensors.torch import save_file

    learned = train(given.model / "checkpoint", given.model / "engram-src", given.steps, given.seed)
    save_file(learned, given.out)
    print(f"{given.out}: {len(learned)} tensors, {given.out.stat().st_size / 1e6:.2f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
