"""vLLM's inserts by the kernels here: its names, parameters and results. V4.1's FP8 formats only:
another record or key width is an error."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from spark_overlay.attention.format import HEAD_DIM, RECORD_BYTES, ROPE_DIM
from spark_overlay.attention.inserts.kernels import (
    rotate_queries_and_write,
    write_keys,
    write_latents,
)
from spark_overlay.indexer.format import KEY_DIM, STATE_BYTES

#: Heads a program rotates.
_HEADS = 4
#: Warps that write a latent's record.
LATENT_WARPS = 4
#: What vLLM compiles with nvcc, which contracts: whatever Triton's default is.
CONTRACTED = {"enable_fp_fusion": True}


class InsertError(ValueError):
    """Tensors that the kernels do not write, or a format that V4.1 does not have here."""


def _need(condition: bool, what: str) -> None:
    if not condition:
        raise InsertError(f"cache insert: {what}")


def _check_rows(name: str, rows: Tensor, width: int, count: int) -> None:
    _need(
        rows.dtype == torch.bfloat16 and rows.shape[-1] == width and rows.stride(-1) == 1,
        f"{name} is {list(rows.shape)} {rows.dtype}, needed rows of {width} bfloat16",
    )
    _need(rows.shape[0] >= count, f"{name} has {rows.shape[0]} rows for {count} slots")


def _check_table(cos_sin: Tensor, positions: Tensor, count: int) -> None:
    _need(
        cos_sin.dim() == 2 and cos_sin.shape[1] == ROPE_DIM and cos_sin.stride(1) == 1,
        f"cosines and sines are {list(cos_sin.shape)}, needed [positions, {ROPE_DIM}]",
    )
    _need(
        positions.is_contiguous() and positions.numel() >= count,
        f"{positions.numel()} positions for {count} slots",
    )


def _check_cache(cache: Tensor, width: int, block: int) -> None:
    _need(
        cache.dtype == torch.uint8 and cache[0].numel() >= block * width,
        f"a cache page is {list(cache.shape[1:])} {cache.dtype}, needed {block} states of {width} "
        "bytes: V4.1's FP8 format",
    )
    _need(cache.stride(-1) == 1 and cache.stride(0) % 2 == 0, f"cache strides {cache.stride()}")


def rope_quant_insert(
    latent: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    compress_ratio: int,
    fp8_scale: Tensor | None = None,
) -> None:
    """Group-end latents ``[T, 512]`` bf16, rotated to their group's first position, to records."""
    count = slot_mapping.numel()
    _need(fp8_scale is None, "records have their own scales, a tensor's scale is not theirs")
    _need(kv_cache.shape[-1] == RECORD_BYTES, f"found records of {kv_cache.shape[-1]} bytes")
    _insert(latent, kv_cache, slot_mapping, positions, cos_sin_cache, kv_cache.shape[1],
            compress_ratio, count, window=False)  # fmt: skip


def insert_kv(
    kv: Tensor, cache: Tensor, slots: Tensor, positions: Tensor, cos_sin: Tensor, block: int
) -> None:
    """The window's records: ``kv [>=T, 512]`` bf16 at ``slots [T]``, pages of ``block`` tokens."""
    _insert(kv, cache, slots, positions, cos_sin, block, 1, slots.numel(), window=True)


def _insert(
    rows: Tensor,
    cache: Tensor,
    slots: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    block: int,
    ratio: int,
    count: int,
    *,
    window: bool,
) -> None:
    _check_rows("latent", rows, HEAD_DIM, count)
    _check_table(cos_sin, positions, count)
    _check_cache(cache, RECORD_BYTES, block)
    _need(rows.stride(0) == HEAD_DIM, f"rows lie {rows.stride(0)} values apart, needed {HEAD_DIM}")
    _need(ratio in (1, 2) and slots.is_contiguous(), f"ratio {ratio}; only 1 and 2 exist")
    if count:
        write_latents[(count,)](
            rows, positions, cos_sin, cos_sin.stride(0), cache, cache.stride(0), slots,
            BLOCK=block, RATIO=ratio, WINDOW=window, num_warps=LATENT_WARPS,
            **(CONTRACTED if window else {}),
        )  # fmt: skip


def rotate_queries_and_insert(
    q: Tensor,
    kv: Tensor,
    cache: Tensor,
    slots: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    padded_heads: int,
    block: int,
) -> Tensor:
    """``q [T, H, 512]`` bf16 rotated, with heads of zeros up to ``padded_heads``; ``kv`` (normed)
    stored as ``insert_kv`` does. One launch."""
    tokens, heads = q.shape[0], q.shape[1]
    count = slots.numel()
    _check_rows("q", q, HEAD_DIM, 0)
    _need(
        q.dim() == 3 and heads > 0 and (heads == 1 or q.stride(1) == HEAD_DIM),
        f"q is {list(q.shape)} {q.stride()}, needed [tokens, heads, {HEAD_DIM}]",
    )
    _need(padded_heads >= heads, f"{heads} heads do not fit {padded_heads}")
    _check_rows("kv", kv, HEAD_DIM, count)
    _check_table(cos_sin, positions, max(count, tokens))
    _check_cache(cache, RECORD_BYTES, block)
    out = q.new_empty(tokens, padded_heads, HEAD_DIM)
    programs = count + tokens * triton.cdiv(padded_heads, _HEADS)
    if programs:
        rotate_queries_and_write[(programs,)](
            q, q.stride(0), out, kv, kv.stride(0), positions, cos_sin, cos_sin.stride(0), cache,
            cache.stride(0), slots, count, heads, padded_heads,
            HEADS=_HEADS, BLOCK=block, num_warps=4, **CONTRACTED,
        )  # fmt: skip
    return out


def indexer_k_norm_rope_store(
    k_pre: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    rms_norm_weight: Tensor,
    rms_norm_eps: float,
    k_cache: Tensor,
    kv_slot_mapping: Tensor,
    compress_ratio: int,
    use_fp4_cache: bool,
) -> None:
    """Index keys ``[>=T, 128]`` bf16 of group-end tokens, normed, rotated, quantised, stored."""
    count = kv_slot_mapping.numel()
    _need(not use_fp4_cache, "index keys are FP8: set attention_config.indexer_kv_dtype=fp8")
    _check_rows("index key", k_pre, KEY_DIM, count)
    _check_table(cos_sin_cache, positions, count)
    _need(k_cache.shape[-1] == STATE_BYTES, f"found keys of {k_cache.shape[-1]} bytes")
    _check_cache(k_cache, STATE_BYTES, k_cache.shape[1])
    _need(k_cache.stride(0) % 4 == 0, "a page of keys begins at a multiple of 4 bytes")
    _need(compress_ratio in (1, 2), f"ratio {compress_ratio}; only 1 and 2 exist")
    if count:
        write_keys[(count,)](
            k_pre, k_pre.stride(0), positions, cos_sin_cache, cos_sin_cache.stride(0),
            rms_norm_weight, rms_norm_eps, k_cache, k_cache.stride(0), kv_slot_mapping,
            BLOCK=k_cache.shape[1], RATIO=compress_ratio, num_warps=1,
        )  # fmt: skip
