"""Makes Triton's interpreter usable, and exact, as the CPU's way to run vLLM's small kernels.

Four defects of triton 3.7-3.9 are mended in memory (no file is changed):
- a mask made by ``scalar & block`` arrives as an integer and is refused by masked loads and stores;
- float32 to bf16 truncates, and to e4m3 loses the carry of the mantissa (0.4987 becomes 0.25);
- a dot multiplies the bit patterns of bf16 operands as if they were integers;
- after each launch every argument's whole storage is copied onto itself: a KV cache per kernel.
"""

from __future__ import annotations

import os
import sys
import types
from typing import Any


class InterpreterError(RuntimeError):
    """The interpreter cannot be used in this process."""


def announce_cpu_backend() -> None:
    """Let vLLM find an active Triton driver named "cpu"; without one it switches Triton off."""
    import triton.backends

    driver = types.SimpleNamespace(is_active=lambda: True)
    triton.backends.backends.setdefault("cpu", types.SimpleNamespace(driver=driver, compiler=None))


def require_interpreter() -> None:
    """Triton reads TRITON_INTERPRET when it is imported (torch imports it), so it must be in the
    environment before Python starts."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        import triton.language as tl
        import triton.runtime.interpreter as interpreter

        if not isinstance(tl.zeros, interpreter.InterpretedFunction):
            raise InterpreterError(
                "TRITON_INTERPRET=1 was set after triton was imported, so its kernels cannot run "
                "on this CPU; set it in the environment before Python starts"
            )
        return
    raise InterpreterError(
        "found TRITON_INTERPRET unset on a CPU; vLLM's small Triton kernels need the interpreter "
        f"there: start Python with TRITON_INTERPRET=1 in the environment ({sys.executable})"
    )


def mend() -> None:
    """Apply the corrections once."""
    import numpy as np
    import torch
    import triton.language as tl
    import triton.runtime.interpreter as interpreter

    builder = interpreter.InterpreterBuilder
    if getattr(builder, "_spark_mended", False):
        return
    handle = interpreter.TensorHandle
    load, store = builder.create_masked_load, builder.create_masked_store
    convert, dot = interpreter._convert_float, builder.create_dot

    def as_bool(mask: Any) -> Any:
        if mask.data.dtype == np.bool_:
            return mask
        return handle(mask.data.astype(np.bool_), mask.dtype)

    def masked_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        return load(self, pointers, as_bool(mask), *rest)

    def masked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        return store(self, pointers, value, as_bool(mask), *rest)

    def convert_float(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if source == tl.float32 and target in (tl.bfloat16, tl.float8e4nv):
            exact = torch.from_numpy(np.array(data, dtype=np.float32))
            if target == tl.bfloat16:
                bits = exact.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
            else:
                bits = exact.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
            return bits.reshape(np.shape(data))
        return convert(data, source, target, rounding)

    def as_float32(operand: Any) -> Any:
        if operand.dtype.scalar != tl.bfloat16:
            return operand
        bits = operand.data.astype(np.uint16).astype(np.uint32) << 16
        return handle(bits.view(np.float32), tl.float32)

    def exact_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(self, as_float32(a), as_float32(b), *rest)

    builder.create_masked_load = masked_load
    builder.create_masked_store = masked_store
    builder.create_dot = exact_dot
    interpreter._convert_float = convert_float
    interpreter.GridExecutor._restore_args_dev = lambda *_: None
    builder._spark_mended = True
