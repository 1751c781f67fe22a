"""What the overlay is told, through vLLM's own ``--additional-config``.

--additional-config '{"spark_overlay": {"engram_dir": "/engram-src", "engram_store": "file"}}'
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from spark_overlay.attention.select import Kind

EngramStore = Literal["file", "plain", "memory"]
Sampling = Literal["official", "request"]


@dataclass(frozen=True, slots=True)
class OverlaySettings:
    """``engram_dir``: directory of the native shards with the Engram tables, their index and
    config.json. ``engram_store``: read rows from the files by native code, by plain reads, or hold
    this rank's rows in memory. ``engram_packed_dir``: where this rank's packed files may lie.
    ``engram_io_threads``: reads in flight of one table; ``engram_cache_gib``: rows kept in memory,
    for all tables of the rank; ``engram_stats_seconds``: between lines of read statistics, 0 none.
    ``api_sampling``: temperature and top_p of a chat as the official API has them, or as the
    request names them. ``weights_prepared_dir``: where this rank's prepared file may lie.
    ``memory_drop_page_cache``: drop the checkpoint's page cache while and after
    it is read. ``memory_release_tokens``: prompt length from which the allocator gives memory back
    between chunks while MemAvailable is under ``memory_release_below_gib`` (0: always), and with
    ``memory_release_at_end`` once when the prompt is done. ``indexer_prefill_factor``: prefill
    workspace of the indexer in prompts of full length; None as vLLM has it, 40. ``attention``:
    portable or stock, as OVERLAY_ATTENTION; None as attention/select.py chooses."""

    engram_dir: str | None = None
    engram_store: EngramStore = "file"
    engram_packed_dir: str | None = None
    engram_io_threads: int = 32
    engram_cache_gib: float = 0.0
    engram_stats_seconds: int = 0
    api_sampling: Sampling = "official"
    weights_prepared_dir: str | None = None
    memory_drop_page_cache: bool = True
    memory_release_tokens: int = 8192
    memory_release_below_gib: float = 2.5
    memory_release_at_end: bool = False
    indexer_prefill_factor: int | None = None
    attention: Kind | None = None

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
        if settings.attention not in (None, *get_args(Kind)):
            raise ValueError(
                f"additional_config.spark_overlay.attention: found {settings.attention!r}; "
                f"needed one of {', '.join(get_args(Kind))}"
            )
        for name in ("memory_drop_page_cache", "memory_release_at_end"):
            if not isinstance(found := getattr(settings, name), bool):
                raise ValueError(
                    f"additional_config.spark_overlay.{name}: found {found!r}; needed true or false"
                )
        for name, low, whole in _NUMBERS:
            found = getattr(settings, name)
            if found is None and name == "indexer_prefill_factor":
                continue
            kinds: tuple[type, ...] = (int,) if whole else (int, float)
            # `not >=` refuses a NaN, too.
            if isinstance(found, bool) or not isinstance(found, kinds) or not found >= low:
                raise ValueError(
                    f"additional_config.spark_overlay.{name}: found {found!r}; needed a"
                    f"{' whole' if whole else ''} number of at least {low}"
                )
        return settings


#: Field, least value, whether it is a whole number.
_NUMBERS: tuple[tuple[str, int, bool], ...] = (
    ("engram_io_threads", 1, True),
    ("engram_cache_gib", 0, False),
    ("engram_stats_seconds", 0, True),
    ("memory_release_tokens", 1, True),
    ("memory_release_below_gib", 0, False),
    ("indexer_prefill_factor", 1, True),
)


def overlay_settings(vllm_config: Any) -> OverlaySettings:
    """The overlay's part of a ``VllmConfig``'s additional config."""
    extra = vllm_config.additional_config
    raw = extra.get("spark_overlay", {}) if isinstance(extra, dict) else {}
    return OverlaySettings.parse(raw)
