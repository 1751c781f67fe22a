"""The indexer's kernels as served at V4.1's shapes, for overlay/benchmarks/triton_check.py."""

from __future__ import annotations

from typing import Any

from spark_overlay.compiled import Compiled
from spark_overlay.indexer.kernels import logits, queries, select, sizes

_POINTERS = {
    **dict.fromkeys(("q", "cache"), "*u8"),
    **dict.fromkeys(("weights", "out", "tops"), "*fp32"),
    **dict.fromkeys(("table", "request", "starts", "lengths", "chosen"), "*i32"),
}
#: Bytes a thread may store and load besides: several rows' sums, and a choice of 2048 among 16384
#: by 1024 threads, do not quite fit their registers.
_SPILLS = 1024
_SPILLED_ROWS = {1: 0, 2: 128, 4: 256, 8: _SPILLS}
_PLAIN = ("first_row", "rows", "requests", "width", "blocks")
_STRIDES = ("cache_stride", "table_stride", "chosen_stride", "out_stride", "tops_stride")


def _of(kernel: Any, known: dict[str, str]) -> dict[str, str]:
    """The signature: what is ``known``, and int32 for sizes and strides."""
    every = known | dict.fromkeys((*_PLAIN, *_STRIDES), "i32")
    return {name: every[name] for name in kernel.arg_names if name in every}


def kernels() -> list[Compiled]:
    tuning = sizes.Tuning()
    shape = {"RATIO": 1, "STATES": 64, "HEADS": 32, "PADDED": 32, "PACKED": True}
    found = [
        Compiled(
            f"dense_logits {group} rows, fan {fan}",
            logits.dense_logits,
            _of(logits.dense_logits, _POINTERS),
            {**shape, "GROUP": group, "KEYS": keys, "FAN": fan},
            warps,
            stages,
            _PLAIN,
            _SPILLED_ROWS[group],
        )
        for group, (keys, warps, stages) in sizes.DENSE.items()
        for fan in (tuning.fan, 8)
    ]
    found.append(
        Compiled(
            "candidate_logits",
            logits.candidate_logits,
            _of(logits.candidate_logits, _POINTERS),
            {
                **shape,
                "KEYS": tuning.candidate_keys,
                "SIZE": 8,
                "COUNT": 2048,
                "FAN": tuning.fan,
            },
            tuning.candidate_warps,
            tuning.candidate_stages,
            _PLAIN,
        )
    )
    known = {
        **dict.fromkeys(("values", "tops"), "*fp32"),
        **dict.fromkeys(("chosen", "request", "starts", "lengths", "final", "lists"), "*i32"),
        **dict.fromkeys(("value_stride", "final_stride", "lists_stride"), "i32"),
    }
    for name, kind, count, entries, fan in (
        ("positions", select.POSITIONS, 512, 1 << 20, tuning.fan),
        ("blocks", select.BLOCKS, 2048, 1 << 17, 8),
        ("candidates", select.CANDIDATES, 512, 1 << 14, tuning.fan),
    ):
        blocks = kind is select.BLOCKS
        steps = sizes.steps_of(entries, count, fan, sizes.MOST if blocks else tuning.last)
        constants = {
            "RATIO": 1,
            "KIND": kind.value,
            "SIZE": 8,
            "CHOSEN": 2048,
            "COUNT": count,
            "TAIL": count,
            "PICKED": steps.picked,
            "ROOM": steps.picked,
            "FAN": fan,
            "LAST": steps.last,
            "MIDDLE": steps.middle,
            "FIRST": steps.first,
        }
        signature = _of(select.choose, known)
        found.append(
            Compiled(
                f"choose {name}",
                select.choose,
                signature,
                constants,
                tuning.choice_warps * (1 + (max(steps.last, steps.first) >= sizes.MOST)),
                plain=_PLAIN,
                spills=_SPILLS,
            )
        )
    known = {
        **dict.fromkeys(("q", "weights"), "*bf16"),
        "positions": "*i64",
        **dict.fromkeys(("cos_sin", "out_weights", "softmax_scale", "head_scale"), "*fp32"),
        "out": "*u8",
        **dict.fromkeys(("q_stride", "head_stride", "weight_stride"), "i32"),
        "table_stride": "i32",
        **dict.fromkeys(("softmax_scale", "head_scale"), "fp32"),
    }
    found.append(
        Compiled(
            "quantise",
            queries.quantise,
            known,
            {"HEADS": 32, "PADDED": 32, "DIM": 128, "HALF": 32},
            plain=("softmax_scale", "head_scale"),
        )
    )
    return found
