"""The packed checkpoint as the overlay's torch path keeps it on a GPU: decoded, then bf16.

The rounding alone is worth a percent of an attention's answer: a KV value moved by 0.2 % falls to
the other side of an e4m3 step now and then, and the steps are 6 % wide. With the same rounding in
the reference what remains is the arithmetic and the glue.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spark_overlay.reference.weights import Weights


class DenseWeights(Weights):
    def linear(self, x: Tensor, key: str) -> Tensor:
        if key not in self.packed:
            return super().linear(x, key)
        return x @ self.dense(key)

    def dense(self, key: str) -> Tensor:
        """``[in, out]`` of a packed matrix, rounded once; kept in place of the inner one."""
        name = f"{key}.dense"
        if name not in self._inner:
            whole = self[f"{key}.suh"][:, None] * self.inner(key) * self[f"{key}.svh"]
            self._inner[name] = whole.to(torch.bfloat16).to(self.dtype)
            del self._inner[key]
        return self._inner[name]
