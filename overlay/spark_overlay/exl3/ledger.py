"""A pack's own ledger: ``tensor_storage`` of quantization_config.json, which may lie about a file.

The headers are the truth; the ledger is read only to notice that a shard of another pack has been
put among this one's. It may be incomplete (some packs leave the draft out), and is never kept.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from spark_overlay.exl3.format import Exl3FormatError
from spark_overlay.exl3.modules import Exl3Facts

LEDGER = "quantization_config.json"


def read_ledger(model_dir: Path) -> dict[str, float]:
    """Bits per weight by key; empty where the pack has no ledger."""
    try:
        storage = json.loads((model_dir / LEDGER).read_bytes()).get("tensor_storage") or {}
    except FileNotFoundError:
        return {}
    except (ValueError, AttributeError) as error:
        raise Exl3FormatError(f"{LEDGER}: cannot be read ({error}); download it again") from None
    return {
        key: float(entry["bits_per_weight"])
        for key, entry in storage.items()
        if isinstance(entry, dict) and "bits_per_weight" in entry
    }


def check_ledger(found: Mapping[str, Exl3Facts], ledger: Mapping[str, float]) -> None:
    """Raise Exl3FormatError for a matrix whose file has another rate than the ledger says."""
    for key, bits in ledger.items():
        facts = found.get(key)
        # Half a bit is the finest step of a rate; less may be a ledger that counts scales too.
        if facts is not None and abs(facts.bits - bits) >= 0.5:
            raise Exl3FormatError(
                f"{key}.trellis has K = {facts.bits:g} in its file and {bits:g} in {LEDGER}: its "
                "shard is of another pack; download the shard again"
            )
