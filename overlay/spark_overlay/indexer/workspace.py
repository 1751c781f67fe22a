"""One workspace a GPU for the indexers' scores: they run one after another.

It is reserved while the model is built, so that vLLM's memory profile sees it and no graph
allocates. Its size: the scores of every row of the largest step over the longest context (and an
eighth to a quarter more, for rounds of the choice), but at most VLLM_SPARSE_INDEXER_MAX_LOGITS_MB.
A step that needs more runs in parts: decoding R rows of W positions, R = MAX_NUM_SEQS x (1 + draft
tokens), takes ceil(4.5 * R * W / size) of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

_held: dict[torch.device, Tensor] = {}


def reserve(
    device: torch.device, *, rows: int, width: int, blocks: int, size: int, most: int
) -> None:
    """See to it that a layer's steps fit: ``rows`` rows over ``width`` positions, of which
    ``blocks`` (0: none) of ``size`` are chosen, too; ``most`` bytes unless one row needs
    more."""
    from spark_overlay.indexer.kernels.sizes import Tuning, workspace_numbers

    numbers = workspace_numbers(rows, width, blocks, size, most // 4, Tuning())
    held = _held.get(device)
    if held is None or held.numel() < numbers:
        _held.pop(device, None)
        _held[device] = torch.empty(numbers, dtype=torch.int32, device=device)


def reserved(device: torch.device) -> Tensor:
    """int32 ``[numbers]``; KeyError before any layer reserved one."""
    return _held[device]
