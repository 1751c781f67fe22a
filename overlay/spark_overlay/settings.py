"""What the overlay is told, through vLLM's own ``--additional-config``.

--additional-config '{"spark_overlay": {"engram_dir": "/engram-src", "engram_store": "file"}}'
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

EngramStore = Literal["file", "memory"]
Sampling = Literal["official", "request"]


@dataclass(frozen=True, slots=True)
class OverlaySettings:
    """``engram_dir``: directory of the native shards with the Engram tables, their index and
    config.json. ``engram_store``: read rows from the files, or hold this rank's rows in memory.
    ``api_sampling``: temperature and top_p of a chat as the official API has them, or as the
    request names them."""

    engram_dir: str | None = None
    engram_store: EngramStore = "file"
    api_sampling: Sampling = "official"

    @classmethod
    def parse(cls, raw: dict[str, Any]) -> OverlaySettings:
        """Raises ValueError for an unknown key or value."""
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(raw) - known)
        if unknown:
            raise ValueError(
                f"additional_config.spark_overlay: unknown {', '.join(unknown)}; "
                f"known are {', '.join(sorted(known))}"
            )
        settings = cls(**raw)
        for name, kind in (("engram_store", EngramStore), ("api_sampling", Sampling)):
            if (found := getattr(settings, name)) not in get_args(kind):
                raise ValueError(
                    f"additional_config.spark_overlay.{name}: found {found!r}; "
                    f"needed one of {', '.join(get_args(kind))}"
                )
        return settings


def overlay_settings(vllm_config: Any) -> OverlaySettings:
    """The overlay's part of a ``VllmConfig``'s additional config."""
    extra = vllm_config.additional_config
    raw = extra.get("spark_overlay", {}) if isinstance(extra, dict) else {}
    return OverlaySettings.parse(raw)
