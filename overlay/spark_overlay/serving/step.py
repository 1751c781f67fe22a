"""What the API needs of an engine; ``glue.VllmEngine`` is the one there is. Pure."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from spark_overlay.serving.answer import Logprobs, Reason
from spark_overlay.serving.errors import ApiError
from spark_overlay.serving.sampling import Sampling


@dataclass(frozen=True)
class Step:
    """``ids``: new tokens, no EOS among them. ``prompt``: tokens of the prompt, those of its images
    among them; ``cached``: how many came from the prefix cache. ``reason``: set on the last
    step."""

    ids: Sequence[int]
    logprobs: Logprobs | None = None
    prompt: int = 0
    cached: int = 0
    reason: Reason | None = None


class Engine(Protocol):
    @property
    def context(self) -> int:
        """Tokens of one request, prompt and answer."""

    @property
    def sees_images(self) -> bool: ...

    def generate(
        self,
        ids: Sequence[int],
        sampling: Sampling,
        *,
        reasons_first: bool,
        salt: str | None = None,
        images: Sequence[Any] = (),
    ) -> AsyncGenerator[Step, None]:
        """Closing it ends the request. ``reasons_first``: what ``sampling`` constrains begins
        after the reasoning. What it raises goes to ``refusal``."""

    def refusal(self, error: Exception) -> ApiError | None:
        """What the API says of an exception; None for a fault that has no better name."""
