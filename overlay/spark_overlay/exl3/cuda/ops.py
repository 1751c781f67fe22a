"""torch ops: ``spark_exl3::group``, ``::experts`` and ``::decode``, on CUDA, on a CPU, and faked.

    group    several matrices, each with its own rate and scales, over one input or one each
    experts  routed experts and, if there is one, the shared expert: raw routing in, their sum out
    decode   the decoded fp16 values, bit for bit

On CUDA they are launches of the library: ordinary ones, without locks, with scratch and counters
of the calling layer and stream. So they may run on any number of streams and in CUDA graphs, and
vLLM's side streams need no switch. On a CPU they are the torch reference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor
from torch.library import Library, register_fake

from spark_overlay.exl3.cuda import library, on_cpu, plan, workspace
from spark_overlay.exl3.cuda.checks import DTYPES, Routed, aligned, check_group, check_matrix
from spark_overlay.exl3.format import Codebook, bits_from_words

Op = Callable[..., Tensor]
_kept: list[Library] = []  # a Library takes its ops with it when it goes


def group(
    xs: Sequence[Tensor],
    trellis: Sequence[Tensor],
    suh: Sequence[Tensor],
    svh: Sequence[Tensor],
    bias: Sequence[Tensor | None],
    codebooks: Sequence[int],
    dtype: torch.dtype,
) -> Tensor:
    """``x @ W (+ bias)`` of each matrix, side by side: ``[rows, sum of out]`` of ``dtype``.

    ``xs``: one bf16 ``[rows, in]`` for all matrices, or one each; at most 64 rows on CUDA. Of each
    matrix: ``trellis`` int16 ``[in/16, out/16, T]``, ``suh`` fp16 ``[in]``, ``svh`` fp16 ``[out]``,
    ``bias`` fp16 ``[out]`` or None, and the codebook's number. ``dtype`` bf16 or fp32; sums are
    fp32 and rounded once. Raises ValueError for anything else."""
    found: Tensor = torch.ops.spark_exl3.group(
        list(xs), list(trellis), list(suh), list(svh), list(bias), list(codebooks), dtype
    )
    return found


def experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    table: Tensor,
    count: int,
    inter: int,
    max_k2: int,
    *,
    first_id: int = 0,
    shared: bool = False,
    limit: float | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """``sum_j weights[t, j] * expert(ids[t, j])(x[t]) (+ shared(x[t]))``: ``[tokens, hidden]``.

    ``x`` bf16 ``[tokens, hidden]``, ``ids`` int64 or int32 ``[tokens, k]``, ``weights`` fp32
    alike; at most 128 ids on CUDA. ``table``: see ``experts_table``; it holds ``count`` routed
    experts. ``first_id``: the id of entry 0; other ids than the table's contribute nothing.
    ``limit``: the clamp of gate and up, before silu."""
    found: Tensor = torch.ops.spark_exl3.experts(
        x, ids, weights, table, count, first_id, shared, inter, max_k2, limit or 0.0, dtype
    )
    return found


def decode(trellis: Tensor, codebook: Codebook) -> Tensor:
    """``W_hat`` fp16 ``[in, out]`` of a trellis int16 ``[in/16, out/16, T]``, bit for bit."""
    found: Tensor = torch.ops.spark_exl3.decode(trellis, library.CODEBOOKS[codebook])
    return found


Entry = tuple[Tensor, Tensor, Tensor, Codebook]


def experts_table(gate: Sequence[Entry], up: Sequence[Entry], down: Sequence[Entry]) -> Tensor:
    """int64 ``[3, entries, 4]`` on the entries' device: addresses of trellis, suh and svh, and
    rate and codebook. The tensors must outlive it and stay where they are; a shared expert comes
    last. Raises ValueError where the entries do not belong together."""
    if not len(gate) == len(up) == len(down) > 0:
        raise ValueError(f"{len(gate)} gates, {len(up)} ups and {len(down)} downs")
    rows, cols = gate[0][1].numel(), gate[0][2].numel()
    listed = []
    for what, entries, n_in, n_out in (
        ("gate", gate, rows, cols), ("up", up, rows, cols), ("down", down, cols, rows)
    ):  # fmt: skip
        for trellis, suh, svh, codebook in entries:
            check_matrix(trellis, suh, svh, library.CODEBOOKS[codebook], what)
            if (suh.numel(), svh.numel()) != (n_in, n_out):
                raise ValueError(f"{what} {[suh.numel(), svh.numel()]}, expected {[n_in, n_out]}")
            packed = bits_from_words(trellis.shape[2]) | library.CODEBOOKS[codebook] << 8
            listed.append([trellis.data_ptr(), suh.data_ptr(), svh.data_ptr(), packed])
    table = torch.tensor(listed, dtype=torch.int64).view(3, len(gate), 4)
    return table.to(gate[0][0].device)


def define(name: str, schema: str, cuda: Op, cpu: Op, fake: Op) -> None:
    """One op of ``spark_exl3``, for as long as the process runs."""
    space = Library("spark_exl3", "FRAGMENT")
    space.define(name + schema)
    space.impl(name, cuda, "CUDA")
    space.impl(name, cpu, "CPU")
    register_fake(f"spark_exl3::{name}", fake, lib=space)
    _kept.append(space)


def define_routed(name: str, cuda: Callable[[Routed], Tensor]) -> None:
    """One that takes ``Routed``."""
    define(
        name,
        "(Tensor x, Tensor ids, Tensor weights, Tensor table, int experts, int first_id, "
        "bool shared, int inter, int max_k2, float limit, ScalarType dtype) -> Tensor",
        lambda *given: cuda(Routed(*given)),
        lambda *given: on_cpu.experts(Routed(*given)),
        lambda *given: Routed(*given).output(),
    )


@cache
def install() -> None:
    """Define the ops; done when this module is imported."""
    define(
        "group",
        "(Tensor[] xs, Tensor[] trellis, Tensor[] suh, Tensor[] svh, Tensor?[] bias, "
        "int[] codebooks, ScalarType dtype) -> Tensor",
        launch_group,
        on_cpu.group,
        group_output,
    )
    define_routed("experts", launch_experts)
    schema = "(Tensor trellis, int codebook) -> Tensor"
    define("decode", schema, _decode_cuda, on_cpu.decode, _decode_fake)


# -- group ------------------------------------------------------------------------------------


def group_output(
    xs: Sequence[Tensor],
    trellis: Sequence[Tensor],
    suh: Sequence[Tensor],
    svh: Sequence[Tensor],
    bias: Sequence[Tensor | None],
    codebooks: Sequence[int],
    dtype: torch.dtype,
) -> Tensor:
    """``[rows, sum of out]`` of ``dtype``, not written yet; checks what ``group`` is given."""
    check_group(xs, trellis, suh, svh, bias, codebooks, dtype)
    return xs[0].new_empty((xs[0].shape[0], sum(s.numel() for s in svh)), dtype=dtype)


def launch_group(
    xs: Sequence[Tensor],
    trellis: Sequence[Tensor],
    suh: Sequence[Tensor],
    svh: Sequence[Tensor],
    bias: Sequence[Tensor | None],
    codebooks: Sequence[int],
    dtype: torch.dtype,
    chosen: plan.GroupPlan | None = None,
) -> Tensor:
    """``group`` on CUDA, by ``chosen`` instead of the table's plan: what a tuner compares."""
    y = group_output(xs, trellis, suh, svh, bias, codebooks, dtype)
    rows, device = xs[0].shape[0], xs[0].device
    shapes = tuple(
        plan.Shape(u.numel(), v.numel(), bits_from_words(t.shape[2]))
        for t, u, v in zip(trellis, suh, svh, strict=True)
    )
    if rows == 0:
        return y
    if rows > plan.MAX_ROWS:
        raise ValueError(f"{rows} rows: group takes at most {plan.MAX_ROWS}; decode serves more")
    if chosen is None:
        chosen, need = _planned_group(device, shapes, rows)
    else:
        need = plan.group_need(shapes, rows, chosen)
    inputs = [aligned(x) for x in xs]
    shards = (library.Shard * len(shapes))()
    place, size = y.data_ptr(), y.element_size()
    for i, (shape, part) in enumerate(zip(shapes, chosen.parts, strict=True)):
        x, extra = inputs[i if len(inputs) > 1 else 0], bias[i]
        shards[i] = library.Shard(
            x.data_ptr(),
            x.stride(0),
            trellis[i].data_ptr(),
            suh[i].data_ptr(),
            svh[i].data_ptr(),
            extra.data_ptr() if extra is not None else None,
            place,
            y.stride(0),
            shape.inputs,
            shape.outputs,
            shape.k2,
            codebooks[i],
            DTYPES[dtype],
            part.chunks,
            part.kblocks,
            0,
        )
        place += shape.outputs * size
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream(device).cuda_stream
        scratch = workspace.scratch(need.scratch_bytes, device)
        counters = workspace.counters(device).of((stream, trellis[0].data_ptr()), need.counters)
        library.load().group(
            shards, rows, chosen.warps, scratch.data_ptr(), counters.data_ptr(), need, stream
        )
    return y


@cache
def _planned_group(
    device: torch.device, shapes: tuple[plan.Shape, ...], rows: int
) -> tuple[plan.GroupPlan, plan.Need]:
    chosen = table_of(device).group_plan(shapes, rows)
    return chosen, plan.group_need(shapes, rows, chosen)


# -- experts ----------------------------------------------------------------------------------


def launch_experts(a: Routed, chosen: plan.ExpertsPlan | None = None) -> Tensor:
    """``experts`` on CUDA, by ``chosen`` instead of the table's plan: what a tuner compares."""
    (tokens, topk), device, hidden = a.ids.shape, a.x.device, a.x.shape[1]
    y = a.output()
    if tokens == 0:
        return y
    if tokens * topk > plan.MAX_SLOTS:
        raise ValueError(f"{tokens} tokens of {topk} experts: at most {plan.MAX_SLOTS} ids a call")
    if chosen is None:
        chosen, need = _planned_experts(device, hidden, a.inter, tokens, topk, a.shared, a.max_k2)
    else:
        need = plan.experts_need(hidden, a.inter, tokens, tokens * topk, a.shared, chosen)
    x, ids, weights = aligned(a.x), a.ids.contiguous(), a.weights.contiguous()
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream(device).cuda_stream
        scratch = workspace.scratch(need.scratch_bytes, device)
        counters = workspace.counters(device).of((stream, a.table.data_ptr()), need.counters)
        args = library.Experts(
            x.data_ptr(),
            x.stride(0),
            ids.data_ptr(),
            weights.data_ptr(),
            a.table.data_ptr(),
            y.data_ptr(),
            y.stride(0),
            ids.element_size(),
            tokens,
            topk,
            a.experts,
            a.first_id,
            int(a.shared),
            hidden,
            a.inter,
            DTYPES[a.dtype],
            a.max_k2,
            a.limit,
            chosen.a_warps,
            chosen.a_chunks,
            chosen.a_kblocks,
            chosen.b_warps,
            chosen.b_chunks,
            chosen.b_kblocks,
        )
        library.load().experts(args, scratch.data_ptr(), counters.data_ptr(), need, stream)
    return y


@cache
def _planned_experts(
    device: torch.device, hidden: int, inter: int, tokens: int, topk: int, shared: bool, max_k2: int
) -> tuple[plan.ExpertsPlan, plan.Need]:
    chosen = table_of(device).experts_plan(hidden, inter, tokens, topk, max_k2)
    return chosen, plan.experts_need(hidden, inter, tokens, tokens * topk, shared, chosen)


# -- decode -----------------------------------------------------------------------------------


def _decode_fake(trellis: Tensor, codebook: int) -> Tensor:
    rows, columns, _ = trellis.shape
    return trellis.new_empty((16 * rows, 16 * columns), dtype=torch.float16)


def _decode_cuda(trellis: Tensor, codebook: int) -> Tensor:
    weights = _decode_fake(trellis, codebook)
    rows, columns = weights.shape
    k2 = bits_from_words(trellis.shape[2])
    trellis = trellis.contiguous()
    with torch.cuda.device(trellis.device):
        stream = torch.cuda.current_stream(trellis.device).cuda_stream
        library.load().decode(
            trellis.data_ptr(), rows, columns, k2, codebook, weights.data_ptr(), stream
        )
    return weights


@cache
def table_of(device: torch.device) -> plan.Table:
    """The launch table of a GPU. Raises plan.PlanError."""
    return plan.for_capability(*torch.cuda.get_device_capability(device))


install()
