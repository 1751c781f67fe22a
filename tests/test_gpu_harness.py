"""The harness for a GPU host, as far as it needs no GPU: chunks, results, resumption, the model."""

from __future__ import annotations

if __name__ == "__main__":
    from _standalone import main

    main(__file__)

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from gpu import engines, hidden, hidden_checks, results, run, shape, stage
from gpu.checks import CHECKS, against
from gpu.chunks import plan
from hypothesis import given
from hypothesis import strategies as st

from spark_overlay.exl3.names import parse

RESULTS = Path(__file__).resolve().parents[1] / "overlay" / "benchmarks" / "results"
NAMES = st.text("abcdef0123456789.-", min_size=1, max_size=8)


@given(st.dictionaries(NAMES, st.integers(0, 100), max_size=30), st.integers(100, 150))
def test_every_file_is_in_one_chunk_and_no_chunk_is_too_large(
    sizes: dict[str, int], limit: int
) -> None:
    chunks = plan(sizes, limit)
    assert sorted(name for chunk in chunks for name in chunk) == sorted(sizes)
    assert all(sum(sizes[name] for name in chunk) <= limit for chunk in chunks)
    # First fit leaves at most one chunk half empty.
    half = [chunk for chunk in chunks if sum(sizes[name] for name in chunk) * 2 <= limit]
    assert len(half) <= 1


def test_the_same_files_give_the_same_chunks() -> None:
    sizes = {f"f{n}": n * 7 % 50 for n in range(40)}
    backwards = dict(reversed(sizes.items()))
    assert plan(sizes, 60) == plan(backwards, 60)


def test_a_file_larger_than_a_chunk_is_named() -> None:
    with pytest.raises(ValueError, match=r"huge\.whl has 11 bytes, a chunk at most 10: split it"):
        plan({"huge.whl": 11, "small.whl": 1}, 10)


def test_wheels_are_recognised_by_name_and_version() -> None:
    wheel = "Outlines_Core-0.2.14-cp39-abi3-manylinux_2_17_x86_64.whl"
    assert stage.wheel_name(wheel) == stage.wheel_name("outlines-core-0.2.14")
    assert stage.wheel_name(wheel) != stage.wheel_name("outlines-core-0.2.15")


def test_every_requirement_is_pinned_once() -> None:
    lines = (Path(stage.__file__).with_name("requirements.txt")).read_text().split()
    names = [line.split("==")[0] for line in lines if line.count("==") == 1]
    assert len(names) == len(lines) == len(set(names))


def test_packed_chunks_are_kept_until_something_changes(tmp_path: Path) -> None:
    (tmp_path / "c1").mkdir()
    (tmp_path / "c1" / "a.whl").write_bytes(b"abc")
    manifest = {"key": "k", "chunks": {"c1": {"a.whl": 3}}}
    assert stage.complete(tmp_path, manifest)
    (tmp_path / "c1" / "a.whl").write_bytes(b"abcd")
    assert not stage.complete(tmp_path, manifest)
    assert not stage.complete(tmp_path, {"key": "k"})


def test_the_scripts_for_the_host_are_legal_shell() -> None:
    for text in stage.SCRIPTS.values():
        subprocess.run(["bash", "-n"], input=text, text=True, check=True)


def host(commit: str = "abc") -> results.Result:
    return results.Result("2026-01-01T00:00:00+00:00", "a GPU", "580", {"vllm": "0.33.0"}, commit)


def row(name: str, ok: bool = True) -> dict[str, Any]:
    return {"name": name, "ok": ok, "seconds": 1.5, "values": {"median": 0.25}}


def test_a_result_is_read_as_it_was_written(tmp_path: Path) -> None:
    written = host()
    written.add(row("one"))
    written.add(row("two"))
    written.add(row("one", ok=False))
    written.write(tmp_path / "r.json")
    found = results.read(tmp_path / "r.json")
    assert found == written
    assert [(r["name"], r["ok"]) for r in found.rows] == [("two", True), ("one", False)]
    assert list(tmp_path.iterdir()) == [tmp_path / "r.json"]


@pytest.mark.parametrize("missing", [*results.TOP, *(f"rows.{key}" for key in results.ROW)])
def test_a_file_that_lacks_something_is_refused_by_name(tmp_path: Path, missing: str) -> None:
    whole = host()
    whole.add(row("one"))
    file = tmp_path / "r.json"
    whole.write(file)
    value = json.loads(file.read_text())
    key = missing.rpartition(".")[2]
    del (value["rows"][0] if missing.startswith("rows.") else value)[key]
    file.write_text(json.dumps(value))
    with pytest.raises(results.ResultError, match=rf"{key} needs .*, found nothing"):
        results.read(file)


def test_another_schema_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    host().write(file)
    file.write_text(file.read_text().replace('"schema": 1', '"schema": 2'))
    with pytest.raises(results.ResultError, match="schema 2, this reads 1"):
        results.read(file)


@pytest.mark.parametrize("file", sorted(RESULTS.glob("*.json")), ids=lambda p: p.stem)
def test_committed_results_have_the_schema(file: Path) -> None:
    found = results.read(file)
    assert found.rows and found.versions["python"]
    # The form of a table of trials is put together afterwards: no run of its own took time.
    assert found.seconds > 0 or found.commit.startswith("trials")
    assert "cpu-copy" in file.stem or found.versions["vllm"]
    assert file.name.startswith(found.date[:10])


def test_a_second_call_runs_the_rest(tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    first = host()
    first.add(row(CHECKS[0].name))
    first.add(row(CHECKS[2].name, ok=False))
    first.write(file)
    found = run.begin(file, host(), again=False)
    rest = run.chosen((), found.done())
    assert [c.name for c in rest] == [c.name for c in CHECKS if c not in (CHECKS[0], CHECKS[2])]
    assert run.chosen([CHECKS[0].name], found.done()) == []
    assert run.begin(file, host(), again=True).rows == []


def test_rows_of_another_commit_are_not_gone_on_with(tmp_path: Path) -> None:
    host("abc").write(tmp_path / "r.json")
    with pytest.raises(results.ResultError, match="commit abc; this is a GPU, commit def"):
        run.begin(tmp_path / "r.json", host("def"), again=False)


def test_an_unknown_check_is_named() -> None:
    with pytest.raises(ValueError, match="no check is named stock-layer; there are stock-layers"):
        run.chosen(["stock-layer"], ())


def test_every_check_asks_known_engines_and_says_its_cost() -> None:
    assert len({check.name for check in CHECKS}) == len(CHECKS)
    for check in CHECKS:
        assert set(check.asks) <= set(engines.ENGINES) and check.seconds > 0
        assert check.name in run.listing()
    assert set(run.asked(CHECKS)) == set(engines.ENGINES)
    assert run.asked([c for c in CHECKS if c.name == "graphs-tokens"]) == [
        "stock-eager",
        "stock-graphs",
    ]


@pytest.mark.parametrize("name", shape.SHAPES)
def test_the_model_is_legal_for_one_and_two_ranks(name: str) -> None:
    for tp in (1, 2):
        shape.check_ranks(shape.SHAPES[name], tp)
        shape.check_ranks(shape.with_draft(name), tp)


@pytest.mark.parametrize("name", shape.SHAPES)
def test_the_draft_is_added_behind_the_same_model(name: str) -> None:
    plain, drafted = shape.SHAPES[name], shape.with_draft(name)
    for items in (shape.linears, shape.natives):
        before, after = list(items(plain)), list(items(drafted))
        added = [item for item in after if item not in before]
        assert [item for item in after if item in before] == before and added
        keys = [getattr(item, "key", None) or item.name for item in added]
        assert all(key.startswith("mtp.") for key in keys) and len(set(keys)) == len(keys)
    parsed = [parse(f"{i.key}.slice.0" if i.key.endswith("wo_a") else i.key)
              for i in shape.linears(drafted)]  # fmt: skip
    assert sum(target.stage == "mtp" for target in parsed) > 3 * 16 * 3


def test_the_model_has_the_real_dimensions_and_every_kind_of_layer() -> None:
    text = shape.REAL
    linears = {item.key: item for item in shape.linears(text)}
    sizes = {
        "layers.0.attn.wq_a": (5120, 1280),
        "layers.0.attn.wq_b": (1280, 64 * 512),
        "layers.0.attn.wkv": (5120, 512),
        "layers.0.attn.wo_a": (4096, 1024),
        "layers.0.attn.wo_b": (8192, 5120),
        "layers.1.attn.indexer.wq_b": (1280, 32 * 128),
        "layers.0.ffn.experts.15.w1": (5120, 2304),
        "layers.0.ffn.experts.15.w2": (2304, 5120),
    }
    assert {key: (linears[key].n_in, linears[key].n_out) for key in sizes} == sizes
    ratios, sources = text["compress_ratios"], text["kv_source_layer_ids"]
    assert len(ratios) == text["num_hidden_layers"] and set(ratios) == {0, 1, 2}
    assert {ratios[source] for source in sources} == {1, 2}
    reindexing = set(text["index_source_layer_ids"]) - set(sources)
    assert min(reindexing) > text["candidate_source_layer_id"]
    # Compressed layers that choose nothing themselves, at both ratios.
    followers = set(range(len(ratios))) - set(text["index_source_layer_ids"])
    assert {ratios[layer] for layer in followers} == {0, 1, 2}
    assert len({shape.rate(i.key) for i in shape.linears(text) if i.key[-4:] != "wo_a"}) >= 5


@pytest.mark.parametrize("name", shape.SHAPES)
def test_a_prompt_is_long_enough_for_every_choice(name: str) -> None:
    text = shape.SHAPES[name]
    *_, longest = engines.prompts(text)
    assert len(longest) // 2 > text["index_topk"]
    assert len(longest) > text["candidate_topk_blocks"] * text["candidate_block_size"]
    for prompt in engines.prompts(text):
        assert all(8 <= token < text["vocab_size"] for token in prompt)


def test_kl_is_zero_for_the_same_and_grows_with_the_difference() -> None:
    import math

    same = [math.log(p) for p in (0.6, 0.3, 0.1)]

    class Row(list[float]):
        def argmax(self) -> int:
            return self.index(max(self))

    place = {"0": same[0], "1": same[1]}
    assert against(place, 0, Row(same))["kl"] == pytest.approx(0, abs=1e-9)
    other = against(place, 0, Row([math.log(p) for p in (0.3, 0.6, 0.1)]))
    assert other["kl"] == pytest.approx(0.3 * math.log(2)) and not other["equal"]
    assert against(place, 0, Row(same))["gap"] == pytest.approx(math.log(2))


def test_listing_needs_no_gpu() -> None:
    argv = [sys.executable, run.__file__, "--list"]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert "graphs-tokens" in done.stdout and "about" in done.stdout


def test_what_the_overlay_depends_on_travels_to_the_gpu_host() -> None:
    """numpy is there; a parser that only serving imports was once forgotten."""
    root = Path(__file__).resolve().parents[1]
    project = tomllib.loads((root / "overlay/pyproject.toml").read_text())["project"]
    carried = (root / "tests/gpu/requirements.txt").read_text().split()
    assert set(project["dependencies"]) - {"numpy"} <= set(carried)


def test_what_is_hidden_cannot_be_found_or_imported_and_all_else_can(tmp_path: Path) -> None:
    for name in ("tilelang", "tilelang_like", "flashinfer"):
        package = tmp_path / "installed" / name
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("")
        (package / "jit.py").write_text("")
    look = (
        "import importlib.util as u, importlib\n"
        "assert u.find_spec('tilelang_like.jit') and u.find_spec('json')\n"
        "assert u.find_spec('tilelang') is None and u.find_spec('flashinfer') is None\n"
        "try: importlib.import_module('tilelang.jit')\n"
        "except ModuleNotFoundError: print('hidden')\n"
    )
    paths = [str(hidden.folder(tmp_path)), str(tmp_path / "installed")]
    ran = subprocess.run(
        [sys.executable, "-c", look], capture_output=True, text=True,
        env={"PYTHONPATH": os.pathsep.join(paths)}, check=False,
    )  # fmt: skip
    assert ran.stdout == "hidden\n", ran.stderr
    seen = subprocess.run(
        [sys.executable, "-c", "import tilelang.jit"], capture_output=True, text=True,
        env={"PYTHONPATH": paths[1]}, check=False,
    )  # fmt: skip
    assert seen.returncode == 0, seen.stderr


def test_held_engines_are_told_so_and_no_other_is(tmp_path: Path) -> None:
    for name, engine in engines.ENGINES.items():
        told = engines.environment(tmp_path, engine, cpu=False)
        assert (told.get("OVERLAY_FORCE_ARCH") == "80") == name.startswith("hidden-"), name
        assert (str(tmp_path / "hidden") in told["PYTHONPATH"]) == engine.hidden, name
        # Nothing is asked for: the class must be chosen by what the GPU is held to.
        assert not (engine.hidden and engine.attention), name


def a_reply(tokens: list[int], gap: float = 1.0) -> dict[str, Any]:
    return {"tokens": tokens, "logprobs": [{"1": -0.1, "2": -0.1 - gap} for _ in tokens]}


class Answers:
    """As much of a bench as judges of engines that were held read."""

    device = "cuda"

    def __init__(self, **changed: Any) -> None:
        said: dict[str, Any] = {
            "replies": [a_reply([1, 2, 3])], "batch": [a_reply([4, 5])], "verified": [{}],
            "hidden": [{"held": "80", "loaded": []}], "classes": [{}], "seconds": {},
        }  # fmt: skip
        self.answers = {"fixed": said, "adaptive": {**said, "verified": [{"cut": 3}], **changed}}


def test_an_engine_that_found_what_was_hidden_is_wrong() -> None:
    judge = hidden_checks.held(lambda _: (True, {}), "adaptive")
    assert judge(Answers())[0]
    assert not judge(Answers(hidden=[{"held": "80", "loaded": ["tilelang"]}]))[0]
    assert not judge(Answers(hidden=[{"held": "", "loaded": []}]))[0]


def test_adaptive_verification_must_have_cut_and_may_change_no_token_but_at_a_tie() -> None:
    judge = hidden_checks.verified("fixed", "adaptive")
    assert judge(Answers())[0]
    assert not judge(Answers(verified=[{}]))[0]
    assert not judge(Answers(verified=[{"cut": 0}]))[0]
    assert not judge(Answers(replies=[a_reply([1, 9, 3])]))[0]
    assert not judge(Answers(batch=[a_reply([4, 6])]))[0]
