"""Images of a request: from the recipe's sources to what vLLM's image processor takes."""

from __future__ import annotations

import io
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import deepseek_recipe as recipe

from spark_overlay.serving.errors import ApiError


@dataclass(frozen=True)
class Pictures:
    """``images``: PIL images, in the order of their places in the prompt. ``more_tokens``: tokens
    that the engine makes of them beyond the one each has in the prompt."""

    images: Sequence[Any]
    more_tokens: int


def pictures(sources: Sequence[Any]) -> Pictures:
    """Fetches, checks and scales them as the official API does. Raises ApiError."""
    from PIL import Image

    fetcher = recipe.ReqwestImageFetcher().with_destination_filter(_public)
    resolver = recipe.ImageResolver(fetcher, recipe.OpenCvImagePreprocessor())
    try:
        found = resolver.resolve(list(sources), recipe.ImageQuota())
        more = found.image_token_adjustment()
        images = [Image.open(io.BytesIO(info.data)).convert("RGB") for info in found.images]
    except (recipe.ImageError, recipe.CalcResizeError, OSError) as error:
        raise ApiError(400, str(error)) from error
    return Pictures(images, more)


def _public(host: str, address: str) -> bool:
    """Whether an image may come from there: never from this machine or its network."""
    return ipaddress.ip_address(address).is_global
