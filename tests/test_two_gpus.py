"""The run on two GPUs, as far as it needs neither GPU nor engine: plan, argv, judges, remains."""

from __future__ import annotations

if __name__ == "__main__":
    from _standalone import main

    main(__file__)

import math
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from gpu import engines, fall, results, served, shape, two
from gpu.two_checks import BY_SOCKET, CHECKS, Listed, Two, compared, share

from launcher.runtimes.process import ProcessRuntime

TEXT = {**shape.with_engram("tiny"), **shape.DRAFT}


def plan(tmp_path: Path, tp: int, cpu: bool, draft: bool = True, kit: bool = True) -> Any:
    chosen = served.settings(tmp_path, draft, cpu)
    return served.planned(
        chosen, tmp_path / "model", tmp_path, tp=tp, cpu=cpu, gpus=(0, 1), kit=kit
    )


def after(argv: tuple[str, ...], option: str) -> str:
    return argv[argv.index(option) + 1]


def test_two_ranks_are_two_nodes_with_a_gpu_each(tmp_path: Path) -> None:
    ranks = plan(tmp_path, 2, cpu=False).ranks
    assert [after(r.argv, "--node-rank") for r in ranks] == ["0", "1"]
    assert {after(r.argv, "--nnodes") for r in ranks} == {"2"}
    assert {after(r.argv, "--tensor-parallel-size") for r in ranks} == {"2"}
    assert [r.env["CUDA_VISIBLE_DEVICES"] for r in ranks] == ["0", "1"]
    assert ["--headless" in r.argv for r in ranks] == [False, True]
    for rank in ranks:
        assert "--enforce-eager" not in rank.argv and "--cudagraph-capture-sizes" in rank.argv
        assert after(rank.argv, "--compilation-config.cudagraph_mode") == "PIECEWISE"
        assert "--disable-custom-all-reduce" in rank.argv
        assert "--no-swa-bounded-replay" not in rank.argv
        assert '"method":"dspark"' in after(rank.argv, "--speculative-config")
        assert '"engram_store":"file"' in after(rank.argv, "--additional-config")
        assert rank.env["NCCL_BUFFSIZE"] == "1048576" and rank.env["NCCL_NVLS_ENABLE"] == "0"
        assert not any(key.startswith(("NCCL_IB_", "NCCL_NET")) for key in rank.env)


def test_one_rank_names_no_node_and_no_draft_if_none_is_asked(tmp_path: Path) -> None:
    (rank,) = plan(tmp_path, 1, cpu=False, draft=False).ranks
    assert after(rank.argv, "--tensor-parallel-size") == "1"
    words = ("--nnodes", "--node-rank", "--master-addr", "--master-port", "--speculative-config")
    assert not set(words) & set(rank.argv)
    assert rank.argv[3] == "serve"


def test_the_kit_s_settings_are_the_launcher_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_PROTO", "Simple")  # of the shell: no part of either choice
    kit = served.kit_env(tmp_path)
    assert kit["NCCL_PROTO"] == "^LL128" and kit["NCCL_MAX_NCHANNELS"] == "8"
    assert kit["NCCL_CUMEM_ENABLE"] == "0" and not BY_SOCKET.keys() & {"NCCL_BUFFSIZE"}
    stock = plan(tmp_path, 2, cpu=False, kit=False).ranks[0].env
    assert {k: v for k, v in stock.items() if k.startswith("NCCL_")} == {"NCCL_NVLS_ENABLE": "0"}


def test_every_check_needs_what_exists_and_can_be_run_in_one_call() -> None:
    assert len({check.name for check in CHECKS}) == len(CHECKS)
    for check in CHECKS:
        assert set(check.asks) <= set(served.SERVED) and check.name in two.listing()
        assert all(served.SERVED[name].tp <= check.world for name in check.asks)
        longest = max((served.SERVED[name].seconds for name in check.asks), default=0)
        assert longest + check.seconds < 540
    assert {name for check in CHECKS for name in check.asks} == set(served.SERVED)


def test_the_rest_is_run_and_one_rank_does_what_it_can() -> None:
    names = [check.name for check in CHECKS]
    rest = two.chosen((), names[:3], 2)
    assert [check.name for check in rest] == names[3:]
    alone = two.chosen((), (), 1)
    assert all(check.world == 1 for check in alone) and "kill" in {c.name for c in alone}
    assert two.turns(rest, (), 4) == [["tp1", "tp1-draft", "tp2", "tp2-draft"]]
    assert two.turns(rest, (), 3) == [["tp1", "tp1-draft", "tp2"], ["tp2-draft"]]
    assert two.turns(rest, ("tp1", "tp2"), 1) == [["tp1-draft"], ["tp2-draft"]]
    with pytest.raises(ValueError, match="tp2-tp1 needs 2 ranks, --world is 1"):
        two.chosen(["tp2-tp1"], (), 1)
    with pytest.raises(ValueError, match="no check is named tp3"):
        two.chosen(["tp3"], (), 2)


def test_contexts_are_prompts_and_prompts_continued() -> None:
    asked = served.contexts(TEXT)
    count = len(engines.many_prompts(TEXT))
    forced = asked[count:]
    assert len(forced) == 4 * served.FORCED
    for prompt, at in zip(engines.prompts(TEXT), range(0, len(forced), served.FORCED), strict=True):
        for number, context in enumerate(forced[at : at + served.FORCED], 1):
            assert context[: len(prompt)] == prompt and len(context) == len(prompt) + number


def test_what_is_timed_is_timed_alone() -> None:
    quiet, seen = served.Quiet(("a", "b", "gone")), []

    def engine(name: str) -> None:
        time.sleep(0.05)
        with quiet.alone(name, 10.0):
            seen.append(f"{name} begins")
            time.sleep(0.05)
            seen.append(f"{name} ends")

    threads = [threading.Thread(target=engine, args=(name,)) for name in "ab"]
    for each in threads:
        each.start()
    time.sleep(0.2)
    assert not seen  # "gone" still works
    with pytest.raises(served.ServedFailed, match="others work after"), quiet.alone("c", 0.01):
        pass
    quiet.leave("gone")
    for each in threads:
        each.join()
    assert [word.split()[1] for word in seen] == ["begins", "ends", "begins", "ends"]
    assert seen[0][0] == seen[1][0] != seen[2][0] == seen[3][0]


def test_a_listed_row_shares_the_rest_among_the_others() -> None:
    row = Listed({"3": math.log(0.6), "5": math.log(0.3)}, 12)
    assert row.argmax() == 3 and row[7] == pytest.approx(math.log(0.01))
    assert sum(math.exp(row[token]) for token in range(12)) == pytest.approx(1)


def answers(tp: int, best: float = 0.9, parted: int | None = None) -> dict[str, Any]:
    """What an engine of ``tp`` ranks might have said: token 9 at every place, 8 where parted."""

    def reply(length: int) -> dict[str, Any]:
        tokens = [8 if at == parted and length > 1 else 9 for at in range(length)]
        place = {"9": math.log(best), "8": math.log(0.98 - best)}
        return {"tokens": tokens, "logprobs": [place] * length}

    table = {"lookups": 5, "parameters": 0}
    ranks = range(tp)
    return {
        "places": [{"rank": r, "tp": tp, "pid": 100 + r, "gpu": ""} for r in ranks],
        "classes": [{"graphs": 0, "kernels": None}] * tp,
        "engram": [[table, table] for _ in ranks],
        "rows": [[TEXT["sliding_window"], 1]] * tp,
        "replies": [reply(served.REPLY) for _ in engines.prompts(TEXT)],
        "nexts": [reply(1) for _ in served.contexts(TEXT)],
        "collectives": [{"seconds": 2.0, "collective_seconds": 0.5, "kernel_seconds": None,
                         "collectives": {"all_reduce": 400 * (tp - 1)}}] * tp,
        "timed": {str(served.SHORT): 0.5, str(served.LONG): 2.1},
        "seconds": {"start": 1.0, "whole": 2.0},
    }  # fmt: skip


def bench(tmp_path: Path, one: dict[str, Any], other: dict[str, Any]) -> Two:
    return Two(TEXT, tmp_path, tmp_path, "cpu", 2, lambda: 100.0, {"tp1": one, "tp2": other})


def test_equal_answers_are_right_and_other_ones_are_not(tmp_path: Path) -> None:
    right, values = compared("tp1", "tp2", bench(tmp_path, answers(1), answers(2)))
    assert right and values["kl_median"] == 0 and not values["replies_parted"]
    assert values["teacher_forced"] == len(served.contexts(TEXT))
    right, values = compared("tp1", "tp2", bench(tmp_path, answers(1), answers(2, best=0.6)))
    assert not right and values["kl_median"] > 0.01
    right, values = compared("tp1", "tp2", bench(tmp_path, answers(1), answers(2, parted=4)))
    assert not right and {each["at"] for each in values["replies_parted"]} == {4}


def test_an_engine_that_is_not_what_it_is_called_is_wrong(tmp_path: Path) -> None:
    for wrong in (
        {"places": answers(1)["places"]},
        {"rows": [[max(map(len, engines.prompts(TEXT))), TEXT["sliding_window"]]] * 2},
        {"engram": [[{"lookups": 0, "parameters": 0}] * 2] * 2},
    ):
        right, _ = compared("tp1", "tp2", bench(tmp_path, answers(1), {**answers(2), **wrong}))
        assert not right, wrong


def test_the_share_of_collectives(tmp_path: Path) -> None:
    right, values = share("tp2", bench(tmp_path, answers(1), answers(2)))
    assert right and values["share_of_time"] == [0.25, 0.25]
    assert values["ms_per_token"] == 50.0 and values["collectives"] == [400, 400]
    none = answers(2)
    none["collectives"] = [{**one, "collectives": {}} for one in none["collectives"]]
    assert not share("tp2", bench(tmp_path, answers(1), none))[0]


def test_a_row_of_it_has_the_schema(tmp_path: Path) -> None:
    _, values = share("tp2", bench(tmp_path, answers(1), answers(2)))
    found = results.Result("2026-01-01T00:00:00+00:00", "two GPUs", "580", {}, "abc")
    found.add({"name": "share-tp2", "ok": True, "seconds": 0.1, "values": values})
    found.write(tmp_path / "r.json")
    assert results.read(tmp_path / "r.json") == found


def test_remains_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fall, "gpu_used", lambda: [700, 100])
    pair = served.Pair(plan(tmp_path, 2, cpu=True), tmp_path)
    assert isinstance(pair.runtime, ProcessRuntime)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        from launcher import processes

        found = processes.find(child.pid)
        assert found is not None
        known = [(found.pid, found.ticks)]
        told = fall.left_over(pair, known, [100, 100], wait=0.0)
        assert told["processes"] == [child.pid] and told["gpu_mib"] == [600, 0]
        assert not told["nothing"]
    finally:
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
    deadline = time.monotonic() + 5
    told = fall.left_over(pair, known, [700, 100], wait=0.0)
    while not told["nothing"] and time.monotonic() < deadline:
        told = fall.left_over(pair, known, [700, 100], wait=0.0)
    assert told == {"processes": [], "ports": {}, "gpu_mib": [0, 0], "nothing": True}


def test_listing_needs_no_gpu() -> None:
    argv = [sys.executable, two.__file__, "--list"]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert "worker, then head" in done.stdout and "collectives-kit" in done.stdout
