"""Holds a process to an older GPU: Triton without e4m3 as a type, DeepGEMM and FlashMLA refused.

Nothing of this is touched unless OVERLAY_FORCE_ARCH is set.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, MutableMapping
from importlib import import_module
from typing import Any, NoReturn

from spark_overlay import arch
from spark_overlay.arch import ArchError, Capability, Path

#: Names through which every call of a path goes. Modules that take them by name (the third) must
#: not have been imported before.
CALLS: dict[Path, tuple[str, tuple[str, ...], str]] = {
    arch.DEEP_GEMM: ("vllm.utils.deep_gemm", ("_lazy_init", "_import_deep_gemm"), ""),
    arch.FLASH_MLA: (
        "vllm.v1.attention.ops.flashmla",
        ("flash_mla_with_kvcache", "flash_mla_sparse_fwd"),
        "vllm.models.deepseek_v41.nvidia.flashmla",
    ),
}


def capability() -> Capability | None:
    """Of the GPU, or what it is held to; None on a CPU."""
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        return None
    found = current_platform.get_device_capability()
    if found is None:
        raise ArchError("vLLM names no compute capability of this GPU")
    return arch.held((found.major, found.minor), os.environ)


def device() -> str:
    """Which hooks apply to this process (hooks.for_device)."""
    found = capability()
    if found is None:
        return "cpu"
    return "cuda" if arch.portable(found) else "stock"


def start() -> None:
    """Hold this process, if that is asked for. Raises ArchError for an impossible wish."""
    if arch.forced(os.environ) is not None and (to := capability()) is not None:
        hold(to, os.environ)


def hold(to: Capability, environment: MutableMapping[str, str]) -> None:
    """Refuse every path that begins after ``to``."""
    for path, (module, names, taker) in CALLS.items():
        if not arch.has(path, to):
            if taker in sys.modules:
                raise ArchError(f"{taker} was imported before {path.name} could be refused to it")
            refuse(path, import_module(module), names)
    if not arch.has(arch.DEEP_GEMM, to):
        environment["VLLM_USE_DEEP_GEMM"] = "0"  # so that vLLM does not choose it
    if to < arch.FP8_TYPE:
        without_fp8_type()


def refuse(path: Path, module: Any, names: tuple[str, ...]) -> None:
    why = arch.refusal(path, os.environ)

    def refused(*_: Any, **__: Any) -> NoReturn:
        raise ArchError(why)

    for name in names:
        if not hasattr(module, name):
            raise ArchError(f"vLLM's {module.__name__} has no {name}, which is to be refused")
        setattr(module, name, refused)


def without_fp8_type() -> None:
    """Triton's compiler then says of e4m3 what it says on an SM80."""
    from triton.backends.nvidia.compiler import CUDABackend, CUDAOptions

    parse: Callable[..., Any] = CUDABackend.parse_options

    def parse_options(self: Any, options: dict[str, Any]) -> Any:
        known = tuple(sorted(CUDAOptions.supported_fp8_dtypes))
        return parse(self, {**options, "supported_fp8_dtypes": known})

    CUDABackend.parse_options = parse_options
